#include <cstdio>
#include <nlohmann/json.hpp>

#include "commands.hpp"
#include "conformance/check/output.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl_tool {
namespace {

using nlohmann::json;

std::string gib(uint64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f GiB", static_cast<double>(bytes) / (1 << 30));
  return text;
}

// Formats a device's copy bandwidth in its own memory, bytes/s read plus written; 0: not measured.
std::string copy_text(double bandwidth) {
  if (!(bandwidth > 0)) return "-";
  char text[32];
  std::snprintf(text, sizeof text, "%.0f GB/s", bandwidth / 1e9);
  return text;
}
json measured(double bandwidth) { return bandwidth > 0 ? json(bandwidth) : json(nullptr); }

Color color_of(te_fl::plugins::State state) {
  switch (state) {
    case te_fl::plugins::State::kActive:
      return Color::kGreen;
    case te_fl::plugins::State::kFailed:
    case te_fl::plugins::State::kAbandoned:
      return Color::kRed;
    default:
      return Color::kYellow;
  }
}

// Returns a plugin's findings about its devices and the libraries that it uses. Returns none for a
// plugin without devices: its libraries do not matter then, and loading them takes time; `te-fl
// doctor` loads them nevertheless.
std::vector<te_fl::plugins::Finding> list_findings(const te_fl::plugins::PluginInfo& p) {
  if (p.state != te_fl::plugins::State::kActive || p.devices.empty()) return {};
  auto found = te_fl::plugins::diagnose(p.name);
  if (!found.ok()) {
    complain(found.status().to_string());
    return {};
  }
  return std::move(found).value();
}

using Findings = std::vector<te_fl::plugins::Finding>;

// Formats the providers of collectives: "nccl", "gloo, other" or "-".
std::string comms_text(const std::vector<std::string>& comms) {
  std::string text;
  for (const std::string& name : comms) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "-" : text;
}

json plugin_json(const te_fl::plugins::PluginInfo& p, const Findings& list) {
  json findings = json::array();
  for (const auto& f : list) {
    findings.push_back({{"subject", f.subject},
                        {"state", f.state},
                        {"disables", f.disables},
                        {"remedy", f.remedy}});
  }
  return {{"findings", findings},
          {"name", p.name},
          {"vendor", p.vendor},
          {"version", p.version},
          {"build_id", p.build_id},
          {"path", p.path},
          {"origin", p.origin},
          {"abi", p.abi},
          {"state", te_fl::plugins::to_string(p.state)},
          {"reason", p.reason},
          {"load_ms", p.load_ms},
          {"devices", p.devices},
          {"ops", p.ops},
          {"comms", p.comms}};
}

// Returns the policy's settings for staging, which runs host implementations on copies of a
// device's tensors.
json staging_json(const te_fl::PolicySettings& s) {
  json out = {{"strict", s.strict}, {"max_bytes", nullptr}};
  if (s.max_staged_bytes) out["max_bytes"] = *s.max_staged_bytes;
  return out;
}

std::string staging_text(const te_fl::PolicySettings& s) {
  if (s.max_staged_bytes == 0u) return "forbidden (TE_FL_MAX_STAGED_BYTES=0)";
  std::string text = "host implementations run calls of other devices on copies, ";
  text += s.max_staged_bytes ? "up to " + std::to_string(*s.max_staged_bytes) +
                                   " bytes a call (TE_FL_MAX_STAGED_BYTES)"
                             : "of any size";
  return text + (s.strict ? ", where the policy names them (TE_FL_STRICT)" : "");
}

}  // namespace

// Reports settings that make calls fail, and names in environment variables that match nothing.
int problems(const std::vector<te_fl::plugins::PluginInfo>& plugins, const te_fl::Status& policy) {
  te_fl::Status status = te_fl::environment::status();
  if (status.ok()) status = policy;
  if (!status.ok()) {
    complain(status.to_string());
    return kProblem;
  }
  for (const auto& p : plugins) {
    if (p.origin != "TE_FL_PLUGIN_PATH" || p.state != te_fl::plugins::State::kFailed) continue;
    complain("TE_FL_PLUGIN_PATH: " + p.name + ": " + p.reason);
    return kProblem;
  }
  return kSuccess;
}

