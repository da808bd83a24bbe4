#include "te_fl/environment.hpp"

#include <sys/auxv.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <list>
#include <map>
#include <mutex>

#include "core/base/environment_table.hpp"
#include "core/base/fork.hpp"
#include "core/base/plugin_settings.hpp"
#include "core/base/settings.hpp"
#include "core/base/text.hpp"

namespace te_fl::environment {
namespace {

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
  PluginSetting declared = {};  // what `spec` points into, of a plugin's
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
  Status status;
  std::vector<std::string> remarks;
  bool loaded = false;
};

constinit core::ForkMutex mutex(core::LockLevel::kEnvironment);
const core::ForkMutex::Registration registration(mutex);

State& state() {  // never destroyed: destructors of static objects may still ask
  static State* const instance = new State;
  return *instance;
}

// The functions from here to lock_loaded() require the lock.

std::vector<std::string> all_names() {
  std::vector<std::string> names;
  for (const Known& k : state().known) {
    names.emplace_back(k.spec.name);
    if (!k.spec.alias.empty()) names.emplace_back(k.spec.alias);
  }
  return names;
}

Known* find(std::string_view name) {
  for (Known& k : state().known) {
    if (name == k.spec.name || (!k.spec.alias.empty() && name == k.spec.alias)) return &k;
  }
  return nullptr;
}

Result<Known*> find_or_error(std::string_view name) {
  if (Known* known = find(name)) return known;
  return not_found("there is no variable '" + std::string(name) + "'" +
                   core::did_you_mean(name, all_names()));
}

Status must_be(const Known& known, std::string_view name, core::VariableType type) {
  if (known.spec.type == type) return {};
  return invalid_argument(std::string(name) + " is of type " +
                          std::string(core::type_name(known.spec.type)) + ", not " +
                          std::string(core::type_name(type)));
}

std::string in_effect(const Known& known) {
  const Value& v = known.value;
  if (v.from_code) return *v.from_code;
  if (v.from_environment) return *v.from_environment;
  return std::string(known.spec.default_value);
}

// An empty value of a bool, an int or an enum is as good as none; an empty list is a list.
bool means_unset(const VariableSpec& spec, std::string_view value) {
  using enum core::VariableType;
  const bool needs_text = spec.type == kBool || spec.type == kInt || spec.type == kEnum;
  return needs_text && core::trim(value).empty();
}

std::string_view without_prefix(std::string_view name) {
  for (const std::string_view prefix : {"TE_FL_", "TEFL_"}) {
    if (name.starts_with(prefix)) return name.substr(prefix.size());
  }
  return name;
}

// The nearest of te-fl's own names, compared behind the prefix that all share; empty if none is.
std::string nearest_own(std::string_view name) {
  std::vector<std::string> words;
  std::map<std::string, std::string> full;
  for (const Known& k : state().known) {
    for (const std::string_view own : {k.spec.name, k.spec.alias}) {
      if (!k.plugin.empty() || own.empty()) continue;
      words.emplace_back(without_prefix(own));
      full.emplace(words.back(), own);
    }
  }
  const std::string best = nearest(without_prefix(name), words);
  return best.empty() ? "" : full.at(best);
}

// "TE_FL_ACME_" of a plugin's setting.
std::string_view beginning_of(const Known& setting) {
  return setting.spec.name.substr(0, std::string_view("TE_FL_").size() + setting.plugin.size() + 1);
}

// A setting of the plugin whose settings begin as `name` does (null: none), and the nearest of
// them, compared behind that beginning.
const Known* of_plugin(std::string_view name, std::string& near) {
  const Known* some = nullptr;  // of "acme_x" rather than of "acme"
  for (const Known& k : state().known) {
    const bool fits = !k.plugin.empty() && name.starts_with(beginning_of(k));
    if (fits && (some == nullptr || k.plugin.size() > some->plugin.size())) some = &k;
  }
  if (some == nullptr) return nullptr;
  const std::string_view beginning = beginning_of(*some);
  std::vector<std::string> words;
  for (const Known& k : state().known) {
    if (k.plugin == some->plugin) words.emplace_back(k.spec.name.substr(beginning.size()));
  }
  const std::string best = nearest(name.substr(beginning.size()), words);
  near = best.empty() ? "" : std::string(beginning) + best;
  return some;
}

struct Findings {
  std::vector<std::string> mistakes, remarks;
  // What is wrong with a variable of an active plugin or of te-fl's own is a mistake.
  void add(bool mistake, std::string text) {
    (mistake ? mistakes : remarks).push_back(std::move(text));
  }
};

void unknown(std::string_view name, Findings& found) {
  const std::string what = "environment variable " + std::string(name) + " is unknown";
  const std::string unset = " (unset it if it is not meant for te-fl)";
  std::string near;
  if (const Known* plugin = of_plugin(name, near)) {
    found.add(plugin->active && !near.empty(),
              what +
                  (near.empty() ? "; plugin " + plugin->plugin +
                                      " has no such setting, `te-fl env` lists those it has"
                                : "; did you mean " + near + "?") +
                  unset);
  } else if (near = nearest_own(name); !near.empty()) {
    found.add(true, what + "; did you mean " + near + "?" + unset);
  } else {
    found.add(false, what +
                         "; it may be of a plugin that is not here, and `te-fl env` lists those "
                         "that exist" +
                         unset);
  }
}

void take_entry(const std::string& name, const std::string& text, bool elevated, Findings& found) {
  Known* const known = find(name);
  if (known == nullptr) return unknown(name, found);
  Value& value = known->value;
  if (known->spec.privileged && elevated) {
    value.ignored = true;
    return;
  }
  if (means_unset(known->spec, text)) return;
  const bool under_alias = name != known->spec.name;
  if (under_alias && value.from_environment) return;  // the name wins
  Result<std::string> checked = core::check_value(known->spec, name, text);
  if (!checked.ok()) return found.add(known->active, checked.status().message());
  value.from_environment = std::move(*checked);
  value.under_alias = under_alias;
}

// Values and status, from the entries that were read. Values set by code stay.
void evaluate() {
  State& s = state();
  for (Known& k : s.known) {
    k.value.from_environment.reset();
    k.value.under_alias = k.value.ignored = false;
  }
  const bool elevated = getauxval(AT_SECURE) != 0;
  Findings found;
  for (const auto& [name, text] : s.entries) take_entry(name, text, elevated, found);
  for (auto at = s.undeclared.begin(); at != s.undeclared.end();) {
    Known* const known = find(at->first);
    if (known == nullptr) {
      found.add(false, at->first +
                           " was set by the program, and no plugin that is here declares it; "
                           "`te-fl env` lists those that exist");
      ++at;
      continue;
    }
    Result<std::string> checked = core::check_value(known->spec, at->first, at->second);
    if (checked.ok()) {
      known->value.from_code = std::move(*checked);
      at = s.undeclared.erase(at);
    } else {
      found.add(known->active, checked.status().message());
      ++at;
    }
  }
  s.status = found.mistakes.empty() ? Status() : invalid_argument(core::join(found.mistakes, "; "));
  s.remarks = std::move(found.remarks);
}

// One pass over the environment.
void read_environment() {
  State& s = state();
  s.entries.clear();
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const char* text = *entry;
    if (text[0] != 'T' || text[1] != 'E') continue;
    if (std::strncmp(text, "TE_FL_", 6) != 0 && std::strncmp(text, "TEFL_", 5) != 0) continue;
    if (const char* equals = std::strchr(text, '=')) {
      s.entries.emplace_back(std::string(text, equals), equals + 1);
    }
  }
  evaluate();
  s.loaded = true;
}

