// Tries one implementation on a call: supports(), lock, plan, scratch, run().

#include "dispatch/attempt.hpp"

#include <exception>
#include <mutex>
#include <optional>
#include <string>

#include "dispatch/manager_impl.hpp"
#include "dispatch/staging/staged_call.hpp"
#include "registry/arguments.hpp"
#include "registry/in_place.hpp"
#include "registry/plan_cache.hpp"

namespace te_fl::dispatch {
namespace {

// The error for an object (a plan or stream state) that cannot be made while the stream is being
// captured. The caller has to run the call once before the capture. A fallback to another
// implementation would give other bits than that run.
te_fl_status missing_in_capture(const Status& status, core::ErrorText& errors) {
  errors.sink()->write(errors.sink()->host, status.message().c_str());
  return TE_FL_FAILED_PRECONDITION;
}

// The status for a failure of te-fl itself, such as a lock or memory that it could not get. It
// never causes a fallback: the same step may succeed on another rank, and the ranks would then
// compute different bits.
te_fl_status own_failure(const Status& status, core::ErrorText& errors) {
  errors.sink()->write(errors.sink()->host, status.to_string().c_str());
  const te_fl_status code = TE_FL_STATUS_CODE(status.to_c());
  return code == TE_FL_UNSUPPORTED ? te_fl_status{TE_FL_INTERNAL} : code;
}

// The objects that one run() needs besides its context. `args` and the context's device are what
// the implementation sees: the call's own, or those of the host copies of a staged call.
struct Attempt {
  // A constructor avoids aggregate initialisation, which would also zero the unused scratch member.
  Attempt(const Call& of, const Implementation& by, te_fl_context& with, const void* seen,
          bool there, core::ErrorText& to)
      : call(of), impl(by), context(with), args(seen), on_host(there), errors(to) {}
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;

  const Call& call;
  const Implementation& impl;
  te_fl_context& context;
  const void* args;
  bool on_host;
  core::ErrorText& errors;
  std::optional<registry::DeviceScratch> state, scratch;
  bool serial = false;

  ~Attempt() {
    if (!serial) return;
    --call.thread.serial_locks;
    impl.serial.unlock();
  }

  te_fl_status lock() {
    if ((impl.desc.flags & TE_FL_OP_THREAD_SAFE) != 0) return TE_FL_OK;
    using Taken = registry::SerialLock::Taken;
    registry::ThreadRecord& thread = call.thread;
    const Taken taken = impl.serial.lock(&thread, thread.slot.depth - 1, thread.serial_locks != 0);
    serial = taken == Taken::kYes;
    if (serial) {
      ++thread.serial_locks;
      return TE_FL_OK;
    }
    return own_failure(
        Status(StatusCode::kBusy,
               taken == Taken::kOwn
                   ? "it is not thread-safe and this thread is inside it already"
                   : "it is not thread-safe, and the thread that is inside it waits for an "
                     "implementation that this thread is inside: two that are not thread-safe run "
                     "each other's ops, and would wait for ever (rule R13); make one of them "
                     "thread-safe (TE_FL_OP_THREAD_SAFE), or run such calls on one thread"),
        errors);
  }

  // Must be called before workspace(), since the mutexes of an op are locked in this order.
  te_fl_status stream_state() {
    const uint64_t bytes = impl.desc.stream_state_bytes;
    if (bytes == 0) return TE_FL_OK;
    const Status held = call.manager.arenas.acquire_state(
        call.signature.device, call.options.stream, call.thread.slot.depth - 1, impl.number, bytes,
        call.capturing, state.emplace());
    if (!held.ok()) return own_failure(held, errors);
    context.stream_state = state->data();
    return TE_FL_OK;
  }

