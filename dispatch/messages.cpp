// The error messages for calls that are not run.

#include <algorithm>

#include "core/base/text.hpp"
#include "core/op/compiled_op.hpp"
#include "dispatch/manager_impl.hpp"
#include "policy/current.hpp"
#include "policy/select.hpp"
#include "policy/text.hpp"
#include "registry/arguments.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/log.hpp"

namespace te_fl::dispatch {
namespace {

using policy::Refusal;

class CallNames final : public policy::ArgumentNames {
 public:
  CallNames(const core::CompiledOp& op, const void* args) : op_(op), args_(args) {}
  std::string dtype_outside(uint64_t mask) const override { return op_.dtype_outside(args_, mask); }
  std::string scaling_outside(uint32_t mask) const override {
    return op_.scaling_outside(args_, mask);
  }
  std::string later_names(uint32_t mask) const override { return op_.later_names(mask); }

 private:
  const core::CompiledOp& op_;
  const void* args_;
};

std::string quoted(std::string_view s) { return "'" + std::string(s) + "'"; }

std::string accepted_text(const OpRow& row, const policy::Standing& v, const Choice& decision,
                          bool chosen) {
  const Implementation& impl = *row.impls[v.impl];
  const bool absent = !decision.call.present && !decision.call.device.is_host();
  std::string text = absent ? "it would be a candidate if there were a " +
                                  to_string(decision.call.device) + " here: "
                     : chosen ? "chosen: "
                              : "next if the chosen one cannot: ";
  if (v.staged) {
    text +=
        "staged (copies of the tensors of " + to_string(decision.call.device) + " on the host), ";
  }
  if (policy::list_for(*decision.settings, decision.call) != nullptr) {
    text += "place " + std::to_string(v.group + 1) + " of the policy's list, ";
  } else if (decision.settings->prefer == impl.kind) {
    text += "preferred kind, ";
  }
  text += "priority " + std::to_string(row.views[v.impl].priority);
  return text;
}

// The remedy for the error that no implementation can run a call.
std::string way_out(const OpRow& row, const Choice& decision,
                    const std::vector<Failure>& failures) {
  const std::string op(decision.call.op);
  if (row.impls.empty()) {
    return "no loaded backend implements it; load a plugin that does (TE_FL_PLUGIN_MODULES), "
           "`te-fl doctor` says "
           "what is missing";
  }
  const policy::Ranking free = policy::decide(PolicySettings{}, decision.call, row.views);
  for (const policy::Standing& v : free.order) {
    const Implementation& impl = *row.impls[v.impl];
    const bool failed = std::any_of(failures.begin(), failures.end(),
                                    [&](const Failure& f) { return f.impl == &impl; });
    if (v.refusal != Refusal::kNone || failed) continue;
    return quoted(impl.impl_id) + " could run it if the policy allowed it: change " +
           (decision.settings->strict ? "TE_FL_STRICT, " : "") +
           (decision.settings->max_staged_bytes ? "TE_FL_MAX_STAGED_BYTES, " : "") +
           "TE_FL_PREFER, TE_FL_PER_OP or the vendor lists, or the scope set in code";
  }
  return "use a dtype, scaling mode or device that one of them supports (`te-fl explain " + op +
         "`), or load a plugin that has another (TE_FL_PLUGIN_MODULES)";
}

}  // namespace

std::string failure_text(const Failure& f) {
  if (!f.text.empty()) return f.text;
  return "it answered " + std::string(to_string(Status::from_c(f.status, "").code())) +
         " without a reason";
}

Status bad_arguments(const OpRow& row, const void* args) {
  const std::string op = row.compiled->schema().name;
  if (args == nullptr)
    return invalid_argument("op " + quoted(op) + ": the argument struct is a null pointer");
  Status status = row.compiled->check_status(args);
  if (status.ok()) status = internal_error("the arguments changed while they were checked");
  return status.wrap("op " + quoted(op) + " was called with wrong arguments");
}

Status check_profile(const OpRow& row, const CallProfile& profile) {
  const te_fl_op_schema& schema = row.compiled->schema();
  uint64_t dtypes = 0, raw = 0;  // raw: dtypes accepted without a scale
  uint32_t scalings = 0;
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    if (arg.type != TE_FL_ARG_TENSOR && arg.type != TE_FL_ARG_TENSOR_LIST) continue;
    dtypes |= arg.dtypes;
    scalings |= arg.scalings;
    const bool takes_codes = (arg.flags & TE_FL_ARG_RAW_FP8) != 0;
    raw |= takes_codes ? arg.dtypes : arg.dtypes & ~core::kScaledDTypes;
  }
  const bool scaled = std::any_of(profile.scalings.begin(), profile.scalings.end(),
                                  [](Scaling s) { return s != Scaling::kNone; });
  const std::string op = "op " + quoted(schema.name) + " takes no tensor ";
  for (const DType t : profile.dtypes) {
    if ((dtypes >> static_cast<uint32_t>(t) & 1) != 0) {
      if (scaled || (raw >> static_cast<uint32_t>(t) & 1) != 0) continue;
      return invalid_argument(op + "of dtype " + std::string(name(t)) +
                              " without a scaling mode (--scaling); its tensors' are " +
                              policy::scaling_mask_text(scalings));
    }
    return invalid_argument(op + "of dtype " + std::string(name(t)) + "; its tensors are " +
                            policy::dtype_mask_text(dtypes));
  }
  for (const Scaling s : profile.scalings) {
    if ((scalings >> static_cast<uint32_t>(s) & 1) != 0) continue;
    return invalid_argument(op + "with scaling " + std::string(name(s)) + "; its tensors' are " +
                            policy::scaling_mask_text(scalings));
  }
  return {};
}

