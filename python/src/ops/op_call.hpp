// Calls of ops by name from Python's keyword arguments, by the op's schema.
#pragma once

#include "py/py.hpp"

namespace te_fl::python {

// The class that describes quantised tensors (te_fl.Quantized), the one of saved records
// (te_fl.Saved) and that of a tensor's rows as a list (te_fl.Rows); set once by the package.
void set_argument_classes(PyObject* quantized, PyObject* saved, PyObject* rows);
PyObject* quantized_class() noexcept;  // borrowed

// op(name, doc) -> a callable of keyword arguments that runs the op; doc: its signature and
// description, which help() shows. KeyError-like te_fl.NotFound names the nearest op.
PyObject* make_op(PyObject*, PyObject* args) noexcept;
// matrix_op(name) -> the same of a callable that sees tensors as matrices: one whose rule has two
// dimensions or begins with "..." is seen as [the others' product, last], an input that is not
// contiguous is copied first, and it takes storages (storage.hpp). Its op is of the catalogue.
PyObject* make_matrix_op(PyObject*, PyObject* name) noexcept;
// call(op, arguments, manager=None, positional=()): runs the op, by the process's manager or
// another; None, or what a function in Python returned where the op is of such (function_op.hpp).
PyObject* call_by(PyObject*, PyObject* args) noexcept;
// resolve(op, arguments, manager=None, positional=()) -> dict: how the call would be routed, with
// every candidate's reason.
PyObject* resolve(PyObject*, PyObject* args) noexcept;
// explain(op, device, dtypes, scalings, manager=None) -> the same of a call that is only described.
PyObject* explain(PyObject*, PyObject* args) noexcept;
// saved_bytes(op, arguments) -> bytes of storage that the forward op's implementation wants.
PyObject* saved_bytes(PyObject*, PyObject* args) noexcept;
// schema(op) -> dict of the op's arguments, formula and rules.
PyObject* schema(PyObject*, PyObject* name) noexcept;

}  // namespace te_fl::python
