#include "torch/arguments.hpp"

#include <string>

#include "py/errors.hpp"

namespace te_fl::python {

long long to_integer(PyObject* value) {
  const long long number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred() != nullptr) throw PythonError();
  return number;
}

std::vector<PyObject*> list_items(PyObject* tuple, const char* what) {
  if (!PyTuple_Check(tuple)) throw_type_error(std::string(what) + " must be a tuple");
  const auto count = static_cast<size_t>(PyTuple_Size(tuple));
  std::vector<PyObject*> items(count);
  for (size_t i = 0; i < count; ++i) {
    items[i] = PyTuple_GetItem(tuple, static_cast<Py_ssize_t>(i));
  }
  return items;
}

}  // namespace te_fl::python
