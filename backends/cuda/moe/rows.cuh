// Kernels that sum the rows of a token into one row, and kernels that copy groups of rows.
#pragma once

#include "common/integers.cuh"
#include "common/pack.cuh"
#include "common/value_errors.cuh"
#include "moe/row_launch.cuh"

namespace te_fl::cuda {

// ---- sums

struct PermutedRows {
  const int32_t* map;  // shape [each, tokens]
  const float* probs;  // shape [tokens, each]; NULL: all weights are 1
  int64_t tokens, each, rows;
  ValueErrorSink errors;

  // Returns the row in map entry s of a token; -1 if the entry has none or is invalid. If `notes`,
  // records an invalid entry as an error; `notes` should be true in one thread only.
  __device__ int64_t row(int64_t s, int64_t token, bool notes) const {
    const int64_t at = s * tokens + token, row = map[at];
    if (row >= -1 && row < rows) return row;
    if (notes) note(errors, ValueRule::kPermutedRow, at, row, rows);
    return -1;
  }
  __device__ float weight(int64_t s, int64_t token) const {
    return probs != nullptr ? probs[token * each + s] : 1.0f;
  }
};

static __global__ void __launch_bounds__(kThreads)
    check_rows_kernel(const int32_t* map, int64_t size, int64_t rows, ValueErrorSink errors) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * kThreads) {
    if (map[i] < -1 || map[i] >= rows) note(errors, ValueRule::kPermutedRow, i, map[i], rows);
  }
}

// The unit of access: a Pack, or a single element if rows are not a multiple of a pack.
template <class T, bool kWhole>
struct RowPiece {
  static constexpr int kSize = kWhole ? Pack<T>::kSize : 1;
  static __device__ void load(const T* p, float (&v)[kSize]) {
    if constexpr (kWhole) {
      Pack<T> pack;
      pack.load(p);
#pragma unroll
      for (int i = 0; i < kSize; ++i) v[i] = pack[i];
    } else {
      v[0] = to_f32(*p);
    }
  }
  static __device__ void store(T* p, const float (&v)[kSize]) {
    if constexpr (kWhole) {
      Pack<T> pack;
      pack.set(v);
      pack.store(p);
    } else {
      *p = from_f32<T>(v[0]);
    }
  }
};

// Sums the rows of each token, for short rows and few map entries. Each thread sums one RowPiece.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    sum_rows_kernel(const T* input, PermutedRows m, T* output, RowPieces p) {
  using P = RowPiece<T, kWhole>;
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= p.size) return;
  uint32_t word = 0;
  const int64_t token = p.first + p.words(static_cast<uint32_t>(i), word);
  const int64_t stride = int64_t{p.words.divisor} * P::kSize, col = int64_t{word} * P::kSize;
  float sum[P::kSize] = {};
  for (int64_t s = 0; s < m.each; s += kAtOnce) {
    float v[kAtOnce][P::kSize];
    int64_t row[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      row[u] = s + u < m.each ? m.row(s + u, token, word == 0) : -1;
      if (row[u] >= 0) P::load(input + row[u] * stride + col, v[u]);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (row[u] < 0) continue;
      const float weight = m.weight(s + u, token);
#pragma unroll
      for (int e = 0; e < P::kSize; ++e) sum[e] = fmaf(weight, v[u][e], sum[e]);
    }
  }
  P::store(output + token * stride + col, sum);
}

// ---- gradient of permuted rows

// Sets the bit of each row that a map entry refers to.
static __global__ void __launch_bounds__(kThreads)
    mark_rows_kernel(const int32_t* map, int64_t size, int64_t rows, uint32_t* bits,
                     ValueErrorSink errors) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * kThreads) {
    const int32_t row = map[i];
    if (row == -1) continue;
    if (row < -1 || row >= rows) {
      note(errors, ValueRule::kPermutedRow, i, row, rows);
      continue;
    }
    const uint32_t mine = 1u << (row % 32);
    if ((atomicOr(bits + row / 32, mine) & mine) != 0) {
      note(errors, ValueRule::kRowTwice, i, row, rows);
    }
  }
}

// Zeroes the rows whose bit is not set. A warp handles the 32 rows of a word.
template <class T>
__global__ void __launch_bounds__(kThreads)
    zero_rows_kernel(const uint32_t* bits, int64_t rows, int64_t cols, T* output) {
  const int64_t warps = int64_t{gridDim.x} * (kThreads / 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t w = blockIdx.x * int64_t{kThreads / 32} + threadIdx.x / 32; w * 32 < rows;
       w += warps) {
    for (uint32_t missing = ~bits[w]; missing != 0; missing &= missing - 1) {
      const int64_t row = w * 32 + __ffs(static_cast<int>(missing)) - 1;
      if (row >= rows) break;
      for (int64_t c = lane; c < cols; c += 32) output[row * cols + c] = from_f32<T>(0.0f);
    }
  }
}

