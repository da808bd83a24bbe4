// Communicators of Python: an object that has one serves the collectives that are called with it.
#pragma once

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

// A call of a collective on this thread, while it is dispatched.
class ServedCall {
 public:
  // `server` has `communicator` and serves the call; `arguments` is a dict of them. The caller
  // keeps both, and has the interpreter's lock here and in the destructor.
  ServedCall(PyObject* server, const te_fl_communicator* communicator,
             PyObject* arguments) noexcept;
  ~ServedCall();
  ServedCall(const ServedCall&) = delete;
  ServedCall& operator=(const ServedCall&) = delete;
  // Raises what the server raised, if it did.
  void raise_failure();

  // Has the innermost call of this thread served, which must be one with `communicator`. Called
  // without the interpreter's lock.
  static te_fl_status serve(const te_fl_communicator* communicator, const char* op,
                            const te_fl_error_sink* errors) noexcept;

 private:
  te_fl_status serve(const char* op, const te_fl_error_sink* errors);

  PyObject* const server_;
  const te_fl_communicator* const communicator_;
  PyObject* const arguments_;
  PyObject *type_ = nullptr, *value_ = nullptr, *trace_ = nullptr;
  ServedCall* const outer_;
};

}  // namespace te_fl::python
