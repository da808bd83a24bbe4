// Policies from Python.
#pragma once

#include "py.hpp"

namespace te_fl::python {

// policy_scope(settings) -> a scope for enter_scope() and leave_scope(). `settings` is a dict of
// prefer, strict, deterministic, allow_vendors, deny_vendors, per_op, max_staged_bytes, each as the
// TE_FL_ variable of that name takes it; None: as it is. ValueError for a misspelt one.
PyObject* policy_scope(PyObject*, PyObject* settings) noexcept;
// The calling thread's policy from now on. A scope is entered once, and left on the thread that
// entered it, the innermost first; otherwise te_fl.FailedPrecondition.
PyObject* enter_scope(PyObject*, PyObject* scope) noexcept;
PyObject* leave_scope(PyObject*, PyObject* scope) noexcept;
// policy_text() -> the policy in force on this thread, in words.
PyObject* policy_text(PyObject*, PyObject*) noexcept;

}  // namespace te_fl::python
