// Policies set from Python.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "py/py.hpp"
#include "te_fl/policy.hpp"

namespace te_fl::python {

// follow_policy(f): f(line) is called on a thread whenever a policy scope begins or ends on it. The
// line lists the settings of the thread's open scopes as NAME=VALUE, with the innermost scope's
// value for each; values have no blanks. Returns the calling thread's line.
PyObject* follow_policy(PyObject*, PyObject* function) noexcept;

// The process's policy (without any scope), overridden by the settings of a line of
// follow_policy().
class LinePolicy {
 public:
  static Result<LinePolicy> parse(std::string_view line);
  Result<SelectionPolicy> now() const;

 private:
  PolicySettings requested_;
  std::vector<std::string> names_;  // names of the settings in the line
};

// While this object lives, policy scopes that Python opened on the calling thread do not apply.
class WithoutPolicyScopes {
 public:
  WithoutPolicyScopes();
  ~WithoutPolicyScopes();
  WithoutPolicyScopes(const WithoutPolicyScopes&) = delete;
  WithoutPolicyScopes& operator=(const WithoutPolicyScopes&) = delete;

 private:
  void* innermost_;
};

// check_policy(settings): validates a dict of prefer, strict, deterministic, allow_vendors,
// deny_vendors, per_op and max_staged_bytes, each in the form of the TE_FL_ variable of that name.
// A value None keeps the setting, or unsets it with whole=True. Raises ValueError for a malformed
// value.
PyObject* check_policy(PyObject*, PyObject* settings) noexcept;
// enter_policy(settings) -> scope: sets the calling thread's policy until leave_policy(scope).
// Scopes must be left on the same thread, innermost first; otherwise te_fl.FailedPrecondition.
PyObject* enter_policy(PyObject*, PyObject* settings) noexcept;
PyObject* leave_policy(PyObject*, PyObject* scope) noexcept;
// set_deterministic(function): te-fl calls function() -> bool at each call of an op or layer. True
// means that the framework requests bitwise reproducible results.
PyObject* set_deterministic(PyObject*, PyObject* function) noexcept;
// The result of the function given to set_deterministic(); false if there is none. Call under the
// interpreter's lock.
bool wants_deterministic();

// While this object lives, and if `wanted` is true, the calling thread's policy also requires
// determinism. Destroy in reverse order of construction, as with te_fl::PolicyScope.
class DeterministicScope {
 public:
  explicit DeterministicScope(bool wanted = wants_deterministic());

 private:
  std::optional<PolicyScope> scope_;
};

// policy_text() -> the policy in force on this thread, as readable text.
PyObject* policy_text(PyObject*, PyObject*) noexcept;
// policy_settings() -> the policy's settings as a dict: prefer (or None), strict, and the lists of
// text allow_vendors, deny_vendors and per_op.
PyObject* policy_settings(PyObject*, PyObject*) noexcept;
// tex_names() -> te_fl::tex_op_names() as a list.
PyObject* tex_names(PyObject*, PyObject*) noexcept;
// set_global_policy(settings): sets the process's policy, which applies outside of scopes. None
// restores the policy of the environment variables.
PyObject* set_global_policy(PyObject*, PyObject* settings) noexcept;

}  // namespace te_fl::python
