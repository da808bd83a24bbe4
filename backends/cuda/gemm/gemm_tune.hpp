// Measuring the algorithms of one product on the operands of a call.
#pragma once

#include <cublasLt.h>

#include <cstdint>
#include <string>
#include <vector>

#include "gemm/gemm_plan.hpp"

namespace te_fl::cuda {

// The fastest of the heuristic's algorithms `heuristic`, the first of which comes first, and of
// those around them (gemm_space.hpp), which are kept only if their results are the first one's.
// Runs the product of `matmul` with what it writes in scratch, so that the call itself finds all as
// it was; `key` is what the choice is kept under, `alignment` the least of the call's matrices, in
// bytes. Changes pointers in `matmul`, which run_plan() sets again. If measuring fails, the
// heuristic's first and a warning in the log; throws if the device is lost or the file cannot be
// written.
cublasLtMatmulAlgo_t tune_gemm(const te_fl_context& ctx, const te_fl_generic_gemm_args& args,
                               const Problem& p, Matmul& matmul, const std::string& key,
                               std::vector<cublasLtMatmulAlgo_t> heuristic, uint32_t alignment);

}  // namespace te_fl::cuda
