#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "te_fl/export.hpp"
#include "te_fl/status.hpp"

// Every TE_FL_* / TEFL_* variable, in one table: te-fl's own, and those that plugins declare
// (TE_FL_<PLUGIN>_...; rule R21 of plugin.h), which are known once the plugin's manifest or header
// was read. Variables are read once, at first use, and again on reload(); nothing else in te-fl
// calls getenv. Thread-safe.
namespace te_fl::environment {

struct Variable {
  std::string name;   // "TE_FL_PREFER"
  std::string alias;  // older or alternative name, empty if none; the name wins
  std::string type;   // "bool", "int", "list", "enum", "string", "file", "path list", "policy"
  std::string default_value;
  std::string doc;    // one sentence
  std::string value;  // in effect
  std::string
      origin;  // "default", "environment (TE_FL_PREFER)", "environment (alias ...)", "code"; it
               // says so if a variable was ignored because privileges are elevated
  std::string plugin;  // whose setting it is; empty: te-fl's own
  bool active = true;  // false: that plugin is not, so that nobody reads the value
};

// All variables with their values: te-fl's own in table order, then those of plugins.
TE_FL_API std::vector<Variable> table();
// Value in effect; the default if unset. Bools are "0" or "1" and enums have the table's spelling,
// however they were written. Unknown names are an error that names the nearest.
TE_FL_API Result<std::string> get(std::string_view name);
// As get(), as numbers; INVALID_ARGUMENT if the variable is of another type. A bool without a
// default is false; an int that is unset and has none is FAILED_PRECONDITION.
TE_FL_API Result<bool> get_bool(std::string_view name);
TE_FL_API Result<int64_t> get_int(std::string_view name);
// The value if it was set (by environment or code), else nullopt.
TE_FL_API std::optional<std::string> get_if_set(std::string_view name);
// Sets from code; wins over the environment until unset(). Checks the value's type. A name that
// may be a plugin's and is declared by none yet is kept until one declares it, which then checks
// it; plugins read their settings when they are loaded.
TE_FL_API Status set(std::string_view name, std::string value);
TE_FL_API Status unset(std::string_view name);
// Reads the process environment again. Not OK if a TE_FL_/TEFL_ variable is misspelt (near to one
// of te-fl's or of an active plugin's) or a value is of the wrong type; the message names variable,
// value and the nearest right one. Well-formed variables take effect all the same. The same status
// is returned by status() until the next reload or the next plugin that declares settings.
TE_FL_API Status reload();
TE_FL_API Status status();
// Findings that are no error, one sentence each: unknown variables that are near to no known one,
// and wrong values for plugins that are not active. OpManager logs them as warnings.
TE_FL_API std::vector<std::string> remarks();
// Changes with every reload/set/unset.
TE_FL_API uint64_t generation() noexcept;
// The nearest of `choices` to `word` by edit distance, or empty if none is near.
TE_FL_API std::string nearest(std::string_view word, const std::vector<std::string>& choices);
// docs/environment.md: te-fl's own variables.
TE_FL_API std::string markdown();

}  // namespace te_fl::environment
