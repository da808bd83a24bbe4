// te-fl's statuses as Python exceptions.
#pragma once

#include "py/py.hpp"
#include "te_fl/status.hpp"

namespace te_fl::python {

// `classes`: a dict from a code's name ("INVALID_ARGUMENT") to the exception class for it; the
// package sets it once when it is imported.
void set_error_classes(PyObject* classes);
// Sets the exception of a status that is not OK, with its whole text, and throws PythonError. Its
// __cause__ is the exception of note_cause() if the status says what that said; one that is no
// Exception, as KeyboardInterrupt, is raised itself.
[[noreturn]] void throw_status(const Status& status);
// An implementation in Python has failed on this thread by `exception`, about which te-fl was told
// `text`. Both are kept until the next failure.
void note_cause(PyObject* exception, const std::string& text);

// The code whose class the exception is of; INTERNAL for one that is not te-fl's.
StatusCode code_of(PyObject* exception) noexcept;

inline void check(const Status& status) {
  if (!status.ok()) throw_status(status);
}
template <class T>
T value_of(Result<T> result) {
  if (!result.ok()) throw_status(result.status());
  return *std::move(result);
}

}  // namespace te_fl::python
