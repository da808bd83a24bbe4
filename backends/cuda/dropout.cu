// Dropout with a saved mask of one bit per element.
#include "te_fl/ops/dropout.h"

#include "families.hpp"
#include "overlap.hpp"
#include "random.cuh"
#include "store.cuh"

namespace te_fl::cuda {
namespace {

void check_mask(const te_fl_tensor& mask, int64_t elements) {
  const int64_t bytes = (elements + 7) / 8;
  if (mask.dl.ndim == 1 && mask.dl.shape[0] == bytes) return;
  backend::invalid("mask has " + std::to_string(backend::numel(mask)) + " bytes, expected shape [" +
                   std::to_string(bytes) + "]: one bit for each of the " +
                   std::to_string(elements) + " elements");
}

__global__ void __launch_bounds__(kThreads)
    forward_kernel(Source in, Target out, uint8_t* mask, int64_t size, float kept,
                   DropoutStream stream) {
  const int64_t groups = (size + kGroup - 1) / kGroup;
  for (int64_t g = blockIdx.x * int64_t{kThreads} + threadIdx.x; g < groups;
       g += int64_t{gridDim.x} * kThreads) {
    const int64_t first = g * kGroup;
    const int n = static_cast<int>(size - first < kGroup ? size - first : kGroup);
    const uint32_t bits = stream.keep_eight(first) & (n == kGroup ? 0xFFu : (1u << n) - 1u);
    float v[kGroup];
    in.load(first, n, v);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] = (bits >> i & 1u) != 0 ? v[i] / kept : 0.0f;
    out.store(first, n, v);
    mask[g] = static_cast<uint8_t>(bits);
  }
}

__global__ void __launch_bounds__(kThreads)
    backward_kernel(Source in, Target out, const uint8_t* mask, int64_t size, float kept) {
  const int64_t groups = (size + kGroup - 1) / kGroup;
  for (int64_t g = blockIdx.x * int64_t{kThreads} + threadIdx.x; g < groups;
       g += int64_t{gridDim.x} * kThreads) {
    const int64_t first = g * kGroup;
    const int n = static_cast<int>(size - first < kGroup ? size - first : kGroup);
    const uint32_t bits = mask[g];
    float v[kGroup];
    in.load(first, n, v);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] = (bits >> i & 1u) != 0 ? v[i] / kept : 0.0f;
    out.store(first, n, v);
  }
}

void dropout_fwd(const te_fl_context& ctx, const te_fl_dropout_fwd_args& a) {
  const int64_t n = backend::numel(*a.input);
  check_mask(*a.mask, n);
  if (n == 0) return;
  forward_kernel<<<blocks_for(ceil_div(n, kGroup)), kThreads, 0, stream_of(ctx)>>>(
      Source(*a.input), Target(*a.output), backend::data<uint8_t>(*a.mask), n,
      static_cast<float>(1.0 - a.p), DropoutStream(ctx.rng, a.p));
  check_launch("dropout_fwd");
}
void dropout_bwd(const te_fl_context& ctx, const te_fl_dropout_bwd_args& a) {
  const int64_t n = backend::numel(*a.grad_output);
  check_mask(*a.mask, n);
  if (n == 0) return;
  backward_kernel<<<blocks_for(ceil_div(n, kGroup)), kThreads, 0, stream_of(ctx)>>>(
      Source(*a.grad_output), Target(*a.grad_input), backend::data<const uint8_t>(*a.mask), n,
      static_cast<float>(1.0 - a.p));
  check_launch("dropout_bwd");
}
Refusal refuse_fwd(const te_fl_dropout_fwd_args& a) {
  if (!all_dense(a.input, a.output, a.mask)) return kNotContiguous;
  return overlaps_askew(*a.output, *a.input) ? kOverlaps : nullptr;
}
Refusal refuse_bwd(const te_fl_dropout_bwd_args& a) {
  if (!all_dense(a.grad_output, a.grad_input, a.mask)) return kNotContiguous;
  return overlaps_askew(*a.grad_input, *a.grad_output) ? kOverlaps : nullptr;
}

}  // namespace

void append_dropout(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(descriptor<te_fl_dropout_fwd_args, dropout_fwd, refuse_fwd>("dropout_fwd"));
  ops.push_back(descriptor<te_fl_dropout_bwd_args, dropout_bwd, refuse_bwd>("dropout_bwd"));
}

}  // namespace te_fl::cuda
