#include <memory>
#include <utility>

#include "core/device_list.hpp"
#include "core/error_text.hpp"
#include "core/host_device.hpp"
#include "te_fl/device.hpp"
#include "te_fl/log.hpp"

namespace te_fl::devices {
namespace {

using core::DeviceEntry;
using core::ErrorText;

Result<DeviceEntry*> entry_of(const Device& device) {
  if (DeviceEntry* entry = core::find_device(device)) return entry;
  return find(device).status();
}

// Counts the object in, or says that the device is going.
Result<DeviceEntry*> acquire(const Device& device) {
  TE_FL_ASSIGN_OR_RETURN(DeviceEntry * entry, entry_of(device));
  if (!entry->acquire())
    return not_found("device " + te_fl::to_string(device) + " is being removed");
  return entry;
}

// A device in use for the length of a call: it does not go meanwhile. The host never goes, so it is
// not counted.
class Use {
 public:
  static Result<Use> of(const Device& device) {
    TE_FL_ASSIGN_OR_RETURN(DeviceEntry * entry, entry_of(device));
    if (entry->desc == core::host_device()) return Use(entry, false);
    if (!entry->pin()) return not_found("device " + te_fl::to_string(device) + " is gone");
    return Use(entry, true);
  }
  Use(Use&& other) noexcept
      : entry_(other.entry_), counted_(std::exchange(other.counted_, false)) {}
  Use& operator=(Use&&) = delete;
  ~Use() {
    if (counted_) entry_->release();
  }
  const DeviceEntry* operator->() const noexcept { return entry_; }
  const DeviceEntry& operator*() const noexcept { return *entry_; }

