// Computes how a call would run, without running it: prepared handles, resolve(), explain(),
// saved_bytes().

#include <algorithm>
#include <atomic>
#include <utility>

#include "core/device/device_list.hpp"
#include "dispatch/attempt.hpp"
#include "dispatch/manager_impl.hpp"
#include "dispatch/watch/barred.hpp"
#include "te_fl/op_manager.hpp"

namespace te_fl {
namespace {

using dispatch::Call;
using dispatch::Implementation;
using dispatch::OpRow;
using dispatch::Step;
using dispatch::with_call;

std::atomic<uint64_t> g_handles{1};

Decision public_decision(const OpRow& row, const dispatch::Choice& decision, const void* args,
                         const std::vector<dispatch::Failure>& failures) {
  Decision r;
  r.op = row.compiled->schema().name;
  r.policy = policy::describe_for(*decision.settings, r.op);
  r.candidates = dispatch::list_candidates(row, decision, args, failures);
  for (const Candidate& c : r.candidates) {
    if (c.chosen) r.impl_id = c.impl_id;
  }
  return r;
}

// Calls supports() of the implementations that have it, and returns those that refuse. With
// `first_only`, stops at the first one that accepts. Returns an error if a status of supports()
// would end the call.
Result<std::vector<dispatch::Failure>> refusals(const Call& call, const dispatch::Choice& decision,
                                                bool first_only) {
  std::vector<dispatch::Failure> list;
  bool accepted = false;
  for (size_t i = 0; i < decision.order.size(); ++i) {
    const policy::Standing& v = decision.order[i];
    if (v.refusal != policy::Refusal::kNone || !decision.permits(i)) continue;
    const Implementation& impl = *call.row.impls[v.impl];
    core::ErrorText errors;
    te_fl_status code = TE_FL_OK;
    if (v.staged) {
      code = dispatch::ask_staged(call, impl, decision.settings->deterministic, errors);
    } else if (impl.checks_support) {
      const te_fl_context context =
          dispatch::context_of(call, decision.settings->deterministic, errors.sink());
      code = dispatch::ask_support(impl, context, call.args, errors);
    }
    if (code != TE_FL_OK) {
      const bool lost = TE_FL_STATUS_CODE(code) == TE_FL_DEVICE_LOST;
      if (lost || (!accepted && !dispatch::may_follow(code)))
        return dispatch::after_failure(call, impl, code, errors.text());
      list.push_back({&impl, code, errors.text()});
    } else if (first_only) {
      break;
    } else {
      accepted = true;
    }
  }
  return list;
}

Result<dispatch::Choice> choose(Call& call) {
  (void)dispatch::follow_communicator(call);
  return dispatch::choose(call, call.policy);
}

Step chosen(const OpRow& row, const dispatch::Choice& decision,
            const std::vector<dispatch::Failure>& failures) {
  for (size_t i = 0; i < decision.order.size(); ++i) {
    const policy::Standing& v = decision.order[i];
    const Implementation* impl = row.impls[v.impl].get();
    const bool failed = std::any_of(failures.begin(), failures.end(),
                                    [&](const auto& f) { return f.impl == impl; });
    if (v.refusal == policy::Refusal::kNone && decision.permits(i) && !failed)
      return {impl, v.staged};
  }
  return {};
}

}  // namespace

Result<PreparedOp> OpManager::prepare(OpId op, const void* args, const CallOptions& options) {
  return with_call<Result<PreparedOp>>(
      *impl_, op, args, options, [&](Call& call) -> Result<PreparedOp> {
        TE_FL_RETURN_IF_ERROR(dispatch::prepare_call(call));
        TE_FL_ASSIGN_OR_RETURN(const dispatch::Choice decision, choose(call));
        TE_FL_ASSIGN_OR_RETURN(const auto failures, refusals(call, decision, true));
        if (chosen(call.row, decision, failures).impl == nullptr)
          return dispatch::no_candidate(call, decision, failures);
        PreparedOp handle;
        handle.rep_ = std::make_shared<PreparedOp::Rep>(
            PreparedOp::Rep{impl_.get(), op, call.signature, g_handles.fetch_add(1)});
        return handle;
      });
}

Result<Decision> OpManager::resolve(OpId op, const void* args, const CallOptions& options) {
  return with_call<Result<Decision>>(*impl_, op, args, options, [](Call& call) -> Result<Decision> {
    TE_FL_RETURN_IF_ERROR(dispatch::prepare_call(call));
    const std::string communicator = dispatch::follow_communicator(call);
    TE_FL_ASSIGN_OR_RETURN(const dispatch::Choice decision, dispatch::choose(call, call.policy));
    TE_FL_ASSIGN_OR_RETURN(const auto failures, refusals(call, decision, false));
    Decision r = public_decision(call.row, decision, call.args, failures);
    if (!communicator.empty()) {
      r.policy += "; of communicator '" + communicator +
                  "', on which its ranks agreed when it was made, in place of this thread's";
    }
    if (const Step step = chosen(call.row, decision, failures); step.impl != nullptr) {
      auto [text, silent] = dispatch::described(call, step, decision.settings->deterministic);
      r.runs = std::move(text);
      r.silent = std::move(silent);
    }
    return r;
  });
}

Result<Decision> OpManager::explain(OpId op, const CallProfile& profile) {
  (void)core::find_device(profile.device);  // loads its plugin, which is not possible inside an op
  const CallOptions options;
  return with_call<Result<Decision>>(
      *impl_, op, nullptr, options, [&](Call& call) -> Result<Decision> {
        TE_FL_ASSIGN_OR_RETURN(const SelectionPolicy policy, current_policy());
        call.policy = policy.id();
        call.signature.device = profile.device;
        TE_FL_RETURN_IF_ERROR(dispatch::check_profile(call.row, profile));
        for (const DType t : profile.dtypes)
          call.signature.dtypes |= TE_FL_BIT(static_cast<uint32_t>(t));
        for (const Scaling s : profile.scalings)
          call.signature.scalings |= TE_FL_BIT(static_cast<uint32_t>(s));
        if (profile.scalings.empty()) call.signature.scalings = TE_FL_BIT(TE_FL_SCALING_NONE);
        TE_FL_ASSIGN_OR_RETURN(const dispatch::Choice decision, choose(call));
        Decision r = public_decision(call.row, decision, nullptr, {});
        // A call described without dtypes matches no quarantine entry above, so the reasons list
        // the entries that may apply.
        for (Candidate& c : r.candidates) {
          const std::string barred =
              profile.dtypes.empty()
                  ? dispatch::quarantined_for(r.op, c.impl_id, c.owner, profile.device)
                  : std::string();
          if (!barred.empty()) c.reason += (c.reason.empty() ? "" : "; ") + barred;
        }
        return r;
      });
}

Result<size_t> OpManager::saved_bytes(OpId op, const void* args, const CallOptions& options) {
  return with_call<Result<size_t>>(*impl_, op, args, options, [](Call& call) -> Result<size_t> {
    TE_FL_RETURN_IF_ERROR(dispatch::prepare_call(call));
    TE_FL_ASSIGN_OR_RETURN(const dispatch::Choice decision, choose(call));
    TE_FL_ASSIGN_OR_RETURN(const auto failures, refusals(call, decision, true));
    const Step step = chosen(call.row, decision, failures);
    const Implementation* impl = step.impl;
    if (impl == nullptr) return dispatch::no_candidate(call, decision, failures);
    if (impl->desc.saved_bytes == nullptr) return size_t{0};
    core::ErrorText errors;
    const bool deterministic = decision.settings->deterministic;
    size_t bytes = 0;
    te_fl_status code = TE_FL_OK;
    if (step.staged) {
      code = dispatch::ask_staged_saved_bytes(call, *impl, deterministic, bytes, errors);
    } else {
      const te_fl_context context = dispatch::context_of(call, deterministic, errors.sink());
      code = dispatch::ask_saved_bytes(*impl, context, call.args, bytes, errors);
    }
    if (code != TE_FL_OK) return dispatch::after_failure(call, *impl, code, errors.text());
    return bytes;
  });
}

}  // namespace te_fl
