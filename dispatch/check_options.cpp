// Under TE_FL_VALIDATE, checks that the call's stream and RNG seed belong to its device, by
// querying the device. core/op/op_memory.cpp checks the tensor arguments in the same way.

#include "core/device/device_use.hpp"
#include "dispatch/manager_impl.hpp"

namespace te_fl::dispatch {
namespace {

std::string of_op(const Call& call) {
  return "op '" + std::string(call.row.compiled->schema().name) + "': ";
}

// The entry of the call's device. Null for host memory, and for a device that must not be entered
// any more (dispatch reports that).
const core::DeviceEntry* find_entry(const Call& call) {
  if (call.signature.device.is_host()) return nullptr;
  const core::DeviceEntry* entry = core::find_device(call.signature.device);
  return entry != nullptr && entry->in_service() ? entry : nullptr;
}

}  // namespace

Status check_stream(const Call& call) {
  const core::DeviceEntry* entry = find_entry(call);
  if (entry == nullptr || call.options.stream == nullptr) return {};
  const auto check = core::slot(*entry->desc->api, &te_fl_device_api::check_stream);
  if (check == nullptr) return {};
  core::ErrorText errors;
  const te_fl_status code =
      errors.call([&] { return check(entry->desc->self, call.options.stream, errors.sink()); });
  if (code == TE_FL_OK) return {};
  if (TE_FL_STATUS_CODE(code) == TE_FL_DEVICE_LOST) {
    return core::device_status(call.signature.device, call.options.stream, errors, code,
                               of_op(call) + "the stream cannot be looked at");
  }
  return invalid_argument(of_op(call) + "the stream given for " + to_string(call.signature.device) +
                          " is not one of it: " + errors.text() +
                          "; give a stream of that device, or NULL for its default stream");
}

namespace {

Status check_random_address(const Call& call, const uint64_t* address, const std::string& what) {
  const core::DeviceEntry* entry = find_entry(call);
  if (entry == nullptr || address == nullptr) return {};
  const auto check = core::slot(*entry->desc->api, &te_fl_device_api::check_pointer);
  if (check == nullptr) return {};
  core::ErrorText errors;
  const te_fl_status code = errors.call(
      [&] { return check(entry->desc->self, address, sizeof *address, errors.sink()); });
  if (code == TE_FL_OK) return {};
  if (TE_FL_STATUS_CODE(code) == TE_FL_DEVICE_LOST) {
    return core::device_status(call.signature.device, call.options.stream, errors, code,
                               of_op(call) + "the random state's " + what + " cannot be looked at");
  }
  return invalid_argument(
      of_op(call) + "the random state's " + what + " (CallOptions::rng." + what +
      "_address) is not memory of " + to_string(call.signature.device) + ": " + errors.text() +
      "; give it 8 bytes of that device, or NULL to use the " + what + " beside it");
}

}  // namespace

Status check_random_state(const Call& call) {
  const te_fl_rng& rng = call.options.rng;
  TE_FL_RETURN_IF_ERROR(check_random_address(call, rng.seed_address, "seed"));
  return check_random_address(call, rng.offset_address, "offset");
}

}  // namespace te_fl::dispatch
