#include "errors.hpp"

namespace te_fl::python {
namespace {

PyObject* g_classes = nullptr;  // kept until the process ends

}  // namespace

std::string type_name(PyObject* object) {
  const Ref type = Ref::take(PyObject_Type(object));
  const Ref name = Ref::take(PyObject_GetAttrString(type.get(), "__name__"));
  return std::string(text_of(name.get(), "__name__"));
}

void set_error_classes(PyObject* classes) {
  if (!PyDict_Check(classes)) throw_type_error("the classes of errors must be a dict");
  Py_INCREF(classes);
  std::swap(g_classes, classes);
  Py_XDECREF(classes);
}

void throw_status(const Status& status) {
  const std::string code(to_string(status.code()));
  PyObject* found = g_classes != nullptr ? PyDict_GetItemString(g_classes, code.c_str()) : nullptr;
  PyErr_SetString(found != nullptr ? found : PyExc_RuntimeError, status.to_string().c_str());
  throw PythonError();
}

}  // namespace te_fl::python
