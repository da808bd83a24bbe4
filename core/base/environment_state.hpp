#pragma once

#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/environment_table.hpp"
#include "core/base/fork.hpp"
#include "core/base/plugin_settings.hpp"
#include "te_fl/status.hpp"

// The state holds the value of every known variable, te-fl's own and those that plugins declared;
// it is filled from the process environment.
namespace te_fl::environment::detail {

using core::PluginSetting;
using core::VariableSpec;

struct Value {
  std::optional<std::string> from_environment;
  bool under_alias = false;
  bool ignored = false;  // present but not read: elevated privileges
  std::optional<std::string> from_code;
};

// A variable of te-fl, or one that a plugin declared.
struct Known {
  VariableSpec spec;
  Value value;
  std::string plugin = {};      // empty: te-fl's own
  bool active = true;           // false: its plugin is not
  PluginSetting declared = {};  // owns the text of a plugin's `spec`
};

struct State {
  State() {
    for (const VariableSpec& spec : core::variable_specs()) known.push_back({spec, {}});
  }
  std::list<Known> known;  // te-fl's own first; addresses stay
  // NAME=value of the process environment, of TE_FL_ and TEFL_, as they were read.
  std::vector<std::pair<std::string, std::string>> entries;
  // Set by code under names that nobody has declared yet.
  std::map<std::string, std::string, std::less<>> undeclared;
  // The last that a plugin asked for and had not declared.
  std::string asked_undeclared;
  Status status;
  std::vector<std::string> remarks;
  bool loaded = false;
};

// The lock, with the environment read. All that follows requires it.
std::unique_lock<core::ForkMutex> lock_loaded();
// Reads the process environment again. Returns the lock.
std::unique_lock<core::ForkMutex> lock_read_again();

State& state();
Known* find(std::string_view name);
// NOT_FOUND names the nearest.
Result<Known*> find_or_error(std::string_view name);
std::string in_effect(const Known& known);
// A name that a plugin may declare later: not te-fl's own, nor near to one.
bool may_be_declared(std::string_view name);
// Values and status, from the entries that were read. Values set by code stay.
void evaluate();
// Brings the settings that are kept elsewhere up to date.
void publish(bool from_code);

}  // namespace te_fl::environment::detail
