// Reductions over the threads that share a row: maximum, sum, and sum of exponentials.
#pragma once

#include <cfloat>

#include "common/pack.cuh"

namespace te_fl::cuda {

__device__ inline float max_nan(float a, float b) {  // NaN if either is NaN
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
// Reductions over the kLanes consecutive threads that share a row, in a fixed order. All of them
// receive the result. kLanes is a power of two. If kLanes exceeds 32, it must be the number of
// threads of the block, and `parts` must be shared memory of kLanes / 32 floats that no earlier
// reduction in the same loop iteration has used.
template <int kLanes, class Combine>
__device__ inline float reduce_lanes(float v, float* parts, Combine combine) {
  constexpr int kInWarp = kLanes < 32 ? kLanes : 32, kWarps = kLanes / kInWarp;
#pragma unroll
  for (int step = kInWarp / 2; step > 0; step /= 2) {
    v = combine(v, __shfl_xor_sync(0xFFFFFFFFu, v, step));
  }
  if constexpr (kWarps > 1) {
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
    __syncthreads();
    v = parts[threadIdx.x % kWarps];
#pragma unroll
    for (int step = kWarps / 2; step > 0; step /= 2) {
      v = combine(v, __shfl_xor_sync(0xFFFFFFFFu, v, step));
    }
  }
  return v;
}
template <int kLanes>
__device__ inline float max_lanes(float v, float* parts) {
  return reduce_lanes<kLanes>(v, parts, [](float a, float b) { return max_nan(a, b); });
}
template <int kLanes>
__device__ inline float sum_lanes(float v, float* parts) {
  return reduce_lanes<kLanes>(v, parts, [](float a, float b) { return a + b; });
}

// e^v to within a few units in the last place, for v <= 0 as in softmax.
__device__ inline float fast_exp(float v) { return exp2f(v * 1.4426950408889634f); }

// The largest x so far and the sum of e^(x - top); NaN if an x was NaN. `top` starts at the lowest
// finite value, so a sum of 0 means that every x was -inf.
struct RunningSum {
  float top = -FLT_MAX, sum = 0.0f;

  template <int kCount>
  __device__ void add(const float (&v)[kCount]) {
    float next = top;
#pragma unroll
    for (int i = 0; i < kCount; ++i) next = max_nan(next, v[i]);
    float more = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) more += fast_exp(v[i] - next);
    sum = fmaf(sum, fast_exp(top - next), more);
    top = next;
  }
  // Combines the RunningSums of kLanes threads. top_parts and sum_parts: `parts` of reduce_lanes().
  template <int kLanes>
  __device__ void join(float* top_parts, float* sum_parts) {
    const float all = max_lanes<kLanes>(top, top_parts);
    sum = sum_lanes<kLanes>(sum * fast_exp(top - all), sum_parts);
    top = all;
  }
};

}  // namespace te_fl::cuda
