// The exchange of tensors with a PyTorch older than 2.11, whose tensors have no DLPack C exchange
// API: the same by calls of PyTorch's Python functions.
#pragma once

#include "py/exchange.hpp"
#include "py/py.hpp"

namespace te_fl::python {

// The exchange table for a class of PyTorch's tensors; null for other types. Its `describe` is
// null: call describe_by_calls(). Throws PythonError.
const Exchange* find_older_torch(PyTypeObject* type);

// Describes a tensor of PyTorch. Its shape and strides are added to `extents`. Returns false and
// sets a Python exception if the tensor has no memory or DLPack has no such dtype or device.
bool describe_by_calls(PyObject* tensor, Extents& extents, te_fl_dltensor& out) noexcept;

}  // namespace te_fl::python
