// Elementwise kernels (tile.cuh) into FP8 scaled in 128 blocks: a tile is 128 x 128, so that it
// holds whole blocks in both directions, and every input is read once.
#pragma once

#include "common/tile.cuh"

namespace te_fl::cuda {

constexpr int kBlockTile = 128, kBlockThreads = 512, kBlockWarps = kBlockThreads / 32;

struct BlockShared {
  __align__(16) uint32_t columns[kBlockTile][32];
  float row_amax[2][kBlockTile];  // of the tile's left and right half
  __align__(8) float column_amax[kBlockWarps / 2][kBlockTile];
  float row_scale[kBlockTile], column_scale[kBlockTile];
  float amax;
};

// Scales of the tile from the values' amaxes; all in shared memory when it returns.
template <int kBytes>
__device__ inline void find_block_scales(const Quantised& q, const float (&v)[4][8], int64_t row0,
                                         int64_t col0, int right, int warp_row,
                                         const Place<kBytes>& at, int64_t cols_end,
                                         BlockShared& shared) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31;
  const auto larger = [](float a, float b) { return fmaxf(a, b); };
  float row_most[4] = {}, column_most[8] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      row_most[i] = fmaxf(row_most[i], fabsf(v[i][e]));
      column_most[e] = fmaxf(column_most[e], fabsf(v[i][e]));
    }
  }
  float half[2], one[1];
  fold<4>(row_most, half, larger);
  fold<2>(half, one, larger);
  one[0] = fmaxf(one[0], __shfl_xor_sync(0xFFFFFFFFu, one[0], 1));
  if (lane % 2 == 0) {
    shared.row_amax[right][at.group * 4 + (lane & 4) / 2 + (lane & 2) / 2] = one[0];
  }
  const bool square = q.scaling == TE_FL_SCALING_BLOCK_128X128;
  if (!square && q.columns != nullptr) {
    *reinterpret_cast<float2*>(&shared.column_amax[warp_row][right * kTileCols + pair_col(at)]) =
        combine_columns(column_most, larger);
  }
  __syncthreads();
  if (square || q.running_amax != nullptr) {
    if (thread < 32) {
      float most = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) most = fmaxf(most, shared.row_amax[i & 1][(i >> 1) * 32 + lane]);
      most = warp_max(most);
      if (thread == 0) {
        shared.amax = most;
        if (q.running_amax != nullptr) atomic_amax(q.running_amax, most);
      }
    }
    __syncthreads();
  }
  if (thread < kBlockTile) {
    const float most = square ? shared.amax
                              : fmaxf(shared.row_amax[0][thread], shared.row_amax[1][thread]);
    const float scale = q.block_scale(most);
    shared.row_scale[thread] = scale;
    // Factors come in fours: what is beyond the last row, block or column is 0.
    if (q.rows != nullptr && !square && row0 + thread < (q.m + 3) / 4 * 4) {
      *q.row_block(row0 + thread, col0 / kBlockTile) = row0 + thread < q.m ? 1.0f / scale : 0.0f;
    }
    if (square && thread < 4) {
      const int64_t i = row0 / kBlockTile, j = col0 / kBlockTile;
      const int64_t down = (q.m + kBlockTile - 1) / kBlockTile;
      const int64_t across = (q.k + kBlockTile - 1) / kBlockTile;
      const float factor = thread == 0 ? 1.0f / scale : 0.0f;
      const auto mine = [thread](int64_t block, int64_t blocks) {
        return thread == 0 || (block + 1 == blocks && block + thread < (blocks + 3) / 4 * 4);
      };
      if (q.rows != nullptr && mine(j, across)) *q.square_block(i, j + thread) = factor;
      if (q.columns != nullptr && mine(i, down)) *q.column_square_block(i + thread, j) = factor;
    }
    if (square) shared.column_scale[thread] = scale;
  } else if (thread < 2 * kBlockTile && !square && q.columns != nullptr) {
    const int col = thread - kBlockTile;
    float most = 0.0f;
#pragma unroll
    for (int w = 0; w < kBlockWarps / 2; ++w) most = fmaxf(most, shared.column_amax[w][col]);
    const float scale = q.block_scale(most);
    shared.column_scale[col] = scale;
    if (col0 + col < (q.k + 3) / 4 * 4) {
      *q.column_block(row0 / kBlockTile, col0 + col) = col0 + col < cols_end ? 1.0f / scale : 0.0f;
    }
  }
  __syncthreads();
}

