#include "conformance/guarded.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace te_fl::conformance {
namespace {

// What explain_fault() reads. Pages beyond the table's end go unexplained.
struct Guard {
  std::atomic<uintptr_t> page{0};
  std::atomic<uintptr_t> end{0};
  std::atomic<size_t> bytes{0};
  char name[48] = {};
};
std::array<Guard, 1024> g_guards;

size_t page_size() {
  static const auto size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

}  // namespace

te_fl::Result<GuardedMemory> GuardedMemory::make(size_t bytes, size_t alignment, const char* name,
                                                 size_t tensor_bytes) {
  const size_t page = page_size();
  const size_t wanted = (bytes + alignment + page - 1) / page * page;
  void* const mapping =
      mmap(nullptr, wanted + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED)
    return Status(StatusCode::kOutOfMemory,
                  std::string("mmap of guarded memory: ") + strerror(errno));
  GuardedMemory made;
  made.mapping_ = static_cast<uint8_t*>(mapping), made.mapped_ = wanted + page;
  uint8_t* const guard = made.mapping_ + wanted;
  if (mprotect(guard, page, PROT_NONE) != 0)
    return Status(StatusCode::kInternal,
                  std::string("mprotect of a guard page: ") + strerror(errno));
  const auto begin = reinterpret_cast<uintptr_t>(guard - bytes);
  made.data_ = guard - bytes - begin % alignment;
  for (Guard& g : g_guards) {
    uintptr_t free = 0;
    if (!g.page.compare_exchange_strong(free, 1)) continue;
    std::snprintf(g.name, sizeof g.name, "%s", name);
    g.end = reinterpret_cast<uintptr_t>(made.data_ + bytes);
    g.bytes = tensor_bytes;
    g.page = reinterpret_cast<uintptr_t>(guard);
    break;
  }
  return made;
}

GuardedMemory::GuardedMemory(GuardedMemory&& other) noexcept
    : mapping_(std::exchange(other.mapping_, nullptr)),
      mapped_(other.mapped_),
      data_(std::exchange(other.data_, nullptr)) {}

GuardedMemory::~GuardedMemory() {
  if (mapping_ == nullptr) return;
  const auto guard = reinterpret_cast<uintptr_t>(mapping_ + mapped_ - page_size());
  for (Guard& g : g_guards)
    if (g.page == guard) g.page = 0;
  munmap(mapping_, mapped_);
}

bool explain_fault(const void* address, char* text, size_t capacity) noexcept {
  const auto at = reinterpret_cast<uintptr_t>(address);
  for (const Guard& g : g_guards) {
    if (g.page <= 1 || at < g.page || at >= g.page + page_size()) continue;
    std::snprintf(text, capacity, "%zu bytes behind the end of %s, which has %zu bytes",
                  static_cast<size_t>(at - g.end), g.name, g.bytes.load());
    return true;
  }
  return false;
}

}  // namespace te_fl::conformance
