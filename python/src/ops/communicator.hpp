// Communicators implemented in Python. A Python object with a communicator runs the collective ops
// that are called with it.
#pragma once

#include <string>

#include "py/py.hpp"
#include "te_fl/plugin.h"

namespace te_fl::python {

// communicator(backend, device, rank, size, graph_safe) -> an opaque handle. The handle's maker is
// "torch.BACKEND"; the first handle of a maker registers its implementations,
// "vendor.torch.BACKEND". A Python object `o` may be passed as an op's argument `comm` if
// o._communicator is a handle. o.serve(op, arguments) then runs the collective on this rank: on a
// device it enqueues the work on the framework's current stream, on the host it completes the work.
// An exception from serve() propagates to the caller of the op.
PyObject* make_communicator(PyObject*, PyObject* args) noexcept;

// The handle of `object`; throws TypeError, naming `name`, if the object has none.
Ref find_handle(PyObject* object, const char* name);
// Valid as long as the handle.
const te_fl_communicator* communicator_in(const Ref& handle) noexcept;

// One call of a collective, alive on its thread while the call is dispatched.
class CommunicatorCall {
 public:
  explicit CommunicatorCall(const te_fl_communicator* communicator) noexcept;
  virtual ~CommunicatorCall();
  CommunicatorCall(const CommunicatorCall&) = delete;
  CommunicatorCall& operator=(const CommunicatorCall&) = delete;

  // Runs the collective through the innermost CommunicatorCall of this thread, which must use
  // `communicator`. Called without the interpreter's lock.
  static te_fl_status serve(const te_fl_communicator* communicator, const char* op,
                            const te_fl_error_sink* errors) noexcept;

 private:
  // Runs the collective. Called with the interpreter's lock. Throws PythonError if the exception
  // that is set is to be raised to the caller.
  virtual void run(const char* op) = 0;
  // Clears the exception that is set, and returns its text. Called with the interpreter's lock.
  virtual std::string take_failure() = 0;

  const te_fl_communicator* const communicator_;
  CommunicatorCall* const outer_;
};

// The exception as text, for example "RuntimeError: connection closed by peer".
std::string words_of_error(PyObject* value);

// A collective that Python code called. If serve() raises an exception, the caller gets it.
class PythonCall final : public CommunicatorCall {
 public:
  // `server` is the Python object that owns `communicator`; its serve() runs the collective.
  // `arguments` is a dict.
  // The caller keeps both alive, and holds the interpreter's lock here and in the destructor.
  PythonCall(PyObject* server, const te_fl_communicator* communicator, PyObject* arguments) noexcept
      : CommunicatorCall(communicator), server_(server), arguments_(arguments) {}
  ~PythonCall() override;
  // Raises the exception that serve() raised, if any.
  void raise_failure();

 private:
  void run(const char* op) override;
  std::string take_failure() override;

  PyObject* const server_;
  PyObject* const arguments_;
  PyObject *type_ = nullptr, *value_ = nullptr, *trace_ = nullptr;
};

}  // namespace te_fl::python