// With two outputs, neighbouring blocks take one each: the second finds the sources in the L2 cache.
template <class Math, int kBytes, bool kSums>
__device__ inline void quantise_blocks(const TileSources<Math::kSources>& in, const TileGrid& g,
                                       const Quantised& q, const Math& math, float* partials,
                                       unsigned block) {
  __shared__ BlockShared shared;
  __shared__ __align__(8) float warp_sums[kSums ? kBlockWarps / 2 : 1][kBlockTile];
  const unsigned output = block % Math::kOutputs;
  unsigned step, strip;
  place_block(g, block / Math::kOutputs, step, strip);
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5;
  const int right = warp & 1, warp_row = warp >> 1;
  const Place<kBytes> at(warp_row * 32 + (thread & 31));
  const int64_t tile0 = int64_t{strip} * kBlockTile, out0 = output * g.cols;
  // The right half of the last tile may lie outside: it repeats columns of the left one.
  const bool inside = tile0 + right * kTileCols < g.cols;
  const int64_t col0 = inside ? tile0 + right * kTileCols : tile0;
  const int left = static_cast<int>(g.cols - tile0 < kBlockTile ? g.cols - tile0 : kBlockTile);
  const int each = kSums ? g.each : 1;
  for (int t = 0; t < each; ++t) {
    const int64_t row0 = (int64_t{step} * each + t) * kTileRows;
    if (row0 >= g.rows) break;
    if (t > 0) __syncthreads();
    // Three sources are loaded in two turns: all four rows of them and the values do not fit in the
    // registers of two blocks.
    constexpr int kRows = Math::kSources <= 2 ? 4 : 2;
    float v[4][8];
#pragma unroll
    for (int first = 0; first < 4; first += kRows) {
      uint4 raw[Math::kSources][kRows][Piece<kBytes>::kCount];
      load_tile<kBytes>(in, g, row0, col0, at, first, raw);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float all[Math::kOutputs][8];
        compute_row<kBytes>(raw, i, in.is_half, math, all);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          v[first + i][e] = output == 0 ? all[0][e] : all[Math::kOutputs - 1][e];
        }
      }
    }
    if constexpr (kSums) {
      // In shared memory at once: held in registers they would crowd out the tile.
      float sum[8] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (row0 + at.group * 4 + i >= g.rows) break;
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[e] += v[i][e];
      }
      float2 pair = combine_columns(sum, [](float a, float b) { return a + b; });
      auto* total =
          reinterpret_cast<float2*>(&warp_sums[warp_row][right * kTileCols + pair_col(at)]);
      if (t > 0) pair.x += total->x, pair.y += total->y;  // the lane wrote it itself
      *total = pair;
    }
    find_block_scales<kBytes>(q, v, row0, out0 + tile0, right, warp_row, at, out0 + g.cols, shared);
    if (q.rows != nullptr) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t row = row0 + at.group * 4 + i;
        const float s = shared.row_scale[at.group * 4 + i];
        const uint32_t codes[2] = {
            codes_of(v[i][0] * s, v[i][1] * s, v[i][2] * s, v[i][3] * s, q.is_e5m2),
            codes_of(v[i][4] * s, v[i][5] * s, v[i][6] * s, v[i][7] * s, q.is_e5m2)};
        if (row < g.rows) {
          write_row<kBytes>(static_cast<uint8_t*>(q.rows) + row * q.k + out0 + col0,
                            inside ? left - right * kTileCols : 0, at, codes);
        }
      }
    }
    if (q.columns == nullptr) continue;
    float s[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) s[e] = shared.column_scale[right * kTileCols + at.col(e)];
    uint32_t codes[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        codes[i][h] =
            codes_of(v[i][4 * h] * s[4 * h], v[i][4 * h + 1] * s[4 * h + 1],
                     v[i][4 * h + 2] * s[4 * h + 2], v[i][4 * h + 3] * s[4 * h + 3], q.is_e5m2);
      }
    }
    stage_columns<kBytes>(shared.columns, codes, at, right * kTileCols);
    __syncthreads();
    write_columns<kBytes, kBlockThreads>(shared.columns,
                                         static_cast<uint8_t*>(q.columns) + (out0 + tile0) * q.m,
                                         q.m, row0, left);
  }
  if constexpr (kSums) {
    __syncthreads();
    if (thread < kBlockTile && tile0 + thread < g.cols) {
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < kBlockWarps / 2; ++w) total += warp_sums[w][thread];
      partials[step * g.cols + tile0 + thread] = total;
    }
  }
}

template <class Math, int kBytes, bool kSums>
__global__ void __launch_bounds__(kBlockThreads, Math::kSources * kBytes <= 6 ? 2 : 1)
    block_kernel(const __grid_constant__ TileSources<Math::kSources> in,
                 const __grid_constant__ TileGrid g, const __grid_constant__ Quantised q, Math math,
                 float* partials) {
  if (q.skip()) return;
  quantise_blocks<Math, kBytes, kSums>(in, g, q, math, partials, blockIdx.x);
}

}  // namespace te_fl::cuda
