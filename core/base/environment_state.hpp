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

// The values of all known variables: te-fl's own and those that plugins have declared. They are
// read from the process environment.
namespace te_fl::environment::detail {

using core::PluginSetting;
using core::VariableSpec;

struct Value {
  std::optional<std::string> from_environment;
  bool under_alias = false;
  bool ignored = false;  // set, but not read because the process has elevated privileges
  std::optional<std::string> from_code;
  std::string error;  // the reason why the environment's value is not accepted
};

// A variable of te-fl, or one that a plugin declared.
struct Known {
  VariableSpec spec;
  Value value;
  std::string plugin = {};      // empty: te-fl's own
  bool active = true;           // false: the plugin is not active
  PluginSetting declared = {};  // owns the text that `spec` points to if a plugin declared the
                                // variable
};

struct State {
  State() {
    for (const VariableSpec& spec : core::variable_specs()) known.push_back({spec, {}});
  }
  std::list<Known> known;  // te-fl's own variables first; addresses are stable
  // The NAME=value entries of the process environment that begin with TE_FL_ or TEFL_.
  std::vector<std::pair<std::string, std::string>> entries;
  // Values that code set for names that no plugin has declared yet.
  std::map<std::string, std::string, std::less<>> undeclared;
  // The last undeclared setting that a plugin read.
  std::string undeclared_setting;
  Status status;
  std::vector<std::string> remarks;
  bool loaded = false;
};

// Takes the lock, and reads the environment if that was not done before. Every function below
// requires the lock.
std::unique_lock<core::ForkMutex> lock_loaded();
// Takes the lock, and reads the environment if lock_loaded() was not called before. The next call
// reads it again.
std::unique_lock<core::ForkMutex> lock_for_enquiry();
// Reads the process environment again. Returns the lock.
std::unique_lock<core::ForkMutex> lock_read_again();

State& state();
Known* find(std::string_view name);
// Like find(); NOT_FOUND suggests the closest name.
Result<Known*> find_or_error(std::string_view name);
std::string in_effect(const Known& known);
// True if a plugin may declare the name later: it is not one of te-fl's own names and not close to
// one.
bool may_be_declared(std::string_view name);
// Computes values and status from the entries that were read. Values that code set are kept.
void evaluate();
// Updates the copies that are kept outside of this state: the log level, g_validate, g_generation.
void publish(bool from_code);

}  // namespace te_fl::environment::detail
