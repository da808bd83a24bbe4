#include <cstdio>
#include <nlohmann/json.hpp>

#include "commands.hpp"
#include "conformance/check/output.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl_tool {

using nlohmann::json;

int env(const EnvOptions& options) {
  if (options.markdown) {
    std::printf("%s", te_fl::environment::markdown().c_str());
    return kSuccess;
  }
  te_fl::OpManager::instance();  // loads the plugins, which declare their settings
  const te_fl::Status status = te_fl::environment::status();
  const auto table = te_fl::environment::table();
  if (options.json) {
    json out = json::array();
    for (const auto& v : table) {
      out.push_back({{"name", v.name},
                     {"alias", v.alias},
                     {"type", v.type},
                     {"default", v.default_value},
                     {"value", v.value},
                     {"origin", v.origin},
                     {"plugin", v.plugin},
                     {"active", v.active},
                     {"effect", v.doc}});
    }
    std::printf("%s\n", json_text(out).c_str());
  } else {
    Table out({"variable", "value", "origin", "effect"});
    for (const auto& v : table) {
      const bool set = v.origin != "default";
      const std::string value = v.value.empty() ? "(unset)" : v.value;
      const std::string of = v.active ? "" : "plugin " + v.plugin + " is not active: ";
      out.add({v.name, set ? paint(Color::kGreen, value) : value, v.origin, of + v.doc});
    }
    out.print();
  }
  if (!status.ok()) {
    complain(status.to_string());
    return kProblem;
  }
  // Each variable may be well-formed and their combined policy still invalid, for example because
  // an op does not exist.
  if (const auto policy = te_fl::current_policy(); !policy.ok()) {
    complain(policy.status().to_string());
    return kProblem;
  }
  return kSuccess;
}

}  // namespace te_fl_tool
