// Caches a number per device. Plain C++, so tests run without a GPU.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>

namespace te_fl::cuda {

// A number that may differ between devices but is constant during the process, such as a device
// property or the attribute of a kernel on a device. Constant-initialised, so it can be a static
// local of a function. Thread-safe.
class PerDevice {
 public:
  static constexpr int kKept = 64;  // cached devices; for further devices get() calls find() each
                                    // time

  // Returns the result of the first find() call for this device, which must be at least 0. Threads
  // that call get() concurrently before that may each call find(). If find() throws, nothing is
  // cached.
  template <class F>
  int get(int device, F&& find) {
    if (device < 0 || device >= kKept) return find();
    std::atomic<int>& place = values_[static_cast<size_t>(device)];
    if (const int kept = place.load(std::memory_order_acquire); kept != 0) return kept - 1;
    const int found = find();
    place.store(found + 1, std::memory_order_release);
    return found;
  }

 private:
  std::array<std::atomic<int>, kKept> values_{};  // value + 1; 0: not yet known
};

}  // namespace te_fl::cuda
