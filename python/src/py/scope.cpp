#include "py/scope.hpp"

namespace te_fl::python {
namespace {

// The attribute names, interned.
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

// The calling thread's list of scopes, or null.
Ref thread_scopes(PyObject* self) {
  const Ref thread = attribute(self, names().thread);
  return thread.get() == Py_None ? Ref() : attribute(thread.get(), names().scopes);
}

// The fields of the tuple that records one __enter__: the handle, the thread, and that thread's
// list of scopes or None.
enum Entry { kHandle, kThread, kScopes };

Ref this_thread() { return Ref::take(PyLong_FromUnsignedLong(PyThread_get_thread_ident())); }

// The index of the newest entry of the calling thread. If it has none, the index of the newest
// entry of any thread, since a scope may end on another thread than the one that began it.
Py_ssize_t newest_of_thread(PyObject* entered) {
  const Py_ssize_t count = PyList_Size(entered);
  if (count <= 0) {
    PyErr_SetString(PyExc_RuntimeError, "the scope was left more often than it was entered");
    throw PythonError();
  }
  if (count == 1) return 0;
  const unsigned long self = PyThread_get_thread_ident();
  for (Py_ssize_t i = count - 1; i >= 0; --i) {
    PyObject* const thread = PyTuple_GetItem(PyList_GetItem(entered, i), kThread);
    if (PyLong_AsUnsignedLong(thread) == self) return i;
  }
  return count - 1;
}

void drop(PyObject* list, Py_ssize_t at) { check(PyList_SetSlice(list, at, at + 1, nullptr)); }

// Removes the newest occurrence of `object` from the list, if any.
void drop_object(PyObject* list, PyObject* object) {
  for (Py_ssize_t i = PyList_Size(list) - 1; i >= 0; --i) {
    if (PyList_GetItem(list, i) == object) return drop(list, i);
  }
}

PyObject* enter(PyObject* self, PyObject*) noexcept {
  return guarded([&] {
    const Ref open = attribute(self, names().open), arguments = attribute(self, names().arguments);
    const Ref entered = attribute(self, names().entered), scopes = thread_scopes(self);
    const Ref thread = this_thread();
    // No Python code runs from here on, so KeyboardInterrupt cannot split the two steps.
    const Ref handle = Ref::take(PyObject_Call(open.get(), arguments.get(), nullptr));
    PyObject* const list = scopes ? scopes.get() : Py_None;
    const Ref entry = Ref::take(PyTuple_Pack(3, handle.get(), thread.get(), list));
    check(PyList_Append(entered.get(), entry.get()));
    if (scopes) check(PyList_Append(scopes.get(), self));
    return Ref::share(self);
  });
}

PyObject* exit(PyObject* self, PyObject*) noexcept {
  return guarded([&] {
    const Ref close = attribute(self, names().close), entered = attribute(self, names().entered);
    const Py_ssize_t at = newest_of_thread(entered.get());
    const Ref entry = Ref::share(PyList_GetItem(entered.get(), at));
    PyObject* const handle = PyTuple_GetItem(entry.get(), kHandle);
    PyObject* const scopes = PyTuple_GetItem(entry.get(), kScopes);
    if (scopes != Py_None) {
      drop_object(scopes, self);
      drop(entered.get(), at);
    }
    const Ref closed = Ref::take(PyObject_CallFunctionObjArgs(close.get(), handle, nullptr));
    if (scopes == Py_None) drop_object(entered.get(), entry.get());
    return Ref::share(Py_None);
  });
}

PyObject* within(PyObject* self, PyObject* args) noexcept {
  return guarded([&] {
    const Py_ssize_t count = PyTuple_Size(args);
    if (count < 1) throw_type_error("within() takes a function and its arguments");
    const Ref rest = Ref::take(PyTuple_GetSlice(args, 1, count));
    const Ref entered = Ref::take(enter(self, nullptr));
    PyObject* const result = PyObject_Call(PyTuple_GetItem(args, 0), rest.get(), nullptr);
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &value, &trace);
    PyObject* const left = exit(self, nullptr);
    if (type != nullptr) {  // the exception raised by the function propagates
      PyErr_Clear();
      PyErr_Restore(type, value, trace);
    }
    Py_XDECREF(left);
    if (result != nullptr && left == nullptr) Py_DECREF(result);
    return Ref::take(left == nullptr ? nullptr : result);
  });
}

PyMethodDef g_scope_methods[] = {
    {"__enter__", enter, METH_NOARGS, "Opens the scope."},
    {"__exit__", exit, METH_VARARGS, "Closes the scope."},
    {"within", within, METH_VARARGS,
     "within(function, *arguments) -> what the function returns, called inside of the scope."},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot g_scope_slots[] = {
    {Py_tp_doc, const_cast<char*>("A scope whose opening and closing cannot be interrupted.")},
    {Py_tp_methods, g_scope_methods},
    {0, nullptr},
};
PyType_Spec g_scope_spec = {"te_fl._native.Scope", sizeof(PyObject), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, g_scope_slots};

}  // namespace

PyObject* scope_class() {
  static PyObject* const type = PyType_FromSpec(&g_scope_spec);
  if (type == nullptr) throw PythonError();
  return type;
}

}  // namespace te_fl::python
