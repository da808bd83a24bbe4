// Elementwise kernels (tile.cuh) that write FP8 with 128-element block scaling. A tile is 128 x 128
// elements, so no block spans two tiles in either direction and each input is read once. For copies
// of 16-bit elements, maxima are computed on packed pairs; otherwise arithmetic instead of memory
// would limit the speed.
#pragma once

#include "common/pairs.cuh"
#include "common/tile.cuh"

namespace te_fl::cuda {

constexpr int kBlockTile = 128, kBlockThreads = 512, kBlockWarps = kBlockThreads / 32;

struct BlockShared {
  __align__(16) uint32_t columns[kBlockTile][32];
  __align__(8) float row_amax[2][kBlockTile];  // of the tile's left and right half
  __align__(8) float column_amax[kBlockWarps / 2][kBlockTile];
  __align__(16) float row_scale[kBlockTile];
  __align__(16) float column_scale[kBlockTile];
  float amax;
};

__device__ inline bool finds_columns(const Quantised& q) {
  return q.scaling != TE_FL_SCALING_BLOCK_128X128 && q.columns != nullptr;
}

// Writes a warp's row and column amaxes to shared memory.
template <int kBytes>
__device__ inline void keep_amaxes(const Quantised& q, const float (&v)[4][8], int right,
                                   int warp_row, const Place<kBytes>& at, BlockShared& shared) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
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
  if (finds_columns(q)) {
    *reinterpret_cast<float2*>(&shared.column_amax[warp_row][right * kTileCols + pair_col(at)]) =
        combine_columns(column_most, larger);
  }
}
// Like keep_amaxes(), for 16-bit elements that have not been converted to FP32.
template <class T>
__device__ inline void keep_pair_amaxes(const Quantised& q, const uint4 (&raw)[4], int right,
                                        int warp_row, const Place<2>& at, BlockShared& shared) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const auto larger = [](uint32_t a, uint32_t b) { return larger_pair<T>(a, b); };
  uint32_t row_most[4] = {}, column_most[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t pair = absolute_pair(words[w]);
      row_most[i] = larger(row_most[i], pair);
      column_most[w] = larger(column_most[w], pair);
    }
  }
  const uint32_t rows[2] = {larger_halves<T>(row_most[0], row_most[1]),
                            larger_halves<T>(row_most[2], row_most[3])};
  uint32_t two_rows[1];
  fold<4>(rows, two_rows, larger);
#pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    two_rows[0] = larger(two_rows[0], __shfl_xor_sync(0xFFFFFFFFu, two_rows[0], step));
  }
  if (lane % 4 == 0) {
    *reinterpret_cast<float2*>(&shared.row_amax[right][at.group * 4 + (lane & 4) / 2]) =
        values_of_pair<T>(two_rows[0]);
  }
  if (!finds_columns(q)) return;
  uint32_t half[2], two_columns[1];
  fold<8>(column_most, half, larger);
  fold<16>(half, two_columns, larger);
  *reinterpret_cast<float2*>(&shared.column_amax[warp_row][right * kTileCols + pair_col(at)]) =
      values_of_pair<T>(two_columns[0]);
}

// Computes the tile's scales from the amaxes of all warps and writes them to shared memory.
__device__ inline void find_block_scales(const Quantised& q, int64_t row0, int64_t col0,
                                         int64_t cols_end, BlockShared& shared) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31;
  const bool square = q.scaling == TE_FL_SCALING_BLOCK_128X128;
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
    const float most =
        square ? shared.amax : fmaxf(shared.row_amax[0][thread], shared.row_amax[1][thread]);
    const float scale = q.block_scale(most);
    shared.row_scale[thread] = scale;
    // scale_inv is padded to a multiple of four; the padding is set to 0.
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
  } else if (thread < 2 * kBlockTile && finds_columns(q)) {
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

// With two outputs, two consecutive blocks write one output each, so the second block finds the
// sources in the L2 cache.
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
  // If the right half of the last tile is outside the matrix, its threads repeat the left half's
  // columns.
  const bool inside = tile0 + right * kTileCols < g.cols;
  const int64_t col0 = inside ? tile0 + right * kTileCols : tile0;
  const int left = static_cast<int>(g.cols - tile0 < kBlockTile ? g.cols - tile0 : kBlockTile);
  const int each = kSums ? g.each : 1;
  for (int t = 0; t < each; ++t) {
    const int64_t row0 = (int64_t{step} * each + t) * kTileRows;
    if (row0 >= g.rows) break;
    if (t > 0) __syncthreads();
    // Three sources are loaded in two steps of two rows: four rows of three sources and the results
    // do not fit in the registers if two blocks share a multiprocessor.
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
      // Partial sums go to shared memory at once: kept in registers, they would cause spills of the
      // tile.
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
      if (t > 0) pair.x += total->x, pair.y += total->y;  // written earlier by this lane
      *total = pair;
    }
    keep_amaxes<kBytes>(q, v, right, warp_row, at, shared);
    find_block_scales(q, row0, out0 + tile0, out0 + g.cols, shared);
    if (q.rows != nullptr) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t row = row0 + at.group * 4 + i;
        const float s = shared.row_scale[at.group * 4 + i];
        const uint32_t codes[2] = {
            encode_four(v[i][0] * s, v[i][1] * s, v[i][2] * s, v[i][3] * s, q.is_e5m2),
            encode_four(v[i][4] * s, v[i][5] * s, v[i][6] * s, v[i][7] * s, q.is_e5m2)};
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
            encode_four(v[i][4 * h] * s[4 * h], v[i][4 * h + 1] * s[4 * h + 1],
                     v[i][4 * h + 2] * s[4 * h + 2], v[i][4 * h + 3] * s[4 * h + 3], q.is_e5m2);
      }
    }
    stage_columns<kBytes>(shared.columns, codes, at, right * kTileCols);
    __syncthreads();
    write_columns<kBytes, kBlockThreads, kBlockTile>(
        shared.columns, static_cast<uint8_t*>(q.columns) + (out0 + tile0) * q.m, q.m, row0, left);
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

