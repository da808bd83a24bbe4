// New tensors of a framework, allocated by the framework's own functions.
#pragma once

#include <optional>
#include <span>

#include "py/py.hpp"
#include "te_fl/dtype.hpp"

namespace te_fl::python {

// True if set_empty() has registered a function.
bool has_empty() noexcept;
// A new tensor on the device of `like`, by the function of set_empty().
Ref new_tensor(PyObject* like, std::span<const int64_t> shape, DType dtype);
// A new tensor of the dtype of `like`, by its method new_empty(). Needs less time than
// new_tensor().
Ref new_tensor(PyObject* like, std::span<const int64_t> shape);
// A new tensor of the shape and dtype of `like`, a compact tensor, by the function of
// set_tensors(). Needs the least time.
Ref new_tensor_like(PyObject* like);

// True if the object is a tensor of the framework that has called set_tensors(). Imports te_fl's
// module for PyTorch, which calls it, if the program has imported PyTorch.
bool is_framework_tensor(PyObject* object);
// The te-fl dtype of the framework's dtype object; none for any other object.
std::optional<DType> dtype_of_object(PyObject* object);

// set_empty(function): registers function(like, shape, dtype) -> a new tensor on the device of
// `like`. shape: a tuple; dtype: an index in te_fl.tensors.DTYPES.
PyObject* set_empty(PyObject*, PyObject* function) noexcept;
// set_tensors(Tensor, empty_like, dtypes): registers a framework's class of tensors, its function
// empty_like(tensor), and a dict of its dtypes to indices in te_fl.tensors.DTYPES.
PyObject* set_tensors(PyObject*, PyObject* args) noexcept;

}  // namespace te_fl::python
