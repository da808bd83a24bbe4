#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/environment_table.hpp"

// Settings that plugins declare (rule R21). Core does not know their names at compile time: a
// plugin's manifest or header declares them, and from then on they behave like te-fl's own
// variables. Thread-safe.
namespace te_fl::core {

struct PluginSetting {
  std::string name;  // for example "TE_FL_ACME_DEBUG"
  VariableType type = VariableType::kString;
  std::string default_value;  // empty: none
  std::string choices;        // as in VariableSpec
  std::string doc;

  bool operator==(const PluginSetting&) const = default;
};

// Parses the type word of a manifest: "string", "bool", "int", "enum", "list" or "file". nullopt
// for any other word.
std::optional<VariableType> plugin_setting_type(std::string_view word);

// An error if the declaration itself is wrong: the name does not begin with TE_FL_<PLUGIN>_, the
// default is not an accepted value, or the doc sentence is missing.
Status check_declaration(std::string_view plugin, const PluginSetting& setting);

// Declares the settings of a plugin and replaces its earlier declaration. `active`: true if wrong
// values of these variables are errors; false (plugin left out or not loaded yet) if they are only
// remarks. ALREADY_EXISTS: te-fl or another plugin has the name; nothing was changed.
Status declare_settings(const std::string& plugin, const std::vector<PluginSetting>& settings,
                        bool active);
// Marks a plugin as not active: wrong values of its variables are no longer errors. Does nothing
// for a plugin without settings.
void leave_out_settings(std::string_view plugin);

// The value of a variable as a plugin reads it: the value that is set, else the default that the
// plugin declared, else nullopt. Reading a variable that `plugin` did not declare itself records
// the name for take_undeclared_setting().
std::optional<std::string> setting_for_plugin(std::string_view name, std::string_view plugin);
// Returns and clears the last undeclared setting that a plugin read, such as "TE_FL_ACME_X" (R21);
// empty if there was none since the last call.
std::string take_undeclared_setting();

}  // namespace te_fl::core
