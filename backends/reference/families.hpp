// The op families of this backend and the functions that append their descriptors.
#pragma once

#include <vector>

#include "te_fl/backend.hpp"

namespace te_fl::reference {

constexpr uint64_t kHostDevices = (uint64_t{1} << TE_FL_DEVICE_CPU) |
                                  (uint64_t{1} << TE_FL_DEVICE_CUDA_HOST) |
                                  (uint64_t{1} << TE_FL_DEVICE_ROCM_HOST);

// The descriptor of one op, which is run by `void F(const te_fl_context&, const Args&)`. The
// reference supports every call that the schema allows, so it refuses none.
template <class Args, auto F>
te_fl_op_desc descriptor(const char* op_name) {
  te_fl_op_desc desc;
  desc.op_name = op_name;
  desc.impl_id = "reference.host";
  desc.kind = TE_FL_KIND_REFERENCE;
  desc.flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_DETERMINISTIC | TE_FL_OP_IN_PLACE_OK |
               TE_FL_OP_STATIC_SUPPORT;
  desc.device_types = kHostDevices;
  desc.run = backend::run_thunk<Args, F>;
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
void append_softmax(std::vector<te_fl_op_desc>& ops);
void append_attention(std::vector<te_fl_op_desc>& ops);
void append_rope(std::vector<te_fl_op_desc>& ops);
void append_dropout(std::vector<te_fl_op_desc>& ops);
void append_optimizer(std::vector<te_fl_op_desc>& ops);
void append_collective(std::vector<te_fl_op_desc>& ops);

}  // namespace te_fl::reference
