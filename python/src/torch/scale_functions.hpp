// A program's functions that compute amaxes and scales of delayed scaling.
#pragma once

#include <memory>

#include "py/py.hpp"
#include "te_fl/nn/fp8/recipe.hpp"

namespace te_fl::python {

// scale_functions(name, amax, scale, like) -> functions: amax(history, out, stream) writes `out`,
// F32 [tensors], from a history, F32 [length, tensors]; scale, which may be None, is
// scale(amax, scales, fp8_max, stream) and writes over the scales. The tensors are of the framework
// that `like` is of, and the functions' work goes to the stream of that handle.
PyObject* make_scale_functions(PyObject*, PyObject* args) noexcept;

// The functions of a recipe that te_fl.common.recipe.describe_natively() describes so. One such
// description has one result. Needs the interpreter's lock; throws PythonError.
std::shared_ptr<const nn::AmaxFunction> scale_functions_of(PyObject* described);

}  // namespace te_fl::python
