#include "ops/policy.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ops/function_op.hpp"
#include "py/errors.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/tex_names.hpp"

namespace te_fl::python {
namespace {

constexpr const char* kScopeName = "te_fl.policy_scope";

struct Scope {
  SelectionPolicy policy;
  std::unique_ptr<PolicyScope> entered;
  // The settings of this scope and of the scopes around it, as text.
  std::map<std::string, std::string> asked;
  Scope* outer = nullptr;  // the enclosing scope, while this one is entered
};
PyObject* g_follower = nullptr;  // called with the policy line of the thread; never freed

PyObject* g_wants = nullptr;  // the function that set_deterministic() took; never freed

// The innermost scope of this thread. Python code may leave scopes in any order, while C++ scopes
// must be destroyed innermost first.
thread_local Scope* t_innermost = nullptr;

Scope& unwrap_scope(PyObject* capsule) {
  auto* scope = static_cast<Scope*>(PyCapsule_GetPointer(capsule, kScopeName));
  if (scope == nullptr) throw PythonError();
  return *scope;
}

bool to_bool(PyObject* value) {
  const int truth = PyObject_IsTrue(value);
  check(truth);
  return truth != 0;
}

constexpr std::array<std::string_view, 7> kSettings = {
    "prefer",       "strict", "deterministic",   "allow_vendors",
    "deny_vendors", "per_op", "max_staged_bytes"};

Result<bool> parse_flag(std::string_view text) {
  if (text == "1" || text == "0") return text == "1";
  return invalid_argument("'" + std::string(text) + "' is neither 0 nor 1");
}

Result<uint64_t> parse_bytes(std::string_view text) {
  uint64_t bytes = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), bytes);
  if (error == std::errc() && rest == text.data() + text.size()) return bytes;
  return invalid_argument("'" + std::string(text) + "' is no number of bytes");
}

// Sets one of kSettings from its text. `ops` lists the names that per_op accepts.
Status set(PolicySettings& settings, std::string_view name, std::string_view text,
           const std::vector<std::string>& ops) {
  if (name == "prefer") {
    TE_FL_ASSIGN_OR_RETURN(settings.prefer, parse_kind(text));
  } else if (name == "strict") {
    TE_FL_ASSIGN_OR_RETURN(settings.strict, parse_flag(text));
  } else if (name == "deterministic") {
    TE_FL_ASSIGN_OR_RETURN(settings.deterministic, parse_flag(text));
  } else if (name == "allow_vendors") {
    TE_FL_ASSIGN_OR_RETURN(settings.allow_vendors, parse_vendor_list(text));
  } else if (name == "deny_vendors") {
    TE_FL_ASSIGN_OR_RETURN(settings.deny_vendors, parse_vendor_list(text));
  } else if (name == "per_op") {
    TE_FL_ASSIGN_OR_RETURN(settings.per_op, parse_per_op(text, ops));
  } else if (name == "max_staged_bytes") {
    TE_FL_ASSIGN_OR_RETURN(settings.max_staged_bytes, parse_bytes(text));
  } else {
    return invalid_argument("a policy has no setting '" + std::string(name) + "'");
  }
  return {};
}

// Copies one of kSettings.
void copy_setting(PolicySettings& to, const PolicySettings& from, std::string_view name) {
  if (name == "prefer") to.prefer = from.prefer;
  if (name == "strict") to.strict = from.strict;
  if (name == "deterministic") to.deterministic = from.deterministic;
  if (name == "allow_vendors") to.allow_vendors = from.allow_vendors;
  if (name == "deny_vendors") to.deny_vendors = from.deny_vendors;
  if (name == "per_op") to.per_op = from.per_op;
  if (name == "max_staged_bytes") to.max_staged_bytes = from.max_staged_bytes;
}

// Converts a setting that Python gives as an object to its text.
std::string text_of_setting(std::string_view name, PyObject* value) {
  if (name == "strict" || name == "deterministic") return to_bool(value) ? "1" : "0";
  if (name != "max_staged_bytes") {
    return std::string(to_text(value, std::string(name).c_str()));
  }
  const unsigned long long bytes = PyLong_AsUnsignedLongLong(value);
  if (PyErr_Occurred() != nullptr) throw PythonError();
  return std::to_string(bytes);
}

void set(PolicySettings& settings, std::string_view name, PyObject* value) {
  if (std::ranges::find(kSettings, name) == kSettings.end()) {
    throw_type_error("a policy has no setting '" + std::string(name) +
                     "'; it has prefer, strict, deterministic, allow_vendors, deny_vendors, "
                     "per_op and max_staged_bytes");
  }
  std::vector<std::string> ops;
  if (name == "per_op") {
    ops = without_lock([] { return OpManager::instance().registry().op_names(); });
    ops.insert(ops.end(), function_op_names().begin(), function_op_names().end());
  }
  check(set(settings, name, text_of_setting(name, value), ops));
}

