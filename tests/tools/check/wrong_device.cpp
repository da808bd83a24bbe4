// Test devices with streams and events, one for each value of Fault. ext:wrong_device:0 is correct;
// every other device has one fault that the device section of te-fl check must find. Never
// installed.
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "support/far_device.hpp"
#include "te_fl/backend.hpp"

namespace {

namespace b = te_fl::backend;
using te_fl::testing::FarDevice;

enum class Fault {  // the enumerator's value is the device's index
  kNone,
  kEmptyFill,
  kMisaligned,
  kOffsets,      // a copy within the device rounds its start down to a word boundary
  kLateSource,   // a copy from pageable memory reads the source when the stream reaches the copy
  kNoWait,       // synchronize() of a stream returns before the stream's work is done
  kEarlyFree,    // freed memory is overwritten before the stream reaches the free
  kEventHost,    // synchronize_event() returns at once
  kEventStream,  // wait_event() does nothing
  kFirstMark,    // a second record of an event keeps the first record's position in the stream
  kFillHangs,
  kCopyCrashes,
  kCapturing,    // reports every stream as being captured
  kPolledEarly,  // query_event() reports "done" at once
  kOtherUnit,    // elapsed_time() is not in nanoseconds
  kLeak,         // free() frees nothing
  kCount
};
constexpr int kFaults = static_cast<int>(Fault::kCount);

// A stream is represented by its address. An event stores the stream on which it was recorded.
struct Event {
  std::atomic<void*> stream{nullptr};
  std::atomic<bool> waited{false};
  std::atomic<int64_t> time{0};  // time of the record
};

class Device : public FarDevice {
 public:
  Device(int index, Fault fault)
      : FarDevice(index, size_t{1} << 28), fault_(fault), own_(FarDevice::api) {
    desc.provider = "wrong_device";
    api.allocate = [](void* self, const te_fl_memory_desc* memory, void** out,
                      const te_fl_error_sink* e) { return of(self).allocate(*memory, out, e); };
    api.free = [](void* self, void* data, uint32_t kind, void* stream, const te_fl_error_sink* e) {
      return of(self).release(data, kind, stream, e);
    };
    api.copy = [](void* self, void* to, const void* from, size_t bytes, uint32_t host, void* stream,
                  const te_fl_error_sink* e) {
      return of(self).copy(to, from, bytes, host, stream, e);
    };
    api.fill = [](void* self, void* to, uint8_t value, size_t bytes, void* stream,
                  const te_fl_error_sink* e) { return of(self).fill(to, value, bytes, stream, e); };
    api.synchronize = [](void* self, void* stream, const te_fl_error_sink* e) -> te_fl_status {
      if (of(self).is(Fault::kNoWait) && stream != nullptr) return TE_FL_OK;
      return of(self).wait(stream, e);
    };
    api.properties = [](void* self, te_fl_device_props* props,
                        const te_fl_error_sink* e) -> te_fl_status {
      const te_fl_status status = of(self).own_.properties(self, props, e);
      props->total_memory = uint64_t{1} << 28;
      props->free_memory = props->total_memory - static_cast<uint64_t>(of(self).used_ * 4096);
      return status;
    };
    api.is_capturing = [](void* self, void*, int32_t* capturing,
                          const te_fl_error_sink*) -> te_fl_status {
      *capturing = of(self).is(Fault::kCapturing) ? 1 : 0;
      return TE_FL_OK;
    };
    install_streams();
  }

 private:
  static Device& of(void* self) { return static_cast<Device&>(*static_cast<FarDevice*>(self)); }
  bool is(Fault fault) const { return fault_ == fault; }
  te_fl_status wait(void* stream, const te_fl_error_sink* e) {
    return own_.synchronize(desc.self, stream, e);
  }

  void install_streams() {
    api.create_stream = [](void*, void** out, const te_fl_error_sink*) -> te_fl_status {
      *out = new char;
      return TE_FL_OK;
    };
    api.destroy_stream = [](void* self, void* stream, const te_fl_error_sink* e) -> te_fl_status {
      of(self).wait(stream, e);
      delete static_cast<char*>(stream);
      return TE_FL_OK;
    };
    api.create_event = [](void*, uint32_t, void** out, const te_fl_error_sink*) -> te_fl_status {
      *out = new Event;
      return TE_FL_OK;
    };
    api.destroy_event = [](void*, void* event, const te_fl_error_sink*) -> te_fl_status {
      delete static_cast<Event*>(event);
      return TE_FL_OK;
    };
    api.record_event = [](void* self, void* raw, void* stream,
                          const te_fl_error_sink*) -> te_fl_status {
      Event& event = *static_cast<Event*>(raw);
      if (of(self).is(Fault::kFirstMark) && event.waited) return TE_FL_OK;
      event.waited = false, event.stream = stream;
      event.time = std::chrono::steady_clock::now().time_since_epoch().count();
      return TE_FL_OK;
    };
    // wait_event() waits on the host at once instead of in stream order, which is stricter than
    // required.
    api.wait_event = [](void* self, void* event, void*, const te_fl_error_sink* e) -> te_fl_status {
      return of(self).is(Fault::kEventStream) ? TE_FL_OK : of(self).wait_for(event, e);
    };
    api.query_event = [](void* self, void* event, int32_t* done,
                         const te_fl_error_sink* e) -> te_fl_status {
      *done = 1;
      Device& device = of(self);
      return device.is(Fault::kPolledEarly) ? TE_FL_OK : device.wait_for(event, e);
    };
    api.elapsed_time = [](void* self, void* start, void* end, uint64_t* nanoseconds,
                          const te_fl_error_sink*) -> te_fl_status {
      const int64_t from = static_cast<Event*>(start)->time, to = static_cast<Event*>(end)->time;
      const int64_t between = to > from ? to - from : 0;
      *nanoseconds = static_cast<uint64_t>(between) *
                     // a unit other than nanoseconds
                     (of(self).is(Fault::kOtherUnit) ? 1'000'000u : 1u);
      return TE_FL_OK;
    };
    api.synchronize_event = [](void* self, void* event, const te_fl_error_sink* e) -> te_fl_status {
      return of(self).is(Fault::kEventHost) ? TE_FL_OK : of(self).wait_for(event, e);
    };
  }

