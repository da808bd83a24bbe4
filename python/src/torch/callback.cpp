#include "torch/callback.hpp"

#include <string>

#include "py/errors.hpp"
#include "py/interpreter.hpp"

namespace te_fl::python {

Kept::Kept(PyObject* object) : object_(Ref::share(object).release()) {}
Kept::~Kept() { drop_later(object_); }

Status callback_failed() {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  const Ref kind = Ref::share(type), owned = Ref::share(value);
  Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(trace);
  PyObject* const text = value == nullptr ? nullptr : PyObject_Str(owned.get());
  if (text == nullptr) {
    PyErr_Clear();
    return internal_error("an error without words");
  }
  const Ref words = Ref::take(text);
  const std::string message =
      type_name(owned.get()) + ": " + std::string(text_of(words.get(), "an error"));
  note_cause(owned.get(), message);
  return Status(code_of(owned.get()), message);
}

}  // namespace te_fl::python
