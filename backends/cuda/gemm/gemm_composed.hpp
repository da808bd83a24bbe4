// Computes a GEMM with GELU or its gradient in two steps. The GEMM, with the bias, writes to
// pre_gelu_out, or to scratch of pre_gelu_in's dtype. The kernels of the activation then read this
// result.
#pragma once

#include "gemm/gemm_choice.hpp"

namespace te_fl::cuda {

class Composed : public ComposedProduct {
 public:
  using ComposedProduct::ComposedProduct;
  // Returns the bytes of scratch for the second step, in addition to the GEMM's workspace; a
  // multiple of 256.
  size_t scratch_bytes() const;
  // Sets the address of the scratch. If the GEMM writes to scratch, also sets the address of its D.
  void bind(void* scratch);
  // Enqueues the second step, which computes D and d_sum from the result of the GEMM.
  void activate(const te_fl_context& ctx) const;

 private:
  size_t product_bytes() const;

  char* scratch_ = nullptr;
};

}  // namespace te_fl::cuda
