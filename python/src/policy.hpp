// Policies from Python.
#pragma once

#include "py.hpp"

namespace te_fl::python {

// check_policy(settings): `settings` is a dict of prefer, strict, deterministic, allow_vendors,
// deny_vendors, per_op, max_staged_bytes, each as the TE_FL_ variable of that name takes it; None:
// as it is, or with whole=True, unset. ValueError for a misspelt one.
PyObject* check_policy(PyObject*, PyObject* settings) noexcept;
// enter_policy(settings) -> scope: the calling thread's policy from now on, until leave_policy() of
// the scope on the same thread, the innermost first; otherwise te_fl.FailedPrecondition.
PyObject* enter_policy(PyObject*, PyObject* settings) noexcept;
PyObject* leave_policy(PyObject*, PyObject* scope) noexcept;
// policy_text() -> the policy in force on this thread, in words.
PyObject* policy_text(PyObject*, PyObject*) noexcept;
// policy_settings() -> what it consists of, a dict of prefer (or None), strict, allow_vendors,
// deny_vendors and per_op, lists of text.
PyObject* policy_settings(PyObject*, PyObject*) noexcept;
// set_global_policy(settings): the process's policy from now on, outside of scopes; None: that of
// the environment again.
PyObject* set_global_policy(PyObject*, PyObject* settings) noexcept;

}  // namespace te_fl::python
