#include <cstdio>
#include <nlohmann/json.hpp>

#include "cases.hpp"
#include "commands.hpp"
#include "conformance/check/output.hpp"
#include "measure.hpp"
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

te_fl::Result<te_fl::CallProfile> make_profile(const ExplainOptions& options,
                                               const te_fl::Device& device) {
  te_fl::CallProfile profile;
  profile.device = device;
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

// A call of te-fl bench to explain.
struct RequestedCase {
  std::string name;  // name of the case; empty: no call was requested
  te_fl::bench::Shape extents;
  std::vector<std::string> others;  // further matching cases
};

te_fl::Result<te_fl::Decision> ask_case(const ExplainOptions& options, const te_fl::Device& device,
                                        RequestedCase& requested) {
  if (!options.scalings.empty() || options.dtypes.size() > 1) {
    return te_fl::invalid_argument(
        "--shape and --case ask about a call of `te-fl bench --list`, which one --dtype may "
        "choose; "
        "--scaling and several dtypes describe calls without a shape");
  }
  const std::string dtype = options.dtypes.empty() ? "" : options.dtypes.front();
  TE_FL_ASSIGN_OR_RETURN(const auto cases, find_cases(options.op, dtype, options.variant));
  const te_fl::bench::CaseSpec& spec = *cases.front();
  TE_FL_ASSIGN_OR_RETURN(requested.extents, parse_extents(spec, options.shape, device));
  requested.name = spec.variant;
  for (size_t i = 1; i < cases.size(); ++i) requested.others.push_back(cases[i]->variant);
  TE_FL_RETURN_IF_ERROR(te_fl::devices::find(device).status());
  TE_FL_ASSIGN_OR_RETURN(const auto placed, PlacedCase::make(spec, requested.extents, device));
  return placed->resolve();
}

void print_json(const te_fl::Decision& r, const te_fl::Device& device,
                const RequestedCase& requested) {
  json out = {{"op", r.op},
              {"impl_id", r.impl_id},
              {"policy", r.policy},
              {"device", te_fl::to_string(device)},
              {"device_present", te_fl::devices::find(device).ok()},
              {"candidates", json::array()}};
  if (const auto tolerances = te_fl::verify_tolerances(r.op); tolerances.ok())
    out["verify_tolerances"] = *tolerances;
  if (!requested.name.empty()) {
    out["case"] = requested.name;
    out["extents"] = requested.extents;
    out["runs"] = r.runs;
    if (!r.silent.empty()) out["runs_not_said"] = r.silent;
  }
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

void print_case(const RequestedCase& requested) {
  std::printf("call: case '%s' of te-fl bench%s%s", requested.name.c_str(),
              requested.extents.empty() ? "" : ", ", shape_text(requested.extents).c_str());
  std::string others;
  for (const std::string& name : requested.others)
    others += (others.empty() ? "'" : ", '") + name + "'";
  if (!others.empty()) std::printf(" (--case takes another: %s)", others.c_str());
  std::printf("\n");
}

// The implementation that a machine with the device, which is absent here, would ask first.
std::string elsewhere_text(const te_fl::Decision& r, const te_fl::Device& device) {
  const std::string where = "On a machine with " + te_fl::to_string(device) + ", ";
  for (const auto& c : r.candidates) {
    if (c.reason.starts_with("it would be a candidate")) {
      return where + "'" + c.impl_id + "' would be the first that is asked.";
    }
  }
  return where + "only copies in host memory could be used, by an implementation for the host.";
}

void print_table(const te_fl::Decision& r, const te_fl::Device& device,
                 const RequestedCase& requested) {
  std::printf("%s under policy: %s\n", paint(Color::kBold, r.op).c_str(), r.policy.c_str());
  if (!requested.name.empty()) print_case(requested);
  std::printf("\n");
  Table table({"", "implementation", "kind", "priority", "from", "reason"});
  for (const auto& c : r.candidates) {
    const std::string mark = c.chosen     ? paint(Color::kGreen, "->")
                             : c.accepted ? paint(Color::kDim, "next")
                                          : paint(Color::kRed, "no");
    table.add({mark, c.impl_id, std::string(te_fl::to_string(c.kind)), std::to_string(c.priority),
               c.owner, c.reason});
  }
  table.print();
  if (!r.runs.empty()) std::printf("\nruns %s: %s\n", r.impl_id.c_str(), r.runs.c_str());
  if (!r.silent.empty()) {
    std::printf("\nruns %s, which does not say which kernel: %s\n", r.impl_id.c_str(),
                r.silent.c_str());
  }
  if (const auto tolerances = te_fl::verify_tolerances(r.op);
      tolerances.ok() && !tolerances->empty()) {
    std::printf("\nTE_FL_VERIFY tolerates, against the reference:\n");
    for (const std::string& text : *tolerances) std::printf("  %s\n", text.c_str());
  }
  const auto found = te_fl::devices::find(device);
  if (!found.ok()) {
    std::printf("\nNo implementation runs this call here: %s.\n%s\n",
                found.status().message().c_str(), elsewhere_text(r, device).c_str());
  } else if (r.impl_id.empty()) {
    std::printf("\nNo implementation would run this call.\n");
  }
}

}  // namespace

int explain(const ExplainOptions& options) {
  Status status = options.watching;
  if (status.ok()) status = apply_settings(options.settings);
  if (status.ok()) status = te_fl::watch_status();
  if (!status.ok()) {
    complain(status.to_string());
    return kUsage;
  }
  auto& manager = te_fl::OpManager::instance();
  const auto op = manager.registry().find(options.op);
  if (!op.ok()) {
    complain(op.status().to_string());
    return kUsage;
  }
  const auto device = te_fl::parse_device(options.device);
  if (!device.ok()) {
    complain(device.status().to_string());
    return kUsage;
  }
  // A device that is absent here may exist on another machine; the host exists everywhere, so its
  // absence is an error.
  if (const auto found = te_fl::devices::find(*device); device->is_host() && !found.ok()) {
    complain(found.status().to_string());
    return kUsage;
  }
  RequestedCase requested;
  te_fl::Result<te_fl::Decision> decision = te_fl::Decision();
  const bool names_call = !options.shape.empty() || !options.variant.empty();
  const bool absent = !te_fl::devices::find(*device).ok();
  if (names_call && !absent) {
    decision = ask_case(options, *device, requested);
    // If no bench case was found, the error is one in the command's arguments.
    if (!decision.ok() && requested.name.empty()) {
      complain(decision.status().message());
      return kUsage;
    }
  } else {
    const auto profile = make_profile(options, *device);
    if (!profile.ok()) {
      complain(profile.status().to_string());
      return kUsage;
    }
    decision = manager.explain(*op, *profile);
  }
  if (!decision.ok()) {
    complain(decision.status().to_string());
    return kProblem;
  }
  options.json ? print_json(*decision, *device, requested)
               : print_table(*decision, *device, requested);
  if (names_call && absent && !options.json) {
    std::printf("The extents were not looked at: their call needs memory of the device.\n");
  }
  return decision->impl_id.empty() ? kNoCandidate : kSuccess;
}

}  // namespace te_fl_tool
