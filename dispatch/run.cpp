// Running a call along its route: scratch, plans, locks, falling back.

#include <array>

#include "core/device/device_use.hpp"
#include "dispatch/manager_impl.hpp"
#include "dispatch/staging/staged_call.hpp"
#include "policy/current.hpp"
#include "registry/arguments.hpp"
#include "registry/in_place.hpp"
#include "te_fl/log.hpp"

namespace te_fl::registry {
namespace {

// The implementations to try. Copied, since a nested call of this thread may replace the route.
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

// In a capture, what is missing is the caller's to make: another implementation would give other
// bits than the run before.
te_fl_status missing_in_capture(const Status& status, core::ErrorText& errors) {
  errors.sink()->write(errors.sink()->host, status.message().c_str());
  return TE_FL_FAILED_PRECONDITION;
}

// A failure of the host's, which is never a reason to try the next implementation: memory that is
// free here may not be on another rank, and then the two would compute other bits.
te_fl_status own_failure(const Status& status, core::ErrorText& errors) {
  errors.sink()->write(errors.sink()->host, status.to_string().c_str());
  const te_fl_status code = TE_FL_STATUS_CODE(status.to_c());
  return code == TE_FL_UNSUPPORTED ? te_fl_status{TE_FL_INTERNAL} : code;
}

// Holds what one run() needs besides its context. `args` and the context's device are what the
// implementation is to see: the call's, or copies of it on the host.
struct Attempt {
  const Call& call;
  const Implementation& impl;
  te_fl_context& context;
  const void* args;
  bool on_host;
  core::ErrorText& errors;
  DeviceScratch scratch{};
  bool serial = false;

  ~Attempt() {
    if (serial) impl.serial.unlock();
  }

  te_fl_status lock() {
    if ((impl.desc.flags & TE_FL_OP_THREAD_SAFE) != 0) return TE_FL_OK;
    serial = impl.serial.lock(&call.thread);
    if (serial) return TE_FL_OK;
    return own_failure(
        Status(StatusCode::kBusy, "it is not thread-safe and this thread is inside it already"),
        errors);
  }

  te_fl_status workspace() {
    if (impl.desc.workspace == nullptr) return TE_FL_OK;
    size_t bytes = 0;
    const te_fl_status code = entered("workspace() threw an exception (rule R5)", errors, [&] {
      return impl.desc.workspace(impl.desc.self, &context, args, &bytes);
    });
    if (code != TE_FL_OK) return code;
    if (bytes == 0) return TE_FL_OK;
    const uint32_t depth = call.thread.slot.depth - 1;
    if (on_host) {
      context.workspace = call.thread.arenas.get(depth, bytes);
      if (context.workspace == nullptr) {
        return own_failure(
            Status(StatusCode::kOutOfMemory,
                   "a workspace of " + std::to_string(bytes) + " bytes cannot be allocated"),
            errors);
      }
    } else {
      const Status held = call.manager.arenas.acquire(call.signature.device, call.options.stream,
                                                      depth, bytes, call.capturing, scratch);
      if (!held.ok()) return own_failure(held, errors);
      context.workspace = scratch.data();
    }
    context.workspace_bytes = bytes;
    return TE_FL_OK;
  }

