// Registration of op implementations written in Python.
#pragma once

#include "py/py.hpp"

namespace te_fl::python {

// set_registration_helpers(describe_error, on_stream): see set_helpers() in implementation.hpp.
PyObject* set_registration_helpers(PyObject*, PyObject* args) noexcept;
// registry() -> the process's registry; new_registry() -> an empty one. Opaque.
PyObject* process_registry(PyObject*, PyObject*) noexcept;
PyObject* new_registry(PyObject*, PyObject*) noexcept;
// declare(registry, op) -> bool: declares `op` as a function op if the registry does not have it.
// Returns True if the op is a function op.
PyObject* declare(PyObject*, PyObject* args) noexcept;
// register(registry, implementations, owner) -> None: registers a list of dicts, all or none of
// them. te_fl.registration writes the dicts' keys.
PyObject* register_implementations(PyObject*, PyObject* args) noexcept;
PyObject* unregister(PyObject*, PyObject* args) noexcept;        // (registry, op, impl_id)
PyObject* unregister_owner(PyObject*, PyObject* args) noexcept;  // (registry, owner)
PyObject* set_priority(PyObject*, PyObject* args) noexcept;  // (registry, op, impl_id, priority)
PyObject* snapshot(PyObject*, PyObject* registry) noexcept;  // (registry) -> list of dict
// new_manager(registry) -> a manager on this registry; for the process's registry, the process's
// manager.
PyObject* new_manager(PyObject*, PyObject* registry) noexcept;

}  // namespace te_fl::python
