// Scaled dot-product attention as cuDNN graphs. The library knows the pattern and runs it as one
// fused kernel (forward) or three (backward).
#pragma once

#include "attention/cudnn_graph.hpp"
#include "te_fl/attention/mask.hpp"

namespace te_fl::cuda {

// A plan depends on these. Strides are of [batch, heads, seqlen, dim], in elements, the last 1.
struct CudnnAttention {
  int64_t batch = 0, heads = 0, kv_heads = 0, seqlen_q = 0, seqlen_kv = 0, dim = 0, dim_v = 0;
  int dtype = 0;  // cudnn_data; of FP8 q, k, v and o: kE4M3
  Extents q{}, k{}, v{}, o{};
  Extents d_o{}, dq{}, dk{}, dv{};  // backward
  bool stats = false;               // forward: write the log-sum-exp; the backward reads it
  bool lengths = false;             // each sequence has its own, kLengthsQ and kLengthsKv
  bool ragged = false;              // sequences start at offsets (thd); then lengths too
  bool deterministic = false;       // backward
  backend::MaskRule mask;
  float scale = 1;
};

// Tensors that a plan binds. Offsets are int64 [batch + 1], in elements; lengths int32 [batch]; the
// statistics FP32 [batch, heads, seqlen_q], ragged: [tokens, heads].
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
  kAccumulator,  // backward, unless deterministic: scratch, FP32 [batch, heads, seqlen_q, dim]
  kOffsets,      // + the id of the tensor
  // FP8: FP32 [1] each. Codes times kInverse + the id of the tensor are its numbers; numbers times
  // kScale + id are its codes; kAmax + id gets the largest number. kP and kDS are the probabilities
  // and the scaled scores' gradient, which stay inside.
  kP = kOffsets + 16,
  kDS,
  kInverse = 64,
  kScale = 96,
  kAmax = 128,
};
}  // namespace attention_id

// Throw UNSUPPORTED if the library has no plan. `device_properties`: CudnnState::properties.
CudnnPlan attention_forward_plan(const CudnnAttention& p, void* device_properties);
CudnnPlan attention_backward_plan(const CudnnAttention& p, void* device_properties);
// The dtypes in FP8, by tensor: q, k, v, o and the probabilities in E4M3, d_o, dq, dk, dv and the
// scores' gradient in E5M2. kSum and kAccumulator are not bound.
CudnnPlan attention_fp8_forward_plan(const CudnnAttention& p, void* device_properties);
CudnnPlan attention_fp8_backward_plan(const CudnnAttention& p, void* device_properties);

}  // namespace te_fl::cuda