  te_fl_status plan() {
    if (impl.plans == nullptr) return TE_FL_OK;
    PlanKey& made_key = call.thread.plans.scratch();
    made_key.set(call.row.compiled->schema(), args, context);
    const std::string_view key = made_key.text();
    const uint64_t hash = made_key.hash() ^ impl.number;
    // What a graph is to hold is looked up where plans are dropped, so that it is not dropped
    // after.
    const Plan* plan = call.capturing ? nullptr : call.thread.plans.find(impl.number, hash, key);
    if (plan == nullptr) {
      plan = impl.plans->find(key, call.capturing);
      if (plan == nullptr) {
        if (call.capturing) {
          return missing_in_capture(
              failed_precondition(
                  "its plan for these shapes would have to be made while the stream is being "
                  "captured; run the op once with the same shapes before capturing"),
              errors);
        }
        std::string own_key(key);  // prepare() may run ops, which use the scratch
        void* made = nullptr;
        const te_fl_status code = entered("prepare() threw an exception (rule R5)", errors, [&] {
          return impl.desc.prepare(impl.desc.self, &context, args, &made);
        });
        if (code != TE_FL_OK) return code;
        plan = impl.plans->insert(std::move(own_key), made);
      }
      call.thread.plans.insert(impl.number, hash, plan);
    }
    context.plan = plan->plan;
    return TE_FL_OK;
  }
};

// Asks, and gets ready: everything before run().
te_fl_status get_ready(Attempt& a) {
  if (a.impl.not_in_place) {
    if (const std::string pair = shared_in_place(a.call.row.compiled->schema(), a.args);
        !pair.empty()) {
      const std::string why = "it does not work in place (TE_FL_OP_IN_PLACE_OK), and " + pair;
      a.errors.sink()->write(a.errors.sink()->host, why.c_str());
      return TE_FL_UNSUPPORTED;
    }
  }
  if (a.impl.checks_support) {
    if (const te_fl_status code = ask_support(a.impl, a.context, a.args, a.errors)) return code;
  }
  te_fl_status code = a.lock();
  if (code == TE_FL_OK) code = a.plan();
  if (code == TE_FL_OK) code = a.workspace();  // it may ask the plan
  return code;
}

// The record that the op writes, made plain: what it was is of no use any more.
te_fl_saved* fresh_record(const Call& call) {
  const OpRow& row = call.row;
  if (row.saved == nullptr || row.saved->role == TE_FL_IN) return nullptr;
  te_fl_saved* record = saved_record(row, call.args);
  if (record != nullptr) {
    record->opaque = 0;
    record->producer = nullptr;
  }
  return record;
}

// One implementation, from supports() to run().
te_fl_status attempt(Call& call, const Implementation& impl, bool deterministic,
                     core::ErrorText& errors) {
  te_fl_context context = context_of(call, deterministic, errors.sink());
  Attempt a{call, impl, context, call.args, call.signature.device.is_host(), errors};
  if (const te_fl_status code = get_ready(a)) return code;
  te_fl_saved* record = fresh_record(call);
  const te_fl_status code = guarded_run(impl, context, call.args, errors);
  if (code == TE_FL_OK && record != nullptr) record->producer = impl.interned_id;
  return code;
}

// The same on copies in host memory. Nothing of the device's is written unless run() succeeds.
te_fl_status attempt_staged(Call& call, const Implementation& impl, bool deterministic,
                            core::ErrorText& errors) {
  StagedCall staged(call, errors);
  te_fl_status code = staged.plan();
  if (code == TE_FL_OK) code = staged.acquire();
  if (code != TE_FL_OK) return code;
  te_fl_context context = staged.context(deterministic);
  Attempt a{call, impl, context, staged.args(), true, errors};
  code = get_ready(a);
  if (code == TE_FL_OK) code = staged.copy_in();
  if (code != TE_FL_OK) return code;
  te_fl_saved* record = fresh_record(call);
  code = guarded_run(impl, context, staged.args(), errors);
  if (code == TE_FL_OK) code = staged.copy_out();
  if (code != TE_FL_OK) return code;
  if (record != nullptr) record->producer = impl.interned_id;
  staged.count(impl);
  return TE_FL_OK;
}

te_fl_status attempt(Call& call, const Step& step, bool deterministic, core::ErrorText& errors) {
  return step.staged ? attempt_staged(call, *step.impl, deterministic, errors)
                     : attempt(call, *step.impl, deterministic, errors);
}

Status after_success(Call& call, const Implementation& impl) {
  if (std::atomic<uint64_t>* counter = call.thread.counters.at(impl.counter)) {
    counter->store(counter->load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  note_enqueued(call, impl);
  // Work that is being captured has not begun; waiting for it would end the capture.
  if ((call.manager.care() & OpManager::Impl::kSync) == 0 || call.capturing) return {};
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
    // What broke the device was enqueued before.
    const std::string before = core::recent_ops(device, call.options.stream);
    if (!before.empty()) text += "; enqueued before it, newest first: " + before;
    core::lose_device(
        device, "implementation '" + impl.impl_id + "' of op '" + impl.op + "' reported: " + text);
  }
  return implementation_error(call, impl, code, text);
}

namespace {

// The first fallback of each op is logged; one that follows a failure louder.
void say_fallback(const Call& call, const Failure& failed, const Step& next) {
  const Implementation& impl = *failed.impl;
  const bool refused = TE_FL_STATUS_CODE(failed.status) == TE_FL_UNSUPPORTED;
  std::atomic<bool>& said = refused ? impl.refusal_said : impl.failure_said;
  if (said.load(std::memory_order_relaxed) || said.exchange(true, std::memory_order_relaxed))
    return;
  log::once(refused ? log::Level::kInfo : log::Level::kWarning,
            (refused ? "refusal " : "failure ") + impl.op,
            "op '" + impl.op + "' fell back from '" + impl.impl_id + "' to '" + next.impl->impl_id +
                "'" + (next.staged ? " on copies in host memory" : "") + ": " +
                failure_text(failed) + "; with " +
                describe_arguments(call.row.compiled->schema(), call.args) +
                " (TE_FL_STRICT=1 makes it an error, `te-fl explain " + impl.op +
                "` lists who serves it; later ones of this op are not logged)");
}

// A backward whose forward left an opaque record goes to the forward's implementation whatever the
// policy.
Status run_producer(Call& call, const te_fl_saved& record, Served& served) {
  const OpRow& row = call.row;
  const std::string op = row.compiled->schema().name;
  if (record.producer == nullptr) {
    return invalid_argument("op '" + op + "': '" + row.saved->name +
                            "' is opaque but names no producer; give it as the forward op left it");
  }
  TE_FL_ASSIGN_OR_RETURN(const Choice choice,
                         choose(call.manager.table_owner, call.table, row, call.signature,
                                SelectionPolicy().id(), call.capturing));
  for (const policy::Verdict& v : choice.decision.order) {
    const Implementation& impl = *row.impls[v.option];
    if (impl.interned_id != record.producer && impl.impl_id != record.producer) continue;
    const bool deterministic = policy::settings_of(call.policy).deterministic;
    core::ErrorText errors;
    if (v.refusal != policy::Refusal::kNone) {
      return after_failure(call, impl, TE_FL_UNSUPPORTED,
                           "the forward ran here and left an opaque record, but " +
                               policy::refusal_text(v.refusal, row.options[v.option], choice.call,
                                                    *choice.settings, nullptr));
    }
    const te_fl_status code = attempt(call, Step{&impl, v.staged}, deterministic, errors);
    served.impl = &impl;
    served.staged = v.staged;
    return code == TE_FL_OK ? after_success(call, impl)
                            : after_failure(call, impl, code, errors.text());
  }
  return failed_precondition(
      "op '" + op + "': '" + row.saved->name + "' is an opaque record of '" + record.producer +
      "', which alone can read it and which is not registered for this op (any more); run "
      "the forward again, or load the plugin that has it");
}

Status nobody(Call& call, const Served& served) {
  TE_FL_ASSIGN_OR_RETURN(const Choice choice, choose(call.manager.table_owner, call.table, call.row,
                                                     call.signature, call.policy, call.capturing));
  return no_candidate(call, choice, served.failures);
}

// The route's first implementation has run and failed so: may another, and which does? A call keeps
// its table and policy, so this is the route that it came from.
[[gnu::cold]] Status run_others(Call& call, const Failure& first, Served& served) {
  TE_FL_ASSIGN_OR_RETURN(const RouteEntry* entry, route_of(call));
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
        for (const Failure& f : served.failures) say_fallback(call, f, order[i]);
        served.impl = &impl;
        served.staged = order[i].staged;
        return after_success(call, impl);
      }
      failure.text = errors.text();
    }
    // Where nobody can follow, a failure's own code says more than UNSUPPORTED.
    const bool last_word =
        order.size() == 1 && TE_FL_STATUS_CODE(failure.status) != TE_FL_UNSUPPORTED;
    if (last_word || !may_follow(failure.status)) {
      return after_failure(call, impl, failure.status, failure.text);
    }
    served.failures.push_back(std::move(failure));
  }
  return nobody(call, served);
}

}  // namespace

