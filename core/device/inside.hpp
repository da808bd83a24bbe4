#pragma once

#include <atomic>
#include <utility>

#include "core/base/process_end.hpp"
#include "te_fl/device.hpp"

// Tracks which threads are inside an op or a device function. Objects that such a thread may use
// are freed only after it has left: a withdrawal first keeps new calls out and then waits.
namespace te_fl::core {

// The registry's functions that mark threads (registry/epoch.hpp). Without a registry nothing is
// ever withdrawn.
struct InsideHooks {
  void (*enter)();
  void (*leave)() noexcept;
  bool (*is_inside)() noexcept;
  void (*wait_outside)();
};
inline constinit std::atomic<const InsideHooks*> g_inside{nullptr};

// Marks the calling thread as inside a function of the device while this object lives. Create it
// before checking whether the device is open, and after any code that may load its plugin, since
// plugins are not loaded from inside. Does nothing for the host, which is never withdrawn.
class Inside {
 public:
  explicit Inside(const Device& device)
      : hooks_(device.type == TE_FL_DEVICE_CPU ? nullptr
                                               : g_inside.load(std::memory_order_acquire)) {
    if (hooks_ != nullptr) hooks_->enter();
  }
  Inside(Inside&& other) noexcept : hooks_(std::exchange(other.hooks_, nullptr)) {}
  Inside& operator=(Inside&&) = delete;
  // True if another thread is ending the process: the caller must not touch the device.
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

// Waits until every thread that was inside has left. Must not be called from inside.
inline void wait_outside() {
  const InsideHooks* hooks = g_inside.load(std::memory_order_acquire);
  if (hooks != nullptr) hooks->wait_outside();
}

}  // namespace te_fl::core
