// The key of PlanCache. Plain C++, so tests run without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gemm/gemm_problem.hpp"

namespace te_fl::cuda {

// Contains everything that make_plan() reads of a GEMM without activation, residual and d_sum.
// Compared and hashed as bytes, so the struct has no padding.
struct PlanKey {
  int64_t m = 0, n = 0, k = 0;
  int32_t device = 0;
  uint32_t alignments = 0;  // of A, B and D: one byte each, as exponents of two
  uint32_t dtypes = 0;      // of A, B, D and the bias or its gradient: one byte each
  uint32_t flags = 0;

  PlanKey(int device, const te_fl_generic_gemm_args& args, const Problem& p);
  bool operator==(const PlanKey&) const = default;

  struct Hash {
    size_t operator()(const PlanKey& key) const noexcept;
  };
};

}  // namespace te_fl::cuda
