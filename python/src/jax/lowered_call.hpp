// For te_fl.jax while JAX lowers a program: finds the implementation that serves a call of the
// program.
#pragma once

#include "py/py.hpp"

namespace te_fl::python {

// jax_resolve(text, device, operands, results) -> the dict of te_fl.explain(): the choice for a
// call with this text (jax_call.hpp) under the process's policy and the policy in the text.
// operands, results: the arrays, each as (dtype, shape), dtype an index in te_fl.tensors.DTYPES.
// The device may be absent.
PyObject* jax_resolve(PyObject*, PyObject* args) noexcept;
// jax_count(op, impl_id): counts the call for te_fl.usage().
PyObject* jax_count(PyObject*, PyObject* args) noexcept;
// in_jax_call() -> bool: true if XLA is running an op of te-fl on the calling thread.
PyObject* in_jax_call(PyObject*, PyObject*) noexcept;

}  // namespace te_fl::python