// Brings the settings that are kept elsewhere up to date.
void publish(bool from_code) {
  const std::string log_level = in_effect(*find("TEFL_LOG_LEVEL"));
  core::apply_log_level(log_level, from_code);
  core::g_validate.store(in_effect(*find("TE_FL_VALIDATE")) == "1", std::memory_order_relaxed);
  core::g_generation.fetch_add(1, std::memory_order_release);
}

// The lock, with the environment read.
std::unique_lock<core::ForkMutex> lock_loaded() {
  std::unique_lock lock(mutex);
  if (!state().loaded) {
    read_environment();
    publish(false);
  }
  return lock;
}

std::string origin(const VariableSpec& spec, const Value& v) {
  if (v.from_code) return "code";
  if (v.from_environment) {
    return v.under_alias ? "environment (alias " + std::string(spec.alias) + ")"
                         : "environment (" + std::string(spec.name) + ")";
  }
  return v.ignored ? "default (ignored in the environment: privileges are elevated)" : "default";
}

// A name that a plugin may declare later: not te-fl's own, nor near to one.
bool may_be_declared(std::string_view name) {
  const auto plain = [](char c) {
    return (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  };
  return name.starts_with("TE_FL_") && without_prefix(name).find('_') != std::string_view::npos &&
         std::all_of(name.begin(), name.end(), plain) && nearest_own(name).empty();
}

}  // namespace

std::vector<Variable> table() {
  const auto lock = lock_loaded();
  std::vector<Variable> rows;
  for (const Known& k : state().known) {
    rows.push_back({std::string(k.spec.name), std::string(k.spec.alias),
                    std::string(core::type_name(k.spec.type)), std::string(k.spec.default_value),
                    std::string(k.spec.doc), in_effect(k), origin(k.spec, k.value), k.plugin,
                    k.active});
  }
  return rows;
}

Result<std::string> get(std::string_view name) {
  const auto lock = lock_loaded();
  const auto& undeclared = state().undeclared;
  if (const auto at = undeclared.find(name); at != undeclared.end()) return at->second;
  TE_FL_ASSIGN_OR_RETURN(const Known* known, find_or_error(name));
  return in_effect(*known);
}

