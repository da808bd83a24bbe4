// One product of generic_gemm in pieces, for ops that make several in a call: products that no
// activation follows (gemm_choice.hpp), so that each goes by the library, directly or by scratch.
#pragma once

#include "gemm/gemm_plan.hpp"
#include "te_fl/backend/refusal.hpp"

namespace te_fl::cuda {

// The reason for which the product is not served; static text.
backend::Refusal refuse_product(const te_fl_context& ctx, const te_fl_generic_gemm_args& args);

// Bytes of the call's workspace that enqueue_product() needs. `p` is problem_of(args).
size_t product_scratch(const te_fl_generic_gemm_args& args, const Problem& p);

// Enqueues the product on the call's stream. `plan` was made for such a problem; nullptr where
// there is nothing to multiply (runs_library()). Throws INVALID_ARGUMENT if the workspace is too
// small.
void enqueue_product(const te_fl_context& ctx, const te_fl_generic_gemm_args& args, Problem p,
                     const Plan* plan);

}  // namespace te_fl::cuda
