// Ops outside the catalogue whose arguments and results are Python objects: whatever their
// implementations, functions in Python, take and return. To the core such an op has one argument,
// the number of its call; the objects wait on the calling thread, where the chosen implementation
// runs.
#pragma once

#include <optional>
#include <set>
#include <string>

#include "py/py.hpp"
#include "te_fl/op_manager.hpp"

namespace te_fl::python {

bool is_function_op(const te_fl_op_schema& schema) noexcept;

// Sees to it that `registry` has an op of this name, without the interpreter's lock: one that is
// there stays what it is, another becomes a function op. True if it is one.
Result<bool> declare_function_op(OpRegistry& registry, const std::string& name);

// Those of all registries, guarded by the interpreter's lock.
std::set<std::string>& function_op_names();

// The function op of a manager's registry; none if the name is another op's. Throws te_fl.NotFound,
// naming the nearest op, if it is nobody's.
std::optional<OpId> find_function_op(OpManager& manager, PyObject* name);

// Runs it on a tuple and a dict (or null); what the implementation returned.
Ref call_function_op(OpManager& manager, OpId op, PyObject* positional, PyObject* keywords);
// The way that the call would be routed.
Result<Decision> resolve_function_op(OpManager& manager, OpId op, PyObject* positional,
                                     PyObject* keywords);

// The objects of the innermost such call on this thread.
struct FunctionCall {
  PyObject* positional;  // a tuple
  PyObject* keywords;    // a dict, or null
  Ref result;            // of the implementation that served it
};
FunctionCall& current_function_call() noexcept;

}  // namespace te_fl::python
