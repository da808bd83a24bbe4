#pragma once

#include <atomic>
#include <utility>

#include "core/base/process_end.hpp"
#include "te_fl/device.hpp"

// Keeps account of the threads that are inside an op or a function of a device. What a thread may
// be using there is released only after it has left, so a withdrawal first makes new calls stay out
// and then waits.
namespace te_fl::core {

// The registry's way to mark threads (registry/epoch.hpp). Without a registry nothing is withdrawn.
struct InsideHooks {
  void (*enter)();
  void (*leave)() noexcept;
  bool (*is_inside)() noexcept;
  void (*wait_outside)();
};
inline constinit std::atomic<const InsideHooks*> g_inside{nullptr};

// The calling thread is inside a function of the device as long as this lives. To be made before it
// is looked whether the device is still open, and after what may load its plugin, which is not done
// inside. The host never goes, so nothing is done for it.
class Inside {
 public:
  explicit Inside(const Device& device)
      : hooks_(device.type == TE_FL_DEVICE_CPU ? nullptr
                                               : g_inside.load(std::memory_order_acquire)) {
    if (hooks_ != nullptr) hooks_->enter();
  }
  Inside(Inside&& other) noexcept : hooks_(std::exchange(other.hooks_, nullptr)) {}
  Inside& operator=(Inside&&) = delete;
  // True if another thread ends the process: what belongs to the device is then left as it is.
  bool too_late() const noexcept { return hooks_ != nullptr && ends_elsewhere(); }
  ~Inside() {
    if (hooks_ != nullptr) hooks_->leave();
  }

 private:
  const InsideHooks* hooks_;
};

// True if the calling thread is inside an op or a function of a device.
inline bool is_inside() noexcept {
  const InsideHooks* hooks = g_inside.load(std::memory_order_acquire);
  return hooks != nullptr && hooks->is_inside();
}

// Returns when every thread that was inside has left. Not to be called from inside.
inline void wait_outside() {
  const InsideHooks* hooks = g_inside.load(std::memory_order_acquire);
  if (hooks != nullptr) hooks->wait_outside();
}

}  // namespace te_fl::core
