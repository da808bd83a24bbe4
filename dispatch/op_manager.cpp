// A call's way: with_call() finds the op's row, prepare_warm() checks the arguments, the thread's
// cache has the route, run() takes the warm way or run_route() (run.cpp) the complete one.

#include "te_fl/op_manager.hpp"

#include "core/op/op_fast.hpp"
#include "dispatch/manager_impl.hpp"
#include "dispatch/watch/watch.hpp"
#include "plugins/start.hpp"
#include "registry/arguments.hpp"
#include "te_fl/environment.hpp"

namespace te_fl {
namespace {

using dispatch::Call;
using dispatch::Implementation;
using dispatch::RouteEntry;
using dispatch::RouteKey;
using dispatch::with_call;

void count(std::atomic<uint64_t>& counter) noexcept {
  // One writer: no read-modify-write instruction is needed.
  counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

// The warm way: supports() if there is one, and run(), with a context on the stack. Otherwise the
// complete one.
inline Status run(Call& call, const Implementation* fast, std::atomic<uint64_t>* counter) {
  if (fast == nullptr || call.manager.care() != 0) return dispatch::run_route(call, nullptr);
  core::ErrorText errors;
  const te_fl_context context = dispatch::context_of(call, false, errors.sink());
  te_fl_status code = TE_FL_OK;
  if (fast->checks_support) code = dispatch::ask_support(*fast, context, call.args, errors);
  if (code == TE_FL_OK) code = dispatch::guarded_run(*fast, context, call.args, errors);
  if (code == TE_FL_OK) [[likely]] {
    count(*counter);
    dispatch::note_enqueued(call, *fast);
    return {};
  }
  const dispatch::Failure failure{fast, code, errors.text()};
  return dispatch::run_route(call, &failure);
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
    const RouteKey key(call.op, call.signature, call.policy, call.capturing);
    const RouteEntry* entry = call.thread.routes.find(call.table.id, key);
    if (entry == nullptr) [[unlikely]] {
      TE_FL_ASSIGN_OR_RETURN(entry, dispatch::route_of(call));
    }
    return run(call, entry->fast, entry->counter);
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
    registry::HandleEntry& known = call.thread.handles.at(rep.number);
    if (known.handle == rep.number && known.last.is(args)) [[likely]] {
      call.signature = rep.signature;
      if (!dispatch::read_state(call)) [[unlikely]]
        TE_FL_RETURN_IF_ERROR(dispatch::prepare_call(call));
    } else {
      if (!dispatch::prepare_warm(call)) [[unlikely]]
        TE_FL_RETURN_IF_ERROR(dispatch::prepare_call(call));
      if (!(call.signature == rep.signature)) [[unlikely]]
        return wrong_signature(call);
      if (known.handle != rep.number) known.take(rep.number);
      if (known.worth_remembering()) core::remember_exactly(*call.row.compiled, args, known.last);
    }
    if (known.table != call.table.id || known.policy != call.policy ||
        known.capturing != call.capturing) [[unlikely]] {
      TE_FL_ASSIGN_OR_RETURN(const RouteEntry* entry, dispatch::route_of(call));
      known.table = call.table.id;
      known.policy = call.policy;
      known.capturing = call.capturing;
      known.fast = entry->fast;
      known.counter = entry->counter;
    }
    return run(call, known.fast, known.counter);
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
