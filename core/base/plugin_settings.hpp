#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/environment_table.hpp"

// Settings that plugins declare (rule R21). Core knows none of them by name: a plugin's manifest or
// header says which there are, and from then on they are variables like core's own. Thread-safe.
namespace te_fl::core {

struct PluginSetting {
  std::string name;  // "TE_FL_ACME_DEBUG"
  VariableType type = VariableType::kString;
  std::string default_value;  // empty: none
  std::string choices;        // as in VariableSpec
  std::string doc;

  bool operator==(const PluginSetting&) const = default;
};

// "string", "bool", "int", "enum", "list" or "file", as a manifest says it; nullopt: none of them.
std::optional<VariableType> plugin_setting_type(std::string_view word);

// An error if the declaration is wrong by itself: its name does not begin with TE_FL_<PLUGIN>_, its
// default is not accepted, or no sentence explains it. OK: nothing.
Status check_declaration(std::string_view plugin, const PluginSetting& setting);

// Declares the settings of a plugin, in place of those that it declared before. `active`: what is
// wrong with their values is an error of the environment; otherwise, the plugin being left out or
// not loaded yet, it is a remark. ALREADY_EXISTS: a name is taken, by te-fl itself or by another
// plugin's declaration; nothing was changed.
Status declare_settings(const std::string& plugin, const std::vector<PluginSetting>& settings,
                        bool active);
// The plugin is not active (any more): what its variables say is no error. It may have declared
// nothing.
void leave_out_settings(std::string_view plugin);

// A variable as a plugin reads it: its value if it is set, else, for one that a plugin declared,
// the default that it declared. nullopt: neither, or unknown.
// One that `plugin` has no right to, since nobody or another plugin declared it, is remembered for
// take_undeclared_setting().
std::optional<std::string> setting_for_plugin(std::string_view name, std::string_view plugin);
// "TE_FL_ACME_X", the last setting that a plugin asked for without having declared it (R21) since
// this was asked before; empty: none.
std::string take_undeclared_setting();

}  // namespace te_fl::core
