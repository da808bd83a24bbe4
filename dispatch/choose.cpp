// Chooses the implementations that may run a call.

#include <algorithm>

#include "core/base/answer.hpp"
#include "core/device/device_list.hpp"
#include "core/device/device_use.hpp"
#include "dispatch/manager_impl.hpp"
#include "dispatch/watch/barred.hpp"
#include "plugins/discovery.hpp"
#include "policy/current.hpp"
#include "policy/text.hpp"

namespace te_fl::dispatch {
namespace {

bool mentions_names(const PolicySettings& s) {
  return !s.per_op.empty() || !s.per_signature.empty() || !s.allow_vendors.empty() ||
         !s.deny_vendors.empty();
}

// True if memory can be copied to and from the device: it exists and is not being withdrawn.
bool is_present(const Device& device) {
  const core::DeviceEntry* entry = core::find_device(device);
  return entry != nullptr && !entry->closed();
}

// Returns the device entry that can report whether the stream is being captured. Null if the device
// has no function for this, or if it must not be entered any more; choose() reports the latter.
const core::DeviceEntry* entry_to_ask(const Call& call) noexcept {
  const core::DeviceEntry* entry = core::find_device(call.signature.device);
  const bool asks =
      entry != nullptr && entry->in_service() && entry->desc->api->is_capturing != nullptr;
  return asks ? entry : nullptr;
}

// The 1-based number of the policy's list that applies to a call of this size; 0: none.
uint32_t list_by_size(const Call& call) {
  const PolicySettings& settings = policy::settings_of(call.policy);
  policy::CallTraits known{.op = call.row.compiled->schema().name,
                           .device = call.signature.device,
                           .dtypes = call.signature.dtypes,
                           .scalings = call.signature.scalings};
  known.bytes = call.row.compiled->element_bytes(call.args);
  const SignatureList* list = policy::signature_list_for(settings, known);
  return list == nullptr || list->for_all_sizes()
             ? 0
             : 1 + static_cast<uint32_t>(list - settings.per_signature.data());
}

}  // namespace

bool read_stream(Call& call) noexcept {
  call.capturing = false;
  const core::DeviceEntry* entry = entry_to_ask(call);
  if (entry == nullptr) return true;
  int32_t capturing = 0;
  try {
    const te_fl_status code =
        entry->desc->api->is_capturing(entry->desc->self, call.options.stream, &capturing, nullptr);
    call.capturing = capturing != 0;
    return core::known_status(code) == TE_FL_OK;
  } catch (...) {  // forbidden by R5; ask_stream() returns the error
    return false;
  }
}

Status ask_stream(Call& call) {
  call.capturing = false;
  const core::DeviceEntry* entry = entry_to_ask(call);
  if (entry == nullptr) return {};
  core::ErrorText errors;
  int32_t capturing = 0;
  const te_fl_status code = errors.call([&] {
    return entry->desc->api->is_capturing(entry->desc->self, call.options.stream, &capturing,
                                          errors.sink());
  });
  if (code == TE_FL_OK) {
    call.capturing = capturing != 0;
    return {};
  }
  if (TE_FL_STATUS_CODE(code) == TE_FL_INVALID_ARGUMENT) return check_stream(call);
  if (TE_FL_STATUS_CODE(code) == TE_FL_UNSUPPORTED) return {};  // the device has no captures
  // It is unknown whether work on the stream would run or be captured, so the call is refused.
  return core::device_status(call.signature.device, call.options.stream, errors, code,
                             "op '" + std::string(call.row.compiled->schema().name) +
                                 "': " + to_string(call.signature.device) +
                                 " cannot say whether the stream is being captured");
}

Status prepare_call(Call& call) {
  if (call.args == nullptr || !recognise(call)) return bad_arguments(call.row, call.args);
  call.policy = policy::current_id();
  if (call.policy == policy::kInvalidPolicy) return invalid_policy(call.row);
  return call.signature.device.is_host() ? Status() : ask_stream(call);
}

Result<Choice> choose(const Call& call, uint32_t policy) {
  const Table& table = call.table;
  const OpRow& row = call.row;
  const core::Signature& signature = call.signature;
  if (!table.barred.empty()) {
    if (const registry::BarredDevice* barred = table.barred_device(signature.device))
      return barred->why;
  }
  // An op table made after the withdrawal of the device may not list the device as barred.
  if (const core::DeviceEntry* entry = core::find_device(signature.device);
      entry != nullptr && entry->closed()) {
    return core::withdrawn_device(signature.device);
  }
  Choice decision;
  decision.settings = &policy::settings_of(policy);
  if (decision.settings->strict) TE_FL_RETURN_IF_ERROR(plugins::named_plugins_status());
  if (Status error = policy::settings_error(*decision.settings); !error.ok()) {
    return policy::cause_first(
        error, "op '" + std::string(row.compiled->schema().name) + "' cannot be routed");
  }
  const Result<uint32_t> arch = call.manager.table_owner.arch(signature.device);
  // An absent device is not an error here: the candidates' reasons for refusal describe it better.
  if (!arch.ok() && arch.status().code() != StatusCode::kNotFound) return arch.status();
  decision.call = {row.compiled->schema().name,
                   signature.device,
                   is_present(signature.device),
                   arch.ok() ? *arch : 0,
                   signature.dtypes,
                   signature.scalings,
                   signature.later,
                   call.capturing};
  if (call.args != nullptr) decision.call.bytes = row.compiled->element_bytes(call.args);
  decision.call.collective = core::class_of(row.compiled->schema()) == core::OpClass::kCollective;
  decision.call.maker = signature.maker;
  decision.barred = barred(row, signature);
  decision.call.barred = decision.barred;
  static_cast<policy::Ranking&>(decision) =
      policy::decide(*decision.settings, decision.call, row.views);
  if (mentions_names(*decision.settings)) warn_absent(table, row, *decision.settings);
  return decision;
}

Result<const RouteEntry*> find_route(Call& call) {
  RouteKey key(call.op, call.signature, call.policy, call.capturing);
  if (policy::g_lists_by_size.load(std::memory_order_relaxed)) [[unlikely]]
    key.set_list(list_by_size(call));
  if (const RouteEntry* known = call.thread.routes.find(call.table.id, key)) return known;
  TE_FL_ASSIGN_OR_RETURN(const Choice decision, choose(call, call.policy));
  auto route = std::make_unique<Route>();
  route->deterministic = decision.settings->deterministic;
  route->strict = decision.settings->strict;
  for (size_t i = 0; i < decision.order.size(); ++i) {
    const policy::Standing& v = decision.order[i];
    if (v.refusal == policy::Refusal::kNone && decision.permits(i)) {
      route->order.push_back({call.row.impls[v.impl].get(), v.staged});
    }
  }
  RouteEntry& entry = call.thread.routes.victim(call.table.id, key);
  entry.table = call.table.id;
  entry.key = key;
  entry.first = nullptr;
  entry.counter = nullptr;
  if (!route->order.empty()) {
    const Implementation& first = *route->order.front().impl;
    entry.counter = call.thread.counters.at(first.counter);
    const bool plain = !route->order.front().staged && call.row.saved == nullptr &&
                       entry.counter != nullptr && !decision.call.collective;
    entry.first = plain ? &first : nullptr;
  }
  entry.route = std::move(route);
  return &entry;
}

}  // namespace te_fl::dispatch
