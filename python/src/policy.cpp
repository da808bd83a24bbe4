#include "policy.hpp"

#include <memory>
#include <optional>
#include <utility>

#include "errors.hpp"
#include "function_op.hpp"
#include "te_fl/op_manager.hpp"

namespace te_fl::python {
namespace {

constexpr const char* kName = "te_fl.policy_scope";

struct Scope {
  SelectionPolicy policy;
  std::unique_ptr<PolicyScope> entered;
  Scope* outer = nullptr;  // while it is entered
};

PyObject* g_wants = nullptr;  // kept until the process ends

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

PolicySettings settings_of(PyObject* dict) {
  if (!PyDict_Check(dict)) throw_type_error("the settings of a policy must be a dict");
  PolicySettings made = value_of(without_lock([] { return current_policy(); })).settings();
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value) != 0;) {
    if (value != Py_None) set(made, text_of(key, "a setting's name"), value);
  }
  return made;
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
  return truth_of(Ref::take(PyObject_CallNoArgs(g_wants)).get());
}

DeterministicScope::DeterministicScope(bool wanted) {
  if (!wanted) return;
  const Result<SelectionPolicy> now = current_policy();
  if (!now.ok() || now->settings().deterministic) return;  // the call says what is wrong
  PolicySettings settings = now->settings();
  settings.deterministic = true;
  scope_.emplace(std::move(settings));
}

PyObject* policy_text(PyObject*, PyObject*) noexcept {
  return guarded([] {
    const DeterministicScope deterministic;
    return to_python(value_of(without_lock([] { return current_policy(); })).describe());
  });
}

}  // namespace te_fl::python
