#include "py/errors.hpp"

#include "py/interpreter.hpp"

namespace te_fl::python {
namespace {

PyObject* g_classes = nullptr;  // the dict of exception classes; never freed

struct Cause {
  PyObject* exception = nullptr;
  std::string text;
  // Runs at the thread's end, with or without the interpreter's lock.
  ~Cause() { drop_later(exception); }
};
thread_local Cause t_cause;

// The exception that caused the error `text`; null if there is none.
Ref take_cause(const std::string& text) {
  if (t_cause.exception == nullptr) return Ref();
  const bool found = text.find(t_cause.text) != text.npos;
  PyObject* exception = std::exchange(t_cause.exception, nullptr);
  if (found) return Ref::take(exception);
  Py_DECREF(exception);
  return Ref();
}

void set_cause(Ref cause) {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (value != nullptr) PyException_SetCause(value, cause.release());
  PyErr_Restore(type, value, trace);
}

}  // namespace

std::string type_name(PyObject* object) {
  const Ref type = Ref::take(PyObject_Type(object));
  const Ref name = Ref::take(PyObject_GetAttrString(type.get(), "__name__"));
  return std::string(to_text(name.get(), "__name__"));
}

void set_error_classes(PyObject* classes) {
  if (!PyDict_Check(classes)) throw_type_error("the classes of errors must be a dict");
  Py_INCREF(classes);
  std::swap(g_classes, classes);
  Py_XDECREF(classes);
}

void throw_status(const Status& status) {
  const std::string code(to_string(status.code())), text = status.to_string();
  Ref cause = take_cause(text);
  // KeyboardInterrupt and the like are raised again unchanged. A framework's out-of-memory error is
  // also raised unchanged, because programs catch it by its class; Python's MemoryError is a base
  // class of te_fl.errors.OutOfMemory, so it needs no such case.
  const bool lacks = status.code() == StatusCode::kOutOfMemory && cause &&
                     PyObject_IsInstance(cause.get(), PyExc_MemoryError) == 0;
  const bool own = cause && (lacks || PyObject_IsInstance(cause.get(), PyExc_Exception) == 0);
  if (own) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(cause.get())), cause.get());
    throw PythonError();
  }
  PyObject* found = g_classes != nullptr ? PyDict_GetItemString(g_classes, code.c_str()) : nullptr;
  const size_t prefix = found != nullptr ? code.size() + std::string_view(": ").size() : 0;
  PyErr_SetString(found != nullptr ? found : PyExc_RuntimeError, text.c_str() + prefix);
  if (cause) set_cause(std::move(cause));
  throw PythonError();
}

void note_cause(PyObject* exception, const std::string& text) {
  Py_INCREF(exception);
  PyObject* old = std::exchange(t_cause.exception, exception);
  t_cause.text = text;
  Py_XDECREF(old);
}

StatusCode find_code(PyObject* exception) noexcept {
  PyObject *name = nullptr, *kind = nullptr;
  Py_ssize_t at = 0;
  while (g_classes != nullptr && PyDict_Next(g_classes, &at, &name, &kind) != 0) {
    if (PyErr_GivenExceptionMatches(exception, kind) == 0) continue;
    for (int32_t code = TE_FL_OK; code <= TE_FL_COMM_FAILED; ++code) {
      const auto found = static_cast<StatusCode>(code);
      if (PyUnicode_CompareWithASCIIString(name, std::string(to_string(found)).c_str()) == 0) {
        return found;
      }
    }
  }
  return StatusCode::kInternal;
}

}  // namespace te_fl::python
