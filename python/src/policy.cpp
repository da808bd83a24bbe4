#include "policy.hpp"

#include <memory>
#include <optional>
#include <utility>

#include "errors.hpp"
#include "function_op.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/policy.hpp"

namespace te_fl::python {
namespace {

constexpr const char* kName = "te_fl.policy_scope";

struct Scope {
  SelectionPolicy policy;
  std::unique_ptr<PolicyScope> entered;
  Scope* outer = nullptr;  // while it is entered
};

// Of this thread. Python code may leave scopes in any order; C++ scopes must not be.
thread_local Scope* t_innermost = nullptr;

Scope& scope_of(PyObject* capsule) {
  auto* scope = static_cast<Scope*>(PyCapsule_GetPointer(capsule, kName));
  if (scope == nullptr) throw PythonError();
  return *scope;
}

bool truth_of(PyObject* value) {
  const int truth = PyObject_IsTrue(value);
  check(truth);
  return truth != 0;
}

void set(PolicySettings& settings, std::string_view key, PyObject* value) {
  if (key == "prefer") {
    settings.prefer = value_of(parse_kind(text_of(value, "prefer")));
  } else if (key == "strict") {
    settings.strict = truth_of(value);
  } else if (key == "deterministic") {
    settings.deterministic = truth_of(value);
  } else if (key == "allow_vendors") {
    settings.allow_vendors = value_of(parse_vendor_list(text_of(value, "allow_vendors")));
  } else if (key == "deny_vendors") {
    settings.deny_vendors = value_of(parse_vendor_list(text_of(value, "deny_vendors")));
  } else if (key == "per_op") {
    auto names = without_lock([] { return OpManager::instance().registry().op_names(); });
    names.insert(names.end(), function_op_names().begin(), function_op_names().end());
    settings.per_op = value_of(parse_per_op(text_of(value, "per_op"), names));
  } else if (key == "max_staged_bytes") {
    settings.max_staged_bytes = PyLong_AsUnsignedLongLong(value);
    if (PyErr_Occurred() != nullptr) throw PythonError();
  } else {
    throw_type_error("a policy has no setting '" + std::string(key) +
                     "'; it has prefer, strict, deterministic, allow_vendors, deny_vendors, "
                     "per_op and max_staged_bytes");
  }
}

// What is in force with `dict` put over it. With its key "whole" true, what `dict` lacks is unset
// instead, but for deterministic and max_staged_bytes, which a whole policy does not speak of.
PolicySettings settings_of(PyObject* dict) {
  if (!PyDict_Check(dict)) throw_type_error("the settings of a policy must be a dict");
  PolicySettings made = value_of(without_lock([] { return current_policy(); })).settings();
  if (PyObject* whole = PyDict_GetItemString(dict, "whole"); whole != nullptr && truth_of(whole)) {
    PolicySettings cleared;
    cleared.deterministic = made.deterministic;
    cleared.max_staged_bytes = made.max_staged_bytes;
    made = std::move(cleared);
  }
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value) != 0;) {
    const std::string_view name = text_of(key, "a setting's name");
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
  return list_of(texts, [](const std::string& text) { return to_python(text); });
}

}  // namespace

PyObject* check_policy(PyObject*, PyObject* settings) noexcept {
  return guarded([&] {
    settings_of(settings);
    return Ref::share(Py_None);
  });
}

PyObject* enter_policy(PyObject*, PyObject* settings) noexcept {
  return guarded([&] {
    auto scope = std::make_unique<Scope>();
    scope->policy = SelectionPolicy::intern(settings_of(settings));
    Ref capsule = Ref::take(PyCapsule_New(scope.get(), kName, [](PyObject* c) {
      auto* dropped = static_cast<Scope*>(PyCapsule_GetPointer(c, kName));
      // One that was never left stays in force on its thread, as a C++ scope would.
      if (dropped->entered == nullptr) delete dropped;
    }));
    Scope* const made = scope.release();
    made->entered = std::make_unique<PolicyScope>(made->policy);
    made->outer = std::exchange(t_innermost, made);
    return capsule;
  });
}

PyObject* leave_policy(PyObject*, PyObject* capsule) noexcept {
  return guarded([&] {
    Scope& scope = scope_of(capsule);
    if (scope.entered == nullptr || t_innermost != &scope) {
      throw_status(Status(StatusCode::kFailedPrecondition,
                          "policy scopes end on the thread that entered them, the innermost "
                          "first; this one is not the innermost here"));
    }
    t_innermost = scope.outer;
    scope.entered.reset();
    return Ref::share(Py_None);
  });
}

PyObject* policy_text(PyObject*, PyObject*) noexcept {
  return guarded(
      [] { return to_python(value_of(without_lock([] { return current_policy(); })).describe()); });
}

PyObject* policy_settings(PyObject*, PyObject*) noexcept {
  return guarded([] {
    const PolicySettings settings =
        value_of(without_lock([] { return current_policy(); })).settings();
    Ref dict = Ref::take(PyDict_New());
    put(dict, "prefer",
        settings.prefer ? to_python(to_string(*settings.prefer)) : Ref::share(Py_None));
    put(dict, "strict", to_python(settings.strict));
    put(dict, "allow_vendors", strings(settings.allow_vendors));
    put(dict, "deny_vendors", strings(settings.deny_vendors));
    Ref lists = Ref::take(PyDict_New());
    for (const auto& [op, tokens] : settings.per_op) {
      put(lists, op.c_str(),
          list_of(tokens, [](const PolicyToken& token) { return to_python(token_text(token)); }));
    }
    put(dict, "per_op", lists);
    return dict;
  });
}

PyObject* set_global_policy(PyObject*, PyObject* settings) noexcept {
  return guarded([&] {
    if (settings == Py_None) {
      clear_global_policy();
    } else {
      te_fl::set_global_policy(SelectionPolicy::intern(settings_of(settings)));
    }
    return Ref::share(Py_None);
  });
}

}  // namespace te_fl::python
