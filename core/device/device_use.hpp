#pragma once

#include <string>
#include <utility>

#include "core/base/error_text.hpp"
#include "core/device/device_list.hpp"
#include "core/device/host_device.hpp"
#include "core/device/inside.hpp"
#include "te_fl/device.hpp"
#include "te_fl/log.hpp"

// Helpers for calls of device functions: reference counts, and conversion of the returned codes
// into statuses.
namespace te_fl::core {

// Finds a device. NOT_FOUND lists the devices that exist; DEVICE_LOST says why the device was lost.
inline Result<DeviceEntry*> device_entry(const Device& device) {
  DeviceEntry* entry = find_device(device);
  if (entry == nullptr) return absent_device(device);
  if (const std::string* reason = entry->lost()) return lost_device(device, *reason);
  return entry;
}

// Adds a reference for a new object, or returns an error if the device is being withdrawn. Call it
// while a DeviceUse (below) of the device lives.
inline Result<DeviceEntry*> acquire_device(const Device& device) {
  TE_FL_ASSIGN_OR_RETURN(DeviceEntry * entry, device_entry(device));
  if (!entry->acquire()) return not_found(withdrawn_device(device).message());
  return entry;
}

// Keeps a device for the length of a call: the device stays, and a withdrawal waits for the call.
// The host is never withdrawn, so it is not counted.
class DeviceUse {
 public:
  static Result<DeviceUse> of(const Device& device) {
    TE_FL_ASSIGN_OR_RETURN(DeviceEntry * entry, device_entry(device));
    if (entry->desc == host_device()) return DeviceUse(entry, false);
    DeviceUse use(entry, false);  // marks the thread as inside before it checks the device
    if (use.inside_.too_late()) return process_ends("no device is used");
    if (!entry->pin()) return not_found(withdrawn_device(device).message());
    use.counted_ = true;
    return use;
  }
  DeviceUse(DeviceUse&& other) noexcept
      : inside_(std::move(other.inside_)),
        entry_(other.entry_),
        counted_(std::exchange(other.counted_, false)) {}
  DeviceUse& operator=(DeviceUse&&) = delete;
  ~DeviceUse() {
    if (counted_) entry_->release();
  }
  const DeviceEntry* operator->() const noexcept { return entry_; }
  const DeviceEntry& operator*() const noexcept { return *entry_; }

 private:
  DeviceUse(DeviceEntry* entry, bool counted)
      : inside_(entry->device), entry_(entry), counted_(counted) {}
  Inside inside_;
  DeviceEntry* entry_;
  bool counted_;
};

// Reads a function from a device's table; null if the table is shorter (R3).
template <class F>
F slot(const te_fl_device_api& api, F te_fl_device_api::*member) noexcept {
  const auto* at = reinterpret_cast<const char*>(&(api.*member));
  const auto end = static_cast<size_t>(at - reinterpret_cast<const char*>(&api)) + sizeof(F);
  return end <= api.struct_size ? api.*member : nullptr;
}
// Converts a code that a device returned for work on `stream` into a status. Any op enqueued
// earlier may have caused the error, so the message lists the recent ops. A sticky error marks the
// device as lost.
Status device_status(const Device& device, void* stream, const ErrorText& errors, te_fl_status code,
                     const std::string& what);

// Converts the code and object that a device returned into a result. The caller took a reference to
// the device for the object; an error drops it.
inline Result<void*> made_object(DeviceEntry* entry, const ErrorText& errors, te_fl_status code,
                                 void* object, const char* what) {
  if (code == TE_FL_OK && object != nullptr) return object;
  const Device device = entry->device;
  entry->release();
  if (code == TE_FL_OK) return internal_error(to_string(device) + " allocated a null pointer");
  return device_status(device, nullptr, errors, code, what + to_string(device));
}

// Logs a failed release. The owner no longer has the object, so nothing else can be done. A lost
// device is marked as lost as well.
inline void report_release(te_fl_status code, const ErrorText& errors,
                           const Device& device) noexcept {
  if (code == TE_FL_OK) return;
  try {
    const std::string name = to_string(device);
    const Status failed = device_status(device, nullptr, errors, code, "free on " + name);
    log::once(log::Level::kError, "free " + name, failed.to_string());
  } catch (...) {  // no memory for the message
  }
}

}  // namespace te_fl::core
