#pragma once

#include <functional>

#include "mutable_call.hpp"
#include "mutation.hpp"

namespace te_fl::mutants {

// Runs the op with these arguments and this context.
using RunOp = std::function<te_fl_status(const te_fl_context&, const void*)>;

// Runs the op with the mutation's error.
te_fl_status run_wrong(const Mutation& mutation, const te_fl_context& ctx, MutableCall& call,
                       const RunOp& run);

// As run_wrong(), and runs the op without the error too. `changed`: true if any bit of an output
// differs between the two. The outputs are those with the error.
te_fl_status run_both(const Mutation& mutation, const te_fl_context& ctx, MutableCall& call,
                      const RunOp& run, bool& changed);

}  // namespace te_fl::mutants