  te_fl_status workspace() {
    if (impl.desc.workspace == nullptr) return TE_FL_OK;
    size_t bytes = 0;
    const te_fl_status code = entered("workspace() threw an exception (rule R5)", errors, [&] {
      const InsideFunction inside(impl, args, "workspace()");
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
      // A thread that holds a lock for which another thread may wait must not wait for scratch.
      // Scratch is shared by all ops: its holder may be running this implementation inside its op.
      const bool may_wait = depth == 0 && !serial && !state.has_value();
      const Status held =
          call.manager.arenas.acquire(call.signature.device, call.options.stream, depth, bytes,
                                      call.capturing, may_wait, scratch.emplace());
      if (!held.ok()) return own_failure(held, errors);
      context.workspace = scratch->data();
    }
    context.workspace_bytes = bytes;
    return TE_FL_OK;
  }

  te_fl_status plan() {
    if (impl.plans == nullptr) return TE_FL_OK;
    // The thread's record may be used only if `args` are the call's own arguments, since the record
    // does not describe host copies.
    const bool own = args == call.args;
    const uint64_t generation = registry::g_plan_generation.load(std::memory_order_acquire);
    const uint64_t context_word = registry::PlanKey::context_word(context);
    registry::KnownCall* known = own ? call.still_known() : nullptr;
    // During a capture the plan is always looked up in the plan cache, which marks it as captured,
    // so that it is not dropped while the graph exists.
    if (known != nullptr && known->plan != nullptr && known->plan_of == impl.number &&
        known->plan_generation == generation && known->plan_context == context_word &&
        !call.capturing) {
      known->plan->use();
      if (impl.plan_memory && !on_host) known->plan->used_on(call.options.stream);
      context.plan = known->plan->plan;
      return TE_FL_OK;
    }
    registry::PlanKey& key = call.thread.plan_key;
    key.set(*call.row.compiled, args, context);
    const registry::Plan* plan = impl.plans->find(key.text(), call.capturing);
    if (plan == nullptr) {
      if (call.capturing) {
        return missing_in_capture(
            failed_precondition(
                "its plan for these shapes would have to be made while the stream is being "
                "captured; run the op once with the same shapes before capturing"),
            errors);
      }
      std::string own_key(key.text());  // a copy: prepare() may run ops that change the thread's
      void* made = nullptr;
      const te_fl_status code = entered("prepare() threw an exception (rule R5)", errors, [&] {
        const InsideFunction inside(impl, args, "prepare()");
        return impl.desc.prepare(impl.desc.self, &context, args, &made);
      });
      if (code != TE_FL_OK) return code;
      plan =
          impl.plans->insert(std::move(own_key), on_host ? Device{} : call.signature.device, made);
      known = own ? call.still_known() : nullptr;
    }
    if (known != nullptr) {
      known->plan = plan;
      known->plan_of = impl.number;
      known->plan_generation = generation;  // read before the look-up of the plan
      known->plan_context = context_word;
    }
    if (impl.plan_memory && !on_host) plan->used_on(call.options.stream);
    context.plan = plan->plan;
    return TE_FL_OK;
  }
};

// Runs all steps before run(): the support check, locks, plan, stream state and scratch.
te_fl_status get_ready(Attempt& a) {
  if (a.impl.not_in_place) {
    if (const std::string pair = registry::shared_in_place(a.call.row.compiled->schema(), a.args);
        !pair.empty()) {
      const std::string why = "it does not work in place (TE_FL_OP_IN_PLACE_OK), and " + pair;
      a.errors.sink()->write(a.errors.sink()->host, why.c_str());
      return TE_FL_UNSUPPORTED;
    }
  }
  if (a.impl.checks_support) {
    const te_fl_status code = a.args == a.call.args
                                  ? support_of(a.call, a.impl, a.context, a.errors)
                                  : ask_support(a.impl, a.context, a.args, a.errors);
    if (code != TE_FL_OK) return code;
  }
  te_fl_status code = a.lock();
  if (code == TE_FL_OK) code = a.plan();
  if (code == TE_FL_OK) code = a.stream_state();
  if (code == TE_FL_OK) code = a.workspace();  // after the plan, which workspace() may read
  return code;
}

// Resets the saved record (te_fl_saved) that the op is to write, and returns it; null if there is
// none.
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

// Tries an implementation on the call's own tensors, from supports() to run().
te_fl_status attempt_native(const Call& call, const Implementation& impl, bool deterministic,
                            core::ErrorText& errors) {
  te_fl_context context = context_of(call, deterministic, errors.sink());
  Attempt a{call, impl, context, call.args, call.signature.device.is_host(), errors};
  if (const te_fl_status code = get_ready(a)) return code;
  te_fl_saved* record = fresh_record(call);
  const te_fl_status code = guarded_run(call.thread, impl, context, call.args, errors);
  if (code == TE_FL_OK && record != nullptr) record->producer = impl.interned_id;
  return code;
}

// Tries a host implementation on host copies of the call's tensors. Writes device memory only if
// run() succeeds.
te_fl_status attempt_staged(const Call& call, const Implementation& impl, bool deterministic,
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
  code = guarded_run(call.thread, impl, context, staged.args(), errors);
  if (code == TE_FL_OK) code = staged.copy_out();
  if (code != TE_FL_OK) return code;
  if (record != nullptr) record->producer = impl.interned_id;
  staged.count(impl);
  return TE_FL_OK;
}

}  // namespace

te_fl_status attempt(const Call& call, const Step& step, bool deterministic,
                     core::ErrorText& errors) {
  return step.staged ? attempt_staged(call, *step.impl, deterministic, errors)
                     : attempt_native(call, *step.impl, deterministic, errors);
}

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
  return entered("supports() threw an exception (rule R5)", errors, [&] {
    const InsideFunction inside(impl, args, "supports()");
    return impl.desc.supports(impl.desc.self, &context, args);
  });
}

te_fl_status ask_saved_bytes(const Implementation& impl, const te_fl_context& context,
                             const void* args, size_t& bytes, core::ErrorText& errors) {
  return entered("saved_bytes() threw an exception (rule R5)", errors, [&] {
    const InsideFunction inside(impl, args, "saved_bytes()");
    return impl.desc.saved_bytes(impl.desc.self, &context, args, &bytes);
  });
}

te_fl_saved* saved_record(const OpRow& row, const void* args) noexcept {
  if (row.saved == nullptr) return nullptr;
  auto* record = registry::member_or<te_fl_saved*>(row.saved->offset, args, nullptr);
  const size_t least = offsetof(te_fl_saved, producer) + sizeof(record->producer);
  return record != nullptr && record->struct_size >= least ? record : nullptr;
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

te_fl_status run_on_copies(const Call& call, const Implementation& impl, te_fl_context& context,
                           const void* args, core::ErrorText& errors) {
  Attempt a{call, impl, context, args, true, errors};
  if (const te_fl_status code = get_ready(a)) return code;
  return guarded_run(call.thread, impl, context, args, errors);
}

}  // namespace te_fl::dispatch
