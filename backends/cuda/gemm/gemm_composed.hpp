// A product with GELU or its gradient at the cost of the separate ops: the product goes to
// pre_gelu_out with the bias, or to scratch of pre_gelu_in's dtype, and the activation's kernels
// read that.
#pragma once

#include "te_fl/backend.hpp"
#include "te_fl/ops/gemm.h"

namespace te_fl::cuda {

class Composed {
 public:
  // Decides from metadata. `call` outlives this.
  explicit Composed(const te_fl_generic_gemm_args& call);
  Composed(const Composed&) = delete;
  Composed& operator=(const Composed&) = delete;

  // Whether the call is served so: the pre-activation is not quantised, and FP32, of D's dtype or
  // beside a quantised D; nothing is added to the result, and only a gradient's columns are summed.
  explicit operator bool() const { return composed_; }

  // The first step. Its D may be scratch, whose address comes with bind().
  const te_fl_generic_gemm_args& product() const { return product_; }
  // Of the second step, beside the workspace of the first; multiples of 256.
  size_t scratch_bytes() const;
  void bind(void* scratch);
  // The second step: enqueues what makes D, and d_sum, of the product.
  void activate(const te_fl_context& ctx) const;

 private:
  bool forward() const { return call_.gelu != 0; }
  size_t product_bytes() const;

  const te_fl_generic_gemm_args& call_;
  te_fl_generic_gemm_args product_{};
  te_fl_tensor rounded_{};  // the product in scratch
  char* scratch_ = nullptr;
  bool composed_ = false;
};

}  // namespace te_fl::cuda
