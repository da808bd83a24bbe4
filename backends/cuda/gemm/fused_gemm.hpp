// A product with GELU or GELU's gradient in one kernel of this plugin's own, on GPUs of compute
// capability 9.0 (fused_gemm.cuh).
#pragma once

#include "gemm/gemm_choice.hpp"

namespace te_fl::cuda {

// Serves BF16, and forward FP8 without the split accumulator (into an output that finds its own
// scale, the kernel finds the amax, and a pass over pre_gelu_out writes the codes); extents in
// multiples of the kernel's tiles and large enough to keep the chip busy.
class FusedProduct {
 public:
  // `path` is choose_gemm()'s for the call, of kind kFused. Both outlive this.
  FusedProduct(const te_fl_generic_gemm_args& call, const GemmPath& path)
      : call_(call), problem_(path.problem), form_(path.form) {}

  size_t scratch_bytes() const;  // a multiple of 256
  void run(const te_fl_context& ctx, void* scratch) const;

 private:
  const te_fl_generic_gemm_args& call_;
  const Problem& problem_;
  FusedForm form_;
};

}  // namespace te_fl::cuda
