#pragma once

#include <cstddef>
#include <vector>

#include "core/op/op_error.hpp"
#include "core/op/op_table.hpp"

// Ops that choose the largest values of each row (core::OutputChoice).
namespace te_fl::dispatch {

// The rows, as true, in which another run chose other columns, or the same in another order, and is
// right too, because the keys of the chosen columns agree. `args`: the arguments of the reference
// run, in host memory; `distance`: in bytes, to the results of the other run.
std::vector<bool> equal_choices(const core::CompiledOp& op, const core::OutputChoice& choice,
                                const void* args, ptrdiff_t distance);

}  // namespace te_fl::dispatch