// The text of a setting without blanks. The setting was accepted by set().
std::string setting_text(std::string_view name, PyObject* value) {
  std::string text = text_of_setting(name, value);
  std::erase_if(text, [](unsigned char c) { return std::isspace(c) != 0; });
  return text;
}

std::map<std::string, std::string> read_settings_dict(PyObject* dict) {
  std::map<std::string, std::string> made;
  // A policy with whole=True inherits nothing from the scopes around it.
  PyObject* const whole = PyDict_GetItemString(dict, "whole");
  if (t_innermost != nullptr && (whole == nullptr || !to_bool(whole))) made = t_innermost->asked;
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value) != 0;) {
    if (value == Py_None) continue;
    const std::string name(to_text(key, "a setting's name"));
    if (name == "whole") continue;
    made[name] = setting_text(name, value);
  }
  return made;
}

std::string line_of_thread() {
  std::string line;
  if (t_innermost == nullptr) return line;
  for (const auto& [name, value] : t_innermost->asked) {
    line += (line.empty() ? "" : " ") + name + "=" + value;
  }
  return line;
}

void notify_follower() {
  if (g_follower == nullptr) return;
  const Ref line = to_python(line_of_thread());
  Ref::take(PyObject_CallFunctionObjArgs(g_follower, line.get(), nullptr));
}

// The settings in force, overridden by `dict`. If dict["whole"] is true, settings absent from
// `dict` are unset instead, except deterministic and max_staged_bytes, which always keep the value
// in force.
PolicySettings read_policy(PyObject* dict) {
  if (!PyDict_Check(dict)) throw_type_error("the settings of a policy must be a dict");
  PolicySettings made = value_or_throw(without_lock([] { return current_policy(); })).settings();
  if (PyObject* whole = PyDict_GetItemString(dict, "whole"); whole != nullptr && to_bool(whole)) {
    PolicySettings cleared;
    cleared.deterministic = made.deterministic;
    cleared.max_staged_bytes = made.max_staged_bytes;
    made = std::move(cleared);
  }
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value) != 0;) {
    const std::string_view name = to_text(key, "a setting's name");
    if (value != Py_None && name != "whole") set(made, name, value);
  }
  return made;
}

std::string token_text(const PolicyToken& token) {
  switch (token.type) {
    case PolicyToken::Type::kKind:
      return std::string(to_string(token.kind));
    case PolicyToken::Type::kVendorName:
      return "vendor:" + token.name;
    case PolicyToken::Type::kImpl:
      return "impl:" + token.name;
  }
  return "?";
}

Ref strings(const std::vector<std::string>& texts) {
  return make_list(texts, [](const std::string& text) { return to_python(text); });
}

}  // namespace

PyObject* check_policy(PyObject*, PyObject* settings) noexcept {
  return guarded([&] {
    read_policy(settings);
    return Ref::share(Py_None);
  });
}

PyObject* enter_policy(PyObject*, PyObject* settings) noexcept {
  return guarded([&] {
    auto scope = std::make_unique<Scope>();
    scope->policy = SelectionPolicy::intern(read_policy(settings));
    scope->asked = read_settings_dict(settings);
    Ref capsule = Ref::take(PyCapsule_New(scope.get(), kScopeName, [](PyObject* c) {
      auto* dropped = static_cast<Scope*>(PyCapsule_GetPointer(c, kScopeName));
      // A scope that was never left stays in force on its thread, so it must not be freed.
      if (dropped->entered == nullptr) delete dropped;
    }));
    Scope* const made = scope.release();
    made->entered = std::make_unique<PolicyScope>(made->policy);
    made->outer = std::exchange(t_innermost, made);
    try {
      notify_follower();
    } catch (...) {
      t_innermost = made->outer;
      made->entered.reset();
      throw;
    }
    return capsule;
  });
}

PyObject* leave_policy(PyObject*, PyObject* capsule) noexcept {
  return guarded([&] {
    Scope& scope = unwrap_scope(capsule);
    if (scope.entered == nullptr || t_innermost != &scope) {
      throw_status(Status(StatusCode::kFailedPrecondition,
                          "policy scopes end on the thread that entered them, the innermost "
                          "first; this one is not the innermost here"));
    }
    t_innermost = scope.outer;
    scope.entered.reset();
    notify_follower();
    return Ref::share(Py_None);
  });
}

PyObject* set_deterministic(PyObject*, PyObject* function) noexcept {
  return guarded([&] {
    Py_INCREF(function);
    std::swap(g_wants, function);
    Py_XDECREF(function);
    return Ref::share(Py_None);
  });
}

