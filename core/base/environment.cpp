#include "te_fl/environment.hpp"

#include <algorithm>
#include <atomic>
#include <list>
#include <utility>

#include "core/base/environment_state.hpp"
#include "core/base/settings.hpp"
#include "core/base/text.hpp"

namespace te_fl::environment {
namespace {

using core::PluginSetting;
using core::VariableSpec;
using detail::evaluate;
using detail::find;
using detail::find_or_error;
using detail::in_effect;
using detail::Known;
using detail::lock_loaded;
using detail::publish;
using detail::state;
using detail::Value;

Status must_be(const Known& known, std::string_view name, core::VariableType type) {
  if (known.spec.type == type) return {};
  return invalid_argument(std::string(name) + " is of type " +
                          std::string(core::type_name(known.spec.type)) + ", not " +
                          std::string(core::type_name(type)));
}

std::string origin(const VariableSpec& spec, const Value& v) {
  if (v.from_code) return "code";
  if (v.from_environment) {
    return v.under_alias ? "environment (alias " + std::string(spec.alias) + ")"
                         : "environment (" + std::string(spec.name) + ")";
  }
  return v.ignored ? "default (ignored in the environment: privileges are elevated)" : "default";
}

Variable row_of(const Known& k) {
  return {std::string(k.spec.name),
          std::string(k.spec.alias),
          std::string(core::type_name(k.spec.type)),
          std::string(k.spec.default_value),
          std::string(k.spec.doc),
          in_effect(k),
          origin(k.spec, k.value),
          k.plugin,
          k.active,
          k.value.from_code ? "" : k.value.error};
}

}  // namespace

std::vector<Variable> table() {
  const auto lock = lock_loaded();
  std::vector<Variable> rows;
  for (const Known& k : state().known) rows.push_back(row_of(k));
  return rows;
}

Result<Variable> variable(std::string_view name) {
  const auto lock = detail::lock_for_enquiry();
  TE_FL_ASSIGN_OR_RETURN(const Known* known, find_or_error(name));
  return row_of(*known);
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
    if (!detail::may_be_declared(name)) return find_or_error(name).status();
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
  const auto lock = detail::lock_read_again();
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
  const auto lock = environment::detail::lock_loaded();
}

Status declare_settings(const std::string& plugin, const std::vector<PluginSetting>& settings,
                        bool active) {
  using environment::detail::Known;
  const auto lock = environment::detail::lock_loaded();
  std::list<Known>& known = environment::detail::state().known;
  for (const PluginSetting& setting : settings) {
    const Known* const taken = environment::detail::find(setting.name);
    if (taken == nullptr || taken->plugin == plugin) continue;
    return Status(StatusCode::kAlreadyExists,
                  "setting " + setting.name + " is " +
                      (taken->plugin.empty() ? "te-fl's own" : "plugin " + taken->plugin + "'s") +
                      "; rename it (rule R21)");
  }
  // Keeps a value that code has set, although the plugin's new declaration replaces the setting.
  for (const Known& k : known) {
    if (k.plugin == plugin && k.value.from_code) {
      environment::detail::state().undeclared.emplace(k.spec.name, *k.value.from_code);
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
  environment::detail::evaluate();
  environment::detail::publish(false);
  return {};
}

void leave_out_settings(std::string_view plugin) {
  const auto lock = environment::detail::lock_loaded();
  for (environment::detail::Known& k : environment::detail::state().known) {
    if (k.plugin == plugin && !k.plugin.empty()) k.active = false;
  }
  environment::detail::evaluate();
  environment::detail::publish(false);
}

std::optional<std::string> setting_for_plugin(std::string_view name, std::string_view plugin) {
  const auto lock = environment::detail::lock_loaded();
  const environment::detail::Known* const known = environment::detail::find(name);
  if (known == nullptr || (!known->plugin.empty() && known->plugin != plugin)) {
    environment::detail::state().undeclared_setting = name;
  }
  if (known == nullptr) return std::nullopt;
  const bool set = known->value.from_code || known->value.from_environment;
  const bool declared = !known->plugin.empty() && !known->spec.default_value.empty();
  if (!set && !declared) return std::nullopt;
  return environment::detail::in_effect(*known);
}

std::string take_undeclared_setting() {
  const auto lock = environment::detail::lock_loaded();
  return std::exchange(environment::detail::state().undeclared_setting, {});
}

}  // namespace te_fl::core
