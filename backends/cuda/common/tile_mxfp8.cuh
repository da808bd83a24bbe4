// Elementwise kernels (tile.cuh) into MXFP8. A warp takes 32 rows x 64 columns, and a lane eight
// rows of eight columns: whole blocks of both directions lie in a warp, and as both copies keep
// the order of elements, codes leave from registers. Results are computed once for each copy, which
// is for ops that cost little. Scales are padded to whole tiles of 128 x 128 elements, whose zeros
// are written here as well.
#pragma once

#include "common/tile.cuh"

namespace te_fl::cuda {

constexpr int kMxfp8Rows = kMxfp8Block, kMxfp8Cols = kWarps * kTileCols;  // of a block's tile
constexpr int kMxfp8LaneRows = 8;

// The scales of a block's rows on their way to accesses of four bytes.
struct Mxfp8Shared {
  __align__(4) uint8_t row_scales[kMxfp8Rows][kMxfp8Cols / kMxfp8Block];
  float warp_amax[kWarps];
};

// Clears the scales of a warp's tile that lies outside of the matrix: they are padding.
inline __device__ void clear_mxfp8_scales(const Quantised& q, int64_t row0, int64_t col0, int warp,
                                          Mxfp8Shared& shared) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int j = 0; j < kTileCols / kMxfp8Block; ++j) {
    shared.row_scales[lane][warp * (kTileCols / kMxfp8Block) + j] = 0;
    const int64_t col = col0 + j * 32 + lane;
    if (q.columns != nullptr && col < mxfp8_column_pitch(q.k)) {
      *q.mxfp8_column_block(row0 / kMxfp8Block, col) = 0;
    }
  }
}

// The tile of a warp, the `warp`th of its block, which begins inside of the matrix.
template <class Math, int kBytes, bool kSums>
__device__ inline void quantise_mxfp8_warp(const TileSources<Math::kSources>& in, const TileGrid& g,
                                           const Quantised& q, const Math& math, int64_t row0,
                                           int64_t col0, int warp, const Place<kBytes>& at,
                                           Mxfp8Shared& shared, float (&sum)[8], float& most) {
  // Elements of a lane's row in one block, the lanes that share it, and a lane's blocks.
  constexpr int kRun = kBytes == 2 ? 8 : 4, kLanes = kMxfp8Block / kRun, kRuns = 8 / kRun;
  const int left = static_cast<int>(g.cols - col0 < kTileCols ? g.cols - col0 : kTileCols);
  uint4 raw[Math::kSources][kMxfp8LaneRows][Piece<kBytes>::kCount];
  load_tile<kBytes>(in, g, row0, col0, at, 0, raw);
  float column_most[8] = {};
#pragma unroll
  for (int i = 0; i < kMxfp8LaneRows; ++i) {
    const int r = at.group * 4 + i;
    const bool inside = row0 + r < g.rows;
    float v[1][8], row_most[kRuns] = {};
    compute_row<kBytes>(raw, i, in.is_half, math, v);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float absolute = fabsf(v[0][e]);
      column_most[e] = fmaxf(column_most[e], absolute);
      row_most[e / kRun] = fmaxf(row_most[e / kRun], absolute);
      if (kSums && inside) sum[e] += v[0][e];
    }
    if (q.rows == nullptr) continue;
    uint32_t codes[2];
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, row_most[run], step);
        row_most[run] = fmaxf(row_most[run], other);
      }
      const uint32_t scale = q.mxfp8_scale(row_most[run]);
      const float factor = mxfp8_factor(scale);
      const int block = at.col(run * kRun) / kMxfp8Block;
      if (at.c % kLanes == 0) {
        shared.row_scales[r][warp * (kTileCols / kMxfp8Block) + block] =
            static_cast<uint8_t>(inside && block * kMxfp8Block < left ? scale : 0);
      }
#pragma unroll
      for (int h = run * kRun / 4; h < (run + 1) * kRun / 4; ++h) {
        codes[h] = codes_of(v[0][4 * h] * factor, v[0][4 * h + 1] * factor,
                            v[0][4 * h + 2] * factor, v[0][4 * h + 3] * factor, q.is_e5m2);
      }
    }
    if (inside) {
      write_row<kBytes>(static_cast<uint8_t*>(q.rows) + (row0 + r) * q.k + col0, left, at, codes);
    }
  }
