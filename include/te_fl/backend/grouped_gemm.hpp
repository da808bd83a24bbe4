#pragma once

// Helpers for backends with grouped_gemm. They express one GEMM of the group as a call of
// generic_gemm, so that a backend that computes one GEMM at a time can run the whole group.
// Header-only.

#include "te_fl/backend.hpp"
#include "te_fl/ops/gemm.h"

namespace te_fl::backend {

// Returns the arguments of generic_gemm for GEMM i of the group, 0 <= i < args.a_count. `args` has
// passed the checks of grouped_gemm. The result points to the group's tensors.
inline te_fl_generic_gemm_args product_of(const te_fl_grouped_gemm_args& args, int64_t i) noexcept {
  te_fl_generic_gemm_args product;
  product.a = args.a[i];
  product.b = args.b[i];
  product.d = args.d[i];
  product.bias = args.bias_count > 0 ? args.bias[i] : nullptr;
  product.bias_grad = args.bias_grad_count > 0 ? args.bias_grad[i] : nullptr;
  product.trans_a = args.trans_a;
  product.trans_b = args.trans_b;
  product.accumulate = args.accumulate;
  product.accumulate_bias_grad = args.accumulate_bias_grad;
  product.use_split_accumulator = args.use_split_accumulator;
  product.alpha = args.alpha;
  product.beta = args.beta;
  return product;
}

// True if the GEMM writes nothing: D is empty, and there is no bias gradient.
inline bool writes_nothing(const te_fl_generic_gemm_args& product) noexcept {
  return numel(*product.d) == 0 && product.bias_grad == nullptr;
}

}  // namespace te_fl::backend
