// Decides which attention calls cuDNN computes. Reads metadata only; the returned reasons are
// static strings.
#pragma once

#include "plugin/families.hpp"
#include "te_fl/ops/attention.h"

namespace te_fl::cuda {

Refusal refuse_cudnn_forward(const te_fl_context& ctx, const te_fl_fused_attn_fwd_args& a);
Refusal refuse_cudnn_backward(const te_fl_context& ctx, const te_fl_fused_attn_bwd_args& a);
Refusal refuse_cudnn_enquiry(const te_fl_context& ctx, const te_fl_get_fused_attn_backend_args& a);

}  // namespace te_fl::cuda
