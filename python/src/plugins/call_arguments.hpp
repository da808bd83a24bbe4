// The arguments of a call, as an implementation in Python is handed them.
#pragma once

#include <memory>
#include <vector>

#include "ops/op_binding.hpp"
#include "py/lent_tensor.hpp"
#include "te_fl/plugin.h"

namespace te_fl::python {

// The arguments that a function of an implementation takes.
struct Wanted {
  std::vector<const BoundArg*> args;
  uint32_t context = 0;  // bits of what belongs to the call and not to the op: stream, seed, ..
};
// From a list of names. TypeError for one that is neither the op's nor the context's.
Wanted wanted_of(const OpBinding& op, PyObject* names);

// A dict of these keywords. `convert` makes of each tensor what the implementation wants; null:
// te_fl.LentTensor. Throws PythonError, or backend::Error where the call cannot be handed over,
// which then is UNSUPPORTED.
Ref call_arguments(const OpBinding& op, const Wanted& wanted, const te_fl_context& ctx,
                   const void* args, const std::shared_ptr<Lending>& lending, PyObject* convert);

}  // namespace te_fl::python
