// Scopes of Python, `with te_fl.policy(..):`, that an interrupt cannot leave half open.
#pragma once

#include "py/py.hpp"

namespace te_fl::python {

// te_fl._native.Scope, a base class whose __enter__ and __exit__ are C functions: Python raises
// KeyboardInterrupt between its own instructions, and as functions of Python they could be left
// between the change in C++ and its note in Python, or not be entered at all.
//
// Its subclasses set, on themselves or their objects:
//   _open, _arguments, _close: functions of _native and a tuple; _open(*_arguments) -> handle,
//     _close(handle)
//   _entered: a list, empty at first, of the times that the object was entered; each thread leaves
//     what it entered itself, so that one object may serve several
//   _thread: None, or an object whose `scopes` is the calling thread's list of the objects entered
// within(function, *arguments) calls the function inside of the scope: where a function of Python
// ends a `with` or begins a `finally`, it can be interrupted before the scope is left.
// A _close that fails leaves a scope entered if _thread is None, and else not.
PyObject* scope_class();

}  // namespace te_fl::python
