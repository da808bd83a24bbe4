#include "te_fl/environment.hpp"

#include <sys/auxv.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <mutex>

#include "core/environment_table.hpp"
#include "core/fork.hpp"
#include "core/settings.hpp"
#include "core/text.hpp"

namespace te_fl::environment {
namespace {

using core::VariableSpec;

struct Value {
  std::optional<std::string> from_environment;
  bool under_alias = false;
  bool ignored = false;  // present but not read: elevated privileges
  std::optional<std::string> from_code;
};

struct State {
  std::vector<Value> values = std::vector<Value>(core::variable_specs().size());
  Status status;
  bool loaded = false;
};

constinit core::ForkMutex mutex(10);
const core::ForkMutex::Registration registration(mutex);

State& state() {  // never destroyed: destructors of static objects may still ask
  static State* const instance = new State;
  return *instance;
}

std::vector<std::string> all_names() {
  std::vector<std::string> names;
  for (const VariableSpec& spec : core::variable_specs()) {
    names.emplace_back(spec.name);
    if (!spec.alias.empty()) names.emplace_back(spec.alias);
  }
  return names;
}

// Index into the table, or -1.
int find(std::string_view name) {
  const auto specs = core::variable_specs();
  for (size_t i = 0; i < specs.size(); ++i) {
    if (name == specs[i].name || (!specs[i].alias.empty() && name == specs[i].alias)) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

Result<int> find_or_error(std::string_view name) {
  const int index = find(name);
  if (index >= 0) return index;
  return not_found("there is no variable '" + std::string(name) + "'" +
                   core::did_you_mean(name, all_names()));
}

Status must_be(std::string_view name, core::VariableType type) {
  TE_FL_ASSIGN_OR_RETURN(const int index, find_or_error(name));
  const VariableSpec& spec = core::variable_specs()[index];
  if (spec.type == type) return {};
  return invalid_argument(std::string(name) + " is of type " +
                          std::string(core::type_name(spec.type)) + ", not " +
                          std::string(core::type_name(type)));
}

std::string in_effect(size_t i) {
  const Value& v = state().values[i];
  if (v.from_code) return *v.from_code;
  if (v.from_environment) return *v.from_environment;
  return std::string(core::variable_specs()[i].default_value);
}

// An empty value of a bool, an int or an enum is as good as none; an empty list is a list.
bool means_unset(const VariableSpec& spec, std::string_view value) {
  using enum core::VariableType;
  const bool needs_text = spec.type == kBool || spec.type == kInt || spec.type == kEnum;
  return needs_text && core::trim(value).empty();
}

std::string misspelt(std::string_view name) {
  const std::string best = nearest(name, all_names());
  std::string text = "environment variable " + std::string(name) + " is unknown";
  text += best.empty() ? "; `te-fl env` lists those that exist" : "; did you mean " + best + "?";
  return text + " (unset it if it is not meant for te-fl)";
}

// One "NAME=value" entry; returns what is wrong with it.
std::optional<std::string> read_entry(std::vector<Value>& values, std::string_view entry,
                                      bool elevated) {
  const size_t equals = entry.find('=');
  if (equals == std::string_view::npos) return std::nullopt;
  const std::string_view name = entry.substr(0, equals);
  const std::string_view text = entry.substr(equals + 1);
  const int index = find(name);
  if (index < 0) return misspelt(name);
  const VariableSpec& spec = core::variable_specs()[index];
  Value& value = values[index];
  if (spec.privileged && elevated) {
    value.ignored = true;
    return std::nullopt;
  }
  if (means_unset(spec, text)) return std::nullopt;
  const bool under_alias = name != spec.name;
  if (under_alias && value.from_environment) return std::nullopt;  // the name wins
  Result<std::string> checked = core::check_value(spec, name, text);
  if (!checked) return checked.status().message();
  value.from_environment = std::move(*checked);
  value.under_alias = under_alias;
  return std::nullopt;
}

// One pass over the environment. Values set by code stay. Requires the lock.
void read_environment() {
  State& s = state();
  for (Value& v : s.values) {
    v.from_environment.reset();
    v.under_alias = v.ignored = false;
  }
  const bool elevated = getauxval(AT_SECURE) != 0;
  std::vector<std::string> mistakes;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const char* text = *entry;
    if (text[0] != 'T' || text[1] != 'E') continue;
    if (std::strncmp(text, "TE_FL_", 6) != 0 && std::strncmp(text, "TEFL_", 5) != 0) continue;
    if (auto mistake = read_entry(s.values, text, elevated))
      mistakes.push_back(std::move(*mistake));
  }
  s.status = mistakes.empty() ? Status() : invalid_argument(core::join(mistakes, "; "));
  s.loaded = true;
}

// Brings the settings that are kept elsewhere up to date. Requires the lock.
void publish(bool from_code) {
  const std::string log_level = in_effect(find("TEFL_LOG_LEVEL"));
  core::apply_log_level(log_level, from_code);
  core::g_validate.store(in_effect(find("TE_FL_VALIDATE")) == "1", std::memory_order_relaxed);
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

}  // namespace

std::vector<Variable> table() {
  const auto lock = lock_loaded();
  std::vector<Variable> rows;
  const auto specs = core::variable_specs();
  for (size_t i = 0; i < specs.size(); ++i) {
    const VariableSpec& spec = specs[i];
    rows.push_back({std::string(spec.name), std::string(spec.alias),
                    std::string(core::type_name(spec.type)), std::string(spec.default_value),
                    std::string(spec.doc), in_effect(i), origin(spec, state().values[i])});
  }
  return rows;
}

Result<std::string> get(std::string_view name) {
  TE_FL_ASSIGN_OR_RETURN(const int index, find_or_error(name));
  const auto lock = lock_loaded();
  return in_effect(index);
}

std::optional<std::string> get_if_set(std::string_view name) {
  const int index = find(name);
  if (index < 0) return std::nullopt;
  const auto lock = lock_loaded();
  const Value& v = state().values[index];
  return v.from_code ? v.from_code : v.from_environment;
}

Result<bool> get_bool(std::string_view name) {
  TE_FL_RETURN_IF_ERROR(must_be(name, core::VariableType::kBool));
  const auto lock = lock_loaded();
  return in_effect(find(name)) == "1";
}

Result<int64_t> get_int(std::string_view name) {
  TE_FL_RETURN_IF_ERROR(must_be(name, core::VariableType::kInt));
  const auto lock = lock_loaded();
  return static_cast<int64_t>(std::stoll(in_effect(find(name))));
}

Status set(std::string_view name, std::string value) {
  TE_FL_ASSIGN_OR_RETURN(const int index, find_or_error(name));
  const VariableSpec& spec = core::variable_specs()[index];
  TE_FL_ASSIGN_OR_RETURN(std::string checked, core::check_value(spec, name, value));
  const auto lock = lock_loaded();
  state().values[index].from_code = std::move(checked);
  publish(spec.name == "TEFL_LOG_LEVEL");
  return {};
}

Status unset(std::string_view name) {
  TE_FL_ASSIGN_OR_RETURN(const int index, find_or_error(name));
  const auto lock = lock_loaded();
  state().values[index].from_code.reset();
  publish(core::variable_specs()[index].name == "TEFL_LOG_LEVEL");
  return {};
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

std::string markdown() {
  std::string text =
      "# Environment variables\n\n"
      "<!-- Generated by `te-fl env --markdown`; do not edit. -->\n\n"
      "Variables are read once, at first use, and again when a program asks for it. A value set by "
      "code wins "
      "over the environment. A misspelt variable or value makes calls fail with a message that "
      "names the "
      "nearest right one. An empty bool, int or enum counts as unset.\n\n"
      "| variable | type | default | accepted | meaning |\n|---|---|---|---|---|\n";
  const auto escaped = [](std::string cell) {  // a bar would end the cell
    for (size_t at = 0; (at = cell.find('|', at)) != std::string::npos; at += 2)
      cell.insert(at, "\\");
    return cell;
  };
  for (const VariableSpec& spec : core::variable_specs()) {
    std::string name = "`" + std::string(spec.name) + "`";
    if (!spec.alias.empty()) name += " (alias `" + std::string(spec.alias) + "`)";
    const std::string shown =
        spec.default_value.empty() ? "unset" : "`" + std::string(spec.default_value) + "`";
    text += "| " + name + " | " + std::string(core::type_name(spec.type)) + " | " + shown + " | " +
            escaped(core::accepted_values(spec)) + " | " + escaped(std::string(spec.doc)) + " |\n";
  }
  return text;
}

}  // namespace te_fl::environment

namespace te_fl::core {

void ensure_environment() { const auto lock = environment::lock_loaded(); }

}  // namespace te_fl::core
