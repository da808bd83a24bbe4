// Python context managers (`with te_fl.policy(..):`) that KeyboardInterrupt cannot leave half
// entered.
#pragma once

#include "py/py.hpp"

namespace te_fl::python {

// te_fl._native.Scope, a base class whose __enter__ and __exit__ are C functions. Python raises
// KeyboardInterrupt between bytecode instructions. In Python functions, it could strike between the
// change in C++ and its record in Python, or before the first instruction.
//
// Subclasses set these attributes, on the class or the object:
// - _open, _arguments, _close: functions of _native and a tuple; _open(*_arguments) -> handle,
//   _close(handle)
// - _entered: a list, initially empty, with one record per __enter__. Each thread removes only its
//   own records, so several threads may share one object.
// - _thread: None, or an object whose `scopes` is the calling thread's list of entered objects
//
// within(function, *arguments) calls the function inside of the scope. A Python `with` or `finally`
// could be interrupted before it leaves the scope; within() cannot.
// If _close fails, the scope stays entered if _thread is None, and is left otherwise.
PyObject* scope_class();

}  // namespace te_fl::python