// Computes the gradients of the permuted rows and of the probabilities, for tokens with few map
// entries. Each block processes one token. `dots` [each, warps of the block] is dynamic shared
// memory, used if grad_probs is not NULL.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    few_rows_gradient_kernel(const T* grad_output, const T* fwd_input, PermutedRows m,
                             T* grad_input, float* grad_probs, int64_t cols, int64_t first) {
  using P = RowPiece<T, kWhole>;
  extern __shared__ float dots[];
  const int64_t token = first + blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const T* grad = grad_output + token * cols;
  for (int64_t s = 0; s < m.each; ++s) {
    const int64_t row = m.row(s, token, false);  // mark_rows_kernel records invalid rows
    float dot = 0.0f;
    if (row >= 0) {
      const float weight = m.weight(s, token);
      const T* input = fwd_input + row * cols;
      T* out = grad_input + row * cols;
#pragma unroll 2
      for (int64_t c = int64_t{threadIdx.x} * P::kSize; c < cols;
           c += int64_t{blockDim.x} * P::kSize) {
        float g[P::kSize], x[P::kSize];
        P::load(grad + c, g);
        if (grad_probs != nullptr) P::load(input + c, x);
#pragma unroll
        for (int e = 0; e < P::kSize; ++e) {
          if (grad_probs != nullptr) dot = fmaf(g[e], x[e], dot);
          g[e] *= weight;
        }
        P::store(out + c, g);
      }
    }
    if (grad_probs == nullptr) continue;
    dot = warp_sum(dot);
    if (lane == 0) dots[s * warps + warp] = dot;
  }
  if (grad_probs == nullptr) return;
  __syncthreads();
  for (int64_t s = threadIdx.x; s < m.each; s += blockDim.x) {
    float sum = 0.0f;
    for (int w = 0; w < warps; ++w) sum += dots[s * warps + w];
    grad_probs[token * m.each + s] = sum;
  }
}

// ---- groups

constexpr int kGroups = 64;  // groups per launch; limited by the 4 KiB of kernel parameters

// Groups of rows that are consecutive in the output. Output rows past a group's `rows` become 0.
struct RowGroups {
  int64_t from[kGroups];  // first row in the input
  int64_t to[kGroups];    // first row in the output
  int64_t rows[kGroups];
  int count = 0;
};

template <class Word>
__global__ void __launch_bounds__(kThreads)
    copy_groups_kernel(const Word* input, Word* output, const __grid_constant__ RowGroups groups,
                       RowPieces p) {
  const int64_t first = blockIdx.x * int64_t{kThreads * kAtOnce} + threadIdx.x;
  Word held[kAtOnce];
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    const int64_t i = first + u * kThreads;
    if (i >= p.size) continue;
    uint32_t word = 0;
    const int64_t row = p.first + p.words(static_cast<uint32_t>(i), word);
    int low = 0;
    for (int high = groups.count; high - low > 1;) {
      const int middle = (low + high) / 2;
      (groups.to[middle] <= row ? low : high) = middle;
    }
    const int64_t at = row - groups.to[low];
    held[u] = Word{};
    if (at < groups.rows[low]) {
      held[u] = input[(groups.from[low] + at) * p.words.divisor + word];
    }
  }
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    const int64_t i = first + u * kThreads;
    if (i < p.size) output[p.first * p.words.divisor + i] = held[u];
  }
}

// ---- offsets

constexpr int kScanThreads = 512;

static __global__ void __launch_bounds__(kThreads)
    check_splits_kernel(Integers splits, int64_t size, ValueErrorSink errors) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * kThreads) {
    if (splits[i] < 0) note(errors, ValueRule::kSplit, i, splits[i], 0);
  }
}

// Launched as one block. Sums wrap around on overflow.
template <class Out>
__global__ void __launch_bounds__(kScanThreads)
    offsets_kernel(Integers splits, int64_t size, uint64_t stride, bool leading_zero, Out* out,
                   ValueErrorSink errors) {
  constexpr int kEach = 4;
  __shared__ uint64_t warp_sums[32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  uint64_t carry = 0;
  if (leading_zero && threadIdx.x == 0) *out = 0;
  if (leading_zero) ++out;
  for (int64_t base = 0; base < size; base += kScanThreads * kEach) {
    uint64_t sums[kEach], mine = 0;
    const int64_t first = base + int64_t{threadIdx.x} * kEach;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int64_t v = first + k < size ? splits[first + k] : 0;
      if (v < 0) note(errors, ValueRule::kSplit, first + k, v, 0);
      sums[k] = mine += static_cast<uint64_t>(v) * stride;
    }
    uint64_t before = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint64_t other = __shfl_up_sync(0xFFFFFFFFu, before, step);
      if (lane >= step) before += other;
    }
    if (lane == 31) warp_sums[warp] = before;
    __syncthreads();
    uint64_t all = 0, earlier = carry + before - mine;
    for (int w = 0; w < kScanThreads / 32; ++w) {
      if (w < warp) earlier += warp_sums[w];
      all += warp_sums[w];
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      if (first + k < size) out[first + k] = static_cast<Out>(earlier + sums[k]);
    }
    carry += all;
    __syncthreads();
  }
}

}  // namespace te_fl::cuda
