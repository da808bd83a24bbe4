// User-defined Python functions that quantise tensors under a custom recipe.
#pragma once

#include "py/py.hpp"
#include "te_fl/nn/fp8/recipe.hpp"

namespace te_fl::python {

// A recipe's backward_override: None, 'high_precision' or 'dequantized'.
nn::BackwardOverride read_override(PyObject* value);

// quantisers(name, all, fc2, backward_override, like) -> recipe. `all` has the quantisers of input,
// weight and gradient, each (name, function), or None for high precision. `fc2` has the quantisers
// of the second linear map of LayerNormMLP; None: `all` applies to both maps. function(values,
// rowwise, columnwise, stream) returns the pair of operands, each None, a tensor with values, or a
// te_fl.Quantized. The tensors belong to the framework of `like`; the function enqueues its work on
// the stream of the given handle.
PyObject* make_quantisers(PyObject*, PyObject* args) noexcept;

// Converts a result of te_fl.common.recipe.describe_natively() for a recipe that C++ does not have,
// with quantisers that te_fl.pytorch makes. Equal descriptions give equal recipes. Needs the
// interpreter's lock; throws PythonError.
nn::CustomScaling read_quantisers(PyObject* described);

}  // namespace te_fl::python
