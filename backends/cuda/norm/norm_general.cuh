// The general norm kernels, for all calls that the fused kernels (norm.cuh) do not support: any
// dtypes and sizes. The statistics are computed in two passes in FP32; the second pass corrects the
// mean. Sums over rows have two stages, in a fixed order. Included by norm.cu only.
#pragma once

#include "common/store.cuh"
#include "norm/norm_choice.hpp"

namespace te_fl::cuda {
namespace {

__device__ inline float block_sum(float v, float* shared) {
  v = warp_sum(v);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[warp] = v;
  __syncthreads();
  v = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) v += shared[i];
  return v;
}

// Replaces negative values, which rounding may produce, by 0. NaN is kept.
__device__ inline float not_negative(float v) { return v < 0.0f ? 0.0f : v; }

// Each block computes the statistics of one row at a time. mu NULL: RMS normalisation. `rest`:
// receives the mean minus its FP32 rounding mu.
__global__ void __launch_bounds__(kThreads)
    norm_statistics_kernel(Source x, int64_t rows, int64_t cols, float epsilon, float* mu,
                           float* rest, float* rsigma) {
  __shared__ float shared[kThreads / 32];
  const int64_t groups = (cols + kGroup - 1) / kGroup;
  const float inverse = cols == 0 ? 0.0f : 1.0f / static_cast<float>(cols);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const auto each = [&](auto f) {
      for (int64_t g = threadIdx.x; g < groups; g += kThreads) {
        const int64_t col = g * kGroup;
        const int n = static_cast<int>(cols - col < kGroup ? cols - col : kGroup);
        float v[kGroup];
        x.load(row * cols + col, n, v);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          if (i < n) f(v[i]);
        }
      }
    };
    float centre = 0.0f;
    if (mu != nullptr) {
      float sum = 0.0f;
      each([&](float v) { sum += v; });
      centre = block_sum(sum, shared) * inverse;
    }
    float sum = 0.0f, squares = 0.0f;
    each([&](float v) {
      sum += v - centre;
      squares = fmaf(v - centre, v - centre, squares);
    });
    squares = block_sum(squares, shared) * inverse;
    float shift = 0.0f;
    if (mu != nullptr) {
      shift = block_sum(sum, shared) * inverse;
      squares -= shift * shift;
    }
    if (threadIdx.x == 0) {
      if (mu != nullptr) {
        mu[row] = centre + shift;
        rest[row] = (centre - mu[row]) + shift;
      }
      rsigma[row] = 1.0f / sqrtf(not_negative(squares) + epsilon);
    }
  }
}

// Computes z = (x - mu) rsigma g + beta.
struct Normalise {
  Source x, gamma, beta;
  const float *mu, *rest, *rsigma;
  int64_t cols;
  float offset;  // added to gamma

  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    float g[kGroup], b[kGroup] = {};
    x.load(row * cols + col, n, v);
    gamma.load(col, n, g);
    if (beta.data != nullptr) beta.load(col, n, b);
    const float r = rsigma[row];
    const float centre = mu != nullptr ? mu[row] : 0.0f, more = mu != nullptr ? rest[row] : 0.0f;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      v[i] = fmaf(((v[i] - centre) - more) * r, g[i] + offset, b[i]);
    }
  }
};

// Computes statistics and an unquantised result in one pass; the block keeps its row in registers.
template <int kGroups>  // groups per thread
__global__ void __launch_bounds__(kThreads)
    norm_general_rows_kernel(Source x, Source gamma, Source beta, Target z, int64_t cols,
                             float epsilon, float offset, float* mu, float* rsigma) {
  __shared__ float shared[kThreads / 32];
  const int64_t row = blockIdx.x;
  const float inverse = 1.0f / static_cast<float>(cols);
  float v[kGroups][kGroup];
  const auto each = [&](auto f) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int64_t col = (int64_t{g} * kThreads + threadIdx.x) * kGroup;
      if (col < cols) f(v[g], col, static_cast<int>(cols - col < kGroup ? cols - col : kGroup));
    }
  };
  float sum = 0.0f, squares = 0.0f, centre = 0.0f, shift = 0.0f;
  each([&](float* group, int64_t col, int n) {
    x.load(row * cols + col, n, group);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) sum += i < n ? group[i] : 0.0f;
  });
  if (mu != nullptr) centre = block_sum(sum, shared) * inverse;
  sum = 0.0f;
  each([&](float* group, int64_t, int n) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (i >= n) continue;
      group[i] -= centre;
      sum += group[i];
      squares = fmaf(group[i], group[i], squares);
    }
  });
  squares = block_sum(squares, shared) * inverse;
  if (mu != nullptr) {
    shift = block_sum(sum, shared) * inverse;
    squares -= shift * shift;
  }
  const float r = 1.0f / sqrtf(not_negative(squares) + epsilon);
  if (threadIdx.x == 0) {
    if (mu != nullptr) mu[row] = centre + shift;
    rsigma[row] = r;
  }
  each([&](float* group, int64_t col, int n) {
    float g[kGroup], b[kGroup] = {};
    gamma.load(col, n, g);
    if (beta.data != nullptr) beta.load(col, n, b);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      group[i] = fmaf((group[i] - shift) * r, g[i] + offset, b[i]);
    }
    z.store(row * cols + col, n, group);
  });
}
constexpr int64_t kRegisterCols = int64_t{kThreads} * kGroup * 4;
static_assert(kRegisterCols == norm_choice::kRegisterCols);

