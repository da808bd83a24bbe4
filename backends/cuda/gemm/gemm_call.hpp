// The steps of one generic_gemm product, for ops that compute several products per call. The
// products have no activation (gemm_choice.hpp), so each takes the direct or the general path.
#pragma once

#include "gemm/gemm_plan.hpp"
#include "te_fl/backend/refusal.hpp"

namespace te_fl::cuda {

// Returns why the product is not supported; static text. NULL if it is supported.
backend::Refusal refuse_product(const te_fl_context& ctx, const te_fl_generic_gemm_args& args);

// Bytes of the call's workspace that enqueue_product() needs. `p` is problem_of(args).
size_t product_scratch(const te_fl_generic_gemm_args& args, const Problem& p);

// Enqueues the product on the call's stream. `plan` must have been made for such a problem; NULL if
// there is nothing to multiply (runs_library()). Throws INVALID_ARGUMENT if the workspace is too
// small.
void enqueue_product(const te_fl_context& ctx, const te_fl_generic_gemm_args& args, Problem p,
                     const Plan* plan);

}  // namespace te_fl::cuda
