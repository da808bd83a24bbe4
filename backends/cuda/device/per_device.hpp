// Numbers that are found out once for each device. Plain C++, so that it can be tested where there
// is no GPU.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>

namespace te_fl::cuda {

// A number that is the same for the life of the process, but not on every device: a property of the
// device, or what a kernel was granted there. Constant-initialised, so a function may keep one as a
// static; thread-safe.
class PerDevice {
 public:
  static constexpr int kKept = 64;  // devices; of those past them it is found out each time

  // Returns what find() returned when it was first called for this device, 0 or more. Threads that
  // come first together may each call it. If it throws, nothing is kept.
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
  std::array<std::atomic<int>, kKept> values_{};  // one more than the value; 0: not found out yet
};

}  // namespace te_fl::cuda
