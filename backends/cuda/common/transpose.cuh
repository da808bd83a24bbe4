// Transposing copies: input and output are contiguous in different dimensions. Tiles are transposed
// in shared memory.
#pragma once

#include "common/nest.cuh"

namespace te_fl::cuda {

// The parameters of a transposing copy. Rows are the output's contiguous dimension, columns the
// input's.
struct Tiles {
  int64_t rows, cols;        // extents of the output's and the input's contiguous dimension
  int64_t from_row, to_col;  // the strides other than 1
  FastDiv by_row_tiles, by_col_tiles;
  Nest others;                 // the dimensions other than these two
  bool load_wide, store_wide;  // every run of a tile starts at a multiple of 16 bytes
};

template <class Bits>
// The number of elements in a 16-byte word.
inline constexpr int kRun = 16 / static_cast<int>(sizeof(Bits));

// Tile extents: columns run along the input's contiguous dimension, rows along the output's. These
// sizes were fastest on an H100.
template <class Bits>
inline constexpr int kTransposeCols = (sizeof(Bits) < 4 ? 8 : 16) * kRun<Bits>;
template <class Bits>
inline constexpr int kTransposeRows = (sizeof(Bits) == 8 ? 16 : 8) * kRun<Bits>;

template <class Bits>
__device__ inline void put_run(Bits* to, const Bits (&run)[kRun<Bits>]) {
  if constexpr (sizeof(Bits) < 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const uint32_t*>(run)[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRun<Bits>; ++i) to[i] = run[i];
  }
}

template <class Bits>
__global__ void __launch_bounds__(kThreads) transpose_kernel(const Bits* in, Bits* out, Tiles t) {
  constexpr int kV = kRun<Bits>, kC = kTransposeCols<Bits>, kR = kTransposeRows<Bits>;
  constexpr int kLoadWords = kC / kV, kStoreWords = kR / kV;
  // The pitch is an odd number of 32-bit words, so the elements of a column are in different banks.
  constexpr int kPitch = kC + (sizeof(Bits) < 4 ? 4 / static_cast<int>(sizeof(Bits)) : 1);
  __shared__ alignas(16) Bits tile[kR * kPitch];
  uint32_t row_tile = 0, col_tile = 0;
  const uint32_t other = t.by_col_tiles(t.by_row_tiles(blockIdx.x, row_tile), col_tile);
  int64_t from = 0, to = 0;
  t.others.offsets(other, from, to);
  const int64_t row0 = static_cast<int64_t>(row_tile) * kR;
  const int64_t col0 = static_cast<int64_t>(col_tile) * kC;
  in += from + row0 * t.from_row + col0;
  out += to + col0 * t.to_col + row0;
  const int rows = static_cast<int>(t.rows - row0 < kR ? t.rows - row0 : kR);
  const int cols = static_cast<int>(t.cols - col0 < kC ? t.cols - col0 : kC);
  const int thread = static_cast<int>(threadIdx.x);
  {
    constexpr int kStep = kThreads / kLoadWords, kPasses = kR > kStep ? kR / kStep : 1;
    const int word = thread % kLoadWords * kV, first = thread / kLoadWords;
    alignas(16) Bits held[kPasses][kV];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int r = first + pass * kStep;
      if (r >= rows) continue;
      const Bits* at = in + r * t.from_row + word;
      if (t.load_wide && word + kV <= cols) {
        *reinterpret_cast<uint4*>(held[pass]) = *reinterpret_cast<const uint4*>(at);
      } else {
#pragma unroll
        for (int i = 0; i < kV; ++i) held[pass][i] = word + i < cols ? at[i] : Bits{};
      }
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int r = first + pass * kStep;
      if (r < rows) put_run<Bits>(tile + r * kPitch + word, held[pass]);
    }
  }
  __syncthreads();
  // A warp stores 32 / kTogether columns of kTogether words each.
  constexpr int kTogether = 8, kParts = kStoreWords / kTogether;
  constexpr int kColumns = 32 / kTogether, kWarps = kThreads / 32;
  constexpr int kSteps = kC / kColumns * kParts > kWarps ? kC / kColumns * kParts / kWarps : 1;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int part = step * kWarps + thread / 32;
    const int c = part / kParts * kColumns + thread % 32 / kTogether;
    const int word = (part % kParts * kTogether + thread % kTogether) * kV;
    if (c >= cols || word >= rows) continue;
    alignas(16) Bits held[kV];
    Bits* at = out + c * t.to_col + word;
    if (t.store_wide && word + kV <= rows) {
#pragma unroll
      for (int i = 0; i < kV; ++i) held[i] = tile[(word + i) * kPitch + c];
      // For a plain assignment, the compiler would emit several narrower stores.
      __stwb(reinterpret_cast<uint4*>(at), *reinterpret_cast<const uint4*>(held));
    } else {
#pragma unroll
      for (int i = 0; i < kV; ++i) {
        if (word + i < rows) at[i] = tile[(word + i) * kPitch + c];
      }
    }
  }
}

// True if the copy should go through tiles. `dense` receives the index of the input's contiguous
// dimension.
inline bool is_transposition(const Nest& nest, int& dense) {
  const int last = nest.rank - 1;
  if (nest.to[last] != 1 || nest.from[last] == 1 || nest.shape[last] < 16) return false;
  for (dense = 0; dense < last; ++dense) {
    if (nest.from[dense] == 1 && nest.shape[dense] >= 16) return true;
  }
  return false;
}

template <class Bits>
bool transpose(const te_fl_context& ctx, const Nest& nest, int dense, const void* in, void* out) {
  const int last = nest.rank - 1;
  Tiles t;
  t.rows = nest.shape[last], t.cols = nest.shape[dense];
  t.from_row = nest.from[last], t.to_col = nest.to[dense];
  t.load_wide = reinterpret_cast<uintptr_t>(in) % 16 == 0 && t.from_row % kRun<Bits> == 0;
  t.store_wide = reinterpret_cast<uintptr_t>(out) % 16 == 0 && t.to_col % kRun<Bits> == 0;
  for (int d = 0; d < last; ++d) {
    if (d == dense) continue;
    const int at = t.others.rank++;
    t.others.shape[at] = nest.shape[d];
    t.others.from[at] = nest.from[d], t.others.to[at] = nest.to[d];
    t.load_wide = t.load_wide && nest.from[d] % kRun<Bits> == 0;
    t.store_wide = t.store_wide && nest.to[d] % kRun<Bits> == 0;
  }
  if (t.others.rank == 0) {
    t.others.rank = 1;
    t.others.shape[0] = 1, t.others.from[0] = t.others.to[0] = 0;
  }
  const int64_t row_tiles = ceil_div(t.rows, kTransposeRows<Bits>),
                col_tiles = ceil_div(t.cols, kTransposeCols<Bits>);
  const int64_t blocks = row_tiles * col_tiles * t.others.size();
  if (blocks >= kFastDivLimit) return false;
  prepare(t.others);
  t.by_row_tiles = FastDiv(row_tiles), t.by_col_tiles = FastDiv(col_tiles);
  transpose_kernel<Bits><<<static_cast<unsigned>(blocks), kThreads, 0, stream_of(ctx)>>>(
      static_cast<const Bits*>(in), static_cast<Bits*>(out), t);
  return true;
}

}  // namespace te_fl::cuda
