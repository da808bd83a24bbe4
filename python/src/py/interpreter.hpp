// Python's interpreter as threads of C++ meet it: its lock, its end, and objects that go later.
#pragma once

#include "py/py.hpp"

namespace te_fl::python {

// Holds the interpreter's lock for a thread of any origin. held() is false when the interpreter is
// ending or has ended: then nothing of Python may be touched. While it is held the end is waited
// for, so no thread is ended inside C++. torch.compile does not trace what runs meanwhile,
// which C++ calls as it is written: traced, a collective would give a tensor and no work.
class InterpreterLock {
 public:
  InterpreterLock() noexcept;
  ~InterpreterLock();
  InterpreterLock(const InterpreterLock&) = delete;
  InterpreterLock& operator=(const InterpreterLock&) = delete;
  bool held() const noexcept { return held_; }

 private:
  void stop_tracing() noexcept;
  void trace_again() noexcept;

  bool held_ = false;
  PyGILState_STATE state_{};
  // torch.compile's set_eval_frame, once a program compiles, and the tracer that was in force.
  PyObject *set_tracer_ = nullptr, *tracer_ = nullptr;
};

// True if InterpreterLock would be held, for work that needs no lock but must not outlive Python.
bool interpreter_alive() noexcept;

// Has the functions above notice the interpreter's end and fork(); once, when the package is
// imported. Throws PythonError.
void watch_interpreter();

// Gives up references from a thread that may not have the interpreter's lock, and may hold te-fl's
// own: they go with the next drop_dropped(), which a thread calls that has it.
void drop_later(PyObject* object) noexcept;
void drop_dropped() noexcept;

}  // namespace te_fl::python
