// Helpers for Python objects in the autograd node (node.cpp).
#pragma once

#include <Python.h>
#include <torch/csrc/Exceptions.h>

#include <utility>

#include "layer_call.hpp"

namespace te_fl::node {

using namespace layer_call;

// A field of a LayerCall, borrowed.
inline PyObject* field(PyObject* call, Field f) { return PyTuple_GET_ITEM(call, f); }

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

}  // namespace te_fl::node
