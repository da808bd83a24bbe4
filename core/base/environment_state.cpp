#include "core/base/environment_state.hpp"

#include <sys/auxv.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/base/settings.hpp"
#include "core/base/text.hpp"
#include "te_fl/environment.hpp"

namespace te_fl::environment::detail {
namespace {

constinit core::ForkMutex mutex(core::LockLevel::kEnvironment);
const core::ForkMutex::Registration registration(mutex);

std::vector<std::string> all_names() {
  std::vector<std::string> names;
  for (const Known& k : state().known) {
    names.emplace_back(k.spec.name);
    if (!k.spec.alias.empty()) names.emplace_back(k.spec.alias);
  }
  return names;
}

// An empty value of a bool, an int or an enum means "not set". An empty list is a valid value.
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

// The closest of te-fl's own variable names; empty if none is close. Compares without the common
// prefix.
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

// The prefix of a plugin's settings, for example "TE_FL_ACME_".
std::string_view shorten_value(const Known& setting) {
  return setting.spec.name.substr(0, std::string_view("TE_FL_").size() + setting.plugin.size() + 1);
}

// Returns a setting of the plugin whose prefix `name` begins with; null if there is no such plugin.
// Sets `near` to the closest setting of that plugin, compared without the prefix.
const Known* of_plugin(std::string_view name, std::string& near) {
  const Known* some = nullptr;  // the longest plugin name wins: "acme_x" over "acme"
  for (const Known& k : state().known) {
    const bool fits = !k.plugin.empty() && name.starts_with(shorten_value(k));
    if (fits && (some == nullptr || k.plugin.size() > some->plugin.size())) some = &k;
  }
  if (some == nullptr) return nullptr;
  const std::string_view beginning = shorten_value(*some);
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
  // A wrong value of a variable of te-fl or of an active plugin is a mistake. A wrong value of any
  // other variable is a remark.
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
  if (under_alias && value.from_environment) return;  // the main name wins
  Result<std::string> checked = core::check_value(known->spec, name, text);
  if (!checked.ok()) {
    value.error = checked.status().message();
    return found.add(known->active, value.error);
  }
  value.from_environment = std::move(*checked);
  value.under_alias = under_alias;
}

}  // namespace

State& state() {  // never destroyed: destructors of static objects may still call this
  static State* const instance = new State;
  return *instance;
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

std::string in_effect(const Known& known) {
  const Value& v = known.value;
  if (v.from_code) return *v.from_code;
  if (v.from_environment) return *v.from_environment;
  return std::string(known.spec.default_value);
}

bool may_be_declared(std::string_view name) {
  const auto plain = [](char c) {
    return (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  };
  return name.starts_with("TE_FL_") && without_prefix(name).find('_') != std::string_view::npos &&
         std::all_of(name.begin(), name.end(), plain) && nearest_own(name).empty();
}

void evaluate() {
  State& s = state();
  for (Known& k : s.known) {
    k.value.from_environment.reset();
    k.value.under_alias = k.value.ignored = false;
    k.value.error.clear();
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

namespace {

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
}

}  // namespace

void publish(bool from_code) {
  state().loaded = true;
  const std::string log_level = in_effect(*find("TEFL_LOG_LEVEL"));
  core::apply_log_level(log_level, from_code);
  core::g_validate.store(in_effect(*find("TE_FL_VALIDATE")) == "1", std::memory_order_relaxed);
  core::g_generation.fetch_add(1, std::memory_order_release);
}

std::unique_lock<core::ForkMutex> lock_loaded() {
  std::unique_lock lock(mutex);
  if (!state().loaded) {
    read_environment();
    publish(false);
  }
  return lock;
}

std::unique_lock<core::ForkMutex> lock_for_enquiry() {
  std::unique_lock lock(mutex);
  if (!state().loaded) read_environment();
  return lock;
}

std::unique_lock<core::ForkMutex> lock_read_again() {
  std::unique_lock lock(mutex);
  read_environment();
  publish(false);
  return lock;
}

}  // namespace te_fl::environment::detail