  te_fl_status wait_for(void* raw, const te_fl_error_sink* e) {
    Event& event = *static_cast<Event*>(raw);
    if (is(Fault::kFirstMark) && event.waited.exchange(true)) return TE_FL_OK;
    return wait(event.stream, e);
  }

  te_fl_status allocate(te_fl_memory_desc memory, void** out, const te_fl_error_sink* e) {
    memory.bytes += 64;
    const te_fl_status status = own_.allocate(desc.self, &memory, out, e);
    if (memory.kind != TE_FL_MEMORY_DEVICE) return status;
    if (status == TE_FL_OK) ++used_;
    if (status == TE_FL_OK && is(Fault::kMisaligned)) *out = static_cast<char*>(*out) + 64;
    return status;
  }

  te_fl_status release(void* data, uint32_t kind, void* stream, const te_fl_error_sink* e) {
    if (kind != TE_FL_MEMORY_DEVICE) return own_.free(desc.self, data, kind, stream, e);
    if (is(Fault::kLeak)) return TE_FL_OK;
    --used_;
    if (is(Fault::kMisaligned)) data = static_cast<char*>(data) - 64;
    if (is(Fault::kEarlyFree)) std::memset(real(data), 0xdd, 64);
    return own_.free(desc.self, data, kind, stream, e);
  }

  // Not inlined because te-fl check must name this function in its report of the crash.
  [[gnu::noinline]] te_fl_status copy(void* to, const void* from, size_t bytes, uint32_t host,
                                      void* stream, const te_fl_error_sink* e) {
    if (is(Fault::kCopyCrashes) && host == 0)  // the host dereferences device memory
      return *static_cast<volatile const char*>(from) == 1 ? TE_FL_INTERNAL : TE_FL_OK;
    if (is(Fault::kOffsets) && host == 0)
      from = static_cast<const char*>(from) - reinterpret_cast<uintptr_t>(from) % 4;
    if (is(Fault::kLateSource) && host == 2) {
      enqueue(stream, [at = real(to), from, bytes] { std::memcpy(at, from, bytes); });
      return TE_FL_OK;
    }
    return own_.copy(desc.self, to, from, bytes, host, stream, e);
  }

  te_fl_status fill(void* to, uint8_t value, size_t bytes, void* stream,
                    const te_fl_error_sink* e) {
    if (is(Fault::kEmptyFill)) return TE_FL_OK;
    while (is(Fault::kFillHangs) && bytes == 1021)
      std::this_thread::sleep_for(std::chrono::seconds(1));
    return own_.fill(desc.self, to, value, bytes, stream, e);
  }

  Fault fault_;
  std::atomic<int64_t> used_{0};  // number of allocated blocks
  // the functions of the far device before this plugin replaced some of them
  te_fl_device_api own_;
};

struct Instance {
  std::vector<std::unique_ptr<Device>> devices;
  std::array<const te_fl_device_desc*, kFaults> list;
};

te_fl_status create(const te_fl_host_api*, void** instance, const te_fl_error_sink* errors) {
  return b::guard(errors, [&] {
    auto made = std::make_unique<Instance>();
    for (int i = 0; i < kFaults; ++i) {
      made->devices.push_back(std::make_unique<Device>(i, static_cast<Fault>(i)));
      made->list[static_cast<size_t>(i)] = &made->devices.back()->desc;
    }
    *instance = made.release();
  });
}

te_fl_status devices(void* instance, uint32_t* count, const te_fl_device_desc* const** list,
                     const te_fl_error_sink*) {
  *count = kFaults;
  *list = static_cast<Instance*>(instance)->list.data();
  return TE_FL_OK;
}

constexpr te_fl_plugin_api kApi = {
    .struct_size = sizeof(te_fl_plugin_api),
    .reserved = 0,
    .create = create,
    .devices = devices,
    .ops = nullptr,
    .quiesce = nullptr,
    .destroy = [](void* instance) { delete static_cast<Instance*>(instance); },
};
constexpr te_fl_plugin_header kHeader = {
    .magic = TE_FL_PLUGIN_MAGIC,
    .struct_size = sizeof(te_fl_plugin_header),
    .abi_major = TE_FL_ABI_MAJOR,
    .abi_minor = TE_FL_ABI_MINOR,
    .min_host_minor = 0,
    .features = 0,
    .name = "wrong_device",
    .vendor = "wrong",
    .version = "1.0.0",
    .build_id = nullptr,
    .api = &kApi,
    .reserved = {},
};

}  // namespace

extern "C" TE_FL_PLUGIN_EXPORT const te_fl_plugin_header* te_fl_plugin_query(
    const te_fl_host_info*) {
  return &kHeader;
}
