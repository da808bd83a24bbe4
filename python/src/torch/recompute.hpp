// Pieces that run again in the backward, as te_fl.pytorch's checkpoint makes them.
#pragma once

#include <cstdint>
#include <vector>

#include "py/py.hpp"

namespace te_fl::python {

// A forward of a layer reads these: its parameters' contents by number, as Parameter::borrow()
// wants them, and the framework's counts of writes to them.
struct Contents {
  std::vector<uint64_t> numbers;
  std::vector<long> versions;
};

// True if this thread repeats a piece.
bool repeats_piece();
// The contents by the numbers of the first run if this thread repeats a piece, else `now`, which is
// noted if the piece is to be repeated. Throws FAILED_PRECONDITION if the forward does not follow
// the first run, or if parameters were written since.
Contents contents_in_piece(const void* layer, Contents now);

// recompute_record() -> what a piece's first run leaves for its second (nn::RecomputeRecord).
PyObject* recompute_record(PyObject*, PyObject*) noexcept;
// begin_recompute(record, second, thread) -> scope: the forwards of this thread are the piece's
// first or second run until end_recompute(scope), on the same thread, scopes inside first.
// thread.scopes, this thread's list of autocasts, is during the second run what it was when the
// first began.
PyObject* begin_recompute(PyObject*, PyObject* args) noexcept;
PyObject* end_recompute(PyObject*, PyObject* scope) noexcept;
// hooks_in_force(top, pop, push) -> list of (pack, unpack): PyTorch's hooks of saved tensors on
// this thread, the innermost first. PyTorch shows the innermost alone (`top(False)`, None if there
// is none), so all are taken off and put back; a function of Python could be interrupted between.
PyObject* hooks_in_force(PyObject*, PyObject* args) noexcept;

}  // namespace te_fl::python
