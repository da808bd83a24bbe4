#include "scope.hpp"

namespace te_fl::python {
namespace {

// The attributes' names as Python looks them up.
struct Names {
  PyObject* open = PyUnicode_InternFromString("_open");
  PyObject* arguments = PyUnicode_InternFromString("_arguments");
  PyObject* close = PyUnicode_InternFromString("_close");
  PyObject* entered = PyUnicode_InternFromString("_entered");
  PyObject* thread = PyUnicode_InternFromString("_thread");
  PyObject* scopes = PyUnicode_InternFromString("scopes");
};
const Names& names() {
  static const Names all;
  return all;
}

Ref attribute(PyObject* object, PyObject* name) {
  return Ref::take(PyObject_GetAttr(object, name));
}

// The calling thread's list, or null.
Ref thread_scopes(PyObject* self) {
  const Ref thread = attribute(self, names().thread);
  return thread.get() == Py_None ? Ref() : attribute(thread.get(), names().scopes);
}

void drop_last(PyObject* list) {
  const Py_ssize_t count = PyList_Size(list);
  if (count < 0) throw PythonError();
  if (count > 0) check(PyList_SetSlice(list, count - 1, count, nullptr));
}

PyObject* enter(PyObject* self, PyObject*) noexcept {
  return guarded([&] {
    const Ref open = attribute(self, names().open), arguments = attribute(self, names().arguments);
    const Ref entered = attribute(self, names().entered), scopes = thread_scopes(self);
    // From here on nothing of Python's runs that could be interrupted.
    const Ref handle = Ref::take(PyObject_Call(open.get(), arguments.get(), nullptr));
    check(PyList_Append(entered.get(), handle.get()));
    if (scopes) check(PyList_Append(scopes.get(), self));
    return Ref::share(self);
  });
}

PyObject* exit(PyObject* self, PyObject*) noexcept {
  return guarded([&] {
    const Ref close = attribute(self, names().close), entered = attribute(self, names().entered);
    const Ref scopes = thread_scopes(self);
    const Py_ssize_t count = PyList_Size(entered.get());
    if (count <= 0) {
      PyErr_SetString(PyExc_RuntimeError, "the scope was left more often than it was entered");
      throw PythonError();
    }
    const Ref handle = Ref::share(PyList_GetItem(entered.get(), count - 1));
    if (scopes) {
      drop_last(scopes.get());
      drop_last(entered.get());
    }
    const Ref closed = Ref::take(PyObject_CallFunctionObjArgs(close.get(), handle.get(), nullptr));
    if (!scopes) drop_last(entered.get());
    return Ref::share(Py_None);
  });
}

PyMethodDef g_methods[] = {
    {"__enter__", enter, METH_NOARGS, "Opens the scope."},
    {"__exit__", exit, METH_VARARGS, "Closes the scope."},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot g_slots[] = {
    {Py_tp_doc, const_cast<char*>("A scope whose opening and closing cannot be interrupted.")},
    {Py_tp_methods, g_methods},
    {0, nullptr},
};
PyType_Spec g_spec = {"te_fl._native.Scope", sizeof(PyObject), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, g_slots};

}  // namespace

PyObject* scope_class() {
  static PyObject* const type = PyType_FromSpec(&g_spec);
  if (type == nullptr) throw PythonError();
  return type;
}

}  // namespace te_fl::python
