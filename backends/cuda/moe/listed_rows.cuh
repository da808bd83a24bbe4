// Kernels that first list the rows that the map assigns to a token and then sum or scale them. In a
// map that was made from a mask, most entries of a token have no row.
#pragma once

#include "moe/rows.cuh"

namespace te_fl::cuda {

// ---- sums

// The unit of access: a Pack, or a single element if rows are not a multiple of a pack.
template <class T>
struct OneElement {
  static constexpr int kSize = 1;
  T raw;
  __device__ void load(const T* p) { raw = *p; }
  __device__ void store_set(T* p) const { *p = raw; }
  __device__ float operator[](int) const { return to_f32(raw); }
  __device__ void set(const float (&v)[1]) { raw = from_f32<T>(v[0]); }
};
template <class T, bool kWhole>
using RawPiece = std::conditional_t<kWhole, Pack<T>, OneElement<T>>;

// 64 row_id_map entries of a token, two in each lane of a warp.
struct TokenRows {
  int32_t row[2];

  __device__ void load(const PermutedRows& m, int64_t token, int64_t first) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t s = first + h * 32 + threadIdx.x % 32;
      row[h] = s < m.each ? m.map[s * m.tokens + token] : -1;
    }
  }
  // Sets invalid entries to -1. If `notes`, records an error for them.
  __device__ void check(const PermutedRows& m, int64_t token, int64_t first, bool notes) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row[h] >= -1 && row[h] < m.rows) continue;
      const int64_t at = (first + h * 32 + threadIdx.x % 32) * m.tokens + token;
      if (notes) note(m.errors, ValueRule::kPermutedRow, at, row[h], m.rows);
      row[h] = -1;
    }
  }
  // Returns a bit mask: bit i is set if entry i has a row. All lanes must call there() and
  // row_of().
  __device__ uint64_t there() const {
    const uint64_t high = __ballot_sync(0xFFFFFFFFu, row[1] >= 0);
    return high << 32 | __ballot_sync(0xFFFFFFFFu, row[0] >= 0);
  }
  __device__ int64_t row_of(int place) const {
    return __shfl_sync(0xFFFFFFFFu, place < 32 ? row[0] : row[1], place % 32);
  }
};

// Variant of sum_rows_kernel (rows.cuh) for wide rows and for tokens with many map entries. A warp
// sums a range of columns of a token's rows, and prefetches the map entries of its next range. Each
// thread has four loads in flight: two vectors of two rows.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads, 4)
    sum_listed_rows_kernel(const T* input, PermutedRows m, T* output, RowPieces p, int64_t cols) {
  using Piece = RawPiece<T, kWhole>;
  constexpr int kSize = Piece::kSize, kPieces = 2, kRows = 2;
  const uint32_t warps = gridDim.x * (kThreads / 32), size = static_cast<uint32_t>(p.size);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t item = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  if (item >= size) return;
  uint32_t part = 0;
  const auto token_of = [&](int64_t i) {
    return p.first + p.words(static_cast<uint32_t>(i), part);
  };
  TokenRows next;
  next.load(m, token_of(item), 0);
  for (; item < size; item += warps) {
    TokenRows now = next;
    if (item + warps < size) next.load(m, token_of(item + warps), 0);
    const int64_t token = token_of(item);
    const int64_t col = (int64_t{part} * (32 * kPieces) + lane) * kSize;
    const bool holds[kPieces] = {col < cols, col + 32 * kSize < cols};
    float sum[kPieces][kSize] = {};
    for (int64_t first = 0;;) {
      now.check(m, token, first, part == 0);
      for (uint64_t there = now.there(); there != 0;) {
        const int count = min(__popcll(there), kRows);
        Piece x[kRows][kPieces];
        float weight[kRows];
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
          if (k >= count) continue;
          const int place = __ffsll(static_cast<int64_t>(there)) - 1;
          there &= there - 1;
          weight[k] = m.weight(first + place, token);
          const T* const from = input + now.row_of(place) * cols + col;
#pragma unroll
          for (int i = 0; i < kPieces; ++i) {
            if (holds[i]) x[k][i].load(from + i * 32 * kSize);
          }
        }
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
          if (k >= count) continue;
#pragma unroll
          for (int i = 0; i < kPieces; ++i) {
#pragma unroll
            for (int e = 0; e < kSize; ++e) sum[i][e] = fmaf(weight[k], x[k][i][e], sum[i][e]);
          }
        }
      }
      first += 64;
      if (first >= m.each) break;
      now.load(m, token, first);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      Piece y;
      y.set(sum[i]);
      if (holds[i]) y.store_set(output + token * cols + col + i * 32 * kSize);
    }
  }
}

// ---- gradient of permuted rows

constexpr int64_t kMostListed = 1024;  // map entries of a token; each takes 3 words of shared
                                       // memory, plus the dot products

// Lists of a token's rows in the order of the map, in the block's shared memory.
struct RowList {
  int32_t* rows;   // [each]; `count` entries are used
  float* weights;  // shape [each]; the weights of `rows`
  int32_t* place;  // [each]: position of map entry s in `rows`, or -1
  __device__ RowList(int32_t* memory, int64_t each)
      : rows(memory), weights(reinterpret_cast<float*>(memory + each)), place(memory + 2 * each) {}

  // Fills the lists and returns the number of rows. Omits invalid rows and, if `notes`, records an
  // error for them. All threads of the block must call it.
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

// Dynamic shared memory: a RowList and, if grad_probs is not NULL, one float per map entry and
// warp.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    unpermute_gradient_kernel(const T* grad_output, const T* fwd_input, PermutedRows m,
                              T* grad_input, float* grad_probs, int64_t cols, int64_t first) {
  using P = RowPiece<T, kWhole>;
  extern __shared__ int32_t listed[];
  const RowList list(listed, m.each);
  float* const dots = reinterpret_cast<float*>(listed + 3 * m.each);  // indexed by [position, warp]
  const int64_t token = first + blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const T* const grad = grad_output + token * cols;
  const int count = list.fill(m, token, false);  // mark_rows_kernel has recorded invalid rows
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
