// te-fl's statuses as Python exceptions.
#pragma once

#include "py.hpp"
#include "te_fl/status.hpp"

namespace te_fl::python {

// `classes`: a dict from a code's name ("INVALID_ARGUMENT") to the exception class for it; the
// package sets it once when it is imported.
void set_error_classes(PyObject* classes);
// Sets the exception of a status that is not OK, with its whole text, and throws PythonError.
[[noreturn]] void throw_status(const Status& status);

inline void check(const Status& status) {
  if (!status.ok()) throw_status(status);
}
template <class T>
T value_of(Result<T> result) {
  if (!result.ok()) throw_status(result.status());
  return *std::move(result);
}

}  // namespace te_fl::python
