// The op families of this backend and the functions that append their descriptors.
#pragma once

#include <type_traits>
#include <vector>

#include "device/cuda_check.hpp"
#include "te_fl/backend/refusal.hpp"

namespace te_fl::cuda {

using backend::Refusal;

template <class Args, auto F>
te_fl_status run(void*, const te_fl_context* ctx, const void* raw) noexcept {
  return backend::guard(ctx->errors, [&] {
    refuse_after_fork();
    const backend::Widened<Args> args(raw);
    const DeviceGuard guard(ctx->device.index);
    F(*ctx, *args);
  });
}

// The descriptor of one op, which is run by `void F(const te_fl_context&, const Args&)`. Refuses: a
// function `Refusal (const Args&)` or `Refusal (const te_fl_context&, const Args&)` that returns
// why a call is not supported; or nullptr if the op supports every call that the schema and the
// constraints allow. By default the op is marked as deterministic and capturable; the caller may
// clear these flags.
template <class Args, auto F, auto Refuses = nullptr>
te_fl_op_desc descriptor(const char* op_name) {
  te_fl_op_desc desc;
  desc.op_name = op_name;
  desc.impl_id = "vendor.cuda";
  desc.kind = TE_FL_KIND_VENDOR;
  desc.flags =
      TE_FL_OP_THREAD_SAFE | TE_FL_OP_GRAPH_SAFE | TE_FL_OP_DETERMINISTIC | TE_FL_OP_IN_PLACE_OK;
  desc.device_types = uint64_t{1} << TE_FL_DEVICE_CUDA;
  desc.run = run<Args, F>;
  if constexpr (Refuses == nullptr) {
    desc.flags |= TE_FL_OP_STATIC_SUPPORT;
  } else {
    desc.supports = backend::refusal_thunk<Args, Refuses>;
  }
  return desc;
}

// Each function appends the descriptors of one family and is defined in <family>.cu or .cpp.
void append_activation(std::vector<te_fl_op_desc>& ops);
void append_scaled_activation(std::vector<te_fl_op_desc>& ops);
void append_quantize(std::vector<te_fl_op_desc>& ops);
void append_quantize_lists(std::vector<te_fl_op_desc>& ops);
void append_dequantize(std::vector<te_fl_op_desc>& ops);
void append_scale_update(std::vector<te_fl_op_desc>& ops);
void append_tensor(std::vector<te_fl_op_desc>& ops);
void append_copies(std::vector<te_fl_op_desc>& ops);  // append_tensor calls this and append_fills
void append_fills(std::vector<te_fl_op_desc>& ops);
void append_dropout(std::vector<te_fl_op_desc>& ops);
void append_optimizer(std::vector<te_fl_op_desc>& ops);
void append_softmax(std::vector<te_fl_op_desc>& ops);
void append_gemm(std::vector<te_fl_op_desc>& ops);
void append_grouped_gemm(std::vector<te_fl_op_desc>& ops);  // append_gemm calls this
// `kernel`: the plugin's kernel may run groups. `streams`: the value of TE_FL_CUDA_GROUPED_STREAMS,
// which the host has checked. NULL: the default.
void configure_grouped_gemm(bool kernel, const char* streams);
void append_moe(std::vector<te_fl_op_desc>& ops);
void append_chunks(std::vector<te_fl_op_desc>& ops);
void append_permute_by_mask(std::vector<te_fl_op_desc>& ops);
void append_router(std::vector<te_fl_op_desc>& ops);
void append_norm(std::vector<te_fl_op_desc>& ops);
// `most_scratch`: maximum bytes that an attention backward uses to keep values that it would
// otherwise compute twice. Call it before the first attention call.
void configure_attention(size_t most_scratch);
void append_attention(std::vector<te_fl_op_desc>& ops);
void append_rope(std::vector<te_fl_op_desc>& ops);
void append_collectives(std::vector<te_fl_op_desc>& ops);

class CudnnState;
// Attention on cuDNN. `state` must outlive the descriptors.
void append_attention_cudnn(std::vector<te_fl_op_desc>& ops, CudnnState& state);

}  // namespace te_fl::cuda
