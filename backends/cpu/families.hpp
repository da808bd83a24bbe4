// The op families of this backend and the functions that append their descriptors.
#pragma once

#include <vector>

#include "te_fl/backend/refusal.hpp"

namespace te_fl::cpu {

using backend::Refusal;

// The descriptor of one op, which is run by `void F(const te_fl_context&, const Args&)`. Refuses: a
// function `Refusal (const Args&)` that returns why a call is not supported, or nullptr if the op
// supports every call that the schema and the constraints allow.
template <class Args, auto F, auto Refuses = nullptr>
te_fl_op_desc descriptor(const char* op_name) {
  te_fl_op_desc desc;
  desc.op_name = op_name;
  desc.impl_id = "default.cpu";
  desc.kind = TE_FL_KIND_DEFAULT;
  desc.flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_DETERMINISTIC | TE_FL_OP_IN_PLACE_OK;
  desc.device_types = (uint64_t{1} << TE_FL_DEVICE_CPU) | (uint64_t{1} << TE_FL_DEVICE_CUDA_HOST) |
                      (uint64_t{1} << TE_FL_DEVICE_ROCM_HOST);
  desc.run = backend::run_thunk<Args, F>;
  if constexpr (Refuses == nullptr) {
    desc.flags |= TE_FL_OP_STATIC_SUPPORT;
  } else {
    desc.supports = backend::refusal_thunk<Args, Refuses>;
  }
  return desc;
}

// Each function appends the descriptors of one family and is defined in <family>.cpp.
void append_gemm(std::vector<te_fl_op_desc>& ops);
void append_moe(std::vector<te_fl_op_desc>& ops);
void append_chunks(std::vector<te_fl_op_desc>& ops);
void append_router(std::vector<te_fl_op_desc>& ops);
void append_quantize(std::vector<te_fl_op_desc>& ops);
void append_activation(std::vector<te_fl_op_desc>& ops);
void append_scaled_activation(std::vector<te_fl_op_desc>& ops);
void append_norm(std::vector<te_fl_op_desc>& ops);
void append_tensor(std::vector<te_fl_op_desc>& ops);
void append_optimizer(std::vector<te_fl_op_desc>& ops);
void append_attention(std::vector<te_fl_op_desc>& ops);
void append_softmax(std::vector<te_fl_op_desc>& ops);
void append_rope(std::vector<te_fl_op_desc>& ops);
void append_dropout(std::vector<te_fl_op_desc>& ops);

}  // namespace te_fl::cpu
