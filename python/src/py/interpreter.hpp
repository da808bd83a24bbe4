// The Python interpreter as used by C++ threads: its lock, its shutdown, and deferred decrefs.
#pragma once

#include "py/py.hpp"

namespace te_fl::python {

// Acquires the interpreter's lock on any thread. held() is false if the interpreter is shutting
// down or has shut down; then no Python API may be called. Shutdown waits while the lock is held,
// so no thread is ended inside C++ code. Disables torch.compile's tracing for the duration: C++
// needs the functions to run as written (a traced collective returns a tensor instead of a work).
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
  // torch.compile's set_eval_frame, if imported, and the callback that it had before.
  PyObject *set_tracer_ = nullptr, *tracer_ = nullptr;
};

// True if an InterpreterLock constructed now would hold the lock. For work that needs no lock but
// must not run after Python has ended.
bool interpreter_alive() noexcept;

// Registers the handlers for the interpreter's shutdown and for fork(). The package calls this
// once, when it is imported. Throws PythonError.
void watch_interpreter();

// drop_later() queues a decref, from a thread that may lack the interpreter's lock and may hold
// te-fl mutexes. drop_dropped() runs the queued decrefs, and needs the interpreter's lock.
void drop_later(PyObject* object) noexcept;
void drop_dropped() noexcept;

}  // namespace te_fl::python
