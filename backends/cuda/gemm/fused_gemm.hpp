// A GEMM with GELU or GELU's gradient in a single kernel of this plugin, for GPUs of compute
// capability 9.0 (fused_gemm.cuh).
#pragma once

#include "gemm/gemm_choice.hpp"

namespace te_fl::cuda {

// Accepts BF16 operands, and FP8 operands in the forward without the split accumulator. Extents
// must be multiples of the kernel's tiles and large enough to occupy the GPU. If the output's scale
// is computed, the kernel finds the amax, and a second kernel quantises GELU of pre_gelu_out.
class FusedProduct {
 public:
  // `path`: the result of choose_gemm() for the call, of kind kFused. `call` and `path` must
  // outlive this object.
  FusedProduct(const te_fl_generic_gemm_args& call, const GemmPath& path)
      : call_(call), problem_(path.problem), form_(path.form) {}

  size_t scratch_bytes() const;  // returns a multiple of 256
  void run(const te_fl_context& ctx, void* scratch) const;

 private:
  const te_fl_generic_gemm_args& call_;
  const Problem& problem_;
  FusedForm form_;
};

}  // namespace te_fl::cuda
