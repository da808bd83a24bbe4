// Communicators of Python: an object that has one serves the collectives that are called with it.
#pragma once

#include <string>

#include "py/py.hpp"
#include "te_fl/plugin.h"

namespace te_fl::python {

// communicator(backend, device, rank, size, graph_safe) -> an opaque handle. Its maker is
// "torch.BACKEND", whose implementations "vendor.torch.BACKEND" are registered with the first.
// An object `o` is an argument `comm` of ops if o._communicator is a handle, and
// o.serve(op, arguments) does the collective on this rank: it queues the work on the framework's
// current stream (on the host: does it), and what it raises is what the call raises.
PyObject* make_communicator(PyObject*, PyObject* args) noexcept;

// The handle that `object` has; TypeError, naming `name`, if it has none.
Ref handle_of(PyObject* object, const char* name);
// Valid as long as the handle.
const te_fl_communicator* communicator_in(const Ref& handle) noexcept;

// A call of a collective on this thread, while it is dispatched: from its making to its end.
class ServedCall {
 public:
  explicit ServedCall(const te_fl_communicator* communicator) noexcept;
  virtual ~ServedCall();
  ServedCall(const ServedCall&) = delete;
  ServedCall& operator=(const ServedCall&) = delete;

  // Has the innermost call of this thread served, which must be one with `communicator`. Called
  // without the interpreter's lock.
  static te_fl_status serve(const te_fl_communicator* communicator, const char* op,
                            const te_fl_error_sink* errors) noexcept;

 private:
  // Does the collective; with the interpreter's lock. Throws PythonError where the exception that
  // is set is the call's.
  virtual void run(const char* op) = 0;
  // Takes the exception that is set, and returns its words. As run().
  virtual std::string take_failure() = 0;

  const te_fl_communicator* const communicator_;
  ServedCall* const outer_;
};

// "RuntimeError: connection closed by peer"
std::string words_of_error(PyObject* value);

// A call that comes from Python, whose exception it raises again.
class PythonCall final : public ServedCall {
 public:
  // `server` has `communicator` and serves the call; `arguments` is a dict of them. The caller
  // keeps both, and has the interpreter's lock here and in the destructor.
  PythonCall(PyObject* server, const te_fl_communicator* communicator, PyObject* arguments) noexcept
      : ServedCall(communicator), server_(server), arguments_(arguments) {}
  ~PythonCall() override;
  // Raises what the server raised, if it did.
  void raise_failure();

 private:
  void run(const char* op) override;
  std::string take_failure() override;

  PyObject* const server_;
  PyObject* const arguments_;
  PyObject *type_ = nullptr, *value_ = nullptr, *trace_ = nullptr;
};

}  // namespace te_fl::python
