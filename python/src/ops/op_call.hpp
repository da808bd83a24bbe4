// Calls of ops by name from Python's keyword arguments, by the op's schema.
#pragma once

#include "py/py.hpp"
#include "te_fl/op_manager.hpp"

namespace te_fl::python {

// Sets the classes te_fl.Quantized (quantised tensors), te_fl.Saved (saved records) and te_fl.Rows
// (a tensor's rows as a list of tensors). The package calls this once.
void set_argument_classes(PyObject* quantized, PyObject* saved, PyObject* rows);
PyObject* quantized_class() noexcept;  // borrowed

// op(name, doc) -> a callable that takes keyword arguments and runs the op. doc: the signature and
// description that help() shows. Raises te_fl.NotFound, which names the nearest op, for an unknown
// name. If the call's tensors are PyTorch's, the callable allocates the outputs that the call
// leaves out and the optional ones that it gives as True or as a dtype, and returns them: one
// tensor, or a tuple in the order of the specification; None if there are none.
PyObject* make_op(PyObject*, PyObject* args) noexcept;
// positional_op(name) -> like op(), but inputs may also be positional, in the order of the
// specification, and non-contiguous inputs are copied first. Catalogue ops only.
PyObject* make_positional_op(PyObject*, PyObject* name) noexcept;
// matrix_op(name) -> like positional_op(), but tensors are passed as matrices: an argument whose
// shape rule has two dimensions or begins with "..." is reshaped to [product of the leading
// extents, last extent]. Outputs that the callable allocates have the shapes that follow from the
// arguments before they become matrices.
PyObject* make_matrix_op(PyObject*, PyObject* name) noexcept;
// call(op, arguments, manager=None, positional=()): runs the op by the given manager, by default
// the process's. Returns None, or the Python function's result if the op is a function op
// (function_op.hpp).
PyObject* call_by(PyObject*, PyObject* args) noexcept;
// resolve(op, arguments, manager=None, positional=()) -> dict: the dispatch decision for the call,
// and for each candidate the reason why it was chosen or rejected.
PyObject* resolve(PyObject*, PyObject* args) noexcept;
// The dict that resolve() returns.
Ref decision_dict(const Decision& decision);
// explain(op, device, dtypes, scalings, manager=None) -> the dict of resolve(), for a call given by
// its dtypes instead of tensors.
PyObject* explain(PyObject*, PyObject* args) noexcept;
// saved_bytes(op, arguments) -> the bytes of storage that the forward op's implementation needs for
// its saved record.
PyObject* saved_bytes(PyObject*, PyObject* args) noexcept;
// output(op, tensors, scalars, name) -> (extents, dtype) of an output that the op's schema derives
// from a call. tensors: the other tensors by name, each as (rank, dtype), and the lengths of lists;
// scalars: other arguments by name; dtype: an index in te_fl.tensors.DTYPES. Each extent is
// (argument or None, first, count, less, divisor, factor, more), the members of OutputExtent. None
// stands for extents or a dtype that do not follow from the call.
PyObject* output(PyObject*, PyObject* args) noexcept;
// schema(op) -> dict of the op's arguments, formula and rules.
PyObject* schema(PyObject*, PyObject* name) noexcept;

}  // namespace te_fl::python
