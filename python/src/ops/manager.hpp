// Converts a `manager` argument of the native module's functions.
#pragma once

#include "py/py.hpp"
#include "te_fl/op_manager.hpp"

namespace te_fl::python {

// The OpManager in an object that new_manager() made; for None, the process's manager. Valid as
// long as the object. Throws PythonError.
OpManager& unwrap_manager(PyObject* manager);

}  // namespace te_fl::python
