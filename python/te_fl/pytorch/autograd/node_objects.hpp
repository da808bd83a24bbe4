// Python's objects as the autograd node has them (node.cpp).
#pragma once

#include <Python.h>
#include <torch/csrc/Exceptions.h>

#include <utility>

namespace te_fl::node {

// Fields of call.py's Call.
enum Field {
  kLayer,
  kInputs,
  kExtras,
  kActivation,
  kFirst,
  kAttention,
  kRandom,
  kUpdates,
  kAccumulates,
  kFields = 10
};
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
