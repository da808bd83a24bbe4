#include "comm/choose_provider.hpp"

#include "core/op/op_table.hpp"
#include "plugins/on_demand.hpp"
#include "plugins/start.hpp"
#include "policy/select.hpp"
#include "te_fl/op_registry.hpp"
#include "te_fl/policy.hpp"

namespace te_fl::comm {
namespace {

using registry::CommProvider;
using Providers = std::vector<std::shared_ptr<CommProvider>>;

policy::Implementation make_view(const CommProvider& p) {
  policy::Implementation view;
  view.impl_id = p.name;
  view.vendor = p.vendor;
  view.kind = static_cast<Kind>(p.desc.kind);
  view.priority = p.desc.priority;
  view.flags = ~0u;
  view.dtypes = ~uint64_t{0};
  view.scalings = ~0u;
  view.device_types = p.desc.device_types;
  return view;
}

std::string missing(const std::string& reasons, const Device& device, const std::string& named) {
  return "no provider of collectives " + (named.empty() ? "" : "'" + named + "' ") + "supports " +
         to_string(device) + " here" + (reasons.empty() ? ": none is loaded" : reasons) +
         "; the plugin of a chip or of a transport brings one (TE_FL_PLUGIN_MODULES; "
         "`te-fl info` lists what is loaded)";
}

}  // namespace

Result<std::shared_ptr<CommProvider>> choose_provider(const Device& device,
                                                      const PolicySettings& settings,
                                                      const std::string& named, bool processes) {
  plugins::start();
  plugins::on_demand::load(&device, OpRegistry::instance());
  const Providers list = registry::comm_providers();
  std::vector<policy::Implementation> views;
  for (const auto& p : list) views.push_back(make_view(*p));
  const policy::CallTraits call{.op = "communicator", .device = device};
  std::string reasons;
  for (const policy::Standing& v : policy::decide(settings, call, views).order) {
    const auto& p = list[v.impl];
    std::string reason;
    if (!named.empty() && p->name != named) {
      reason = "another was requested";
    } else if (processes && (p->desc.flags & TE_FL_COMM_THREADS_ONLY) != 0) {
      reason = "its ranks are threads of one process";
    } else if (v.staged) {
      reason = "it supports memory of the host";
    } else if (v.refusal != policy::Refusal::kNone) {
      reason = policy::refusal_text(v.refusal, views[v.impl], call, settings, nullptr);
    } else {
      return p;
    }
    reasons += (reasons.empty() ? ": " : "; ") + p->name + ": " + reason;
  }
  return not_found(missing(reasons, device, named));
}

std::vector<std::pair<std::string, std::string>> choose_implementations(
    const CommProvider& provider, const PolicySettings& settings, const Device& device) {
  OpRegistry& registry = OpRegistry::instance();
  const std::vector<OpImplInfo> every = registry.snapshot();
  std::vector<std::pair<std::string, std::string>> chosen;
  for (const std::string& op : registry.op_names()) {
    const te_fl_op_schema* schema = registry.schema(registry.find(op).value());
    if ((schema->flags & TE_FL_SCHEMA_COLLECTIVE) == 0) continue;
    std::vector<policy::Implementation> views;
    for (const OpImplInfo& i : every) {
      if (i.op != op || i.owner != provider.plugin) continue;
      policy::Implementation view;
      view.impl_id = i.impl_id;
      view.vendor = i.vendor;
      view.kind = i.kind;
      view.priority = i.priority;
      view.flags = ~0u;
      view.dtypes = ~uint64_t{0};
      view.scalings = ~0u;
      view.device_types = i.desc.device_types;
      views.push_back(view);
    }
    policy::CallTraits call{.op = op, .device = device};
    call.collective = true;
    for (const policy::Standing& v : policy::decide(settings, call, views).order) {
      if (v.refusal != policy::Refusal::kNone) continue;
      chosen.emplace_back(op, views[v.impl].impl_id);
      break;
    }
  }
  return chosen;
}

}  // namespace te_fl::comm
