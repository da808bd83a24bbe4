#include "dispatch/manager_impl.hpp"
#include "registry/in_place.hpp"
#include "te_fl/op_manager.hpp"

namespace te_fl {

Result<FirstChoice> OpManager::first_choice(OpId op, const void* args, const CallOptions& options) {
  registry::ThreadRecord& thread = registry::this_thread();
  const registry::EpochGuard guard(thread.slot);
  const registry::Table& table = impl_->table_owner.table();
  const registry::OpRow* const row = table.row(op.index);
  if (row == nullptr) [[unlikely]]
    return dispatch::no_such_op(table, op);
  dispatch::Call call{*impl_, thread, table, *row, op.index, args, options};
  if (!dispatch::prepare_warm(call)) [[unlikely]]
    TE_FL_RETURN_IF_ERROR(dispatch::prepare_call(call));
  TE_FL_ASSIGN_OR_RETURN(const registry::RouteEntry* entry, dispatch::find_route(call));
  const registry::Route& route = *entry->route;
  if (route.order.empty() || route.order[0].staged) return FirstChoice{};
  const registry::Implementation& impl = *route.order[0].impl;
  if (impl.not_in_place &&
      !registry::shared_in_place(call.row.compiled->schema(), call.args).empty()) {
    return FirstChoice{};
  }
  if (impl.checks_support) {
    core::ErrorText errors;
    const te_fl_context context = dispatch::context_of(call, route.deterministic, errors.sink());
    const te_fl_status code = dispatch::ask_support(impl, context, call.args, errors);
    if (code != TE_FL_OK && dispatch::may_follow(code)) return FirstChoice{};
    if (code != TE_FL_OK) return dispatch::after_failure(call, impl, code, errors.text());
  }
  return FirstChoice{impl.interned_id, impl.desc.flags};
}

}  // namespace te_fl
