// A product of FP8 codes in 1x128 blocks on both sides, in a kernel of this plugin's own, on GPUs
// of compute capability 9.0 (block_gemm.cuh). cuBLASLt has one tile for those.
#pragma once

#include "gemm_plan.hpp"

namespace te_fl::cuda {

class BlockProduct {
 public:
  // Decides from metadata and addresses. `call` outlives this.
  BlockProduct(const te_fl_context& ctx, const te_fl_generic_gemm_args& call);
  // Whether the call is served so: a BF16 result and no epilogue, extents in multiples of the
  // kernel's tiles and large enough to keep the chip busy.
  explicit operator bool() const { return serves_; }

  void run(const te_fl_context& ctx) const;

 private:
  bool serves(const te_fl_context& ctx) const;

  const te_fl_generic_gemm_args& call_;
  Problem problem_;
  bool serves_ = false;
};

}  // namespace te_fl::cuda