// Computes h = x + residual.
struct AddPair {
  Source x, residual;
  int64_t cols;
  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    float other[kGroup];
    x.load(row * cols + col, n, v);
    residual.load(row * cols + col, n, other);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] += other[i];
  }
};

// ---- backward

// The operands of the gradients of x and of the weights, with n = (x - mu) rsigma and d = dz g.
struct Gradient {
  Source dz, x, gamma, add;
  const float *mu, *rsigma;
  int64_t cols;
  float offset;

  // Computes n and d of a group.
  __device__ void load(int64_t row, int64_t col, int count, float* n, float* d) const {
    float g[kGroup];
    x.load(row * cols + col, count, n);
    dz.load(row * cols + col, count, d);
    gamma.load(col, count, g);
    const float centre = mu != nullptr ? mu[row] : 0.0f, r = rsigma[row];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      n[i] = (n[i] - centre) * r;
      d[i] *= g[i] + offset;
    }
  }
};

// means[2 row] = mean(d) (0 for RMS normalisation), means[2 row + 1] = mean(d n).
__global__ void __launch_bounds__(kThreads)
    norm_row_means_kernel(Gradient args, int64_t rows, float* means) {
  __shared__ float shared[kThreads / 32];
  const int64_t cols = args.cols, groups = (cols + kGroup - 1) / kGroup;
  const float inverse = cols == 0 ? 0.0f : 1.0f / static_cast<float>(cols);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    float sum_d = 0.0f, sum_dn = 0.0f;
    for (int64_t g = threadIdx.x; g < groups; g += kThreads) {
      const int64_t col = g * kGroup;
      const int count = static_cast<int>(cols - col < kGroup ? cols - col : kGroup);
      float n[kGroup], d[kGroup];
      args.load(row, col, count, n, d);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (i >= count) continue;
        sum_d += d[i];
        sum_dn = fmaf(d[i], n[i], sum_dn);
      }
    }
    sum_dn = block_sum(sum_dn, shared);
    if (args.mu != nullptr) sum_d = block_sum(sum_d, shared);
    if (threadIdx.x == 0) {
      means[2 * row] = args.mu != nullptr ? sum_d * inverse : 0.0f;
      means[2 * row + 1] = sum_dn * inverse;
    }
  }
}

struct GradientOfInput {
  Gradient args;
  const float* means;
  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    float normalised[kGroup], other[kGroup] = {};
    args.load(row, col, n, normalised, v);
    if (args.add.data != nullptr) args.add.load(row * args.cols + col, n, other);
    const float r = args.rsigma[row], mean_d = means[2 * row], mean_dn = means[2 * row + 1];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      v[i] = fmaf(r, (v[i] - mean_d) - normalised[i] * mean_dn, other[i]);
    }
  }
};
struct GradientOfGamma {
  Gradient args;
  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    float normalised[kGroup];
    args.x.load(row * args.cols + col, n, normalised);
    args.dz.load(row * args.cols + col, n, v);
    const float centre = args.mu != nullptr ? args.mu[row] : 0.0f, r = args.rsigma[row];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] *= (normalised[i] - centre) * r;
  }
};
struct GradientOfBeta {
  Source dz;
  int64_t cols;
  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    dz.load(row * cols + col, n, v);
  }
};

}  // namespace
}  // namespace te_fl::cuda