te_fl_status exception_status(const char* entry, core::ErrorText& errors) noexcept {
  try {
    throw;
  } catch (const std::exception& e) {
    errors.sink()->write(errors.sink()->host, entry);
    errors.sink()->write(errors.sink()->host, e.what());
  } catch (...) {
    errors.sink()->write(errors.sink()->host, entry);
  }
  return TE_FL_INTERNAL;
}

te_fl_status ask_support(const Implementation& impl, const te_fl_context& context, const void* args,
                         core::ErrorText& errors) {
  return entered("supports() threw an exception (rule R5)", errors,
                 [&] { return impl.desc.supports(impl.desc.self, &context, args); });
}

te_fl_status ask_staged(const Call& call, const Implementation& impl, bool deterministic,
                        core::ErrorText& errors) {
  StagedCall staged(call, errors);
  const te_fl_status code = staged.plan();
  if (code != TE_FL_OK || !impl.checks_support) return code;
  staged.bind_nowhere();
  return ask_support(impl, staged.context(deterministic), staged.args(), errors);
}

te_fl_status ask_staged_saved_bytes(const Call& call, const Implementation& impl,
                                    bool deterministic, size_t& bytes, core::ErrorText& errors) {
  StagedCall staged(call, errors);
  if (const te_fl_status code = staged.plan()) return code;
  staged.bind_nowhere();
  return ask_saved_bytes(impl, staged.context(deterministic), staged.args(), bytes, errors);
}

