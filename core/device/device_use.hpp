#pragma once

#include <string>
#include <utility>

#include "core/base/error_text.hpp"
#include "core/device/device_list.hpp"
#include "core/device/host_device.hpp"
#include "core/device/inside.hpp"
#include "te_fl/device.hpp"
#include "te_fl/log.hpp"

// Counts a call of a device's function in and out, and turns its answer into a status.
namespace te_fl::core {

// NOT_FOUND names the devices that exist, DEVICE_LOST says since when.
inline Result<DeviceEntry*> device_entry(const Device& device) {
  DeviceEntry* entry = find_device(device);
  if (entry == nullptr) return absent_device(device);
  if (const std::string* reason = entry->lost()) return lost_device(device, *reason);
  return entry;
}

// Counts an object in, or says that the device is going. To be called while it is in use (below).
inline Result<DeviceEntry*> acquire_device(const Device& device) {
  TE_FL_ASSIGN_OR_RETURN(DeviceEntry * entry, device_entry(device));
  if (!entry->acquire()) return not_found(withdrawn_device(device).message());
  return entry;
}

// A device in use for the length of a call: it does not go meanwhile, and a withdrawal waits for
// the call. The host never goes, so it is not counted.
class DeviceUse {
 public:
  static Result<DeviceUse> of(const Device& device) {
    TE_FL_ASSIGN_OR_RETURN(DeviceEntry * entry, device_entry(device));
    if (entry->desc == host_device()) return DeviceUse(entry, false);
    DeviceUse use(entry, false);  // inside, before it is looked whether the device is there
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

// A function of a device's table; null where the table ends before it (R3).
template <class F>
F slot(const te_fl_device_api& api, F te_fl_device_api::*member) noexcept {
  const auto* at = reinterpret_cast<const char*>(&(api.*member));
  const auto end = static_cast<size_t>(at - reinterpret_cast<const char*>(&api)) + sizeof(F);
  return end <= api.struct_size ? api.*member : nullptr;
}
// Turns into a status the code that a device returned for work on `stream`. An error may come from
// any op enqueued before, which is then named; after a sticky one the device is lost.
Status device_status(const Device& device, void* stream, const ErrorText& errors, te_fl_status code,
                     const std::string& what);

// Turns into a result the code and the object that a device returned, for an object that was
// counted in; ends the count when it is an error.
inline Result<void*> made_object(DeviceEntry* entry, const ErrorText& errors, te_fl_status code,
                                 void* object, const char* what) {
  if (code == TE_FL_OK && object != nullptr) return object;
  const Device device = entry->device;
  entry->release();
  if (code == TE_FL_OK) return internal_error(to_string(device) + " allocated a null pointer");
  return device_status(device, nullptr, errors, code, what + to_string(device));
}

// A release that failed can only be reported: the object is gone for its owner. A device that is
// lost is retired all the same.
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
