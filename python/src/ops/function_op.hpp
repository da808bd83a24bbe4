// Function ops: ops outside the catalogue whose arguments and results are arbitrary Python objects,
// and whose implementations are Python functions. For te-fl's core, a function op has a single
// argument: the number of the call. The Python objects stay in a thread-local record, which the
// chosen implementation reads on the same thread.
#pragma once

#include <optional>
#include <set>
#include <string>

#include "py/py.hpp"
#include "te_fl/op_manager.hpp"

namespace te_fl::python {

bool is_function_op(const te_fl_op_schema& schema) noexcept;

// Declares a function op of this name in `registry` unless the name is taken. Returns true if the
// op of this name is a function op. Called without the interpreter's lock.
Result<bool> declare_function_op(OpRegistry& registry, const std::string& name);

// The names of the function ops of all registries. Guarded by the interpreter's lock.
std::set<std::string>& function_op_names();

// The function op of this name in a manager's registry; none if the name is an ordinary op's.
// Throws te_fl.NotFound, naming the nearest op, for an unknown name.
std::optional<OpId> find_function_op(OpManager& manager, PyObject* name);

// Runs the op on a tuple and a dict (or null), and returns the implementation's result.
Ref call_function_op(OpManager& manager, OpId op, PyObject* positional, PyObject* keywords);
// Describes how the call would be dispatched, without running it.
Result<Decision> resolve_function_op(OpManager& manager, OpId op, PyObject* positional,
                                     PyObject* keywords);

// The Python objects of the innermost function op call on this thread.
struct FunctionCall {
  PyObject* positional;  // a tuple
  PyObject* keywords;    // a dict, or null
  Ref result;            // written by the implementation that ran
};
FunctionCall& current_function_call() noexcept;

}  // namespace te_fl::python