bool wants_deterministic() {
  if (g_wants == nullptr) return false;
  return to_bool(Ref::take(PyObject_CallNoArgs(g_wants)).get());
}

DeterministicScope::DeterministicScope(bool wanted) {
  if (!wanted) return;
  const Result<SelectionPolicy> now = current_policy();
  // If the policy is invalid, the call that follows reports the error.
  if (!now.ok() || now->settings().deterministic) return;
  PolicySettings settings = now->settings();
  settings.deterministic = true;
  scope_.emplace(std::move(settings));
}

PyObject* follow_policy(PyObject*, PyObject* function) noexcept {
  return guarded([&] {
    g_follower = Ref::share(function).release();
    return to_python(line_of_thread());
  });
}

Result<LinePolicy> LinePolicy::parse(std::string_view line) {
  const std::vector<std::string> here = OpManager::instance().registry().op_names();
  LinePolicy made;
  while (!line.empty()) {
    const size_t end = std::min(line.find(' '), line.size()), equals = line.find('=');
    if (equals >= end) return invalid_argument("'" + std::string(line) + "' is no policy");
    const std::string_view name = line.substr(0, equals);
    const std::string_view value = line.substr(equals + 1, end - equals - 1);
    line.remove_prefix(std::min(end + 1, line.size()));
    std::vector<std::string> ops = here;
    if (name == "per_op") {
      // The line may come from another process, whose Python may have ops that this process does
      // not.
      for (std::string_view rest = value; !rest.empty();) {
        const std::string_view list = rest.substr(0, rest.find(';'));
        ops.emplace_back(list.substr(0, list.find('=')));
        rest.remove_prefix(std::min(list.size() + 1, rest.size()));
      }
    }
    TE_FL_RETURN_IF_ERROR(set(made.requested_, name, value, ops));
    made.names_.emplace_back(name);
  }
  std::erase_if(made.requested_.per_op, [&](const auto& list) {
    return std::find(here.begin(), here.end(), list.first) == here.end();
  });
  return made;
}

Result<SelectionPolicy> LinePolicy::now() const {
  const Result<SelectionPolicy> around = current_policy();
  if (!around.ok()) return around.status();
  PolicySettings made = around.value().settings();
  for (const std::string& name : names_) copy_setting(made, requested_, name);
  return SelectionPolicy::intern(std::move(made));
}

WithoutPolicyScopes::WithoutPolicyScopes() : innermost_(std::exchange(t_innermost, nullptr)) {
  for (auto* scope = static_cast<Scope*>(innermost_); scope != nullptr; scope = scope->outer) {
    scope->entered.reset();
  }
}

WithoutPolicyScopes::~WithoutPolicyScopes() {
  t_innermost = static_cast<Scope*>(innermost_);
  std::vector<Scope*> scopes;  // the innermost first
  for (Scope* scope = t_innermost; scope != nullptr; scope = scope->outer) scopes.push_back(scope);
  for (auto at = scopes.rbegin(); at != scopes.rend(); ++at) {
    (*at)->entered = std::make_unique<PolicyScope>((*at)->policy);
  }
}

PyObject* policy_text(PyObject*, PyObject*) noexcept {
  return guarded([] {
    const DeterministicScope deterministic;
    return to_python(value_or_throw(without_lock([] { return current_policy(); })).describe());
  });
}

PyObject* policy_settings(PyObject*, PyObject*) noexcept {
  return guarded([] {
    const PolicySettings settings =
        value_or_throw(without_lock([] { return current_policy(); })).settings();
    Ref dict = Ref::take(PyDict_New());
    put(dict, "prefer",
        settings.prefer ? to_python(to_string(*settings.prefer)) : Ref::share(Py_None));
    put(dict, "strict", to_python(settings.strict));
    put(dict, "allow_vendors", strings(settings.allow_vendors));
    put(dict, "deny_vendors", strings(settings.deny_vendors));
    Ref lists = Ref::take(PyDict_New());
    for (const auto& [op, tokens] : settings.per_op) {
      put(lists, op.c_str(),
          make_list(tokens, [](const PolicyToken& token) { return to_python(token_text(token)); }));
    }
    put(dict, "per_op", lists);
    return dict;
  });
}

PyObject* tex_names(PyObject*, PyObject*) noexcept {
  return guarded([] { return strings(tex_op_names()); });
}

PyObject* set_global_policy(PyObject*, PyObject* settings) noexcept {
  return guarded([&] {
    if (settings == Py_None) {
      clear_global_policy();
    } else {
      te_fl::set_global_policy(SelectionPolicy::intern(read_policy(settings)));
    }
    return Ref::share(Py_None);
  });
}

}  // namespace te_fl::python
