#include "core/device/host_device.hpp"

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

namespace te_fl::core {
namespace {

void report(const te_fl_error_sink* sink, const std::string& text) {
  if (sink != nullptr && sink->write != nullptr) sink->write(sink->host, text.c_str());
}

// `bytes` rounded up to a multiple of `multiple`, at least one multiple; 0 on overflow.
size_t round_up(size_t bytes, size_t multiple) {
  if (bytes > SIZE_MAX - multiple) return 0;
  return bytes == 0 ? multiple : (bytes + multiple - 1) / multiple * multiple;
}

te_fl_status out_of_memory(size_t bytes, const te_fl_error_sink* sink) {
  report(sink, "the host cannot provide " + std::to_string(bytes) + " bytes of memory");
  return TE_FL_OUT_OF_MEMORY | TE_FL_CLEAN;
}

// Allocates pinned memory: whole pages, locked if RLIMIT_MEMLOCK allows it. A page in front of them
// stores the size.
te_fl_status allocate_pinned(size_t bytes, size_t alignment, void** out,
                             const te_fl_error_sink* sink) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t body = round_up(bytes, page);
  *out = nullptr;
  if (alignment > page) {
    report(sink, "pinned memory of the host is aligned to " + std::to_string(page) +
                     " bytes, not " + std::to_string(alignment));
    return TE_FL_UNSUPPORTED;
  }
  if (body == 0 || body > SIZE_MAX - page) return out_of_memory(bytes, sink);
  void* base =
      mmap(nullptr, page + body, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return out_of_memory(bytes, sink);
  *static_cast<size_t*>(base) = page + body;
  *out = static_cast<char*>(base) + page;
  (void)mlock(*out, body);  // best effort: memory that is not locked works too
  return TE_FL_OK;
}

// Host memory counts as managed memory and as visible to peers in any case.
te_fl_status allocate(void*, const te_fl_memory_desc* memory, void** out,
                      const te_fl_error_sink* sink) {
  if (memory->kind == TE_FL_MEMORY_PINNED) {
    return allocate_pinned(memory->bytes, memory->alignment, out, sink);
  }
  const size_t rounded = round_up(memory->bytes, memory->alignment);
  *out = rounded == 0 ? nullptr : std::aligned_alloc(memory->alignment, rounded);
  return *out != nullptr ? TE_FL_OK : out_of_memory(memory->bytes, sink);
}

te_fl_status release(void*, void* data, uint32_t kind, void*, const te_fl_error_sink*) {
  if (kind != TE_FL_MEMORY_PINNED) {
    std::free(data);
    return TE_FL_OK;
  }
  void* base = static_cast<char*>(data) - sysconf(_SC_PAGESIZE);
  munmap(base, *static_cast<size_t*>(base));
  return TE_FL_OK;
}

// Host work is complete when its call returns, so an event of the host only stores the time of its
// recording.
using Clock = std::chrono::steady_clock;
using HostEvent = std::atomic<Clock::rep>;

HostEvent& to_event(void* event) { return *static_cast<HostEvent*>(event); }

te_fl_status create_event(void*, uint32_t, void** event, const te_fl_error_sink* sink) {
  *event = new (std::nothrow) HostEvent(0);
  return *event != nullptr ? TE_FL_OK : out_of_memory(sizeof(HostEvent), sink);
}
te_fl_status destroy_event(void*, void* event, const te_fl_error_sink*) {
  delete &to_event(event);
  return TE_FL_OK;
}
te_fl_status record_event(void*, void* event, void*, const te_fl_error_sink*) {
  to_event(event) = Clock::now().time_since_epoch().count();
  return TE_FL_OK;
}
te_fl_status wait_event(void*, void*, void*, const te_fl_error_sink*) { return TE_FL_OK; }
te_fl_status synchronize_event(void*, void*, const te_fl_error_sink*) { return TE_FL_OK; }
te_fl_status query_event(void*, void*, int32_t* done, const te_fl_error_sink*) {
  *done = 1;
  return TE_FL_OK;
}
te_fl_status elapsed_time(void*, void* start, void* end, uint64_t* nanoseconds,
                          const te_fl_error_sink*) {
  const Clock::duration between(to_event(end).load() - to_event(start).load());
  const auto count = std::chrono::duration_cast<std::chrono::nanoseconds>(between).count();
  *nanoseconds = count > 0 ? static_cast<uint64_t>(count) : 0;
  return TE_FL_OK;
}

te_fl_status copy(void*, void* dst, const void* src, size_t bytes, uint32_t, void*,
                  const te_fl_error_sink*) {
  if (bytes > 0) std::memmove(dst, src, bytes);
  return TE_FL_OK;
}

te_fl_status fill(void*, void* dst, uint8_t value, size_t bytes, void*, const te_fl_error_sink*) {
  if (bytes > 0) std::memset(dst, value, bytes);
  return TE_FL_OK;
}

te_fl_status synchronize(void*, void*, const te_fl_error_sink*) { return TE_FL_OK; }

te_fl_status is_capturing(void*, void*, int32_t* capturing, const te_fl_error_sink*) {
  *capturing = 0;
  return TE_FL_OK;
}

// Writes the "model name" of the first processor, or "host" if it is unknown.
void processor_name(char* out, size_t size) {
  std::snprintf(out, size, "host");
  std::FILE* file = std::fopen("/proc/cpuinfo", "re");
  if (file == nullptr) return;
  char line[256];
  while (std::fgets(line, sizeof line, file) != nullptr) {
    const char* colon = std::strchr(line, ':');
    if (std::strncmp(line, "model name", 10) != 0 || colon == nullptr) continue;
    line[std::strcspn(line, "\n")] = '\0';
    std::snprintf(out, size, "%s", colon + 1 + (colon[1] == ' '));
    break;
  }
  std::fclose(file);
}

te_fl_status properties(void*, te_fl_device_props* props, const te_fl_error_sink*) {
  te_fl_device_props p{};
  p.struct_size =
      props->struct_size < sizeof p ? props->struct_size : static_cast<uint32_t>(sizeof p);
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  p.total_memory = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * page;
  p.free_memory = static_cast<uint64_t>(sysconf(_SC_AVPHYS_PAGES)) * page;
  p.compute_units = available_cores();
  processor_name(p.name, sizeof p.name);
  std::memcpy(props, &p, p.struct_size);
  return TE_FL_OK;
}

constexpr te_fl_device_api make_api() {
  te_fl_device_api api{};
  api.struct_size = sizeof(te_fl_device_api);
  api.allocate = allocate;
  api.free = release;
  api.create_event = create_event;
  api.destroy_event = destroy_event;
  api.record_event = record_event;
  api.wait_event = wait_event;
  api.synchronize_event = synchronize_event;
  api.query_event = query_event;
  api.elapsed_time = elapsed_time;
  api.copy = copy;
  api.fill = fill;
  api.synchronize = synchronize;
  api.is_capturing = is_capturing;
  api.properties = properties;
  return api;
}

constexpr te_fl_device_api kApi = make_api();
constexpr te_fl_device_desc kHost = {
    sizeof(te_fl_device_desc), 0, {TE_FL_DEVICE_CPU, 0}, "host", nullptr, &kApi};

}  // namespace

const te_fl_device_desc* host_device() { return &kHost; }

uint32_t available_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return static_cast<uint32_t>(CPU_COUNT(&set));
  const long count = sysconf(_SC_NPROCESSORS_ONLN);  // for machines with more processors than a
                                                     // cpu_set_t holds
  return count > 0 ? static_cast<uint32_t>(count) : 1;
}

}  // namespace te_fl::core
