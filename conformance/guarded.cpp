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

// A guard page in the list that explain_fault() reads. Pages that do not fit into the list are not
// explained.
struct Guard {
  std::atomic<uintptr_t> page{0};
  std::atomic<uintptr_t> edge{0};   // the end of the memory, or its beginning
  std::atomic<bool> before{false};  // the guard page precedes the memory
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
  GuardedMemory made;
  TE_FL_RETURN_IF_ERROR(made.map(bytes + alignment));
  uint8_t* const guard = made.mapping_ + made.mapped_ - page_size();
  TE_FL_RETURN_IF_ERROR(protect(guard));
  const auto begin = reinterpret_cast<uintptr_t>(guard - bytes);
  made.data_ = guard - bytes - begin % alignment;
  made.remember(guard, made.data_ + bytes, false, name, tensor_bytes);
  return made;
}

te_fl::Result<GuardedMemory> GuardedMemory::behind_guard(size_t bytes, const char* name,
                                                         size_t tensor_bytes) {
  GuardedMemory made;
  TE_FL_RETURN_IF_ERROR(made.map(bytes));
  TE_FL_RETURN_IF_ERROR(protect(made.mapping_));
  made.data_ = made.mapping_ + page_size();
  made.remember(made.mapping_, made.data_, true, name, tensor_bytes);
  return made;
}

// Maps enough whole pages for `bytes`, and one more.
te_fl::Status GuardedMemory::map(size_t bytes) {
  const size_t page = page_size(), wanted = (bytes + 2 * page - 1) / page * page;
  void* const mapping =
      mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED)
    return Status(StatusCode::kOutOfMemory,
                  std::string("mmap of guarded memory: ") + strerror(errno));
  mapping_ = static_cast<uint8_t*>(mapping), mapped_ = wanted;
  return {};
}

te_fl::Status GuardedMemory::protect(uint8_t* guard) {
  if (mprotect(guard, page_size(), PROT_NONE) == 0) return {};
  return Status(StatusCode::kInternal, std::string("mprotect of a guard page: ") + strerror(errno));
}

void GuardedMemory::remember(uint8_t* guard, const uint8_t* edge, bool before, const char* name,
                             size_t bytes) {
  guard_ = guard;
  for (Guard& g : g_guards) {
    uintptr_t free = 0;
    if (!g.page.compare_exchange_strong(free, 1)) continue;
    std::snprintf(g.name, sizeof g.name, "%s", name);
    g.edge = reinterpret_cast<uintptr_t>(edge), g.before = before;
    g.bytes = bytes;
    g.page = reinterpret_cast<uintptr_t>(guard);
    return;
  }
}

GuardedMemory::GuardedMemory(GuardedMemory&& other) noexcept
    : mapping_(std::exchange(other.mapping_, nullptr)),
      mapped_(other.mapped_),
      guard_(other.guard_),
      data_(std::exchange(other.data_, nullptr)) {}

GuardedMemory::~GuardedMemory() {
  if (mapping_ == nullptr) return;
  const auto guard = reinterpret_cast<uintptr_t>(guard_);
  for (Guard& g : g_guards)
    if (g.page == guard) g.page = 0;
  munmap(mapping_, mapped_);
}

bool explain_fault(const void* address, char* text, size_t capacity) noexcept {
  const auto at = reinterpret_cast<uintptr_t>(address);
  for (const Guard& g : g_guards) {
    if (g.page <= 1 || at < g.page || at >= g.page + page_size()) continue;
    const bool before = g.before;
    std::snprintf(text, capacity, "%zu bytes %s of %s, which has %zu bytes",
                  static_cast<size_t>(before ? g.edge - at : at - g.edge),
                  before ? "before the start" : "behind the end", g.name, g.bytes.load());
    return true;
  }
  return false;
}

}  // namespace te_fl::conformance
