#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "te_fl/export.hpp"
#include "te_fl/status.hpp"

// The table of all TE_FL_* / TEFL_* environment variables: te-fl's own, and those that plugins
// declare (TE_FL_<PLUGIN>_...; rule R21 of plugin.h). A plugin's variables are known once its
// manifest or header has been read. Variables are read at first use, and again on reload(). Nothing
// else in te-fl calls getenv. Thread-safe.
namespace te_fl::environment {

struct Variable {
  std::string name;   // "TE_FL_PREFER"
  std::string alias;  // older or alternative name, empty if none; `name` takes precedence
  std::string type;   // "bool", "int", "list", "enum", "string", "file", "path list", "policy"
  std::string default_value;
  std::string doc;    // one sentence
  std::string value;  // the value in effect
  // The source of the value: "default", "environment (TE_FL_PREFER)", "environment (alias ...)" or
  // "code". Also states if a variable was ignored because the process has elevated privileges.
  std::string origin;
  std::string plugin;  // the plugin that declared the variable; empty: te-fl's own
  bool active = true;  // false: that plugin is not active, so nothing reads the value
  // The reason why a value of the environment is not accepted and `value` is another; empty if
  // there is none.
  std::string error;
};

// All variables with their values: te-fl's own in table order, then those of plugins.
TE_FL_API std::vector<Variable> table();
// One variable of table(). An unknown name is an error that names the nearest. This is not a first
// use: before that, it looks at the process environment each time, and keeps nothing.
TE_FL_API Result<Variable> variable(std::string_view name);
// The value in effect; the default if unset. Bools are returned as "0" or "1" and enums in the
// table's spelling, whatever spelling was set. An unknown name is an error that names the nearest.
TE_FL_API Result<std::string> get(std::string_view name);
// The value as a bool or a number. INVALID_ARGUMENT if the variable has another type. An unset bool
// without a default is false; an unset int without a default is FAILED_PRECONDITION.
TE_FL_API Result<bool> get_bool(std::string_view name);
TE_FL_API Result<int64_t> get_int(std::string_view name);
// The value if the environment or the program has set it, else nullopt.
TE_FL_API std::optional<std::string> get_if_set(std::string_view name);
// Sets a variable from the program. It takes precedence over the environment until unset(). Checks
// the value's type. A TE_FL_<PLUGIN>_ name that no plugin has declared yet is kept, and its value
// is checked once a plugin declares it. Plugins read their settings when they are loaded.
TE_FL_API Status set(std::string_view name, std::string value);
TE_FL_API Status unset(std::string_view name);
// Reads the process environment again. Returns an error if a TE_FL_/TEFL_ variable is misspelt
// (similar to a variable of te-fl or of an active plugin) or a value has the wrong type; the
// message names variable, value and the nearest valid one. Valid variables take effect all the
// same. status() returns the same status until the next reload(), or until another plugin declares
// settings.
TE_FL_API Status reload();
TE_FL_API Status status();
// Warnings that are not errors, one sentence each: unknown variables that resemble no known one,
// and wrong values for plugins that are not active. OpManager logs them.
TE_FL_API std::vector<std::string> remarks();
// A number that changes with every reload(), set() and unset().
TE_FL_API uint64_t generation() noexcept;
// The element of `choices` nearest to `word` by edit distance; empty if none is similar.
TE_FL_API std::string nearest(std::string_view word, const std::vector<std::string>& choices);
// The text of docs/environment.md: te-fl's own variables.
TE_FL_API std::string markdown();

}  // namespace te_fl::environment
