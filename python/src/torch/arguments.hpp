// Parses arguments of the calls that te_fl.pytorch makes. Call under the interpreter's lock.
#pragma once

#include <vector>

#include "py/py.hpp"

namespace te_fl::python {

// Throws PythonError for an object that is not an integer.
long long to_integer(PyObject* value);
// The items of a tuple, borrowed; throws TypeError with the text `what` for other objects.
std::vector<PyObject*> list_items(PyObject* tuple, const char* what);

}  // namespace te_fl::python
