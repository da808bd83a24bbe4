// Measures cuBLASLt's algorithms for one GEMM on the operands of a call.
#pragma once

#include <cublasLt.h>

#include <cstdint>
#include <string>
#include <vector>

#include "gemm/gemm_plan.hpp"

namespace te_fl::cuda {

// Returns the fastest of the `heuristic` algorithms and their variations (gemm_space.hpp).
// Algorithms whose results differ from those of the heuristic's first are excluded. Runs the GEMM
// of `matmul` with its outputs in scratch, so the call's outputs are unchanged. `key`: the key
// under which the choice is stored. `alignment`: the least alignment of the call's matrices, in
// bytes. Changes pointers in `matmul`; run_plan() sets them again. If measuring fails, logs a
// warning and returns the heuristic's first. Throws if the device is lost or the file cannot be
// written.
cublasLtMatmulAlgo_t tune_gemm(const te_fl_context& ctx, const te_fl_generic_gemm_args& args,
                               const Problem& p, Matmul& matmul, const std::string& key,
                               std::vector<cublasLtMatmulAlgo_t> heuristic, uint32_t alignment);

}  // namespace te_fl::cuda
