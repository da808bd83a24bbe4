// Converts te-fl statuses to Python exceptions.
#pragma once

#include <string>
#include <utility>

#include "py/py.hpp"
#include "te_fl/status.hpp"

namespace te_fl::python {

// `classes`: a dict from a status code's name ("INVALID_ARGUMENT") to its exception class. The
// package sets it once, when it is imported.
void set_error_classes(PyObject* classes);
// Sets the exception for a status that is not OK and throws PythonError. The exception's class adds
// the status code to its text. Its __cause__ is the exception of note_cause() if the status
// contains that exception's text. A cause that is not an Exception, such as KeyboardInterrupt, is
// raised itself.
[[noreturn]] void throw_status(const Status& status);
// Throws te_fl.errors.InvalidArgument, which is a ValueError.
[[noreturn]] inline void throw_invalid(std::string text) {
  throw_status(invalid_argument(std::move(text)));
}
// Records that a Python implementation failed on this thread with `exception`, which was reported
// to te-fl as `text`. Both are kept until the next failure.
void note_cause(PyObject* exception, const std::string& text);

// The status code of the exception's class; INTERNAL for other exceptions.
StatusCode find_code(PyObject* exception) noexcept;

inline void check(const Status& status) {
  if (!status.ok()) throw_status(status);
}
template <class T>
T value_or_throw(Result<T> result) {
  if (!result.ok()) throw_status(result.status());
  return *std::move(result);
}

}  // namespace te_fl::python
