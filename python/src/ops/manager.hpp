// The manager that a function of the native module is to use.
#pragma once

#include "py/py.hpp"
#include "te_fl/op_manager.hpp"

namespace te_fl::python {

// The manager that new_manager() made; the process's for None. Valid while the object is. Throws
// PythonError.
OpManager& manager_of(PyObject* manager);

}  // namespace te_fl::python
