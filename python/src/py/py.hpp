// Python's stable ABI of 3.10, so that one binary works with every later version.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <unistd.h>

#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <utility>

namespace te_fl::python {

// Thrown after a Python exception has been set; guarded() returns to Python with that exception.
struct PythonError {};

// An owned reference to a Python object. Needs the interpreter's lock.
class Ref {
 public:
  Ref() noexcept = default;
  // Takes ownership; null means that a Python exception has been set, and throws PythonError.
  static Ref take(PyObject* object) {
    if (object == nullptr) throw PythonError();
    return Ref(object);
  }
  static Ref share(PyObject* object) noexcept {
    Py_XINCREF(object);
    return Ref(object);
  }
  ~Ref() { Py_XDECREF(object_); }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  PyObject* get() const noexcept { return object_; }
  PyObject* release() noexcept { return std::exchange(object_, nullptr); }
  explicit operator bool() const noexcept { return object_ != nullptr; }

 private:
  explicit Ref(PyObject* object) noexcept : object_(object) {}
  PyObject* object_ = nullptr;
};

inline void check(int result) {
  if (result < 0) throw PythonError();
}

[[noreturn]] inline void throw_type_error(const std::string& text) {
  PyErr_SetString(PyExc_TypeError, text.c_str());
  throw PythonError();
}

// Throws TypeError unless `name` got the expected number of arguments.
inline void check_count(const char* name, Py_ssize_t count, Py_ssize_t wanted) {
  if (count == wanted) return;
  throw_type_error(std::string(name) + " takes " + std::to_string(wanted) + " arguments, got " +
                   std::to_string(count));
}

// Throws TypeError if `name` got fewer arguments than `least`.
inline void check_least(const char* name, Py_ssize_t count, Py_ssize_t least) {
  if (count >= least) return;
  throw_type_error(std::string(name) + " takes at least " + std::to_string(least) +
                   " arguments, got " + std::to_string(count));
}

inline Ref to_python(std::string_view text) {
  return Ref::take(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}
inline Ref to_python(bool value) { return Ref::share(value ? Py_True : Py_False); }
inline Ref to_python(uint64_t value) { return Ref::take(PyLong_FromUnsignedLongLong(value)); }
inline Ref to_python(int64_t value) { return Ref::take(PyLong_FromLongLong(value)); }
inline Ref to_python(double value) { return Ref::take(PyFloat_FromDouble(value)); }

// The UTF-8 text, valid while `object` lives. TypeError, naming `what`, if the object is not a str.
inline std::string_view to_text(PyObject* object, const char* what) {
  if (!PyUnicode_Check(object)) throw_type_error(std::string(what) + " must be a str");
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object, &size);
  if (text == nullptr) throw PythonError();
  return {text, static_cast<size_t>(size)};
}

// type(object).__name__
std::string type_name(PyObject* object);

template <class Sequence, class F>
Ref make_list(const Sequence& items, F&& item) {
  Ref list = Ref::take(PyList_New(0));
  for (const auto& i : items) check(PyList_Append(list.get(), item(i).get()));
  return list;
}
inline void put(const Ref& dict, const char* key, const Ref& value) {
  check(PyDict_SetItemString(dict.get(), key, value.get()));
}

// Runs f, which returns a Ref, and converts C++ exceptions to Python exceptions.
template <class F>
PyObject* guarded(F&& f) noexcept {
  try {
    return f().release();
  } catch (const PythonError&) {
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
  return nullptr;
}

// Acquires the interpreter's lock by calling `take`. Before Python 3.14, a thread that asks for the
// lock during shutdown is ended by unwinding its stack, which terminates the program at a noexcept
// frame. This function then sleeps until the process ends, as Python 3.14 does.
template <class F>
auto lock_or_sleep(F&& take) noexcept {
  try {
    return take();
  } catch (...) {
    for (;;) pause();
  }
}

// Releases the interpreter's lock while C++ waits or computes. Never wait for a te-fl mutex while
// holding the interpreter's lock: the mutex's owner may be about to acquire the interpreter's lock
// for a Python implementation.
class WithoutLock {
 public:
  WithoutLock() noexcept : state_(PyEval_SaveThread()) {}
  ~WithoutLock() {
    lock_or_sleep([this] { PyEval_RestoreThread(state_); });
  }
  WithoutLock(const WithoutLock&) = delete;
  WithoutLock& operator=(const WithoutLock&) = delete;

 private:
  PyThreadState* state_;
};

template <class F>
decltype(auto) without_lock(F&& f) {
  const WithoutLock lock;
  return f();
}

}  // namespace te_fl::python
