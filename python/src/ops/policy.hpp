// Policies from Python.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "py/py.hpp"
#include "te_fl/policy.hpp"

namespace te_fl::python {

// Writes the settings that the scopes open on a thread ask for as one line: NAME=VALUE for each
// setting that any of them gave, the innermost's where several did. Values have no blanks.
//
// follow_policy(f): f(line) is called on a thread whenever a scope begins or ends on it. Returns
// the calling thread's line.
PyObject* follow_policy(PyObject*, PyObject* function) noexcept;

// The process's policy, that of no scope, with what such a line asks for in its place.
class LinePolicy {
 public:
  static Result<LinePolicy> parse(std::string_view line);
  Result<SelectionPolicy> now() const;

 private:
  PolicySettings asked_;
  std::vector<std::string> names_;  // of the settings that the line has
};

// While it exists, no scope that Python opened on the calling thread applies.
class WithoutPolicyScopes {
 public:
  WithoutPolicyScopes();
  ~WithoutPolicyScopes();
  WithoutPolicyScopes(const WithoutPolicyScopes&) = delete;
  WithoutPolicyScopes& operator=(const WithoutPolicyScopes&) = delete;

 private:
  void* innermost_;
};

// check_policy(settings): `settings` is a dict of prefer, strict, deterministic, allow_vendors,
// deny_vendors, per_op, max_staged_bytes, each as the TE_FL_ variable of that name takes it; None:
// as it is, or with whole=True, unset. ValueError for a misspelt one.
PyObject* check_policy(PyObject*, PyObject* settings) noexcept;
// enter_policy(settings) -> scope: the calling thread's policy from now on, until leave_policy() of
// the scope on the same thread, the innermost first; otherwise te_fl.FailedPrecondition.
PyObject* enter_policy(PyObject*, PyObject* settings) noexcept;
PyObject* leave_policy(PyObject*, PyObject* scope) noexcept;
// set_deterministic(function): function() -> bool is asked at each call of an op or a layer whether
// a framework's program wants the same bits in every run.
PyObject* set_deterministic(PyObject*, PyObject* function) noexcept;
// The answer of the function that set_deterministic() took; false without one. Under the
// interpreter's lock.
bool wants_deterministic();

// While it lives, the calling thread's policy is the one in force with `deterministic`, where that
// is wanted. Destroyed in reverse order, as te_fl::PolicyScope.
class DeterministicScope {
 public:
  explicit DeterministicScope(bool wanted = wants_deterministic());

 private:
  std::optional<PolicyScope> scope_;
};

// policy_text() -> the policy in force on this thread, in words.
PyObject* policy_text(PyObject*, PyObject*) noexcept;
// policy_settings() -> what it consists of, a dict of prefer (or None), strict, allow_vendors,
// deny_vendors and per_op, lists of text.
PyObject* policy_settings(PyObject*, PyObject*) noexcept;
// set_global_policy(settings): the process's policy from now on, outside of scopes; None: that of
// the environment again.
PyObject* set_global_policy(PyObject*, PyObject* settings) noexcept;

}  // namespace te_fl::python
