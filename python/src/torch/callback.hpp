// Python functions that nn calls while it computes, on any thread.
#pragma once

#include "py/py.hpp"
#include "te_fl/status.hpp"

namespace te_fl::python {

// A reference that may go on any thread.
class Kept {
 public:
  // Under the interpreter's lock.
  explicit Kept(PyObject* object);
  ~Kept();
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

// Takes the Python exception that is set, as a status, with the notes that it has; it is the cause
// of the exception that the call into te-fl ends with, which is of te-fl's class if this one is,
// else of the class of `other`. Under the interpreter's lock.
Status callback_failed(StatusCode other = StatusCode::kInternal);
// Takes a collective's exception, which is COMM_FAILED where it is torch.distributed's.
inline Status collective_failed() { return callback_failed(StatusCode::kCommFailed); }

}  // namespace te_fl::python
