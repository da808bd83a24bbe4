// Quarantines of a job of several ranks, on which the ranks agree at the ends of steps
// (te_fl/watch.hpp).
#pragma once

#include "py/py.hpp"

namespace te_fl::python {

PyObject* step_boundary(PyObject*, PyObject*) noexcept;  // () -> None
// (function) -> None: function(text) returns the texts of all ranks, or None without a process
// group.
PyObject* set_rank_exchange(PyObject*, PyObject* function) noexcept;
PyObject* ranks_exchange_quarantines(PyObject*, PyObject*) noexcept;  // () -> bool
PyObject* held_quarantines(PyObject*, PyObject*) noexcept;            // () -> str
PyObject* take_quarantines(PyObject*, PyObject* texts) noexcept;      // (list of str) -> None
// (function) -> None: te-fl calls function() in each layer_backward() of a job whose ranks exchange
// quarantines.
PyObject* set_backward_boundary(PyObject*, PyObject* function) noexcept;

// Calls the function of set_backward_boundary() if the ranks exchange quarantines.
void note_backward();

}  // namespace te_fl::python
