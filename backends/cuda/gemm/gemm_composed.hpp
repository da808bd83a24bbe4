// Computes a product with GELU or its gradient in two steps. The product, with the bias, is written
// to pre_gelu_out, or to scratch of pre_gelu_in's dtype. The activation's kernels then read it.
#pragma once

#include "gemm/gemm_choice.hpp"

namespace te_fl::cuda {

class Composed : public ComposedProduct {
 public:
  using ComposedProduct::ComposedProduct;
  // Bytes of scratch for the second step, in addition to the product's workspace; a multiple of
  // 256.
  size_t scratch_bytes() const;
  // Sets the address of the scratch, which may become the product's D.
  void bind(void* scratch);
  // Enqueues the second step, which computes D and d_sum from the product.
  void activate(const te_fl_context& ctx) const;

 private:
  size_t product_bytes() const;

  char* scratch_ = nullptr;
};

}  // namespace te_fl::cuda