int info(bool as_json) {
  te_fl::OpManager::instance();  // registers the built-in backends, discovers plugins
  const auto plugins = te_fl::plugins::list();
  const auto devices = te_fl::devices::list();
  const auto policy = te_fl::current_policy();
  std::vector<te_fl::Quarantine> quarantined;
  if (auto entries = te_fl::quarantines(); entries.ok()) quarantined = *std::move(entries);
  // comes first, because plugins may measure their devices for their findings
  std::vector<Findings> findings;
  for (const auto& p : plugins) findings.push_back(list_findings(p));
  const std::string abi = std::to_string(TE_FL_ABI_MAJOR) + "." + std::to_string(TE_FL_ABI_MINOR);
  if (as_json) {
    json out = {{"version", TE_FL_VERSION},
                {"abi", abi},
                {"devices", json::array()},
                {"plugins", json::array()}};
    for (const auto& device : devices) {
      json d = {{"device", te_fl::to_string(device)}};
      if (auto props = te_fl::devices::properties(device); props.ok()) {
        d.update({{"name", props->name},
                  {"arch", props->arch},
                  {"total_memory", props->total_memory},
                  {"free_memory", props->free_memory},
                  {"compute_units", props->compute_units},
                  {"copy_bandwidth", measured(props->copy_bandwidth)}});
      } else {
        d["error"] = props.status().to_string();
      }
      out["devices"].push_back(d);
    }
    for (size_t i = 0; i < plugins.size(); ++i)
      out["plugins"].push_back(plugin_json(plugins[i], findings[i]));
    if (policy.ok()) out["staging"] = staging_json(policy->settings());
    out["quarantined"] = quarantined.size();
    std::printf("%s\n", json_text(out).c_str());
    return problems(plugins, policy.status());
  }
  std::printf("te-fl %s, plugin ABI %s\n\nDevices\n", TE_FL_VERSION, abi.c_str());
  Table device_table({"device", "name", "arch", "units", "memory", "copy"});
  for (const auto& device : devices) {
    const auto props = te_fl::devices::properties(device);
    if (props.ok()) {
      device_table.add({te_fl::to_string(device), props->name, std::to_string(props->arch),
                        std::to_string(props->compute_units), gib(props->total_memory),
                        copy_text(props->copy_bandwidth)});
    } else {
      device_table.add({te_fl::to_string(device), paint(Color::kRed, props.status().to_string())});
    }
  }
  device_table.print();
  if (policy.ok()) std::printf("Staging: %s\n", staging_text(policy->settings()).c_str());
  if (!quarantined.empty())
    std::printf(
        "Quarantine: %zu in %s are not used for calls that they computed wrongly (te-fl quarantine "
        "list)\n",
        quarantined.size(), te_fl::quarantine_file().c_str());
  std::printf("\nPlugins\n");
  Table plugin_table(
      {"plugin", "vendor", "version", "abi", "state", "ops", "ranks by", "start", "from"});
  for (const auto& p : plugins) {
    char start[32];
    std::snprintf(start, sizeof start, "%.1f ms", p.load_ms);
    plugin_table.add({p.name.empty() ? "?" : p.name, p.vendor, p.version, p.abi,
                      paint(color_of(p.state), std::string(te_fl::plugins::to_string(p.state))),
                      std::to_string(p.ops.size()), comms_text(p.comms), start,
                      p.path.empty() ? p.origin : p.path});
  }
  plugin_table.print();
  for (size_t i = 0; i < plugins.size(); ++i) {
    if (findings[i].empty()) continue;
    std::printf("\n%s\n", plugins[i].name.c_str());
    Table found({"what", "found"});
    for (const auto& f : findings[i]) found.add({f.subject, f.state});
    found.print();
  }
  for (const auto& p : plugins) {
    if (!p.reason.empty())
      std::printf("\n  %s: %s\n", p.name.empty() ? p.path.c_str() : p.name.c_str(),
                  p.reason.c_str());
  }
  return problems(plugins, policy.status());
}

}  // namespace te_fl_tool
