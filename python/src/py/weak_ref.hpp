// A reference to an object of Python's that does not keep it alive.
#pragma once

#include <utility>

#include "py/interpreter.hpp"
#include "py/py.hpp"

namespace te_fl::python {

// May be destroyed by a thread without the interpreter's lock; everything else needs that.
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

  // True if the object that it was last pointed at is this one, and has lived since.
  bool is(PyObject* object) const {
    return ref_ != nullptr && Ref::take(PyObject_CallNoArgs(ref_)).get() == object;
  }
  // Throws PythonError for an object that has no weak references.
  void point_at(PyObject* object) {
    Ref made = Ref::take(PyWeakref_NewRef(object, nullptr));
    Py_XDECREF(std::exchange(ref_, made.release()));
  }

 private:
  PyObject* ref_ = nullptr;
};

}  // namespace te_fl::python
