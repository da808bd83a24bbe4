// Helpers for Python objects in the autograd node (node.cpp).
#pragma once

#include <Python.h>
#include <torch/csrc/Exceptions.h>

#include <utility>

namespace te_fl::node {

// The fields of call.py's LayerCall. call.py compares them with CALL_FIELDS when it loads the node.
#define TE_FL_CALL_FIELDS(X)     \
  X(kLayer, "layer")             \
  X(kInputs, "inputs")           \
  X(kExtras, "extras")           \
  X(kActivation, "activation")   \
  X(kFirst, "first")             \
  X(kAttention, "attention")     \
  X(kRandom, "random")           \
  X(kUpdates, "updates")         \
  X(kAccumulates, "accumulates") \
  X(kDelays, "delays")
// The arguments that the node passes to _native.layer_forward() and layer_backward(), in order.
// call.py compares them with te-fl's own lists.
#define TE_FL_FORWARD_ARGUMENTS(X) \
  X(kLayer, "layer")               \
  X(kActivation, "activation")     \
  X(kMode, "mode")                 \
  X(kFirst, "is_first_microbatch") \
  X(kInputs, "inputs")             \
  X(kParameters, "parameters")     \
  X(kAttention, "attention")       \
  X(kRandom, "random")
#define TE_FL_BACKWARD_ARGUMENTS(X) \
  X(kToken, "token")                \
  X(kGradient, "gradient")          \
  X(kParameters, "parameters")      \
  X(kMainGrads, "main_grads")       \
  X(kKeep, "keep")                  \
  X(kInputGrad, "input_grad")
#define TE_FL_PLACE(place, name) place,
enum Field { TE_FL_CALL_FIELDS(TE_FL_PLACE) kFields };
struct ForwardArgument {
  enum Place { TE_FL_FORWARD_ARGUMENTS(TE_FL_PLACE) kCount };
};
struct BackwardArgument {
  enum Place { TE_FL_BACKWARD_ARGUMENTS(TE_FL_PLACE) kCount };
};
#undef TE_FL_PLACE
inline PyObject* field(PyObject* call, Field f) { return PyTuple_GET_ITEM(call, f); }
// Modes of _native.layer_forward().
constexpr long kTraining = 0, kUncached = 1;

// An owned reference.
class Ref {
 public:
  explicit Ref(PyObject* object) : object_(object) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&&) = delete;
  ~Ref() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_;
};
// Throws the Python exception that is set if `object` is null.
inline Ref checked(PyObject* object) {
  if (object == nullptr) {
    python_error error;
    error.persist();
    throw error;
  }
  return Ref(object);
}

// Adds a tuple of the names to the module; returns false if a Python exception was set.
template <size_t N>
inline bool add_names(PyObject* module, const char* attribute, const char* const (&names)[N]) {
  PyObject* const tuple = PyTuple_New(N);
  for (size_t i = 0; tuple != nullptr && i < N; ++i) {
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), PyUnicode_FromString(names[i]));
  }
  const bool added = tuple != nullptr && PyModule_AddObjectRef(module, attribute, tuple) == 0;
  Py_XDECREF(tuple);
  return added;
}

}  // namespace te_fl::node
