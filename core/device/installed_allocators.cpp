#include "core/device/installed_allocators.hpp"

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "core/base/fork.hpp"

namespace te_fl::core {
namespace {

constinit ForkMutex allocators_mutex(LockLevel::kAllocators);
const ForkMutex::Registration allocators_registration(allocators_mutex);

struct Installed {
  Device device;
  AllocatorRef allocator;
};
std::vector<Installed>& installed() {  // never destroyed: memory may be freed at exit
  static auto* const all = new std::vector<Installed>;
  return *all;
}
// The number of installed allocators. While it is 0, no lock is taken.
std::atomic<int> g_installed{0};

}  // namespace

AllocatorRef find_allocator(const Device& device) noexcept {
  if (g_installed.load(std::memory_order_acquire) == 0) return nullptr;
  const std::lock_guard lock(allocators_mutex);
  for (const Installed& i : installed()) {
    if (i.device == device) return i.allocator;
  }
  return nullptr;
}

AllocatorRef exchange_allocator(const Device& device, AllocatorRef next) {
  const std::lock_guard lock(allocators_mutex);
  auto& all = installed();
  AllocatorRef before;
  std::erase_if(all, [&](Installed& i) {
    if (i.device != device) return false;
    before = std::move(i.allocator);
    return true;
  });
  if (next != nullptr) all.push_back({device, std::move(next)});
  g_installed.store(static_cast<int>(all.size()), std::memory_order_release);
  return before;
}

void drop_allocator(const Device& device) noexcept {
  if (g_installed.load(std::memory_order_acquire) != 0) exchange_allocator(device, nullptr);
}

}  // namespace te_fl::core
