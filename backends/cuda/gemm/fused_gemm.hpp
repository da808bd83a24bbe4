// A product with GELU or GELU's gradient in one kernel of this plugin's own, on GPUs of compute
// capability 9.0 (fused_gemm.cuh).
#pragma once

#include "gemm/gemm_plan.hpp"

namespace te_fl::cuda {

class FusedProduct {
 public:
  // Decides from metadata and addresses. `call` outlives this.
  FusedProduct(const te_fl_context& ctx, const te_fl_generic_gemm_args& call);
  // Whether the call is served so: BF16, or forward FP8 without the split accumulator (into an
  // output that finds its own scale, the kernel finds the amax, and a pass over pre_gelu_out writes
  // the codes); extents in multiples of the kernel's tiles and large enough to keep the chip busy.
  explicit operator bool() const { return form_ != Form::kNone; }
  const char* refusal() const { return refusal_; }  // or why not; static text

  size_t scratch_bytes() const;  // a multiple of 256
  void run(const te_fl_context& ctx, void* scratch) const;

 private:
  enum class Form { kNone, kForward, kForwardCodes, kForwardMeasured, kBackward };
  const char* refuse(const te_fl_context& ctx) const;
  const char* refuse_operands() const;
  const char* refuse_result() const;
  Form form_of() const;
  bool finds_scale() const;

  const te_fl_generic_gemm_args& call_;
  Problem problem_;
  const char* refusal_ = nullptr;
  Form form_ = Form::kNone;
};

}  // namespace te_fl::cuda
