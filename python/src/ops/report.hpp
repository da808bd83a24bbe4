// Reports about te-fl. Each function returns plain Python objects and raises exceptions of the
// package.
#pragma once

#include "py/py.hpp"

namespace te_fl::python {

PyObject* op_names(PyObject*, PyObject*) noexcept;     // () -> list of str
PyObject* usage(PyObject*, PyObject*) noexcept;        // (manager=None) -> list of dict
PyObject* reset_usage(PyObject*, PyObject*) noexcept;  // (manager=None) -> None
PyObject* reload(PyObject*, PyObject*) noexcept;       // () -> None: reads the environment again
// (name) -> the value of a TE_FL_ variable as a bool, an int or a str; None if it is unset and has
// no default. Raises INVALID_ARGUMENT if the environment's value is not accepted.
PyObject* setting(PyObject*, PyObject* name) noexcept;
PyObject* info(PyObject*, PyObject*) noexcept;  // () -> dict: version, devices, plugins
PyObject* device_name(PyObject*, PyObject* device) noexcept;  // ("cuda:0") -> the chip's name
PyObject* load_plugin(PyObject*, PyObject* path) noexcept;    // (path or name) -> name
// (path) -> str: why code there may not be executed; empty if it may
PyObject* file_trust_problem(PyObject*, PyObject* path) noexcept;
PyObject* verify_counts(PyObject*, PyObject*) noexcept;      // () -> dict
PyObject* fingerprint(PyObject*, PyObject*) noexcept;        // () -> str
PyObject* fingerprint_table(PyObject*, PyObject*) noexcept;  // () -> str
// (table, table) -> list of str: their differences, one a line, "in the first" and "in the second"
PyObject* fingerprint_difference(PyObject*, PyObject* args) noexcept;
PyObject* write_trace(PyObject*, PyObject*) noexcept;  // () -> None

}  // namespace te_fl::python
