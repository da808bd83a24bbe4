#include <algorithm>
#include <bit>
#include <memory>
#include <string>

#include "core/base/text.hpp"
#include "core/device/allocations.hpp"
#include "core/device/allocator.hpp"
#include "core/device/current_stream.hpp"
#include "core/device/device_use.hpp"
#include "core/device/in_flight.hpp"
#include "core/device/recent_ops.hpp"

namespace te_fl {

Status core::device_status(const Device& device, void* stream, const ErrorText& errors,
                           te_fl_status code, const std::string& what) {
  Status status = errors.status(code, what);
  const bool lost = status.code() == StatusCode::kDeviceLost;
  if (device.is_host() || (!lost && status.code() != StatusCode::kInternal)) return status;
  const std::string suspects = recent_ops(device, stream);
  if (!suspects.empty()) {
    status = Status(status.code(), status.message() + "; enqueued last, newest first: " + suspects +
                                       " (TE_FL_SYNC=1 finds the one that failed)");
  }
  if (lost) lose_device(device, status.message());
  return status;
}

namespace devices {
namespace {

using core::DeviceEntry;
using core::ErrorText;
using Use = core::DeviceUse;

Status copy_by(const DeviceEntry& entry, void* dst, const void* src, size_t bytes,
               uint32_t host_flags, void* stream) {
  ErrorText errors;
  const te_fl_device_desc& d = *entry.desc;
  const te_fl_status code = errors.call(
      [&] { return d.api->copy(d.self, dst, src, bytes, host_flags, stream, errors.sink()); });
  if (code == TE_FL_OK) return {};
  return core::device_status(
      entry.device, stream, errors, code,
      "copy of " + std::to_string(bytes) + " bytes by " + te_fl::to_string(entry.device));
}

// Copies between two devices that have no direct path. The data goes through host memory, and the
// host waits for both streams.
Status copy_by_host(const DeviceEntry& to, void* dst, void* dst_stream, const DeviceEntry& from,
                    const void* src, void* src_stream, size_t bytes) {
  TE_FL_ASSIGN_OR_RETURN(void* bounce, allocate(Device{}, bytes));
  const std::shared_ptr<void> owner(bounce, [](void* p) { free(Device{}, p); });
  // A copy that returned an error may still have started.
  Status copied = copy_by(from, bounce, src, bytes, 1, src_stream);
  Status waited = core::wait_for_copies(from.device, src_stream, owner);
  TE_FL_RETURN_IF_ERROR(copied.ok() ? waited : copied);
  copied = copy_by(to, dst, bounce, bytes, 2, dst_stream);
  waited = core::wait_for_copies(to.device, dst_stream, owner);
  return copied.ok() ? waited : copied;
}

bool captures(const Device& device, void* stream) {
  if (stream == nullptr || device.is_host()) return false;
  const Result<bool> capturing = is_capturing(device, stream);
  return capturing.ok() && *capturing;
}

// Refuses a copy from or to pageable host memory during a capture: each launch of the graph would
// access that memory again.
Status check_captured_copy(const Device& to, const Device& from, size_t bytes, void* stream) {
  const bool down = to.type == TE_FL_DEVICE_CPU, up = from.type == TE_FL_DEVICE_CPU;
  const Device& device = to.is_host() ? from : to;
  if ((!down && !up) || !captures(device, stream)) return {};
  return failed_precondition(
      "a copy of " + std::to_string(bytes) + " bytes " + (up ? "from" : "to") +
      " host memory cannot be captured on " + te_fl::to_string(device) +
      ": every launch of the graph would use that memory again; copy before the capture into a "
      "tensor of the device, or after the launch");
}

Status check_copy_between(const Device& to, void* to_stream, const Device& from,
                          void* from_stream) {
  TE_FL_RETURN_IF_ERROR(core::check_side(to, to_stream, from));
  if (!captures(to, to_stream) && !captures(from, from_stream)) return {};
  return failed_precondition("a copy from " + te_fl::to_string(from) + " to " +
                             te_fl::to_string(to) +
                             " cannot be captured into a graph, which has one device; copy before "
                             "the capture, or after the launch");
}

// Adds the largest holders of the device's memory to an out-of-memory error.
Status out_of_memory(const Device& device, const Status& status) {
  const std::string holders = core::largest_allocations(device);
  if (holders.empty()) return status;
  Status detailed(StatusCode::kOutOfMemory, status.message() + "; " + holders);
  return status.clean() ? std::move(detailed.set_clean()) : detailed;
}

const char* kind_name(uint32_t kind) {
  static constexpr const char* kNames[] = {"", "pinned", "managed", "peer-visible"};
  return kNames[kind];
}

// True for memory that fills the device. An out-of-memory error lists such memory.
bool is_counted(const Device& device, uint32_t kind) {
  return !device.is_host() && kind != TE_FL_MEMORY_PINNED;
}

Status check_memory(const Device& device, const te_fl_memory_desc& memory) {
  const auto bad = [&](const std::string& why) {
    return invalid_argument("memory of " + te_fl::to_string(device) + ": " + why);
  };
  if (memory.struct_size < sizeof memory) {
    return bad("the descriptor's struct_size is " + std::to_string(memory.struct_size) +
               ", must be at least " + std::to_string(sizeof memory) + " (rule R3)");
  }
  if (memory.kind >= TE_FL_MEMORY_KIND_COUNT) {
    return bad("kind " + std::to_string(memory.kind) + " is no te_fl_memory_kind");
  }
  if (memory.flags != 0) {
    return bad("flags is " + std::to_string(memory.flags) + "; none is defined yet, use 0");
  }
  if (memory.alignment >= 256 && std::has_single_bit(memory.alignment)) return {};
  return bad("alignment is " + std::to_string(memory.alignment) +
             ", must be a power of two and at least 256");
}

Result<void*> by_device(const DeviceEntry& entry, const te_fl_memory_desc& memory) {
  const Device& device = entry.device;
  ErrorText errors;
  void* data = nullptr;
  const te_fl_device_desc& d = *entry.desc;
  const te_fl_status code =
      errors.call([&] { return d.api->allocate(d.self, &memory, &data, errors.sink()); });
  if (code == TE_FL_OK && data != nullptr) {
    if (is_counted(device, memory.kind)) core::note_allocation(device, data, memory.bytes);
    return data;
  }
  if (code == TE_FL_OK)
    return internal_error(te_fl::to_string(device) + " allocated a null pointer");
  const char* const kind = kind_name(memory.kind);
  return core::device_status(device, nullptr, errors, code,
                             "allocation of " + core::bytes_text(memory.bytes) +
                                 (*kind == '\0' ? "" : std::string(" of ") + kind + " memory") +
                                 " on " + te_fl::to_string(device));
}

Result<void*> by_allocator(const core::AllocatorRef& allocator, const Device& device,
                           const te_fl_memory_desc& memory) {
  TE_FL_ASSIGN_OR_RETURN(void* data, allocator->allocate(memory));
  const Status noted = core::note_given(device, data, memory.bytes, {allocator, memory.stream});
  if (noted.ok()) return data;
  // Memory that overlaps a live block stays with that block's owner.
  if (noted.code() == StatusCode::kOutOfMemory) allocator->free(data, nullptr, nullptr);
  return noted;
}

}  // namespace

Result<te_fl_device_props> properties(const Device& device) {
  TE_FL_ASSIGN_OR_RETURN(const Use entry, Use::of(device));
  te_fl_device_props props{};
  props.struct_size = sizeof props;
  ErrorText errors;
  const te_fl_status code = errors.call(
      [&] { return entry->desc->api->properties(entry->desc->self, &props, errors.sink()); });
  if (code != TE_FL_OK) {
    return core::device_status(device, nullptr, errors, code,
                               "properties of " + te_fl::to_string(device));
  }
  props.name[sizeof props.name - 1] = '\0';
  props.driver[sizeof props.driver - 1] = '\0';
  return props;
}

Result<void*> allocate(const Device& device, size_t bytes, void* stream) {
  te_fl_memory_desc memory;
  memory.bytes = bytes;
  memory.stream = stream;
  return allocate(device, memory);
}

Result<void*> allocate(const Device& device, const te_fl_memory_desc& request) {
  TE_FL_RETURN_IF_ERROR(check_memory(device, request));
  // Requests at least one byte: for zero bytes, an allocator may return null, or the same address
  // to all callers.
  te_fl_memory_desc memory = request;
  memory.bytes = std::max<uint64_t>(memory.bytes, 1);
  TE_FL_ASSIGN_OR_RETURN(const Use use, Use::of(device));
  TE_FL_ASSIGN_OR_RETURN(DeviceEntry * entry, core::acquire_device(device));
  const core::AllocatorRef allocator = core::find_allocator(device);
  const auto ask = [&] {
    return allocator != nullptr && memory.kind == TE_FL_MEMORY_DEVICE
               ? by_allocator(allocator, device, memory)
               : by_device(*entry, memory);
  };
  Result<void*> data = ask();
  const auto is_full = [&] { return data.status().code() == StatusCode::kOutOfMemory; };
  if (is_full() && allocator != nullptr && memory.kind != TE_FL_MEMORY_PINNED &&
      allocator->trim(memory.bytes)) {
    data = ask();
  }
  if (data.ok()) return data;
  entry->release();
  return is_full() ? out_of_memory(device, data.status()) : data;
}

void free(const Device& device, void* data, void* stream) noexcept {
  free(device, data, TE_FL_MEMORY_DEVICE, stream);
}

void free(const Device& device, void* data, te_fl_memory_kind kind, void* stream) noexcept {
  if (data == nullptr) return;
  const core::Inside inside(device);
  if (inside.too_late()) return;
  DeviceEntry* entry = core::find_device(device);
  if (entry == nullptr) return;  // does not happen: live memory keeps its device in the list
  const core::Giver giver =
      is_counted(device, kind) ? core::forget_allocation(device, data) : core::Giver{};
  if (giver.allocator != nullptr) {
    giver.allocator->free(data, giver.stream, stream);
  } else {
    ErrorText errors;
    core::report_release(errors.call([&] {
      return entry->desc->api->free(entry->desc->self, data, kind, stream, errors.sink());
    }),
                         errors, device);
  }
  entry->release();
}

Result<void*> allocate_pinned(const Device& device, size_t bytes) {
  te_fl_memory_desc memory;
  memory.kind = TE_FL_MEMORY_PINNED;
  memory.bytes = bytes;
  return allocate(device, memory);
}

void free_pinned(const Device& device, void* data) noexcept {
  free(device, data, TE_FL_MEMORY_PINNED, nullptr);
}

Status copy(const Device& dst_device, void* dst, const Device& src_device, const void* src,
            size_t bytes, void* stream) {
  TE_FL_ASSIGN_OR_RETURN(const Use to, Use::of(dst_device));
  TE_FL_ASSIGN_OR_RETURN(const Use from, Use::of(src_device));
  if (bytes == 0) return {};
  TE_FL_RETURN_IF_ERROR(check_captured_copy(dst_device, src_device, bytes, stream));
  const bool to_host = dst_device.is_host(), from_host = src_device.is_host();
  const uint32_t host_flags = (to_host ? 1u : 0u) | (from_host ? 2u : 0u);
  if (&*to == &*from) return copy_by(*to, dst, src, bytes, host_flags, stream);
  if (to_host && from_host)
    return copy_by(*core::find_device(Device{}), dst, src, bytes, 3, nullptr);
  if (to_host) return copy_by(*from, dst, src, bytes, host_flags, stream);
  if (from_host) return copy_by(*to, dst, src, bytes, host_flags, stream);
  return copy_between(dst_device, dst, stream, src_device, src, current_stream(src_device), bytes);
}

Status copy_between(const Device& dst_device, void* dst, void* dst_stream, const Device& src_device,
                    const void* src, void* src_stream, size_t bytes) {
  TE_FL_ASSIGN_OR_RETURN(const Use to, Use::of(dst_device));
  TE_FL_ASSIGN_OR_RETURN(const Use from, Use::of(src_device));
  if (dst_device.is_host() || src_device.is_host() || &*to == &*from) {
    return invalid_argument("copy_between copies between two devices, not from " +
                            te_fl::to_string(src_device) + " to " + te_fl::to_string(dst_device) +
                            "; use devices::copy");
  }
  if (bytes == 0) return {};
  TE_FL_RETURN_IF_ERROR(check_copy_between(dst_device, dst_stream, src_device, src_stream));
  const te_fl_device_desc &t = *to->desc, &f = *from->desc;
  const auto direct = core::slot(*t.api, &te_fl_device_api::copy_between);
  if (direct != nullptr && direct == core::slot(*f.api, &te_fl_device_api::copy_between)) {
    ErrorText errors;
    const te_fl_status code = errors.call([&] {
      return direct(t.self, dst, dst_stream, f.self, src, src_stream, bytes, errors.sink());
    });
    if (code == TE_FL_OK) return {};
    if (TE_FL_STATUS_CODE(code) != TE_FL_UNSUPPORTED) {
      return core::device_status(dst_device, dst_stream, errors, code,
                                 "copy of " + std::to_string(bytes) + " bytes from " +
                                     te_fl::to_string(src_device) + " to " +
                                     te_fl::to_string(dst_device));
    }
  }
  return copy_by_host(*to, dst, dst_stream, *from, src, src_stream, bytes);
}

Status fill(const Device& device, void* dst, uint8_t value, size_t bytes, void* stream) {
  TE_FL_ASSIGN_OR_RETURN(const Use entry, Use::of(device));
  if (bytes == 0) return {};
  ErrorText errors;
  const te_fl_device_desc& d = *entry->desc;
  const te_fl_status code =
      errors.call([&] { return d.api->fill(d.self, dst, value, bytes, stream, errors.sink()); });
  if (code == TE_FL_OK) return {};
  return core::device_status(
      device, stream, errors, code,
      "fill of " + std::to_string(bytes) + " bytes on " + te_fl::to_string(device));
}

Status synchronize(const Device& device, void* stream) {
  TE_FL_ASSIGN_OR_RETURN(const Use entry, Use::of(device));
  if (captures(device, stream)) {
    return failed_precondition(
        "a stream of " + te_fl::to_string(device) +
        " is being captured into a graph: its work has not run and cannot be waited for; read "
        "results after launching the graph");
  }
  ErrorText errors;
  const te_fl_device_desc& d = *entry->desc;
  const te_fl_status code =
      errors.call([&] { return d.api->synchronize(d.self, stream, errors.sink()); });
  if (code == TE_FL_OK) return {};
  return core::device_status(device, stream, errors, code,
                             "synchronisation of " + te_fl::to_string(device));
}

}  // namespace devices
}  // namespace te_fl
