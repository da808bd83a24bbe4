// Scaled dot-product attention as cuDNN graphs. cuDNN recognises the pattern and runs it as one
// fused kernel (forward) or three kernels (backward).
#pragma once

#include "attention/cudnn_graph.hpp"
#include "te_fl/attention/mask.hpp"

namespace te_fl::cuda {

// The properties of an attention call that determine its plan. q, k, v, ... hold the strides of
// [batch, heads, seqlen, dim], in elements; the stride of `dim` is 1.
struct CudnnAttention {
  int64_t batch = 0, heads = 0, kv_heads = 0, seqlen_q = 0, seqlen_kv = 0, dim = 0, dim_v = 0;
  int dtype = 0;  // a value of cudnn_data; kE4M3 if q, k, v and o are FP8
  Extents q{}, k{}, v{}, o{};
  Extents d_o{}, dq{}, dk{}, dv{};  // used by the backward only
  bool stats = false;               // forward: writes the log-sum-exp, which the backward reads
  bool lengths = false;             // sequence lengths differ: binds kLengthsQ and kLengthsKv
  bool ragged = false;              // sequences start at offsets (thd); implies `lengths`
  bool deterministic = false;       // used by the backward only
  backend::MaskRule mask;
  float scale = 1;
};

// Ids of the tensors that a run binds. Offsets are int64 [batch + 1], in elements. Lengths are
// int32 [batch]. The statistics are FP32 [batch, heads, seqlen_q]; ragged: [tokens, heads].
namespace attention_id {
enum {
  kQ = 1,
  kK,
  kV,
  kO,
  kStats,
  kDO,
  kDQ,
  kDK,
  kDV,
  kLengthsQ,
  kLengthsKv,
  kSum,          // backward: scratch, FP32 [batch, heads, seqlen_q]
  kAccumulator,  // non-deterministic backward: scratch, FP32 [batch, heads, seqlen_q, dim]
  kOffsets,      // id = kOffsets + the id of the tensor
  // FP32 scalars of FP8 tensors. The tensor with id t has the inverse scale kInverse + t (value =
  // code * inverse scale), the scale kScale + t (code = value * scale), and kAmax + t, which
  // receives its amax. kP (the probabilities) and kDS (the gradient of the scaled scores) are
  // intermediate tensors of the graph.
  kP = kOffsets + 16,
  kDS,
  kInverse = 64,
  kScale = 96,
  kAmax = 128,
};
}  // namespace attention_id

// Build a plan. Throw UNSUPPORTED if cuDNN has none. `device_properties`: CudnnState::properties().
CudnnPlan attention_forward_plan(const CudnnAttention& p, void* device_properties);
CudnnPlan attention_backward_plan(const CudnnAttention& p, void* device_properties);
// The FP8 plans. q, k, v, o and the probabilities are E4M3; d_o, dq, dk, dv and the gradient of the
// scores are E5M2. kSum and kAccumulator are not bound.
CudnnPlan attention_fp8_forward_plan(const CudnnAttention& p, void* device_properties);
CudnnPlan attention_fp8_backward_plan(const CudnnAttention& p, void* device_properties);

}  // namespace te_fl::cuda