 private:
  Use(DeviceEntry* entry, bool counted) noexcept : entry_(entry), counted_(counted) {}
  DeviceEntry* entry_;
  bool counted_;
};

Status copy_by(const DeviceEntry& entry, void* dst, const void* src, size_t bytes,
               uint32_t host_flags, void* stream) {
  ErrorText errors;
  const te_fl_device_desc& d = *entry.desc;
  const te_fl_status code = errors.call(
      [&] { return d.api->copy(d.self, dst, src, bytes, host_flags, stream, errors.sink()); });
  return errors.status(
      code, "copy of " + std::to_string(bytes) + " bytes by " + te_fl::to_string(entry.device));
}

// Between two devices that know nothing of each other: by way of the host, synchronously.
Status copy_across(const DeviceEntry& to, void* dst, const DeviceEntry& from, const void* src,
                   size_t bytes, void* stream) {
  TE_FL_ASSIGN_OR_RETURN(void* bounce, allocate(Device{}, bytes));
  const std::unique_ptr<void, void (*)(void*)> owner(bounce, [](void* p) { free(Device{}, p); });
  TE_FL_RETURN_IF_ERROR(copy_by(from, bounce, src, bytes, 1, nullptr));
  TE_FL_RETURN_IF_ERROR(synchronize(from.device));
  TE_FL_RETURN_IF_ERROR(copy_by(to, dst, bounce, bytes, 2, stream));
  return synchronize(to.device, stream);
}

// What a device returned for an allocation; ends the count when it is an error.
Result<void*> allocated(DeviceEntry* entry, const ErrorText& errors, te_fl_status code, void* data,
                        const char* what) {
  if (code == TE_FL_OK && data != nullptr) return data;
  const Device device = entry->device;
  entry->release();
  if (code == TE_FL_OK)
    return internal_error(te_fl::to_string(device) + " allocated a null pointer");
  return errors.status(code, what + te_fl::to_string(device));
}

// A release that failed can only be reported: the object is gone for its owner.
void report_release(te_fl_status code, const ErrorText& errors, const Device& device) noexcept {
  if (code == TE_FL_OK) return;
  try {
    const std::string name = te_fl::to_string(device);
    log::once(log::Level::kError, "free " + name,
              errors.status(code, "free on " + name).to_string());
  } catch (...) {  // no memory for the message
  }
}

}  // namespace

Result<te_fl_device_props> properties(const Device& device) {
  TE_FL_ASSIGN_OR_RETURN(const Use entry, Use::of(device));
  te_fl_device_props props{};
  props.struct_size = sizeof props;
  ErrorText errors;
  const te_fl_status code =
      errors.call([&] { return entry->desc->api->properties(entry->desc->self, &props); });
  TE_FL_RETURN_IF_ERROR(errors.status(code, "properties of " + te_fl::to_string(device)));
  props.name[sizeof props.name - 1] = '\0';
  return props;
}

Result<void*> allocate(const Device& device, size_t bytes, void* stream) {
  TE_FL_ASSIGN_OR_RETURN(DeviceEntry * entry, acquire(device));
  ErrorText errors;
  void* data = nullptr;
  const te_fl_device_desc& d = *entry->desc;
  const te_fl_status code =
      errors.call([&] { return d.api->allocate(d.self, bytes, stream, &data, errors.sink()); });
  return allocated(entry, errors, code, data, "allocation on ");
}

void free(const Device& device, void* data, void* stream) noexcept {
  if (data == nullptr) return;
  DeviceEntry* entry = core::find_device(device);
  if (entry == nullptr) return;  // cannot be: live memory keeps a device in the list
  ErrorText errors;
  report_release(
      errors.call([&] { return entry->desc->api->free(entry->desc->self, data, stream); }), errors,
      device);
  entry->release();
}

Result<void*> allocate_pinned(const Device& device, size_t bytes) {
  TE_FL_ASSIGN_OR_RETURN(DeviceEntry * entry, acquire(device));
  ErrorText errors;
  void* data = nullptr;
  const te_fl_device_desc& d = *entry->desc;
  te_fl_status code = TE_FL_UNSUPPORTED;
  if (d.api->allocate_pinned != nullptr && d.api->free_pinned != nullptr) {
    code = errors.call([&] { return d.api->allocate_pinned(d.self, bytes, &data, errors.sink()); });
  }
  return allocated(entry, errors, code, data, "allocation of pinned memory by ");
}

void free_pinned(const Device& device, void* data) noexcept {
  if (data == nullptr) return;
  DeviceEntry* entry = core::find_device(device);
  if (entry == nullptr || entry->desc->api->free_pinned == nullptr) return;
  ErrorText errors;
  report_release(
      errors.call([&] { return entry->desc->api->free_pinned(entry->desc->self, data); }), errors,
      device);
  entry->release();
}

Status copy(const Device& dst_device, void* dst, const Device& src_device, const void* src,
            size_t bytes, void* stream) {
  TE_FL_ASSIGN_OR_RETURN(const Use to, Use::of(dst_device));
  TE_FL_ASSIGN_OR_RETURN(const Use from, Use::of(src_device));
  if (bytes == 0) return {};
  const bool to_host = dst_device.is_host(), from_host = src_device.is_host();
  const uint32_t host_flags = (to_host ? 1u : 0u) | (from_host ? 2u : 0u);
  if (&*to == &*from) return copy_by(*to, dst, src, bytes, host_flags, stream);
  if (to_host && from_host)
    return copy_by(*core::find_device(Device{}), dst, src, bytes, 3, nullptr);
  if (to_host) return copy_by(*from, dst, src, bytes, host_flags, stream);
  if (from_host) return copy_by(*to, dst, src, bytes, host_flags, stream);
  return copy_across(*to, dst, *from, src, bytes, stream);
}

Status fill(const Device& device, void* dst, uint8_t value, size_t bytes, void* stream) {
  TE_FL_ASSIGN_OR_RETURN(const Use entry, Use::of(device));
  if (bytes == 0) return {};
  ErrorText errors;
  const te_fl_device_desc& d = *entry->desc;
  const te_fl_status code =
      errors.call([&] { return d.api->fill(d.self, dst, value, bytes, stream, errors.sink()); });
  return errors.status(
      code, "fill of " + std::to_string(bytes) + " bytes on " + te_fl::to_string(device));
}

Status synchronize(const Device& device, void* stream) {
  TE_FL_ASSIGN_OR_RETURN(const Use entry, Use::of(device));
  ErrorText errors;
  const te_fl_device_desc& d = *entry->desc;
  const te_fl_status code =
      errors.call([&] { return d.api->synchronize(d.self, stream, errors.sink()); });
  return errors.status(code, "synchronisation of " + te_fl::to_string(device));
}

}  // namespace te_fl::devices
