#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "te_fl/device.hpp"

namespace te_fl::core {

// Numbers of providers fit into a route's key.
inline constexpr uint32_t kMaxProvider = 0xffff;

// One device that is there. Lives for ever, so that its address can be kept; `desc` is valid until
// the device has been removed.
struct DeviceEntry {
  Device device;
  const te_fl_device_desc* desc;
  std::string provider;

  DeviceEntry(Device d, const te_fl_device_desc* c, std::string p)
      : device(d), desc(c), provider(std::move(p)) {}

  int64_t live() const noexcept {
    const int64_t count = count_.load(std::memory_order_relaxed);
    return count < 0 ? count - kClosed : count;
  }
  // The reason for which the device does nothing any more; null while it works. Never freed.
  const std::string* lost() const noexcept { return lost_.load(std::memory_order_acquire); }
  // False if it is lost already.
  bool lose(const std::string& reason);
  void found_again() noexcept { lost_.store(nullptr, std::memory_order_release); }

  // Withdrawn, gone or going: no new objects, and no new work but to save what there is.
  bool closed() const noexcept {
    return barred_.load(std::memory_order_relaxed) || count_.load(std::memory_order_relaxed) < 0;
  }
  // Ops may enter its functions. A thread that is inside (core/inside.hpp) and finds it so is
  // waited for before the device is released.
  bool in_service() const noexcept { return !closed() && lost() == nullptr; }
  // Closed from now on, while threads may still be inside. For the list's functions below.
  void bar() noexcept { barred_.store(true, std::memory_order_seq_cst); }
  void unbar() noexcept { barred_.store(false, std::memory_order_seq_cst); }
  // Counts an object in. False if the device is closed.
  bool acquire() noexcept {
    if (barred_.load(std::memory_order_acquire)) return false;
    int64_t count = count_.load(std::memory_order_relaxed);
    do {
      if (count < 0) return false;
    } while (!count_.compare_exchange_weak(count, count + 1, std::memory_order_acq_rel));
    return true;
  }
  // Keeps the device for a short use. Works on a retired device too while objects of it live; false
  // if it is gone, or may go at any moment.
  bool pin() noexcept {
    int64_t count = count_.load(std::memory_order_relaxed);
    do {
      if (count == kClosed) return false;
    } while (!count_.compare_exchange_weak(count, count + 1, std::memory_order_acq_rel));
    return true;
  }
  // Ends an acquire() or a pin(). The last one of a retired device takes it out of the list and
  // calls `gone`.
  void release() noexcept {
    if (count_.fetch_sub(1, std::memory_order_acq_rel) == kClosed + 1) last_gone();
  }
  // Refuses objects from now on; false if there are others than `held`. The caller keeps the
  // device, whose functions work until it calls release() or reopen().
  bool close(int64_t held) noexcept {
    return count_.compare_exchange_strong(held, kClosed + held + 1, std::memory_order_acq_rel);
  }
  // Takes a close() back.
  void reopen() noexcept { count_.fetch_sub(kClosed + 1, std::memory_order_acq_rel); }
  // Refuses objects from now on, and calls `gone` once when the last one goes; at once if there is
  // none.
  void retire(std::function<void()> gone) {
    on_gone_ = std::move(gone);
    if (count_.fetch_add(kClosed, std::memory_order_acq_rel) == 0) last_gone();
  }

 private:
  static constexpr int64_t kClosed = INT64_MIN / 2;
  void last_gone() noexcept;

  std::atomic<int64_t> count_{0};
  std::atomic<bool> barred_{false};
  std::atomic<const std::string*> lost_{nullptr};
  std::function<void()>
      on_gone_;  // written before the count is closed, read after the last object went
};

// Lock-free where the device is there. Otherwise plugins that may bring it are loaded first, if
// that has not been done. Null if there is no such device.
DeviceEntry* find_device(const Device& device) noexcept;
// Those that are there now; loads nothing.
std::vector<Device> present_devices();
// As present_devices(), once plugins have been looked for; one that waits until a device of its
// kind is named (a manifest's "load_for") goes on waiting.
std::vector<Device> ready_devices();
// Set by the room plugins: loads the plugins that may bring this device, or any if it is null. Does
// nothing on a thread that is inside an op or is loading a plugin.
inline constinit std::atomic<void (*)(const Device*) noexcept> g_bring_devices{nullptr};

// A sticky error: nothing works on the device any more. Every later use of it fails at once with
// `reason`, through dispatch too. The host cannot be lost.
void lose_device(const Device& device, const std::string& reason);
// The device is there again, perhaps another one.
void find_device_again(const Device& device) noexcept;
// Every later use of the device answers with this status.
Status lost_device(const Device& device, const std::string& reason);
Status withdrawn_device(const Device& device);
// NOT_FOUND, for a caller that found no such device: it may be there by now.
Status absent_device(const Device& device);

// Calls into the rooms above when a device changes; the registry sets all but the last two,
// dispatch those.
struct DeviceHooks {
  // It came, perhaps again and as another one.
  std::atomic<void (*)(const Device&)> added{nullptr};
  std::atomic<void (*)(const Device&, const std::string& reason)> lost{nullptr};
  // It is barred: no op is to run on it from the next call on.
  std::atomic<void (*)(const Device&)> barred{nullptr};
  // A graph of it is about to be launched on the stream.
  std::atomic<void (*)(const Device&, void* stream)> launching{nullptr};
  // BUSY, and why, if what was made for it cannot go now. Asked before anything is changed.
  std::atomic<Status (*)(const Device&)> check_leave{nullptr};
  // Nobody is inside any more: what was made for it, as plans are, is to go. Its functions work
  // yet.
  std::atomic<void (*)(const Device&)> left{nullptr};
  // Counts the device's objects that te-fl keeps for ops to come: scratch and pinned memory.
  std::atomic<int64_t (*)(const Device&)> held{nullptr};
  // Frees those. Nothing may be running on the device.
  std::atomic<void (*)(const Device&)> release{nullptr};
};
inline constinit DeviceHooks g_device_hooks;

// BUSY, and why, if what was made for the device cannot go now.
Status check_leave(const Device& device);
// The steps of a device's withdrawal, for which check_leave() is asked before. First no op and no
// new object reaches it, while threads may still be inside; wait_outside() (core/inside.hpp) then
// waits for them. Frees nothing.
void bar_device(const Device& device);
// Then what was made for it and what is kept on it goes,
void leave_device(const Device& device);
// Counts the objects on the device that are te-fl's own, which leave_device() frees.
int64_t held_on(const Device& device);
// and, that included, it is taken out of service: it leaves the list when its last object goes, on
// the thread that frees it, and then `gone` is called; at once if there is none. Calls on its
// living objects go on working until then.
Status retire_device(const Device& device, std::function<void()> gone);

}  // namespace te_fl::core
