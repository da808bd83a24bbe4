// Validates the header that a plugin's query function returned.

#include <algorithm>
#include <cstring>
#include <iterator>

#include "core/base/abi_struct.hpp"
#include "plugins/activate.hpp"
#include "te_fl/version.hpp"

namespace te_fl::plugins {
namespace {

using core::copy_struct;
using core::plausible_size;
using core::struct_size_of;

Status incompatible(std::string text) { return Status(StatusCode::kIncompatible, std::move(text)); }

bool good_name(const char* name) {
  if (name == nullptr || *name == '\0') return false;
  for (const char* c = name; *c != '\0'; ++c) {
    const bool good = (*c >= 'a' && *c <= 'z') || (*c >= '0' && *c <= '9') || *c == '_';
    if (!good || c - name > 63) return false;
  }
  return true;
}

std::string version_text(uint32_t major, uint32_t minor) {
  return std::to_string(major) + "." + std::to_string(minor);
}

bool is_withdrawn(uint32_t major, uint32_t minor) { return major == 1 && minor == 0; }

std::string our_version() { return version_text(TE_FL_ABI_MAJOR, TE_FL_ABI_MINOR); }

// Reads only the members that have the same place in every major version.
Status check_version(const te_fl_plugin_header& raw) {
  const std::string why = version_problem(raw.abi_major, raw.abi_minor);
  if (why.empty()) return {};
  return incompatible("the plugin speaks ABI " + version_text(raw.abi_major, raw.abi_minor) +
                      ", this te-fl " TE_FL_VERSION " speaks " + our_version() + "; " + why);
}

// From 2.0 on, plugin and host may differ in the minor version (R2), unless the plugin requires a
// minimum.
Status check_needs(const te_fl_plugin_header& h) {
  if (h.min_host_minor > TE_FL_ABI_MINOR) {
    return incompatible("the plugin needs a host of ABI " +
                        version_text(h.abi_major, h.min_host_minor) +
                        " or newer, this te-fl " TE_FL_VERSION " speaks " + our_version() +
                        " (rule R2): use a newer te-fl, or a plugin that can do with this one");
  }
  if (h.features != 0) {
    return incompatible("the plugin requires features " + std::to_string(h.features) +
                        " that this te-fl " TE_FL_VERSION ", ABI " + our_version() +
                        ", does not know (rule R2): use a newer te-fl");
  }
  return {};
}

Status check_table(const te_fl_plugin_header& h) {
  if (h.api == nullptr)
    return incompatible("the plugin's header has no table of functions (rule R4)");
  const uint32_t size = struct_size_of(h.api);
  const size_t least = core::kLeastPluginApi;
  if (!plausible_size(size, least)) {
    return incompatible("the plugin's table of functions has " + core::size_text(size, least));
  }
  const auto api = copy_struct<te_fl_plugin_api>(h.api);
  if (api.create == nullptr)
    return incompatible("the plugin's create is NULL, but required (rule R4)");
  if (api.destroy == nullptr)
    return incompatible("the plugin's destroy is NULL, but required (rule R4)");
  return {};
}

Result<std::vector<core::PluginSetting>> read_settings(const te_fl_plugin_header& h) {
  std::vector<core::PluginSetting> out;
  constexpr uint32_t kMost = 1024;
  if (h.setting_count > kMost || (h.setting_count != 0 && h.settings == nullptr)) {
    return incompatible("it declares " + std::to_string(h.setting_count) + " settings" +
                        (h.settings == nullptr ? " and no list" : "") + " (rule R21, at most " +
                        std::to_string(kMost) + ")");
  }
  const auto text = [](const char* s) { return std::string(s == nullptr ? "" : s); };
  for (uint32_t i = 0; i < h.setting_count; ++i) {
    const te_fl_setting_desc* raw = h.settings[i];
    if (raw == nullptr || !plausible_size(raw->struct_size, core::kLeastSetting)) {
      return incompatible("its setting " + std::to_string(i) +
                          (raw == nullptr
                               ? " is NULL (rule R21)"
                               : " has " + core::size_text(raw->struct_size, core::kLeastSetting)));
    }
    const auto desc = copy_struct<te_fl_setting_desc>(raw);
    constexpr core::VariableType kTypes[] = {
        core::VariableType::kString, core::VariableType::kBool, core::VariableType::kInt,
        core::VariableType::kEnum,   core::VariableType::kList, core::VariableType::kFile};
    if (desc.type >= std::size(kTypes)) {
      return incompatible("its setting " + text(desc.name) + " has the type " +
                          std::to_string(desc.type) +
                          ", which this te-fl " TE_FL_VERSION " does not know (rule R21)");
    }
    out.push_back({text(desc.name), kTypes[desc.type], text(desc.default_value), text(desc.choices),
                   text(desc.doc)});
    TE_FL_RETURN_IF_ERROR(core::check_declaration(h.name, out.back()));
    for (size_t k = 0; k + 1 < out.size(); ++k) {
      if (out[k].name == out.back().name)
        return incompatible("it declares setting " + out[k].name + " twice (rule R21)");
    }
  }
  return out;
}

Result<const te_fl_plugin_header*> ask(te_fl_plugin_query_fn query) {
  te_fl_host_info info{};
  info.struct_size = sizeof info;
  info.abi_major = TE_FL_ABI_MAJOR;
  info.abi_minor = TE_FL_ABI_MINOR;
  info.version = TE_FL_VERSION;
  try {
    return query(&info);
  } catch (...) {
    return incompatible(TE_FL_PLUGIN_QUERY_SYMBOL
                        " threw an exception; nothing may throw across the "
                        "boundary (rule R5)");
  }
}

}  // namespace

std::string version_problem(uint32_t major, uint32_t minor) {
  const bool kept = TE_FL_ABI_MAJOR >= 2;  // compatibility begins with 2.0
  if (major == TE_FL_ABI_MAJOR && (kept || minor == TE_FL_ABI_MINOR)) return {};
  if (is_withdrawn(major, minor)) {
    return "1.0 was withdrawn and no te-fl loads it any more (rule R2): rebuild the plugin with "
           "this te-fl's header, te_fl/plugin.h";
  }
  const bool newer =
      major > TE_FL_ABI_MAJOR || (major == TE_FL_ABI_MAJOR && minor > TE_FL_ABI_MINOR);
  return std::string(kept ? "the major numbers must be equal"
                          : "before 2.0 both numbers must be equal") +
         " (rule R2): " +
         (newer ? "use a newer te-fl, or rebuild the plugin with this one's header"
                : "rebuild the plugin with this te-fl's header");
}

Result<Header> read_header(te_fl_plugin_query_fn query) {
  TE_FL_ASSIGN_OR_RETURN(const te_fl_plugin_header* raw, ask(query));
  if (raw == nullptr) {
    return incompatible("the plugin does not support this host: " TE_FL_PLUGIN_QUERY_SYMBOL
                        " returned NULL to te-fl " TE_FL_VERSION ", ABI " +
                        our_version());
  }
  if (raw->magic != TE_FL_PLUGIN_MAGIC) {
    return incompatible(
        "the plugin's header does not begin with TE_FL_PLUGIN_MAGIC; it is no te-fl plugin header");
  }
  TE_FL_RETURN_IF_ERROR(check_version(*raw));
  const size_t least = core::kLeastHeader;
  if (!plausible_size(raw->struct_size, least)) {
    return incompatible("the plugin's header has " + core::size_text(raw->struct_size, least));
  }
  te_fl_plugin_header h{};  // struct_size is the second member, so copy_struct does not apply
  std::memcpy(&h, raw, core::copied_size(raw->struct_size, sizeof h));
  TE_FL_RETURN_IF_ERROR(check_needs(h));
  if (!good_name(h.name)) {
    return incompatible("the plugin's name must be 1 to 64 characters of a-z, 0-9 and _");
  }
  if (h.vendor == nullptr || *h.vendor == '\0') {
    return incompatible("plugin '" + std::string(h.name) + "' names no vendor");
  }
  TE_FL_RETURN_IF_ERROR(check_table(h).wrap("plugin '" + std::string(h.name) + "'"));
  Header out;
  out.abi_major = h.abi_major;
  out.abi_minor = h.abi_minor;
  out.name = h.name;
  out.vendor = h.vendor;
  out.version = h.version == nullptr ? "" : h.version;
  out.build_id = h.build_id == nullptr ? "" : h.build_id;
  out.api = copy_struct<te_fl_plugin_api>(h.api);
  Result<std::vector<core::PluginSetting>> settings = read_settings(h);
  if (!settings.ok()) return settings.status().wrap("plugin '" + out.name + "'");
  out.settings = std::move(*settings);
  return out;
}

}  // namespace te_fl::plugins
