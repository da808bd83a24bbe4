// User-defined Python functions that compute amaxes and scales of delayed scaling.
#pragma once

#include <memory>

#include "py/py.hpp"
#include "te_fl/nn/fp8/recipe.hpp"

namespace te_fl::python {

// scale_functions(name, amax, scale, like) -> functions. amax(history, out, stream) writes `out`,
// F32 [tensors], from a history, F32 [length, tensors]. scale, which may be None, is called as
// scale(amax, scales, fp8_max, stream) and overwrites the scales. The tensors belong to the
// framework of `like`; the functions enqueue their work on the stream of the given handle.
PyObject* make_scale_functions(PyObject*, PyObject* args) noexcept;

// Converts the result of te_fl.common.recipe.describe_natively(). Equal descriptions give the same
// object. Needs the interpreter's lock; throws PythonError.
std::shared_ptr<const nn::AmaxFunction> read_scale_functions(PyObject* described);

}  // namespace te_fl::python
