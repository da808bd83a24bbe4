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

// The largest provider id: a route's key stores it in 16 bits.
inline constexpr uint32_t kMaxProvider = 0xffff;

// One device. Entries are never freed, so their addresses may be kept. `desc` is valid until the
// device has been removed.
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
  // The reason if the device has been lost; null while it works. The text is never freed.
  const std::string* lost() const noexcept { return lost_.load(std::memory_order_acquire); }
  // Marks the device as lost. False if it was lost before.
  bool lose(const std::string& reason);
  void found_again() noexcept { lost_.store(nullptr, std::memory_order_release); }

  // True if the device is being withdrawn or has been removed. It accepts no new objects and no new
  // work, except work that saves existing data.
  bool closed() const noexcept {
    return barred_.load(std::memory_order_relaxed) || count_.load(std::memory_order_relaxed) < 0;
  }
  // True if ops may enter the device's functions. A thread that has marked itself as inside
  // (core/device/inside.hpp) before it reads true here is waited for before the device is released.
  bool in_service() const noexcept { return !closed() && lost() == nullptr; }
  // Closes the device while threads may still be inside. Used by the functions of the device list
  // only.
  void bar() noexcept { barred_.store(true, std::memory_order_seq_cst); }
  void unbar() noexcept { barred_.store(false, std::memory_order_seq_cst); }
  // Adds a reference for an object. False if the device is closed.
  bool acquire() noexcept {
    if (barred_.load(std::memory_order_acquire)) return false;
    int64_t count = count_.load(std::memory_order_relaxed);
    do {
      if (count < 0) return false;
    } while (!count_.compare_exchange_weak(count, count + 1, std::memory_order_acq_rel));
    return true;
  }
  // Adds a reference for a short use. Also works on a retired device while it has objects. False if
  // the device is removed or may be removed at any moment.
  bool pin() noexcept {
    int64_t count = count_.load(std::memory_order_relaxed);
    do {
      if (count == kClosed) return false;
    } while (!count_.compare_exchange_weak(count, count + 1, std::memory_order_acq_rel));
    return true;
  }
  // Drops the reference of acquire() or pin(). On a retired device, the last release takes the
  // device out of the list and calls `gone`.
  void release() noexcept {
    if (count_.fetch_sub(1, std::memory_order_acq_rel) == kClosed + 1) last_gone();
  }
  // Refuses new objects, if exactly `held` references exist; otherwise returns false. The caller
  // keeps a reference: the device's functions work until it calls release() or reopen().
  bool close(int64_t held) noexcept {
    return count_.compare_exchange_strong(held, kClosed + held + 1, std::memory_order_acq_rel);
  }
  // Undoes close().
  void reopen() noexcept { count_.fetch_sub(kClosed + 1, std::memory_order_acq_rel); }
  // Refuses new objects. Calls `gone` once when the last object has been released, or at once if
  // there is none.
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
      on_gone_;  // written before the count is closed, read after the last release
};

// Finds a device. Lock-free if the device is in the list. Otherwise first loads the plugins that
// may provide it, unless that was tried before, and then asks the function of devices::set_maker().
// Null if there is no such device.
DeviceEntry* find_device(const Device& device) noexcept;
// The devices in the list. Loads no plugin.
std::vector<Device> present_devices();
// The devices in the list after plugin discovery. A plugin whose manifest delays loading
// ("load_for") stays unloaded until a device of its kind is named.
std::vector<Device> ready_devices();
// Hook set by plugins/: loads the plugins that may provide this device, or all if it is null. Does
// nothing on a thread that is inside an op or is loading a plugin.
inline constinit std::atomic<void (*)(const Device*) noexcept> g_bring_devices{nullptr};
// The function of devices::set_maker().
inline constinit std::atomic<bool (*)(const Device&) noexcept> g_make_device{nullptr};

// Marks a device as lost after a sticky error. Every later use of it fails at once with `reason`,
// also in dispatch. The host cannot be lost.
void lose_device(const Device& device, const std::string& reason);
// Clears the lost state: the device is back, or another device has taken its place.
void find_device_again(const Device& device) noexcept;
// The status DEVICE_LOST that every later use of the device returns.
Status lost_device(const Device& device, const std::string& reason);
Status withdrawn_device(const Device& device);
// The status NOT_FOUND for a device that was not in the list. (The device may have been added
// since.)
Status absent_device(const Device& device);

// Hooks into upper layers for changes of a device. Dispatch sets `count_cached` and
// `release_cached`; the registry sets all others.
struct DeviceHooks {
  // The device was added; a different device may have had the same number before.
  std::atomic<void (*)(const Device&)> on_added{nullptr};
  std::atomic<void (*)(const Device&, const std::string& reason)> on_lost{nullptr};
  // The device was barred: later calls must not run ops on it.
  std::atomic<void (*)(const Device&)> on_barred{nullptr};
  // A graph of the device is about to be launched on the stream.
  std::atomic<void (*)(const Device&, void* stream)> on_launching{nullptr};
  // BUSY with the reason if plans or other objects of the device cannot be released now. Called
  // before anything is changed.
  std::atomic<Status (*)(const Device&)> check_removal{nullptr};
  // The device is barred and no thread is inside it: releases plans and other objects made for it.
  // The device's functions still work.
  std::atomic<void (*)(const Device&)> on_removed{nullptr};
  // Counts the device's objects that te-fl caches for later ops: scratch and pinned memory.
  std::atomic<int64_t (*)(const Device&)> count_cached{nullptr};
  // Frees the objects that `count_cached` counts. Nothing may be running on the device.
  std::atomic<void (*)(const Device&)> release_cached{nullptr};
};
inline constinit DeviceHooks g_device_hooks;

// BUSY with the reason if objects made for the device cannot be released now.
Status check_leave(const Device& device);
// Step 1 of a withdrawal; call check_leave() before it. Stops new ops and new objects on the
// device. Frees nothing, and does not wait for threads that are inside functions of the device
// (call wait_outside() of core/device/inside.hpp next).
void bar_device(const Device& device);
// Step 2 of a withdrawal: frees the plans and caches that te-fl made for the device.
void leave_device(const Device& device);
// Counts the objects on the device that te-fl itself owns and leave_device() frees.
int64_t held_on(const Device& device);
// Step 3 of a withdrawal; runs step 2 itself. The device then leaves the list when its last object
// is freed. The thread that frees that object calls `gone`; if there is no object, it is called at
// once. Functions of live objects work until then.
Status retire_device(const Device& device, std::function<void()> gone);

}  // namespace te_fl::core
