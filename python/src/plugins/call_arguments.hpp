// Converts the arguments of a C++ call for an implementation written in Python.
#pragma once

#include <memory>
#include <vector>

#include "ops/op_binding.hpp"
#include "py/lent_tensor.hpp"
#include "te_fl/plugin.h"

namespace te_fl::python {

// The arguments that an implementation's function takes.
struct Wanted {
  std::vector<const BoundArg*> args;
  uint32_t context = 0;  // bits of the call's own arguments: stream, seed, ..
};
// Builds a Wanted from a list of names. Throws TypeError for a name that is neither an argument of
// the op nor a context argument.
Wanted find_wanted(const OpBinding& op, PyObject* names);

// A dict of these keyword arguments. `convert` converts each tensor to the implementation's type;
// null: te_fl.LentTensor. Throws PythonError, or backend::Error with UNSUPPORTED if an argument
// cannot be passed.
Ref call_arguments(const OpBinding& op, const Wanted& wanted, const te_fl_context& ctx,
                   const void* args, const std::shared_ptr<Lending>& lending, PyObject* convert);

}  // namespace te_fl::python