Status no_such_op(const Table& table, OpId op) {
  return not_found(
      "there is no op number " + std::to_string(op.index) +
      (op.index < table.ops.size()
           ? " any more; it left the catalogue, and numbers are not given again"
           : "; this registry has numbers up to " + std::to_string(table.ops.size() - 1)));
}

Status invalid_policy(const OpRow& row) {
  const std::string op = "op " + quoted(row.compiled->schema().name) + " cannot be routed";
  const Status status = current_policy().status();
  if (!status.ok()) return policy::cause_first(status, op);
  return failed_precondition("the policy changed while the call was made; call again").wrap(op);
}

Status implementation_error(const Call& call, const Implementation& impl, te_fl_status code,
                            const std::string& text) {
  const Status own = Status::from_c(code, text.empty() ? "it gave no reason" : text);
  return own.wrap("op " + quoted(impl.op) + " failed in " + quoted(impl.impl_id) + " (" +
                  impl.owner + ") with " +
                  registry::describe_arguments(call.row.compiled->schema(), call.args));
}

std::vector<Candidate> list_candidates(const OpRow& row, const Choice& decision, const void* args,
                                       const std::vector<Failure>& failures) {
  std::vector<Candidate> list;
  const CallNames names(*row.compiled, args);
  bool taken = false;
  for (size_t i = 0; i < decision.order.size(); ++i) {
    const policy::Standing& v = decision.order[i];
    const Implementation& impl = *row.impls[v.impl];
    Candidate c;
    c.impl_id = impl.impl_id;
    c.kind = impl.kind;
    c.vendor = impl.vendor;
    c.owner = impl.owner;
    c.priority = row.views[v.impl].priority;
    c.staged = v.staged;
    const auto failed = std::find_if(failures.begin(), failures.end(),
                                     [&](const Failure& f) { return f.impl == &impl; });
    if (v.refusal != Refusal::kNone) {
      c.reason = policy::refusal_text(v.refusal, row.views[v.impl], decision.call,
                                      *decision.settings, args == nullptr ? nullptr : &names);
    } else if (!decision.permits(i)) {
      c.reason = "it is not the first choice and the policy is strict (TE_FL_STRICT)";
    } else if (failed != failures.end()) {
      c.reason = failure_text(*failed);
    } else {
      // A call that is only described may name an absent device, on which no implementation can
      // run.
      c.accepted = args != nullptr || decision.call.present || decision.call.device.is_host();
      c.chosen = c.accepted && !taken;
      taken = taken || c.accepted;
      c.reason = accepted_text(row, v, decision, c.chosen);
      if (args == nullptr && impl.checks_support)
        c.reason += "; its supports() check of a call's shapes may still refuse it";
    }
    list.push_back(std::move(c));
  }
  return list;
}

Status no_candidate(const Call& call, const Choice& decision,
                    const std::vector<Failure>& failures) {
  const PolicySettings& settings = *decision.settings;
  std::string text = "no implementation can run op " + quoted(decision.call.op) + " with " +
                     registry::describe_arguments(call.row.compiled->schema(), call.args) +
                     " (policy: " + policy::describe_for(settings, decision.call.op) + ")";
  if (settings.strict) {
    text += decision.first < 0
                ? "\n  strict: " + policy::missing_first_text(decision.call, settings)
                : "\n  strict: the first choice " +
                      quoted(call.row.impls[decision.order[decision.first].impl]->impl_id) +
                      " cannot, and nothing else may";
  }
  for (const Candidate& c : list_candidates(call.row, decision, call.args, failures)) {
    text += "\n  " + c.impl_id + " (" + c.owner + ", priority " + std::to_string(c.priority) +
            "): " + c.reason;
  }
  if (call.row.impls.empty()) text += "\n  none is registered";
  text += "\n  way out: " + way_out(call.row, decision, failures);
  return Status(StatusCode::kUnsupported, std::move(text));
}

void warn_absent(const Table& table, const OpRow& row, const PolicySettings& settings) {
  std::vector<std::string> vendors;
  for (const auto& r : table.ops) {
    if (r == nullptr) continue;
    for (const policy::Implementation& view : r->views) {
      if (std::find(vendors.begin(), vendors.end(), view.vendor) == vendors.end()) {
        vendors.emplace_back(view.vendor);
      }
    }
  }
  for (const std::string& vendor : policy::unknown_vendors(settings, vendors)) {
    log::once(log::Level::kWarning, "absent vendor " + vendor,
              "the policy names vendor " + quoted(vendor) + ", of which nothing is registered" +
                  core::did_you_mean(vendor, vendors));
  }
  const std::string op = row.compiled->schema().name;
  std::vector<std::string> ids;
  for (const policy::Implementation& view : row.views) ids.emplace_back(view.impl_id);
  const auto look_in = [&](const std::vector<PolicyToken>& tokens) {
    for (const PolicyToken& token : tokens) {
      if (token.type != PolicyToken::Type::kImpl ||
          std::find(ids.begin(), ids.end(), token.name) != ids.end())
        continue;
      log::once(log::Level::kWarning, "absent implementation " + op + " " + token.name,
                "the policy names implementation " + quoted(token.name) + " of op " + quoted(op) +
                    ", which is not registered" + core::did_you_mean(token.name, ids));
    }
  };
  if (const auto list = settings.per_op.find(op); list != settings.per_op.end())
    look_in(list->second);
  for (const SignatureList& list : settings.per_signature) {
    if (list.op == op) look_in(list.use);
  }
}

}  // namespace te_fl::dispatch
