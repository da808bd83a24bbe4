// Support for Python functions that nn calls during computation, on any thread.
#pragma once

#include "py/py.hpp"
#include "te_fl/status.hpp"

namespace te_fl::python {

// A reference to a Python object that any thread may destroy.
class Kept {
 public:
  // Needs the interpreter's lock.
  explicit Kept(PyObject* object);
  ~Kept();
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

// Saves and clears the calling thread's Python exception, and restores it at the end. Memory may be
// freed while an exception propagates, and Python functions must not be called with an exception
// set.
class ErrorAside {
 public:
  ErrorAside() { PyErr_Fetch(&type_, &value_, &trace_); }
  ~ErrorAside() { PyErr_Restore(type_, value_, trace_); }
  ErrorAside(const ErrorAside&) = delete;
  ErrorAside& operator=(const ErrorAside&) = delete;

 private:
  PyObject *type_ = nullptr, *value_ = nullptr, *trace_ = nullptr;
};

// Converts the Python exception that is set, with its notes, to a status. The exception becomes the
// __cause__ of the exception that the call into te-fl finally raises. The code is the exception's
// if it is te-fl's, else `other`. Needs the interpreter's lock.
Status callback_failed(StatusCode other = StatusCode::kInternal);
// As callback_failed() for a collective: the code is COMM_FAILED for exceptions of
// torch.distributed.
inline Status collective_failed() { return callback_failed(StatusCode::kCommFailed); }

}  // namespace te_fl::python