te_fl_status ask_saved_bytes(const Implementation& impl, const te_fl_context& context,
                             const void* args, size_t& bytes, core::ErrorText& errors) {
  return entered("saved_bytes() threw an exception (rule R5)", errors,
                 [&] { return impl.desc.saved_bytes(impl.desc.self, &context, args, &bytes); });
}

te_fl_saved* saved_record(const OpRow& row, const void* args) noexcept {
  if (row.saved == nullptr) return nullptr;
  auto* record = member_or<te_fl_saved*>(row.saved->offset, args, nullptr);
  const size_t least = offsetof(te_fl_saved, producer) + sizeof(record->producer);
  return record != nullptr && record->struct_size >= least ? record : nullptr;
}

te_fl_status run_on_copies(const Call& call, const Implementation& impl, te_fl_context& context,
                           const void* args, core::ErrorText& errors) {
  Attempt a{call, impl, context, args, true, errors};
  if (const te_fl_status code = get_ready(a)) return code;
  return guarded_run(impl, context, args, errors);
}

Status run_route(Call& call, const Failure* first) {
  const uint64_t care = call.manager.care();
  if ((care & OpManager::Impl::kValidate) != 0) {
    TE_FL_RETURN_IF_ERROR(check_stream(call));
    TE_FL_RETURN_IF_ERROR(check_random_state(call));
  }
  if ((care & (OpManager::Impl::kVerify | OpManager::Impl::kTrace)) != 0) {
    return run_watched(call, first, care);
  }
  Served served;
  return run_order(call, first, served);
}

Status run_order(Call& call, const Failure* first, Served& served) {
  if (call.row.saved != nullptr && call.row.saved->role == TE_FL_IN) {
    const te_fl_saved* record = saved_record(call.row, call.args);
    if (record != nullptr && record->opaque != 0) return run_producer(call, *record, served);
  }
  TE_FL_ASSIGN_OR_RETURN(const RouteEntry* entry, route_of(call));
  if (first == nullptr && !entry->route->order.empty()) {
    // Nearly always it serves; the others are looked at only if it does not.
    const Step step = entry->route->order.front();
    core::ErrorText errors;
    const te_fl_status status = attempt(call, step, entry->route->deterministic, errors);
    if (status == TE_FL_OK) [[likely]] {
      served.impl = step.impl;
      served.staged = step.staged;
      return after_success(call, *step.impl);
    }
    const Failure failure{step.impl, status, errors.text()};
    return run_others(call, failure, served);
  }
  if (first != nullptr) return run_others(call, *first, served);
  return nobody(call, served);
}

}  // namespace te_fl::registry
