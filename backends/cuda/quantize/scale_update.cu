// The delayed-scaling update. One launch processes as many amax histories as fit the kernel
// parameters.
#include <cfloat>
#include <cmath>

#include "common/element.cuh"
#include "common/overlap.hpp"
#include "optimizer/list_choice.hpp"
#include "plugin/families.hpp"
#include "te_fl/backend/describe.hpp"
#include "te_fl/numeric.hpp"
#include "te_fl/ops/quantize.h"

namespace te_fl::cuda {
namespace {

constexpr int kSlots = 8;    // tensors of a history per block
constexpr int kAtOnce = 16;  // history entries per thread

struct History {
  float* entries;  // shape [length, tensors]
  float* scale;    // shape [tensors]
  int64_t length, tensors;
  int64_t first;         // index of its first tensor in the reduced amaxes
  unsigned first_block;  // the history's first block in the launch
};
template <int kCapacity>
struct Histories {
  History items[kCapacity];
  int count;
};

// Thread (y, t) processes entries y, y + rows, ... of tensor t. Entry r receives the value of entry
// r + 1, which may belong to another thread. This is safe: in each iteration all reads precede all
// writes, and later iterations read only entries after those already written.
template <int kCapacity>
__global__ void __launch_bounds__(kThreads)
    scale_update_kernel(const __grid_constant__ Histories<kCapacity> all, const float* reduced,
                        numeric::DelayedScalingRule rule) {
  __shared__ float largest_of[kThreads];
  int which = 0;
  for (int below = all.count - 1; which < below;) {
    const int middle = (which + below + 1) / 2;
    if (all.items[middle].first_block <= blockIdx.x) {
      which = middle;
    } else {
      below = middle - 1;
    }
  }
  const History& h = all.items[which];
  const int64_t slot0 = int64_t{blockIdx.x - h.first_block} * kSlots;
  const int slots = static_cast<int>(h.tensors - slot0 < kSlots ? h.tensors - slot0 : kSlots);
  const int rows = kThreads / slots, thread = static_cast<int>(threadIdx.x);
  const int y = thread / slots, t = thread - y * slots;
  const bool active = y < rows;
  float* column = h.entries + slot0 + t;
  float last = 0.0f, largest = 0.0f;
  if (active) {
    const float reduced_amax = reduced != nullptr ? reduced[h.first + slot0 + t] : 0.0f;
    last = reduced_amax != 0.0f ? reduced_amax : column[0];
  }
  // If the latest amax is 0, neither history nor scale changes, but the threads still take part in
  // the barriers.
  const bool roll = active && last != 0.0f;
  for (int64_t base = 0; base < h.length; base += int64_t{rows} * kAtOnce) {
    float entries[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t r = base + i * rows + y;
      entries[i] = !roll || r >= h.length ? 0.0f
                   : r + 1 < h.length     ? column[(r + 1) * h.tensors]
                                          : last;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t r = base + i * rows + y;
      largest = fmaxf(largest, entries[i]);  // NaN is ignored
      if (roll && r < h.length) column[r * h.tensors] = r == 0 ? 0.0f : entries[i];
    }
  }
  largest_of[thread] = largest;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (active && y < half && y + half < rows) {
      largest_of[thread] = fmaxf(largest_of[thread], largest_of[thread + half * slots]);
    }
    __syncthreads();
  }
  if (y != 0) return;
  const float amax = rule.algo == numeric::AmaxComputeAlgo::kMax ? largest_of[thread] : last;
  float* scale = h.scale + slot0 + t;
  if (amax > 0.0f && amax < INFINITY) *scale = rule.fp8_max / amax;
  if (isinf(*scale)) *scale = FLT_MAX;
}

using Args = te_fl_fused_amax_and_scale_update_after_reduction_args;

// Launches the kernel as often as kCapacity requires.
template <int kCapacity>
void launch(const te_fl_context& ctx, const Args& args, const float* reduced,
            const numeric::DelayedScalingRule& rule) {
  Histories<kCapacity> all;
  int64_t first = 0;
  for (int64_t i = 0; i < args.amax_histories_count;) {
    unsigned blocks = 0;
    for (all.count = 0; all.count < kCapacity && i < args.amax_histories_count; ++i) {
      const te_fl_tensor& history = *args.amax_histories[i];
      const int64_t length = history.dl.shape[0], tensors = history.dl.shape[1];
      if (tensors == 0) continue;
      all.items[all.count++] = {backend::data<float>(history),
                                backend::data<float>(*args.scales[i]),
                                length,
                                tensors,
                                first,
                                blocks};
      first += tensors;
      blocks += static_cast<unsigned>(ceil_div(tensors, kSlots));
    }
    if (blocks == 0) continue;
    scale_update_kernel<kCapacity><<<blocks, kThreads, 0, stream_of(ctx)>>>(all, reduced, rule);
    check_launch("scale_update_kernel");
  }
}

constexpr int kFewHistories = list_choice::kFewHistories,
              kManyHistories = list_choice::kManyHistories;

void fused_update(const te_fl_context& ctx, const Args& args) {
  const float* reduced = args.amax_reduction_buffer == nullptr
                             ? nullptr
                             : backend::data<const float>(*args.amax_reduction_buffer);
  numeric::DelayedScalingRule rule;
  rule.fp8_max =
      numeric::delayed_scaling_numerator(args.fp8_dtype == TE_FL_FP8_FORMAT_E5M2, args.margin);
  rule.algo =
      args.algo == 0 ? numeric::AmaxComputeAlgo::kMax : numeric::AmaxComputeAlgo::kMostRecent;
  if (choose_list(args).capacity == kFewHistories)
    return launch<kFewHistories>(ctx, args, reduced, rule);
  launch<kManyHistories>(ctx, args, reduced, rule);
}
Refusal refuse_update(const Args& args) {
  if (!dense(args.amax_reduction_buffer)) return kNotContiguous;
  for (int64_t i = 0; i < args.amax_histories_count; ++i) {
    if (!all_dense(args.amax_histories[i], args.scales[i])) return kNotContiguous;
  }
  return nullptr;
}

std::string words_of_update(const te_fl_context&, const Args& args) {
  return "kernel " + choose_list(args).text();
}

}  // namespace

void append_scale_update(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(
      descriptor<Args, fused_update, refuse_update>("fused_amax_and_scale_update_after_reduction"));
  ops.back().describe = backend::describe_thunk<Args, words_of_update>;
}

}  // namespace te_fl::cuda
