// Python's objects as the autograd node has them (node.cpp).
#pragma once

#include <Python.h>
#include <torch/csrc/Exceptions.h>

#include <utility>

namespace te_fl::node {

// Fields of call.py's LayerCall, which compares its own with CALL_FIELDS when it takes the node.
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
#define TE_FL_FIELD(field, name) field,
enum Field { TE_FL_CALL_FIELDS(TE_FL_FIELD) kFields };
#undef TE_FL_FIELD
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
// Throws the interpreter's error if there is no object.
inline Ref checked(PyObject* object) {
  if (object == nullptr) {
    python_error error;
    error.persist();
    throw error;
  }
  return Ref(object);
}

}  // namespace te_fl::node
