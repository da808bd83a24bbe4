#include "py/new_tensor.hpp"

#include <utility>

#include "py/errors.hpp"

namespace te_fl::python {
namespace {

// Never freed: the process's end would free them after the interpreter.
PyObject* g_empty = nullptr;  // the function of set_empty()
PyObject* g_class = nullptr;  // the arguments of set_tensors()
PyObject* g_empty_like = nullptr;
PyObject* g_dtypes = nullptr;
PyTypeObject* g_dtype_class = nullptr;

void replace(PyObject*& place, PyObject* object) {
  Py_INCREF(object);
  std::swap(place, object);
  Py_XDECREF(object);
}

Ref to_tuple(std::span<const int64_t> shape) {
  Ref tuple = Ref::take(PyTuple_New(static_cast<Py_ssize_t>(shape.size())));
  for (size_t i = 0; i < shape.size(); ++i) {
    check(PyTuple_SetItem(tuple.get(), static_cast<Py_ssize_t>(i), to_python(shape[i]).release()));
  }
  return tuple;
}

// Imports the module that calls set_tensors(), if the program has imported PyTorch.
void find_framework() {
  PyObject* const modules = PyImport_GetModuleDict();
  if (modules == nullptr || PyDict_GetItemString(modules, "torch") == nullptr) return;
  Ref::take(PyImport_ImportModule("te_fl.torch_tensors"));
}

}  // namespace

bool has_empty() noexcept { return g_empty != nullptr; }

Ref new_tensor(PyObject* like, std::span<const int64_t> shape, DType dtype) {
  const Ref extents = to_tuple(shape);
  const Ref code = to_python(static_cast<int64_t>(dtype));
  return Ref::take(PyObject_CallFunctionObjArgs(g_empty, like, extents.get(), code.get(), nullptr));
}

Ref new_tensor(PyObject* like, std::span<const int64_t> shape) {
  static PyObject* const name = Ref::take(PyUnicode_InternFromString("new_empty")).release();
  const Ref extents = to_tuple(shape);
  return Ref::take(PyObject_CallMethodObjArgs(like, name, extents.get(), nullptr));
}

Ref new_tensor_like(PyObject* like) {
  return Ref::take(PyObject_CallFunctionObjArgs(g_empty_like, like, nullptr));
}

bool is_framework_tensor(PyObject* object) {
  if (g_class == nullptr) find_framework();
  if (g_class == nullptr) return false;
  const int is = PyObject_IsInstance(object, g_class);
  check(is);
  return is != 0;
}

std::optional<DType> dtype_of_object(PyObject* object) {
  if (g_class == nullptr) find_framework();
  if (g_class == nullptr || Py_TYPE(object) != g_dtype_class) return std::nullopt;
  PyObject* const code = PyDict_GetItemWithError(g_dtypes, object);
  if (code == nullptr) {
    if (PyErr_Occurred() != nullptr) throw PythonError();
    return std::nullopt;
  }
  return static_cast<DType>(PyLong_AsLong(code));
}

PyObject* set_empty(PyObject*, PyObject* function) noexcept {
  return guarded([&] {
    replace(g_empty, function);
    return Ref::share(Py_None);
  });
}

PyObject* set_tensors(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *type = nullptr, *empty_like = nullptr, *dtypes = nullptr;
    if (PyArg_ParseTuple(args, "OOO!", &type, &empty_like, &PyDict_Type, &dtypes) == 0)
      throw PythonError();
    Py_ssize_t at = 0;
    PyObject *dtype = nullptr, *code = nullptr;
    if (PyDict_Next(dtypes, &at, &dtype, &code) == 0)
      throw_invalid("set_tensors() takes one dtype or more");
    replace(g_class, type);
    replace(g_empty_like, empty_like);
    replace(g_dtypes, dtypes);
    g_dtype_class = Py_TYPE(dtype);
    return Ref::share(Py_None);
  });
}

}  // namespace te_fl::python
