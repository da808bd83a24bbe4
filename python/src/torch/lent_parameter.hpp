// Parameters of a framework, as layers of te_fl::nn borrow them.
#pragma once

#include "py/py.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::python {

// A parameter's memory, not kept alive, and the dtype that the framework says it has, which its
// gradient has: FP8 codes show another than theirs.
struct LentParameter {
  Tensor value;
  DType dtype = DType::kF32;
};

// Errors name `name`. training: a backward is to follow, so codes come with their columns.
LentParameter lent_parameter(PyObject* parameter, const char* name, bool training);

// set_codes_class(type): parameters of this type are FP8 codes alone. type._lent(training) is
// (codes, scale_inv, amax or None, columns or None, columns' scale_inv or None, nominal dtype as an
// index in te_fl.tensors.DTYPES, scaling as an index in te_fl.tensors.SCALINGS); training: with
// columns.
PyObject* set_codes_class(PyObject*, PyObject* type) noexcept;

// touch(dict): has CPython count a write to the dict, which is as it was: who caches what he found
// out about the dict's values by its version looks again. Nobody sees it in between.
PyObject* touch(PyObject*, PyObject* dict) noexcept;

}  // namespace te_fl::python
