// Kernels in which a block takes a token and lists the rows that it has before it moves them: a
// token has few of the rows that a mask's map has places for.
#pragma once

#include "moe/rows.cuh"

namespace te_fl::cuda {

constexpr int64_t kMostListed = 1024;  // places of a token: 4 words of shared memory each, and dots

// The rows of a token in the order of s, in a block's shared memory.
struct RowList {
  int32_t* rows;   // [each], `count` of them
  float* weights;  // likewise
  int32_t* place;  // [each]: where the list has s, or -1
  __device__ RowList(int32_t* memory, int64_t each)
      : rows(memory), weights(reinterpret_cast<float*>(memory + each)), place(memory + 2 * each) {}

  // Returns the count. All threads of the block call it; wrong rows are left out, and noted if
  // asked for.
  __device__ int fill(const PermutedRows& m, int64_t token, bool notes) const {
    __shared__ int count;
    const int lane = static_cast<int>(threadIdx.x);
    if (lane < 32) {
      int found = 0;
      for (int64_t first = 0; first < m.each; first += 32) {
        const int64_t s = first + lane;
        const int64_t row = s < m.each ? m.row(s, token, notes) : -1;
        const unsigned there = __ballot_sync(0xFFFFFFFFu, row >= 0);
        const int at = found + __popc(there & ((1u << lane) - 1));
        if (row >= 0) rows[at] = static_cast<int32_t>(row), weights[at] = m.weight(s, token);
        if (s < m.each) place[s] = row >= 0 ? at : -1;
        found += __popc(there);
      }
      if (lane == 0) count = found;
    }
    __syncthreads();
    return count;
  }
};
inline size_t row_list_bytes(int64_t each) { return static_cast<size_t>(each) * 12; }

// sum_rows_kernel for wide rows, and for tokens with many places. A thread has four loads under
// way: two pieces of two rows.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    sum_listed_rows_kernel(const T* input, PermutedRows m, T* output, int64_t cols, int64_t first) {
  using P = RowPiece<T, kWhole>;
  constexpr int kPair = 2;
  extern __shared__ int32_t listed[];
  const RowList list(listed, m.each);
  const int64_t token = first + blockIdx.x, step = int64_t{blockDim.x} * P::kSize;
  const int count = list.fill(m, token, true);
  for (int64_t c = int64_t{threadIdx.x} * P::kSize; c < cols; c += kPair * step) {
    const bool both = c + step < cols;
    float sum[kPair][P::kSize] = {};
    for (int k = 0; k < count; k += kPair) {
      float v[kPair][kPair][P::kSize];  // of a row and a piece
#pragma unroll
      for (int u = 0; u < kPair; ++u) {
        if (k + u >= count) continue;
        const T* const row = input + list.rows[k + u] * cols + c;
        P::load(row, v[u][0]);
        if (both) P::load(row + step, v[u][1]);
      }
#pragma unroll
      for (int u = 0; u < kPair; ++u) {
        if (k + u >= count) continue;
        const float weight = list.weights[k + u];
#pragma unroll
        for (int e = 0; e < P::kSize; ++e) {
          sum[0][e] = fmaf(weight, v[u][0][e], sum[0][e]);
          if (both) sum[1][e] = fmaf(weight, v[u][1][e], sum[1][e]);
        }
      }
    }
    P::store(output + token * cols + c, sum[0]);
    if (both) P::store(output + token * cols + c + step, sum[1]);
  }
}

// Shared memory is that of the list, then, if grad_probs is not null, a number for each place and
// warp.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    unpermute_gradient_kernel(const T* grad_output, const T* fwd_input, PermutedRows m,
                              T* grad_input, float* grad_probs, int64_t cols, int64_t first) {
  using P = RowPiece<T, kWhole>;
  extern __shared__ int32_t listed[];
  const RowList list(listed, m.each);
  float* const dots = reinterpret_cast<float*>(listed + 3 * m.each);  // [place, warp]
  const int64_t token = first + blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const T* const grad = grad_output + token * cols;
  const int count = list.fill(m, token, false);  // wrong rows are noted by mark_rows_kernel
  for (int k = 0; k < count; k += kAtOnce) {
    float dot[kAtOnce] = {};
    for (int64_t c = int64_t{threadIdx.x} * P::kSize; c < cols;
         c += int64_t{blockDim.x} * P::kSize) {
      float g[P::kSize], x[kAtOnce][P::kSize];
      P::load(grad + c, g);
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (grad_probs == nullptr || k + u >= count) continue;
        P::load(fwd_input + list.rows[k + u] * cols + c, x[u]);
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (k + u >= count) continue;
        const float weight = list.weights[k + u];
        float out[P::kSize];
#pragma unroll
        for (int e = 0; e < P::kSize; ++e) {
          if (grad_probs != nullptr) dot[u] = fmaf(g[e], x[u][e], dot[u]);
          out[e] = weight * g[e];
        }
        P::store(grad_input + list.rows[k + u] * cols + c, out);
      }
    }
    if (grad_probs == nullptr) continue;
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (k + u >= count) continue;
      const float sum = warp_sum(dot[u]);
      if (lane == 0) dots[(k + u) * warps + warp] = sum;
    }
  }
  if (grad_probs == nullptr) return;
  __syncthreads();
  for (int64_t s = threadIdx.x; s < m.each; s += blockDim.x) {
    float sum = 0.0f;
    const int at = list.place[s];
    for (int w = 0; at >= 0 && w < warps; ++w) sum += dots[at * warps + w];
    grad_probs[token * m.each + s] = sum;
  }
}

}  // namespace te_fl::cuda