#pragma unroll
  for (int e = 0; e < 8; ++e) most = fmaxf(most, column_most[e]);
  if (q.columns == nullptr) return;
  float factor[8];
  uint32_t scales[2] = {};
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    float block_most = column_most[e];
    block_most = fmaxf(block_most, __shfl_xor_sync(0xFFFFFFFFu, block_most, 8));
    block_most = fmaxf(block_most, __shfl_xor_sync(0xFFFFFFFFu, block_most, 16));
    const uint32_t scale = q.mxfp8_scale(block_most);
    factor[e] = mxfp8_factor(scale);
    if (at.col(e) < left) scales[e / 4] |= scale << (e % 4 * 8);
  }
  if (at.group == 0) {
    const int64_t padded = mxfp8_column_pitch(q.k) - col0;
    write_row<kBytes>(q.mxfp8_column_block(row0 / kMxfp8Block, col0),
                      static_cast<int>(padded < kTileCols ? padded : kTileCols), at, scales);
  }
#pragma unroll
  for (int i = 0; i < kMxfp8LaneRows; ++i) {
    const int64_t row = row0 + at.group * 4 + i;
    float v[1][8];
    compute_row<kBytes>(raw, i, in.is_half, math, v);
    uint32_t codes[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      codes[h] = codes_of(v[0][4 * h] * factor[4 * h], v[0][4 * h + 1] * factor[4 * h + 1],
                          v[0][4 * h + 2] * factor[4 * h + 2], v[0][4 * h + 3] * factor[4 * h + 3],
                          q.is_e5m2);
    }
    if (row < g.rows) {
      write_row<kBytes>(static_cast<uint8_t*>(q.columns) + row * q.k + col0, left, at, codes);
    }
  }
}

template <class Math, int kBytes, bool kSums>
__device__ inline void quantise_mxfp8(const TileSources<Math::kSources>& in, const TileGrid& g,
                                      const Quantised& q, const Math& math, float* partials,
                                      unsigned block) {
  static_assert(Math::kOutputs == 1);
  __shared__ Mxfp8Shared shared;
  unsigned step, strip;
  place_block(g, block, step, strip);
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5;
  Place<kBytes> at(thread & 31);
  at.group *= kMxfp8LaneRows / 4;
  const int64_t tile0 = int64_t{strip} * kMxfp8Cols, col0 = tile0 + warp * kTileCols;
  float most = 0.0f, sum[8] = {};
  const int each = kSums ? g.each : 1;
  for (int t = 0; t < each; ++t) {
    const int64_t row0 = (int64_t{step} * each + t) * kMxfp8Rows;
    if (row0 >= mxfp8_padded_rows(g.rows)) break;
    if (t > 0) __syncthreads();
    if (row0 < g.rows && col0 < g.cols) {
      quantise_mxfp8_warp<Math, kBytes, kSums>(in, g, q, math, row0, col0, warp, at, shared, sum,
                                               most);
    } else {
      clear_mxfp8_scales(q, row0, col0, warp, shared);
    }
    if (q.rows == nullptr) continue;
    __syncthreads();
    constexpr int kWords = kMxfp8Cols / kMxfp8Block / 4;
    const int r = thread / kWords, word = thread % kWords;
    const int64_t j = tile0 / kMxfp8Block + word * 4;
    if (r < kMxfp8Rows && j < mxfp8_row_pitch(q.k)) {
      *reinterpret_cast<uint32_t*>(q.mxfp8_row_block(row0 + r, j)) =
          *reinterpret_cast<const uint32_t*>(&shared.row_scales[r][word * 4]);
    }
  }
  if (q.running_amax != nullptr) {
    most = block_amax(most, shared.warp_amax);
    if (thread == 0) atomic_amax(q.running_amax, most);
  }
  if constexpr (kSums) {
    const float2 pair = combine_columns(sum, [](float a, float b) { return a + b; });
    const int64_t col = col0 + pair_col(at);
    if (col < g.cols) *reinterpret_cast<float2*>(&partials[step * g.cols + col]) = pair;
  }
}

// A block of 16-bit elements holds so few registers that there is room for three of them.
template <class Math, int kBytes, bool kSums>
__global__ void __launch_bounds__(kThreads, Math::kSources* kBytes <= 2 && !kSums ? 3 : 2)
    mxfp8_kernel(const __grid_constant__ TileSources<Math::kSources> in,
                 const __grid_constant__ TileGrid g, const __grid_constant__ Quantised q, Math math,
                 float* partials) {
  if (q.skip()) return;
  quantise_mxfp8<Math, kBytes, kSums>(in, g, q, math, partials, blockIdx.x);
}

}  // namespace te_fl::cuda