std::optional<std::string> get_if_set(std::string_view name) {
  const auto lock = lock_loaded();
  const Known* const known = find(name);
  if (known == nullptr) return std::nullopt;
  return known->value.from_code ? known->value.from_code : known->value.from_environment;
}

Result<bool> get_bool(std::string_view name) {
  const auto lock = lock_loaded();
  TE_FL_ASSIGN_OR_RETURN(const Known* known, find_or_error(name));
  TE_FL_RETURN_IF_ERROR(must_be(*known, name, core::VariableType::kBool));
  return in_effect(*known) == "1";
}

Result<int64_t> get_int(std::string_view name) {
  const auto lock = lock_loaded();
  TE_FL_ASSIGN_OR_RETURN(const Known* known, find_or_error(name));
  TE_FL_RETURN_IF_ERROR(must_be(*known, name, core::VariableType::kInt));
  const std::string value = in_effect(*known);
  if (value.empty()) return failed_precondition(std::string(name) + " is unset");
  return static_cast<int64_t>(std::stoll(value));
}

Status set(std::string_view name, std::string value) {
  const auto lock = lock_loaded();
  Known* const known = find(name);
  if (known == nullptr) {
    if (!may_be_declared(name)) return find_or_error(name).status();
    state().undeclared[std::string(name)] = std::move(value);
    evaluate();
    publish(false);
    return {};
  }
  TE_FL_ASSIGN_OR_RETURN(std::string checked, core::check_value(known->spec, name, value));
  state().undeclared.erase(std::string(name));
  known->value.from_code = std::move(checked);
  publish(known->spec.name == "TEFL_LOG_LEVEL");
  return {};
}

Status unset(std::string_view name) {
  const auto lock = lock_loaded();
  const bool undeclared = state().undeclared.erase(std::string(name)) != 0;
  Known* const known = find(name);
  if (known == nullptr && !undeclared) return find_or_error(name).status();
  if (known != nullptr) known->value.from_code.reset();
  if (undeclared) evaluate();
  publish(known != nullptr && known->spec.name == "TEFL_LOG_LEVEL");
  return {};
}

std::vector<std::string> remarks() {
  const auto lock = lock_loaded();
  return state().remarks;
}

Status reload() {
  const std::lock_guard lock(mutex);
  read_environment();
  publish(false);
  return state().status;
}

Status status() {
  const auto lock = lock_loaded();
  return state().status;
}

uint64_t generation() noexcept { return core::g_generation.load(std::memory_order_acquire); }

}  // namespace te_fl::environment

namespace te_fl::core {

void ensure_environment() {
  if (g_generation.load(std::memory_order_acquire) != 0) return;  // published at least once
  const auto lock = environment::lock_loaded();
}

Status declare_settings(const std::string& plugin, const std::vector<PluginSetting>& settings,
                        bool active) {
  using environment::Known;
  const auto lock = environment::lock_loaded();
  std::list<Known>& known = environment::state().known;
  for (const PluginSetting& setting : settings) {
    const Known* const taken = environment::find(setting.name);
    if (taken == nullptr || taken->plugin == plugin) continue;
    return Status(StatusCode::kAlreadyExists,
                  "setting " + setting.name + " is " +
                      (taken->plugin.empty() ? "te-fl's own" : "plugin " + taken->plugin + "'s") +
                      "; rename it (rule R21)");
  }
  // What code set stays with the name.
  for (const Known& k : known) {
    if (k.plugin == plugin && k.value.from_code) {
      environment::state().undeclared.emplace(k.spec.name, *k.value.from_code);
    }
  }
  std::erase_if(known, [&](const Known& k) { return !k.plugin.empty() && k.plugin == plugin; });
  for (const PluginSetting& setting : settings) {
    Known& k = known.emplace_back(Known{{}, {}, plugin, active, setting});
    k.spec = {k.declared.name,
              {},
              k.declared.type,
              k.declared.default_value,
              k.declared.choices,
              k.declared.doc,
              k.declared.type == VariableType::kFile};
  }
  environment::evaluate();
  environment::publish(false);
  return {};
}

void leave_out_settings(std::string_view plugin) {
  const auto lock = environment::lock_loaded();
  for (environment::Known& k : environment::state().known) {
    if (k.plugin == plugin && !k.plugin.empty()) k.active = false;
  }
  environment::evaluate();
  environment::publish(false);
}

std::optional<std::string> setting_for_plugin(std::string_view name) {
  const auto lock = environment::lock_loaded();
  const environment::Known* const known = environment::find(name);
  if (known == nullptr) return std::nullopt;
  const bool set = known->value.from_code || known->value.from_environment;
  const bool declared = !known->plugin.empty() && !known->spec.default_value.empty();
  if (!set && !declared) return std::nullopt;
  return environment::in_effect(*known);
}

}  // namespace te_fl::core
