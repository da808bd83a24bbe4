// The steps of one generic_gemm call, for ops that compute several GEMMs per call. The GEMMs have
// no activation (gemm_choice.hpp), so each uses the direct or the general path.
#pragma once

#include "gemm/gemm_plan.hpp"
#include "te_fl/backend/refusal.hpp"

namespace te_fl::cuda {

// Returns why the GEMM is not supported, as static text; NULL if it is supported.
backend::Refusal refuse_product(const te_fl_context& ctx, const te_fl_generic_gemm_args& args);

// Returns the bytes of workspace that enqueue_product() needs. `p`: the result of
// make_problem(args).
size_t product_scratch(const te_fl_generic_gemm_args& args, const Problem& p);

// Enqueues the GEMM on the stream of `ctx`. `plan`: a plan made for a problem like `p`; NULL if
// M, N or K is 0 (runs_library() is false). Throws INVALID_ARGUMENT if the workspace
// is too small.
void enqueue_product(const te_fl_context& ctx, const te_fl_generic_gemm_args& args, Problem p,
                     const Plan* plan);

}  // namespace te_fl::cuda