// Quantises one tile of 16-bit elements (`raw`, not converted to FP32).
template <class T, bool kE5m2>
__device__ inline void quantise_block_pairs(const uint4 (&raw)[4], const Quantised& q, int64_t row0,
                                            int64_t tile0, int left, int right, bool inside,
                                            const Place<2>& at, BlockShared& shared) {
  const auto values = [&](int i, float(&v)[8]) {
    const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 pair = values_of_pair<T>(words[w]);
      v[2 * w] = pair.x, v[2 * w + 1] = pair.y;
    }
  };
  const int rows_left = static_cast<int>(q.m - row0 < kBlockTile ? q.m - row0 : kBlockTile);
  if (q.rows != nullptr) {
    const float4 four = *reinterpret_cast<const float4*>(&shared.row_scale[at.group * 4]);
    const float scale[4] = {four.x, four.y, four.z, four.w};
    const bool has = inside && at.col(0) < left - right * kTileCols;
    uint8_t* to = static_cast<uint8_t*>(q.rows) + (row0 + at.group * 4) * q.k + tile0 +
                  right * kTileCols + at.col(0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float v[8];
      values(i, v);
      const float s = scale[i];
      const uint2 codes = make_uint2(encode_four(v[0] * s, v[1] * s, v[2] * s, v[3] * s, kE5m2),
                                     encode_four(v[4] * s, v[5] * s, v[6] * s, v[7] * s, kE5m2));
      if (has && at.group * 4 + i < rows_left) store_whole(reinterpret_cast<uint2*>(to), codes);
      to += q.k;
    }
  }
  if (q.columns == nullptr) return;
  const auto* scales =
      reinterpret_cast<const float4*>(&shared.column_scale[right * kTileCols + at.col(0)]);
  const float4 low = scales[0], high = scales[1];
  uint32_t codes[4][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float v[8];
    values(i, v);
    codes[i][0] = encode_four(v[0] * low.x, v[1] * low.y, v[2] * low.z, v[3] * low.w, kE5m2);
    codes[i][1] = encode_four(v[4] * high.x, v[5] * high.y, v[6] * high.z, v[7] * high.w, kE5m2);
  }
  stage_columns<2>(shared.columns, codes, at, right * kTileCols);
  __syncthreads();
  write_columns<2, kBlockThreads, kBlockTile>(
      shared.columns, static_cast<uint8_t*>(q.columns) + tile0 * q.m, q.m, row0, left);
}

// Quantises 16-bit elements to FP8 without a further operation. T is the element type of `in`.
template <class T, bool kE5m2>
__device__ inline void copy_block_pairs(const TileSources<1>& in, const TileGrid& g,
                                        const Quantised& q, unsigned block, BlockShared& shared) {
  unsigned step, strip;
  place_block(g, block, step, strip);
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5;
  const int right = warp & 1, warp_row = warp >> 1;
  const Place<2> at(warp_row * 32 + (thread & 31));
  const int64_t row0 = int64_t{step} * kTileRows, tile0 = int64_t{strip} * kBlockTile;
  // If the right half of the last tile is outside the matrix, its threads repeat the left half's
  // columns.
  const bool inside = tile0 + right * kTileCols < g.cols;
  const int left = static_cast<int>(g.cols - tile0 < kBlockTile ? g.cols - tile0 : kBlockTile);
  uint4 raw[1][4][1];
  load_tile<2>(in, g, row0, inside ? tile0 + right * kTileCols : tile0, at, 0, raw);
  const uint4 own[4] = {raw[0][0][0], raw[0][1][0], raw[0][2][0], raw[0][3][0]};
  keep_pair_amaxes<T>(q, own, right, warp_row, at, shared);
  find_block_scales(q, row0, tile0, g.cols, shared);
  quantise_block_pairs<T, kE5m2>(own, q, row0, tile0, left, right, inside, at, shared);
}
__device__ inline void copy_blocks(const TileSources<1>& in, const TileGrid& g, const Quantised& q,
                                   unsigned block) {
  __shared__ BlockShared shared;
  const auto of_type = [&](auto type) {
    using T = decltype(type);
    if (q.is_e5m2) return copy_block_pairs<T, true>(in, g, q, block, shared);
    copy_block_pairs<T, false>(in, g, q, block, shared);
  };
  if (in.is_half) return of_type(fp16{});
  of_type(bf16{});
}

template <class Math, int kBytes, bool kSums>
__global__ void __launch_bounds__(kBlockThreads, Math::kSources* kBytes <= 6 ? 2 : 1)
    block_kernel(const __grid_constant__ TileSources<Math::kSources> in,
                 const __grid_constant__ TileGrid g, const __grid_constant__ Quantised q, Math math,
                 float* partials) {
  if (q.skip()) return;
  if constexpr (Copies<Math> && kBytes == 2 && !kSums) {
    copy_blocks(in, g, q, blockIdx.x);
  } else {
    quantise_blocks<Math, kBytes, kSums>(in, g, q, math, partials, blockIdx.x);
  }
}

}  // namespace te_fl::cuda
