// Runs a call along its route and falls back from one implementation to the next.

#include <algorithm>
#include <array>
#include <vector>

#include "core/device/device_use.hpp"
#include "core/op/collective.hpp"
#include "dispatch/attempt.hpp"
#include "dispatch/manager_impl.hpp"
#include "dispatch/watch/watch.hpp"
#include "policy/current.hpp"
#include "registry/arguments.hpp"
#include "te_fl/log.hpp"

namespace te_fl::dispatch {
namespace {

// A copy of the route's steps. It is needed since a nested call of this thread may replace the
// cached route.
class Order {
 public:
  explicit Order(const std::vector<Step>& order) : size_(order.size()) {
    if (size_ <= inline_.size()) {
      std::copy(order.begin(), order.end(), inline_.begin());
    } else {
      many_ = order;
    }
  }
  size_t size() const { return size_; }
  const Step& operator[](size_t i) const { return size_ <= inline_.size() ? inline_[i] : many_[i]; }

 private:
  size_t size_;
  std::array<Step, 12> inline_;
  std::vector<Step> many_;
};

Status after_success(Call& call, const Implementation& impl) {
  if (std::atomic<uint64_t>* counter = call.thread.counters.at(impl.counter)) {
    counter->store(counter->load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  note_enqueued(call, impl);
  // Captured work has not started, and waiting would end the capture.
  if ((call.manager.switches() & OpManager::Impl::kSync) == 0 || call.capturing) return {};
  const Status synced = devices::synchronize(call.signature.device, call.options.stream);
  if (synced.code() == StatusCode::kDeviceLost) {
    core::lose_device(call.signature.device, "implementation '" + impl.impl_id + "' of op '" +
                                                 impl.op + "' ran: " + synced.to_string());
  }
  return synced.wrap("op '" + impl.op + "' in '" + impl.impl_id +
                     "' failed after it was enqueued (TE_FL_SYNC)");
}

}  // namespace

Status after_failure(const Call& call, const Implementation& impl, te_fl_status code,
                     std::string text) {
  const Device& device = call.signature.device;
  if (TE_FL_STATUS_CODE(code) == TE_FL_DEVICE_LOST && !device.is_host()) {
    // An op that was enqueued earlier may have caused the error.
    const std::string before = core::recent_ops(device, call.options.stream);
    if (!before.empty()) text += "; enqueued before it, newest first: " + before;
    core::lose_device(
        device, "implementation '" + impl.impl_id + "' of op '" + impl.op + "' reported: " + text);
  }
  return implementation_error(call, impl, code, text);
}

namespace {

// Logs the first fallback of each op. A fallback after a failure is logged at a higher
// level than one after a refusal.
void say_fallback(const Call& call, const Failure& failed, const Step& next) {
  const Implementation& impl = *failed.impl;
  const bool refused = TE_FL_STATUS_CODE(failed.status) == TE_FL_UNSUPPORTED;
  std::atomic<bool>& logged = refused ? impl.refusal_logged : impl.failure_logged;
  if (logged.load(std::memory_order_relaxed) || logged.exchange(true, std::memory_order_relaxed))
    return;
  log::once(
      refused ? log::Level::kInfo : log::Level::kWarning,
      (refused ? "refusal " : "failure ") + impl.op,
      "op '" + impl.op + "' fell back from '" + impl.impl_id + "' to '" + next.impl->impl_id + "'" +
          (next.staged ? " on copies in host memory" : "") + ": " + failure_text(failed) +
          "; with " + registry::describe_arguments(call.row.compiled->schema(), call.args) +
          " (TE_FL_STRICT=1 makes it an error, `te-fl explain " + impl.op +
          "` lists the implementations that support it; later ones of this op are not logged)");
}

// Runs a backward op whose forward op wrote an opaque saved record. Always uses the implementation
// that ran the forward, whatever the policy.
Status run_producer(Call& call, const te_fl_saved& record, Execution& execution) {
  const OpRow& row = call.row;
  const std::string op = row.compiled->schema().name;
  if (record.producer == nullptr) {
    return invalid_argument("op '" + op + "': '" + row.saved->name +
                            "' is opaque but names no producer; give it as the forward op left it");
  }
  TE_FL_ASSIGN_OR_RETURN(const Choice decision, choose(call, SelectionPolicy().id()));
  for (const policy::Standing& v : decision.order) {
    const Implementation& impl = *row.impls[v.impl];
    if (impl.interned_id != record.producer && impl.impl_id != record.producer) continue;
    const bool deterministic = policy::settings_of(call.policy).deterministic;
    core::ErrorText errors;
    if (v.refusal != policy::Refusal::kNone) {
      return after_failure(call, impl, TE_FL_UNSUPPORTED,
                           "the forward ran here and left an opaque record, but " +
                               policy::refusal_text(v.refusal, row.views[v.impl], decision.call,
                                                    *decision.settings, nullptr));
    }
    const te_fl_status code = attempt(call, Step{&impl, v.staged}, deterministic, errors);
    execution.impl = &impl;
    execution.staged = v.staged;
    return code == TE_FL_OK ? after_success(call, impl)
                            : after_failure(call, impl, code, errors.text());
  }
  return failed_precondition(
      "op '" + op + "': '" + row.saved->name + "' is an opaque record of '" + record.producer +
      "', which alone can read it and which is not registered for this op (any more); run "
      "the forward again, or load the plugin that has it");
}

Status none_executed(Call& call, const Execution& execution) {
  TE_FL_ASSIGN_OR_RETURN(const Choice decision, choose(call, call.policy));
  return no_candidate(call, decision, execution.failures);
}

// Continues after the failure of the route's first implementation, if a fallback is allowed. The
// call's table and policy are unchanged, so find_route() returns the same route.
[[gnu::cold]] Status run_others(Call& call, const Failure& first, Execution& execution) {
  TE_FL_ASSIGN_OR_RETURN(const RouteEntry* entry, find_route(call));
  const Order order(entry->route->order);
  const bool deterministic = entry->route->deterministic;
  for (size_t i = 0; i < order.size(); ++i) {
    const Implementation& impl = *order[i].impl;
    Failure failure{&impl, TE_FL_OK, {}};
    if (i == 0) {
      failure = first;
    } else {
      core::ErrorText errors;
      failure.status = attempt(call, order[i], deterministic, errors);
      if (failure.status == TE_FL_OK) {
        for (const Failure& f : execution.failures) say_fallback(call, f, order[i]);
        execution.impl = &impl;
        execution.staged = order[i].staged;
        return after_success(call, impl);
      }
      failure.text = errors.text();
    }
    // If no fallback is possible, the failure's own code is more informative than UNSUPPORTED. A
    // collective has no fallback, since the other ranks wait in this implementation.
    const bool last_word =
        core::class_of(call.row.compiled->schema()) == core::OpClass::kCollective ||
        (order.size() == 1 && TE_FL_STATUS_CODE(failure.status) != TE_FL_UNSUPPORTED);
    if (last_word || !may_follow(failure.status)) {
      return after_failure(call, impl, failure.status, failure.text);
    }
    execution.failures.push_back(std::move(failure));
  }
  return none_executed(call, execution);
}

}  // namespace

Status run_route(Call& call, const Failure* first) {
  const uint64_t switches = call.manager.switches();
  if ((switches & OpManager::Impl::kValidate) != 0) {
    TE_FL_RETURN_IF_ERROR(check_stream(call));
    TE_FL_RETURN_IF_ERROR(check_random_state(call));
  }
  if ((switches & (OpManager::Impl::kVerify | OpManager::Impl::kTrace)) != 0) {
    return run_watched(call, first, switches);
  }
  Execution execution;
  return run_order(call, first, execution);
}

namespace {

Status run_in_order(Call& call, const Failure* first, Execution& execution);

// Runs a collective. Reports it to the owner of the communicators (comm/) before and after the run;
// that determines the final status.
[[gnu::noinline]] Status run_collective(Call& call, const Failure* first, Execution& execution) {
  const core::CollectiveKeeper* const keeper =
      core::g_collective_keeper.load(std::memory_order_acquire);
  const te_fl_communicator* const ranks = call.row.compiled->communicator(call.args);
  if (keeper == nullptr || ranks == nullptr) return run_in_order(call, first, execution);
  const core::CollectiveCall known{*call.row.compiled, call.args, *ranks, call.options.stream,
                                   call.capturing};
  core::CollectiveTicket ticket;
  ticket.policy = call.policy;
  TE_FL_RETURN_IF_ERROR(keeper->begin(known, ticket));
  call.policy = ticket.policy;
  return keeper->end(known, ticket, run_in_order(call, first, execution));
}

}  // namespace

std::string follow_communicator(Call& call) {
  const core::CollectiveKeeper* const keeper =
      core::g_collective_keeper.load(std::memory_order_acquire);
  std::string name;
  if (keeper == nullptr || call.args == nullptr || !is_collective(call)) return name;
  const te_fl_communicator* const ranks = call.row.compiled->communicator(call.args);
  if (ranks != nullptr) call.policy = keeper->policy(*ranks, call.policy, name);
  return name;
}

Status run_order(Call& call, const Failure* first, Execution& execution) {
  if (is_collective(call)) [[unlikely]]
    return run_collective(call, first, execution);
  return run_in_order(call, first, execution);
}

namespace {

Status run_in_order(Call& call, const Failure* first, Execution& execution) {
  if (call.row.saved != nullptr && call.row.saved->role == TE_FL_IN) {
    const te_fl_saved* record = saved_record(call.row, call.args);
    if (record != nullptr && record->opaque != 0) return run_producer(call, *record, execution);
  }
  TE_FL_ASSIGN_OR_RETURN(const RouteEntry* entry, find_route(call));
  if (first == nullptr && !entry->route->order.empty()) {
    // The first implementation nearly always succeeds; the others are considered only if it does
    // not.
    const Step step = entry->route->order.front();
    core::ErrorText errors;
    const te_fl_status status = attempt(call, step, entry->route->deterministic, errors);
    if (status == TE_FL_OK) [[likely]] {
      execution.impl = step.impl;
      execution.staged = step.staged;
      return after_success(call, *step.impl);
    }
    const Failure failure{step.impl, status, errors.text()};
    return run_others(call, failure, execution);
  }
  if (first != nullptr) return run_others(call, *first, execution);
  return none_executed(call, execution);
}

}  // namespace
}  // namespace te_fl::dispatch
