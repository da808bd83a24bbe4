// Activation checkpointing for te_fl.pytorch's checkpoint. A "segment" is a checkpointed part of
// the forward, which runs a second time (is recomputed) in the backward.
#pragma once

#include <cstdint>
#include <vector>

#include "py/py.hpp"

namespace te_fl::python {

// The state of a layer's parameters in a forward: version numbers of their contents, for
// Parameter::borrow(), and the framework's version counters.
struct Contents {
  std::vector<uint64_t> numbers;
  std::vector<long> versions;
};

// True if this thread is recomputing a segment.
bool repeats_segment();
// If this thread recomputes a segment, returns the contents that the first run recorded. Otherwise
// returns `now`, and records it if the segment will be recomputed. Throws FAILED_PRECONDITION if
// the forwards differ from the first run's, or if parameters were written in between.
Contents contents_in_segment(const void* layer, Contents now);

// recompute_record() -> an empty record that the first run fills for the second
// (nn::RecomputeRecord).
PyObject* recompute_record(PyObject*, PyObject*) noexcept;
// begin_recompute(record, second, thread) -> scope: forwards on this thread belong to the segment's
// first or second run until end_recompute(scope) on the same thread. Inner scopes end first. During
// the second run, thread.scopes, this thread's list of autocasts, is replaced by the list from the
// beginning of the first run.
PyObject* begin_recompute(PyObject*, PyObject* args) noexcept;
PyObject* end_recompute(PyObject*, PyObject* scope) noexcept;
// hooks_in_force(top, pop, push) -> list of (pack, unpack): PyTorch's saved-tensor hooks on this
// thread, innermost first. PyTorch exposes only the innermost one (`top(False)`, None if there is
// none), so this pops all hooks and pushes them back. It is C++ because KeyboardInterrupt could
// interrupt a Python function in between.
PyObject* hooks_in_force(PyObject*, PyObject* args) noexcept;
// track_hooks(push, pop) -> (push, pop, top): PyTorch's push and pop of saved-tensor hooks, which
// then keep a list of those in force on each thread, and top(), which PyTorch 2.7 lacks. They are
// C++ because KeyboardInterrupt could end a Python function before it calls PyTorch's.
PyObject* track_hooks(PyObject*, PyObject* args) noexcept;

}  // namespace te_fl::python
