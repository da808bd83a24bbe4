// A product with GELU or its gradient at the cost of the separate ops: the product goes to
// pre_gelu_out with the bias, or to scratch of pre_gelu_in's dtype, and the activation's kernels
// read that.
#pragma once

#include "gemm/gemm_choice.hpp"

namespace te_fl::cuda {

class Composed : public ComposedProduct {
 public:
  using ComposedProduct::ComposedProduct;
  // Bytes for the second step, beside the workspace of the first; a multiple of 256.
  size_t scratch_bytes() const;
  // Gives scratch its address, which the product's D may be.
  void bind(void* scratch);
  // The second step: enqueues what makes D, and d_sum, of the product.
  void activate(const te_fl_context& ctx) const;

 private:
  size_t product_bytes() const;

  char* scratch_ = nullptr;
};

}  // namespace te_fl::cuda
