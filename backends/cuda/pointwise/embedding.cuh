// Kernels of the embedding table.
//
// The gradient of a table row is the sum over the positions that looked it up, in the order of the
// positions. First the positions of each row are linked into a list, whose order may differ from
// run to run. A list of up to kListed positions is then sorted, so that the sum is deterministic.
// For longer lists, the block scans all positions in order.
#pragma once

#include "common/integers.cuh"
#include "common/pack.cuh"
#include "common/value_errors.cuh"

namespace te_fl::cuda {

// Copies table rows as `words` 16-byte words each. For an index outside the table, writes NaN (in
// every float dtype) and records an error.
static __global__ void __launch_bounds__(kThreads)
    embedding_kernel(const uint4* table, Integers indices, uint4* out, int64_t rows, FastDiv words,
                     int64_t size, ValueErrorSink errors) {
  constexpr int kAtOnce = 4;
  const int64_t first = blockIdx.x * int64_t{kThreads * kAtOnce} + threadIdx.x;
  uint4 held[kAtOnce];
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    const int64_t i = first + u * kThreads;
    if (i >= size) continue;
    uint32_t word = 0;
    const uint32_t position = words(static_cast<uint32_t>(i), word);
    const int64_t index = indices[position];
    held[u] = uint4{0x7FFFFFFFu, 0x7FFFFFFFu, 0x7FFFFFFFu, 0x7FFFFFFFu};
    if (index >= 0 && index < rows) {
      held[u] = table[index * words.divisor + word];
    } else if (word == 0) {
      note(errors, ValueRule::kIndex, position, index, rows);
    }
  }
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    if (first + u * kThreads < size) out[first + u * kThreads] = held[u];
  }
}

// Links the positions of each table row into a list. heads[row], which must be -1 initially,
// becomes the list's first position, and next[i] the position after position i.
static __global__ void __launch_bounds__(kThreads)
    link_kernel(Integers indices, int64_t positions, int64_t rows, int32_t* heads, int32_t* next,
                ValueErrorSink errors) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= positions) return;
  const int64_t row = indices[i];
  if (row < 0 || row >= rows) return note(errors, ValueRule::kIndex, i, row, rows);
  next[i] = atomicExch(heads + row, static_cast<int32_t>(i));
}

constexpr int kListed = 32;

struct RowSums {
  Integers indices;
  int64_t positions;
  const int32_t* heads;  // NULL: there are no lists
  const int32_t* next;
  Source grad, previous;
  Target out;
  int64_t cols;
  bool accumulate;
};

// Adds the gradients of the listed positions to `sum`, in list order.
__device__ inline void add_positions(const RowSums& s, const int32_t* list, int count, int64_t base,
                                     int64_t col, int n, float (&sum)[kGroup]) {
#pragma unroll 4
  for (int k = 0; k < count; ++k) {
    float v[kGroup];
    s.grad.load((base + list[k]) * s.cols + col, n, v);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) sum[i] += v[i];
  }
}

// Finds the positions in [first, first + 4 * kThreads) that look up `row`, and writes them in order
// to `list`, relative to `first`. Returns their number in all threads.
__device__ inline int find_positions(const RowSums& s, int64_t row, int64_t first, int32_t* list,
                                     int32_t* warp_counts) {
  constexpr int kEach = 4;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  uint32_t mine = 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int64_t i = first + threadIdx.x * kEach + k;
    if (i < s.positions && s.indices[i] == row) mine |= 1u << k;
  }
  const int count = __popc(mine);
  int before = count;  // inclusive prefix sum in this warp
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) warp_counts[warp] = before;
  __syncthreads();
  int begin = before - count, total = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) begin += warp_counts[w];
    total += warp_counts[w];
  }
  for (int k = 0; k < kEach; ++k) {
    if ((mine >> k & 1u) != 0) list[begin++] = static_cast<int32_t>(threadIdx.x * kEach + k);
  }
  __syncthreads();
  return total;
}

// Writes the sorted list of a table row's positions to `list`. Returns the number of positions; if
// the list has more than kListed positions, returns a number above kListed instead. All lanes of a
// warp must call it. Each warp has its own `unsorted` buffer.
__device__ inline int sorted_list(const RowSums& s, int64_t row, int32_t* unsorted, int32_t* list) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int count = 0;
  if (lane == 0) {
    for (int32_t at = s.heads[row]; at >= 0 && count <= kListed; ++count) {
      if (count < kListed) unsorted[count] = at;
      at = s.next[at];
    }
  }
  count = __shfl_sync(0xFFFFFFFFu, count, 0);
  __syncwarp();
  if (count <= kListed && lane < count) {
    int rank = 0;
    for (int k = 0; k < count; ++k) rank += unsorted[k] < unsorted[lane] ? 1 : 0;
    list[rank] = unsorted[lane];
  }
  return count;
}

// Table rows per block. Each of the first kTableRows warps lists the input positions that select
// one of these rows.
constexpr int kTableRows = 4;

// Each block processes kTableRows table rows, from row `first` on. `parts` adjacent blocks share
// these rows; each has kThreads * kGroup columns.
static __global__ void __launch_bounds__(kThreads)
    embedding_gradient_kernel(RowSums s, int64_t rows, unsigned parts, int64_t first) {
  static_assert(kListed == 32, "a lane for each position");
  __shared__ int32_t unsorted[kTableRows][kListed], lists[kTableRows][kListed];
  __shared__ int32_t counts[kTableRows];
  __shared__ int32_t found[4 * kThreads], warp_counts[kThreads / 32];
  const int64_t first_row = first + blockIdx.x / parts * int64_t{kTableRows};
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < kTableRows && first_row + warp < rows) {
    const int count = s.heads == nullptr
                          ? kListed + 1
                          : sorted_list(s, first_row + warp, unsorted[warp], lists[warp]);
    if (threadIdx.x % 32 == 0) counts[warp] = count;
  }
  __syncthreads();
  const int64_t col = (blockIdx.x % parts * int64_t{kThreads} + threadIdx.x) * kGroup;
  const int64_t left = s.cols - col;
  const int n = left >= kGroup ? kGroup : left > 0 ? static_cast<int>(left) : 0;
  for (int r = 0; r < kTableRows && first_row + r < rows; ++r) {
    const int64_t row = first_row + r;
    const int count = counts[r];
    if (count == 0 && s.accumulate) continue;
    float sum[kGroup] = {};
    if (s.accumulate && n > 0) s.previous.load(row * s.cols + col, n, sum);
    if (count <= kListed) {
      if (n > 0) add_positions(s, lists[r], count, 0, col, n, sum);
    } else {
      for (int64_t first = 0; first < s.positions; first += 4 * kThreads) {
        const int here = find_positions(s, row, first, found, warp_counts);
        if (n > 0) add_positions(s, found, here, first, col, n, sum);
        __syncthreads();
      }
    }
    if (n > 0) s.out.store(row * s.cols + col, n, sum);
  }
}

}  // namespace te_fl::cuda
