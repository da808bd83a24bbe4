// te-fl check: requirements of rule R3 on a plugin's structs that the loader does not check.
#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "conformance/check/steps.hpp"

namespace te_fl_tool::check {
namespace {

constexpr unsigned char kMark = 0xa5;

Finding made(const std::string& name, const std::string& wrong, const std::string& right) {
  Finding f;
  f.check = "structs", f.name = name;
  f.outcome = wrong.empty() ? Outcome::kPass : Outcome::kFail;
  f.message = wrong.empty() ? right : wrong;
  return f;
}

std::string not_zero(const char* what) {
  return std::string("rule R3: the reserved member of ") + what +
         " is not zero; a later te-fl gives it a meaning";
}

// Checks that properties() writes only struct_size bytes, since a host may have a shorter
// te_fl_device_props than the plugin.
std::string device_properties(const te_fl_device_desc& device) {
  constexpr size_t kKnown = offsetof(te_fl_device_props, driver);
  te_fl_device_props props;
  std::memset(static_cast<void*>(&props), kMark, sizeof props);
  props.struct_size = kKnown;
  const te_fl_status code = device.api->properties(device.self, &props, nullptr);
  if (code != TE_FL_OK) return {};  // reported by another check
  const auto* bytes = reinterpret_cast<const unsigned char*>(&props);
  const bool kept =
      std::all_of(bytes + kKnown, bytes + sizeof props, [](unsigned char b) { return b == kMark; });
  if (kept && props.struct_size <= kKnown) return {};
  return "rule R3: properties() writes behind the struct_size of " + std::to_string(kKnown) +
         " that the host gave; copy no more than struct_size bytes";
}

Finding check_device(const std::string& name, const te_fl_device_desc& device) {
  std::string wrong;
  if (device.reserved != 0) wrong = not_zero("a te_fl_device_desc");
  if (wrong.empty() && device.api->reserved != 0) wrong = not_zero("a te_fl_device_api");
  if (wrong.empty()) wrong = device_properties(device);
  return made(name, wrong, "reserved members are zero, properties() keeps to the host's size");
}

Finding check_header(const te_fl_plugin_header& header) {
  std::string wrong;
  const size_t end = offsetof(te_fl_plugin_header, reserved) + sizeof header.reserved;
  if (header.struct_size >= end) {
    for (const void* member : header.reserved)
      if (member != nullptr) wrong = not_zero("a te_fl_plugin_header");
  }
  if (wrong.empty() && header.api->reserved != 0) wrong = not_zero("a te_fl_plugin_api");
  return made("header", wrong, "reserved members are zero");
}

}  // namespace

std::vector<Finding> check_structs(const te_fl::plugins::PluginInfo& plugin) {
  std::vector<Finding> found;
  if (!plugin.reason.empty()) {  // left-out ops that this te-fl does not have (R20)
    found.push_back(made("ops", "", plugin.reason));
    found.back().check = "load", found.back().outcome = Outcome::kUnsupported;
  }
  if (void* library = dlopen(plugin.path.c_str(), RTLD_NOW | RTLD_NOLOAD)) {
    const auto query =
        reinterpret_cast<te_fl_plugin_query_fn>(dlsym(library, TE_FL_PLUGIN_QUERY_SYMBOL));
    te_fl_host_info info{};
    info.struct_size = sizeof info;
    info.abi_major = TE_FL_ABI_MAJOR;
    info.abi_minor = TE_FL_ABI_MINOR;
    info.version = TE_FL_VERSION;
    if (query != nullptr) found.push_back(check_header(*query(&info)));
    dlclose(library);
  }
  for (const std::string& name : plugin.devices) {
    const auto device = te_fl::parse_device(name);
    if (!device.ok()) continue;
    const auto desc = te_fl::devices::find(*device);
    if (desc.ok()) found.push_back(check_device(name, **desc));
  }
  return found;
}

}  // namespace te_fl_tool::check
