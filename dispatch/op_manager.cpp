// The stages of a call: with_call() finds the op's row; prepare_warm() recognises or checks the
// arguments; the thread's record of the call has its route; run() takes the fast path, or
// run_route() (run.cpp) the complete one.

#include "te_fl/op_manager.hpp"

#include "dispatch/attempt.hpp"
#include "dispatch/manager_impl.hpp"
#include "dispatch/watch/barred.hpp"
#include "plugins/start.hpp"
#include "registry/arguments.hpp"
#include "te_fl/environment.hpp"

namespace te_fl {
namespace {

using dispatch::Call;
using dispatch::Implementation;
using dispatch::RouteEntry;
using dispatch::with_call;
using registry::KnownCall;

void count(std::atomic<uint64_t>& counter) noexcept {
  // Each counter has a single writer, so no atomic read-modify-write is needed.
  counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

// The fast path: tries only the route's first implementation. If that needs neither scratch nor a
// plan, calls only its run(). In all other cases continues with run_route().
[[gnu::always_inline]] inline Status run(Call& call, const KnownCall& route) {
  if (route.first == nullptr || call.manager.switches() != 0)
    return dispatch::run_route(call, nullptr);
  const Implementation& impl = *route.first;
  std::atomic<uint64_t>& counter = *route.counter;
  core::ErrorText errors;
  te_fl_status code = TE_FL_OK;
  if (impl.direct && !route.deterministic) [[likely]] {
    const te_fl_context context = dispatch::context_of(call, false, errors.sink());
    if (impl.checks_support) code = dispatch::support_of(call, impl, context, errors);
    if (code == TE_FL_OK)
      code = dispatch::guarded_run(call.thread, impl, context, call.args, errors);
  } else {
    code = dispatch::attempt(call, {&impl, false}, route.deterministic, errors);
  }
  if (code == TE_FL_OK) [[likely]] {
    count(counter);
    dispatch::note_enqueued(call, impl);
    return {};
  }
  const dispatch::Failure failure{&impl, code, errors.text()};
  return dispatch::run_route(call, &failure);
}

// Finds the route and stores it in `known`. Not for a collective: its communicator's policy may
// apply, so run_route() finds the route.
[[gnu::noinline]] Status run_first(Call& call, KnownCall& known) {
  const RouteEntry* entry = nullptr;
  if (!dispatch::is_collective(call)) {
    TE_FL_ASSIGN_OR_RETURN(entry, dispatch::find_route(call));
  }
  known.forget_answer();
  known.table = call.table.id;
  known.policy = call.policy;
  known.capturing = call.capturing;
  known.deterministic = entry != nullptr && entry->route->deterministic;
  known.first = entry == nullptr ? nullptr : entry->first;
  known.counter = entry == nullptr ? nullptr : entry->counter;
  return run(call, known);
}

[[gnu::noinline]] Status run_unknown(Call& call) {
  KnownCall known;
  return run_first(call, known);
}

// Runs a valid call along its route, which is cached if the thread has made such a call before.
inline Status run_known(Call& call) {
  KnownCall* const known = call.still_known();
  if (known == nullptr) [[unlikely]]
    return run_unknown(call);
  const bool current = known->table == call.table.id && known->policy == call.policy &&
                       known->capturing == call.capturing;
  return current ? run(call, *known) : run_first(call, *known);
}

[[gnu::cold, gnu::noinline]] Status wrong_signature(const Call& call) {
  return invalid_argument(
      "op '" + std::string(call.row.compiled->schema().name) +
      "': the arguments have other dtypes, scaling modes or another device than those the "
      "handle was prepared for (" +
      registry::describe_arguments(call.row.compiled->schema(), call.args) +
      "); prepare another handle");
}

}  // namespace

OpManager::OpManager(OpRegistry& registry) : impl_(std::make_unique<Impl>(registry)) {}
OpManager::~OpManager() = default;
OpRegistry& OpManager::registry() noexcept { return impl_->registry; }

Status OpManager::call(OpId op, const void* args, const CallOptions& options) {
  return with_call<Status>(*impl_, op, args, options, [](Call& call) -> Status {
    if (!dispatch::prepare_warm(call)) [[unlikely]]
      TE_FL_RETURN_IF_ERROR(dispatch::prepare_call(call));
    return run_known(call);
  });
}

Status OpManager::call(std::string_view op, const void* args, const CallOptions& options) {
  TE_FL_ASSIGN_OR_RETURN(const OpId id, impl_->registry.find(op));
  return call(id, args, options);
}

Status PreparedOp::call(const void* args, const CallOptions& options) const {
  if (rep_ == nullptr)
    return failed_precondition("an empty PreparedOp was called; OpManager::prepare makes one");
  const Rep& rep = *rep_;
  return with_call<Status>(*rep.manager, rep.op, args, options, [&](Call& call) -> Status {
    registry::HandleEntry& entry = call.thread.handles.at(rep.number);
    if (entry.handle == rep.number && entry.last.is(args)) [[likely]] {
      call.signature = rep.signature;
      call.known = &entry.known;
      call.known_number = entry.known.filled;
      if (!dispatch::read_state(call)) [[unlikely]]
        TE_FL_RETURN_IF_ERROR(dispatch::prepare_call(call));
    } else {
      if (!dispatch::prepare_warm(call)) [[unlikely]]
        TE_FL_RETURN_IF_ERROR(dispatch::prepare_call(call));
      if (!(call.signature == rep.signature)) [[unlikely]]
        return wrong_signature(call);
      if (!entry.yields_to(rep.number)) return run_known(call);
      if (entry.handle != rep.number) entry.take(rep.number);
      if (entry.worth_remembering()) {
        entry.last.take(*call.row.compiled, args);
        entry.known = {};
        entry.known.filled = call.thread.calls.new_number();
      }
    }
    return run_known(call);
  });
}

Status OpManager::reload() {
  TE_FL_RETURN_IF_ERROR(environment::reload());
  plugins::log_remarks();
  dispatch::forget_quarantine_file();
  registry::choose_again();
  return current_policy().status();
}

}  // namespace te_fl
