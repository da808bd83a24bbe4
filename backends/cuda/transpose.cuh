// Copies whose input and output are dense in different dimensions: tiles through shared memory.
#pragma once

#include "nest.cuh"

namespace te_fl::cuda {

// The dimension that is dense in the input is not the one that is dense in the output: tiles of
// them go through shared memory. A tile has eight 16-byte words in either direction.
struct Tiles {
  int64_t rows, cols;        // of the output's dense dimension; of the input's
  int64_t from_row, to_col;  // the strides that are not 1
  FastDiv by_row_tiles, by_col_tiles;
  Nest others;                 // the remaining dimensions
  bool load_wide, store_wide;  // every run of a tile begins at a multiple of 16 bytes
};

template <class Bits>
inline constexpr int kRun = 16 / static_cast<int>(sizeof(Bits));  // elements of a 16-byte word

template <class Bits>
__global__ void __launch_bounds__(kThreads) transpose_kernel(const Bits* in, Bits* out, Tiles t) {
  constexpr int kV = kRun<Bits>, kEdge = 8 * kV;
  // An odd number of 32-bit words, so that a column's elements lie in different banks.
  constexpr int kPitch = kEdge + (sizeof(Bits) < 4 ? 4 / static_cast<int>(sizeof(Bits)) : 1);
  __shared__ alignas(16) Bits tile[kEdge * kPitch];
  uint32_t row_tile = 0, col_tile = 0;
  const uint32_t other = t.by_row_tiles(t.by_col_tiles(blockIdx.x, col_tile), row_tile);
  int64_t from = 0, to = 0;
  t.others.offsets(other, from, to);
  const int64_t row0 = static_cast<int64_t>(row_tile) * kEdge;
  const int64_t col0 = static_cast<int64_t>(col_tile) * kEdge;
  in += from + row0 * t.from_row + col0;
  out += to + col0 * t.to_col + row0;
  const int rows = static_cast<int>(t.rows - row0 < kEdge ? t.rows - row0 : kEdge);
  const int cols = static_cast<int>(t.cols - col0 < kEdge ? t.cols - col0 : kEdge);
  const int word = static_cast<int>(threadIdx.x) % 8 * kV;
  for (int r = static_cast<int>(threadIdx.x) / 8; r < rows; r += kThreads / 8) {
    alignas(16) Bits held[kV];
    const Bits* at = in + r * t.from_row + word;
    if (t.load_wide && word + kV <= cols) {
      *reinterpret_cast<uint4*>(held) = *reinterpret_cast<const uint4*>(at);
    } else {
#pragma unroll
      for (int i = 0; i < kV; ++i) held[i] = word + i < cols ? at[i] : Bits{};
    }
    Bits* to_tile = tile + r * kPitch + word;
    if constexpr (sizeof(Bits) < 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        reinterpret_cast<uint32_t*>(to_tile)[i] = reinterpret_cast<const uint32_t*>(held)[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kV; ++i) to_tile[i] = held[i];
    }
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x) / 8; c < cols; c += kThreads / 8) {
    alignas(16) Bits held[kV];
#pragma unroll
    for (int i = 0; i < kV; ++i) {
      if (word + i < rows) held[i] = tile[(word + i) * kPitch + c];
    }
    Bits* at = out + c * t.to_col + word;
    if (t.store_wide && word + kV <= rows) {
      *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(held);
    } else {
#pragma unroll
      for (int i = 0; i < kV; ++i) {
        if (word + i < rows) at[i] = held[i];
      }
    }
  }
}

// Whether two dimensions are worth tiles, and those; `dense` is the input's dense dimension.
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
  constexpr int kEdge = 8 * kRun<Bits>;
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
  const int64_t row_tiles = ceil_div(t.rows, kEdge), col_tiles = ceil_div(t.cols, kEdge);
  const int64_t blocks = row_tiles * col_tiles * t.others.size();
  if (blocks >= kFastDivLimit) return false;
  prepare(t.others);
  t.by_row_tiles = FastDiv(row_tiles), t.by_col_tiles = FastDiv(col_tiles);
  transpose_kernel<Bits><<<static_cast<unsigned>(blocks), kThreads, 0, stream_of(ctx)>>>(
      static_cast<const Bits*>(in), static_cast<Bits*>(out), t);
  return true;
}

}  // namespace te_fl::cuda
