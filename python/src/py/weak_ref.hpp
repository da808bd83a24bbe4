// A weak reference to a Python object.
#pragma once

#include <utility>

#include "py/interpreter.hpp"
#include "py/py.hpp"

namespace te_fl::python {

// The destructor needs no interpreter's lock; all other functions do.
class WeakRef {
 public:
  WeakRef() noexcept = default;
  ~WeakRef() {
    if (ref_ != nullptr) drop_later(ref_);
  }
  WeakRef(WeakRef&& other) noexcept : ref_(std::exchange(other.ref_, nullptr)) {}
  WeakRef& operator=(WeakRef&& other) noexcept {
    std::swap(ref_, other.ref_);
    return *this;
  }

  // True if `object` is the referenced object and has not been freed since point_at().
  bool is(PyObject* object) const {
    return ref_ != nullptr && Ref::take(PyObject_CallNoArgs(ref_)).get() == object;
  }
  // Throws PythonError for an object that does not support weak references.
  void point_at(PyObject* object) {
    Ref made = Ref::take(PyWeakref_NewRef(object, nullptr));
    Py_XDECREF(std::exchange(ref_, made.release()));
  }

 private:
  PyObject* ref_ = nullptr;
};

}  // namespace te_fl::python
