// Arguments of the calls that te_fl.pytorch makes, read under the interpreter's lock.
#pragma once

#include <vector>

#include "py/py.hpp"

namespace te_fl::python {

// A PythonError for what is no integer.
long long integer_of(PyObject* value);
// The items of a tuple, borrowed; a TypeError that says `what` for another object.
std::vector<PyObject*> items_of(PyObject* tuple, const char* what);

}  // namespace te_fl::python
