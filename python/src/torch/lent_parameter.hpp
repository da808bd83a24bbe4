// Borrows parameters of a framework for layers of te_fl::nn.
#pragma once

#include "py/py.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::python {

// A parameter's memory, which this object does not keep alive, and the parameter's dtype in the
// framework, which its gradient also has. For FP8 codes this is the nominal dtype, not the codes'
// dtype.
struct LentParameter {
  Tensor value;
  DType dtype = DType::kF32;
};

// Errors name `name`. training: a backward will follow, so FP8 codes include the column-wise copy.
LentParameter lent_parameter(PyObject* parameter, const char* name, bool training);

// set_codes_class(type): registers the type of parameters that hold FP8 codes only.
// type._lent(training) returns (codes, scale_inv, amax or None, column-wise codes or None,
// column-wise scale_inv or None, nominal dtype as an index in te_fl.tensors.DTYPES, scaling as an
// index in te_fl.tensors.SCALINGS). training: with column-wise codes.
PyObject* set_codes_class(PyObject*, PyObject* type) noexcept;

// touch(dict): makes CPython bump the dict's version tag without a visible change, so that caches
// guarded by the version tag look the values up again.
PyObject* touch(PyObject*, PyObject* dict) noexcept;

}  // namespace te_fl::python
