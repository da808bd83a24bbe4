#include "torch/callback.hpp"

#include <string>

#include "py/errors.hpp"
#include "py/interpreter.hpp"

namespace te_fl::python {

Kept::Kept(PyObject* object) : object_(Ref::share(object).release()) {}
Kept::~Kept() { drop_later(object_); }

namespace {

Ref owned_or_null(PyObject* object) noexcept {
  Ref shared = Ref::share(object);
  Py_XDECREF(object);
  return shared;
}

// The notes that add_note() attached to an exception, as "; te-fl: in number 3, all_reduce of
// float32[4] ...".
std::string read_notes(PyObject* exception) {
  std::string text;
  const Ref notes = owned_or_null(PyObject_GetAttrString(exception, "__notes__"));
  if (!notes) PyErr_Clear();
  const Py_ssize_t count = notes && PyList_Check(notes.get()) ? PyList_Size(notes.get()) : 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Ref note = owned_or_null(PyObject_Str(PyList_GetItem(notes.get(), i)));
    if (note) text += "; " + std::string(to_text(note.get(), "a note"));
    PyErr_Clear();
  }
  return text;
}

// The exception as text. The text of a te-fl exception begins with its status code, which is
// removed because the status repeats it.
std::string error_text(PyObject* exception, std::string text, StatusCode code) {
  const std::string prefix = std::string(to_string(code)) + ": ";
  if (text.starts_with(prefix)) return text.substr(prefix.size());
  return type_name(exception) + ": " + text;
}

}  // namespace

Status callback_failed(StatusCode other) {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  const Ref kind = Ref::share(type), owned = Ref::share(value);
  Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(trace);
  PyObject* const text = value == nullptr ? nullptr : PyObject_Str(owned.get());
  if (text == nullptr) {
    PyErr_Clear();
    return Status(other, "an error without words");
  }
  const Ref words = Ref::take(text);
  const StatusCode code = find_code(owned.get());
  const std::string message =
      error_text(owned.get(), std::string(to_text(words.get(), "an error")), code) +
      read_notes(owned.get());
  note_cause(owned.get(), message);
  return Status(code == StatusCode::kInternal ? other : code, message);
}

}  // namespace te_fl::python
