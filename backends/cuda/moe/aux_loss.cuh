// Kernels of the router's auxiliary loss. Every sum is computed in an order that depends only on
// the shape.
#pragma once

#include "common/element.cuh"

namespace te_fl::cuda {

// The number of tokens per expert, as integers or floats.
struct Counts {
  const void* data;
  int dtype;
  explicit Counts(const te_fl_tensor& t) : data(backend::data<const void>(t)), dtype(dtype_of(t)) {}
  __device__ float operator[](int64_t i) const {
    switch (dtype) {
      case TE_FL_I32:
        return static_cast<float>(static_cast<const int32_t*>(data)[i]);
      case TE_FL_I64:
        return static_cast<float>(static_cast<const int64_t*>(data)[i]);
      case TE_FL_F32:
        return static_cast<const float*>(data)[i];
      default:
        return to_f32(static_cast<const bf16*>(data)[i]);
    }
  }
  // Loads the counts of experts [first, first + n), n <= kGroup; the rest of v becomes 0.
  __device__ void load(int64_t first, int n, float (&v)[kGroup]) const {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] = i < n ? (*this)[first + i] : 0.0f;
  }
};

// The division of a [tokens, experts] matrix among the threads of a block: `across` adjacent
// threads process the runs of kGroup experts of one token, and the next `across` threads those of
// another token.
struct LossShape {
  int64_t tokens, experts;
  int across;  // threads that cover the runs of a row
  __host__ __device__ int64_t down() const { return kThreads / across; }
};

constexpr int kLossBlocks = 1024;  // maximum; each block writes one partial sum

__device__ inline double block_sum(double v, double* warp_sums) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = v;
  __syncthreads();
  double sum = 0.0;
  for (int w = 0; w < kThreads / 32; ++w) sum += warp_sums[w];
  return sum;
}

static __global__ void __launch_bounds__(kThreads)
    loss_sums_kernel(Source probs, Counts counts, LossShape s, double* sums) {
  __shared__ double warp_sums[kThreads / 32];
  const int64_t down = s.down();
  double sum = 0.0;
  for (int64_t run = threadIdx.x % s.across;
       run * kGroup < s.experts && threadIdx.x / s.across < down; run += s.across) {
    const int64_t left = s.experts - run * kGroup;
    const int n = left < kGroup ? static_cast<int>(left) : kGroup;
    float weights[kGroup];
    counts.load(run * kGroup, n, weights);
#pragma unroll 4
    for (int64_t t = blockIdx.x * down + threadIdx.x / s.across; t < s.tokens;
         t += gridDim.x * down) {
      float p[kGroup], part = 0.0f;
      probs.load(t * s.experts + run * kGroup, n, p);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) part = fmaf(p[i], weights[i], part);
      sum += part;
    }
  }
  sum = block_sum(sum, warp_sums);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

struct LossNumbers {
  double coeff;           // the call's coeff times experts / topk
  int64_t total;          // total number of tokens
  const int64_t* totals;  // in device memory; replaces `total` unless NULL
};

static __global__ void __launch_bounds__(kThreads)
    loss_kernel(const double* sums, int blocks, LossNumbers numbers, Target loss, float* constant) {
  __shared__ double warp_sums[kThreads / 32];
  double sum = 0.0;
  for (int b = static_cast<int>(threadIdx.x); b < blocks; b += kThreads) sum += sums[b];
  sum = block_sum(sum, warp_sums);
  if (threadIdx.x != 0) return;
  const auto total =
      static_cast<double>(numbers.totals != nullptr ? *numbers.totals : numbers.total);
  const auto c = static_cast<float>(numbers.coeff / total / total);
  const float value = static_cast<float>(static_cast<double>(c) * sum);
  *constant = c;
  loss.store(0, 1, &value);
}

static __global__ void __launch_bounds__(kThreads)
    loss_gradient_kernel(const float* constant, Counts counts, Source grad, LossShape s,
                         Target out) {
  const int64_t down = s.down();
  const float factor = *constant * grad.at(0);
  for (int64_t run = threadIdx.x % s.across;
       run * kGroup < s.experts && threadIdx.x / s.across < down; run += s.across) {
    const int64_t left = s.experts - run * kGroup;
    const int n = left < kGroup ? static_cast<int>(left) : kGroup;
    float v[kGroup];
    counts.load(run * kGroup, n, v);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] *= factor;
    for (int64_t t = blockIdx.x * down + threadIdx.x / s.across; t < s.tokens;
         t += gridDim.x * down) {
      out.store(t * s.experts + run * kGroup, n, v);
    }
  }
}

}  // namespace te_fl::cuda
