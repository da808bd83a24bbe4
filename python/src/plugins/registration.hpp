// Implementations of ops in Python, registered as C++'s are.
#pragma once

#include "py/py.hpp"

namespace te_fl::python {

// set_registration_helpers(told, on_stream): two functions of te_fl.registration, which says what
// they do.
PyObject* set_registration_helpers(PyObject*, PyObject* args) noexcept;
// registry() -> the process's registry; new_registry() -> an empty one. Opaque.
PyObject* process_registry(PyObject*, PyObject*) noexcept;
PyObject* new_registry(PyObject*, PyObject*) noexcept;
// declare(registry, op) -> bool: True if the op's arguments and results are Python objects, which
// an op becomes that the registry does not have yet.
PyObject* declare(PyObject*, PyObject* args) noexcept;
// register(registry, implementations, owner) -> None: all or none of a list of dicts, whose keys
// te_fl.registration writes.
PyObject* register_implementations(PyObject*, PyObject* args) noexcept;
PyObject* unregister(PyObject*, PyObject* args) noexcept;        // (registry, op, impl_id)
PyObject* unregister_owner(PyObject*, PyObject* args) noexcept;  // (registry, owner)
PyObject* set_priority(PyObject*, PyObject* args) noexcept;  // (registry, op, impl_id, priority)
PyObject* snapshot(PyObject*, PyObject* registry) noexcept;  // (registry) -> list of dict
// new_manager(registry) -> a manager on it; the process's for the process's registry.
PyObject* new_manager(PyObject*, PyObject* registry) noexcept;

}  // namespace te_fl::python
