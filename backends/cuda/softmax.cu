// Scaled softmax: unmasked, with a mask tensor, upper-triangular and aligned causal. One row of
// scores for each block.
#include "te_fl/ops/softmax.h"

#include "families.hpp"
#include "overlap.hpp"
#include "store.cuh"

namespace te_fl::cuda {
namespace {

// Which keys a row sees.
struct Visible {
  int64_t queries = 1, keys = 0, heads = 1;
  bool causal = false;            // aligned at the bottom right
  const uint8_t* mask = nullptr;  // not 0: masked out
  int64_t mask_strides[4] = {};

  __device__ int64_t count(int64_t row) const {
    if (!causal) return keys;
    const int64_t seen = row % queries + keys - queries + 1;
    return seen < 0 ? 0 : seen;
  }
  __device__ const uint8_t* mask_row(int64_t row) const {
    if (mask == nullptr) return nullptr;
    const int64_t head = row / queries;
    return mask + head / heads * mask_strides[0] + head % heads * mask_strides[1] +
           row % queries * mask_strides[2];
  }
};

__device__ float reduce_max(float v) {
  __shared__ float parts[kThreads / 32];
  const auto pick = [](float a, float b) { return isnan(a) || isnan(b) ? NAN : fmaxf(a, b); };
  for (int step = 16; step > 0; step /= 2) v = pick(v, __shfl_xor_sync(0xFFFFFFFFu, v, step));
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  v = parts[0];
  for (int i = 1; i < kThreads / 32; ++i) v = pick(v, parts[i]);
  return v;
}
__device__ float reduce_sum(float v) {
  __shared__ float parts[kThreads / 32];
  v = warp_sum(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  float total = 0.0f;
  for (int i = 0; i < kThreads / 32; ++i) total += parts[i];
  return total;
}

__global__ void __launch_bounds__(kThreads)
    forward_kernel(Source in, Target out, Visible visible, float scale, int64_t rows) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t count = visible.count(row), begin = row * visible.keys;
    const uint8_t* mask = visible.mask_row(row);
    const int64_t step = visible.mask_strides[3];
    const auto hidden = [&](int64_t k) { return mask != nullptr && mask[k * step] != 0; };
    float top = -INFINITY;
    for (int64_t k = threadIdx.x; k < count; k += kThreads) {
      if (hidden(k)) continue;
      const float v = scale * in.at(begin + k);
      if (isnan(v) || isnan(top)) {
        top = NAN;
      } else {
        top = fmaxf(top, v);
      }
    }
    top = reduce_max(top);
    float sum = 0.0f;
    for (int64_t k = threadIdx.x; k < count; k += kThreads) {
      if (!hidden(k)) sum += expf(fmaf(scale, in.at(begin + k), -top));
    }
    sum = reduce_sum(sum);
    const bool empty = top == -INFINITY;  // fully masked
    for (int64_t k = threadIdx.x; k < visible.keys; k += kThreads) {
      float v = 0.0f;
      if (k < count && !empty && !hidden(k)) v = expf(fmaf(scale, in.at(begin + k), -top)) / sum;
      out.store(begin + k, 1, &v);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    backward_kernel(Source grad, Source results, Target out, Visible visible, float scale,
                    int64_t rows) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t count = visible.count(row), begin = row * visible.keys;
    float dot = 0.0f;
    for (int64_t k = threadIdx.x; k < count; k += kThreads) {
      dot = fmaf(grad.at(begin + k), results.at(begin + k), dot);
    }
    dot = reduce_sum(dot);
    for (int64_t k = threadIdx.x; k < visible.keys; k += kThreads) {
      float v = 0.0f;
      if (k < count) v = scale * results.at(begin + k) * (grad.at(begin + k) - dot);
      out.store(begin + k, 1, &v);
    }
  }
}

Visible visible_of(const te_fl_tensor& t, bool causal) {
  Visible v;
  v.queries = t.dl.shape[t.dl.ndim - 2];
  v.keys = t.dl.shape[t.dl.ndim - 1];
  v.heads = t.dl.ndim == 4 ? t.dl.shape[1] : 1;
  v.causal = causal;
  return v;
}
void forward(const te_fl_context& ctx, const te_fl_tensor& in, const te_fl_tensor& out, float scale,
             const Visible& visible) {
  const int64_t rows = backend::as_matrix(in).rows;
  if (rows == 0 || visible.keys == 0) return;
  forward_kernel<<<blocks_for(rows, 1), kThreads, 0, stream_of(ctx)>>>(Source(in), Target(out),
                                                                       visible, scale, rows);
  check_launch("softmax_forward");
}
template <bool kCausal, class Args>
void plain_forward(const te_fl_context& ctx, const Args& a) {
  forward(ctx, *a.input, *a.output, a.scale, visible_of(*a.input, kCausal));
}
void masked_forward(const te_fl_context& ctx, const te_fl_softmax_masked_args& a) {
  Visible visible = visible_of(*a.input, false);
  visible.mask = backend::data<const uint8_t>(*a.mask);
  for (int i = 0; i < 4; ++i) {
    visible.mask_strides[i] = a.mask->dl.shape[i] == 1 ? 0 : backend::stride(*a.mask, i);
  }
  forward(ctx, *a.input, *a.output, a.scale, visible);
}
template <bool kCausal, class Args>
void backward(const te_fl_context& ctx, const Args& a) {
  const int64_t rows = backend::as_matrix(*a.output_grad).rows;
  const Visible visible = visible_of(*a.output_grad, kCausal);
  if (rows == 0 || visible.keys == 0) return;
  backward_kernel<<<blocks_for(rows, 1), kThreads, 0, stream_of(ctx)>>>(
      Source(*a.output_grad), Source(*a.softmax_results), Target(*a.input_grad), visible, a.scale,
      rows);
  check_launch("softmax_backward");
}

template <class Args>
Refusal refuse_forward(const Args& a) {
  if (!all_dense(a.input, a.output)) return kNotContiguous;
  return overlaps_askew(*a.output, *a.input) ? kOverlaps : nullptr;
}
template <class Args>
Refusal refuse_backward(const Args& a) {
  if (!all_dense(a.output_grad, a.softmax_results, a.input_grad)) return kNotContiguous;
  const bool askew = overlaps_askew(*a.input_grad, *a.output_grad) ||
                     overlaps_askew(*a.input_grad, *a.softmax_results);
  return askew ? kOverlaps : nullptr;
}

template <class Args, bool kCausal>
te_fl_op_desc forward_descriptor(const char* name) {
  return descriptor<Args, plain_forward<kCausal, Args>, refuse_forward<Args>>(name);
}
template <class Args, bool kCausal>
te_fl_op_desc backward_descriptor(const char* name) {
  return descriptor<Args, backward<kCausal, Args>, refuse_backward<Args>>(name);
}

}  // namespace

void append_softmax(std::vector<te_fl_op_desc>& ops) {
  using Fwd4 = te_fl_softmax_fwd4_args;
  using Bwd4 = te_fl_softmax_bwd4_args;
  using Masked = te_fl_softmax_masked_args;
  using Fwd3 = te_fl_scaled_upper_triang_masked_softmax_forward_args;
  using Bwd3 = te_fl_scaled_upper_triang_masked_softmax_backward_args;
  ops.push_back(forward_descriptor<Fwd4, false>("scaled_softmax_forward"));
  ops.push_back(backward_descriptor<Bwd4, false>("scaled_softmax_backward"));
  ops.push_back(
      descriptor<Masked, masked_forward, refuse_forward<Masked>>("scaled_masked_softmax_forward"));
  ops.push_back(backward_descriptor<Bwd4, false>("scaled_masked_softmax_backward"));
  ops.push_back(forward_descriptor<Fwd3, true>("scaled_upper_triang_masked_softmax_forward"));
  ops.push_back(backward_descriptor<Bwd3, true>("scaled_upper_triang_masked_softmax_backward"));
  ops.push_back(forward_descriptor<Fwd4, true>("scaled_aligned_causal_masked_softmax_forward"));
  ops.push_back(backward_descriptor<Bwd4, true>("scaled_aligned_causal_masked_softmax_backward"));
}

}  // namespace te_fl::cuda
