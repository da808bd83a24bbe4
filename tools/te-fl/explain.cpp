#include <cstdio>
#include <nlohmann/json.hpp>

#include "commands.hpp"
#include "output.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl_tool {
namespace {

using nlohmann::json;
using te_fl::Status;

Status apply_settings(const std::vector<std::string>& settings) {
  for (const auto& setting : settings) {
    const size_t equals = setting.find('=');
    if (equals == std::string::npos) {
      return te_fl::invalid_argument("--set takes VAR=VALUE, got '" + setting + "'");
    }
    TE_FL_RETURN_IF_ERROR(
        te_fl::environment::set(setting.substr(0, equals), setting.substr(equals + 1)));
  }
  return {};
}

te_fl::Result<te_fl::CallProfile> profile_of(const ExplainOptions& options) {
  te_fl::CallProfile profile;
  TE_FL_ASSIGN_OR_RETURN(profile.device, te_fl::parse_device(options.device));
  for (const auto& text : options.dtypes) {
    TE_FL_ASSIGN_OR_RETURN(const te_fl::DType dtype, te_fl::parse_dtype(text));
    profile.dtypes.push_back(dtype);
  }
  for (const auto& text : options.scalings) {
    TE_FL_ASSIGN_OR_RETURN(const te_fl::Scaling scaling, te_fl::parse_scaling(text));
    profile.scalings.push_back(scaling);
  }
  return profile;
}

void print_json(const te_fl::Decision& r, const te_fl::Device& device) {
  json out = {{"op", r.op},
              {"impl_id", r.impl_id},
              {"policy", r.policy},
              {"device", te_fl::to_string(device)},
              {"device_present", te_fl::devices::find(device).ok()},
              {"candidates", json::array()}};
  for (const auto& c : r.candidates) {
    out["candidates"].push_back({{"impl_id", c.impl_id},
                                 {"kind", te_fl::to_string(c.kind)},
                                 {"vendor", c.vendor},
                                 {"owner", c.owner},
                                 {"priority", c.priority},
                                 {"accepted", c.accepted},
                                 {"chosen", c.chosen},
                                 {"staged", c.staged},
                                 {"reason", c.reason}});
  }
  std::printf("%s\n", json_text(out).c_str());
}

void print_table(const te_fl::Decision& r, const te_fl::Device& device) {
  std::printf("%s under policy: %s\n\n", paint(Color::kBold, r.op).c_str(), r.policy.c_str());
  Table table({"", "implementation", "kind", "priority", "from", "reason"});
  for (const auto& c : r.candidates) {
    const std::string mark = c.chosen     ? paint(Color::kGreen, "->")
                             : c.accepted ? paint(Color::kDim, "next")
                                          : paint(Color::kRed, "no");
    table.add({mark, c.impl_id, std::string(te_fl::to_string(c.kind)), std::to_string(c.priority),
               c.owner, c.reason});
  }
  table.print();
  if (r.impl_id.empty()) std::printf("\nNo implementation would serve this call.\n");
  const auto found = te_fl::devices::find(device);
  if (!found.ok()) {
    std::printf("\nThis is what would be chosen if the device were here, but %s.\n",
                found.status().message().c_str());
  }
}

}  // namespace

int explain(const ExplainOptions& options) {
  if (const Status status = apply_settings(options.settings); !status.ok()) {
    complain(status.to_string());
    return kUsage;
  }
  auto& manager = te_fl::OpManager::instance();
  const auto op = manager.registry().find(options.op);
  if (!op.ok()) {
    complain(op.status().to_string());
    return kUsage;
  }
  const auto profile = profile_of(options);
  if (!profile.ok()) {
    complain(profile.status().to_string());
    return kUsage;
  }
  const auto resolution = manager.explain(*op, *profile);
  if (!resolution.ok()) {
    complain(resolution.status().to_string());
    return kProblem;
  }
  options.json ? print_json(*resolution, profile->device)
               : print_table(*resolution, profile->device);
  return resolution->impl_id.empty() ? kNoCandidate : kSuccess;
}

}  // namespace te_fl_tool
