// Quantises to MXFP8 at memory bandwidth. A warp processes 32 rows x 64 columns, and a lane
// processes eight rows of eight columns (Place of tile.cuh), so no block spans two warps in either
// direction. Row-wise and column-wise data have the layout of the source, so both are written from
// registers. Maxima of 16-bit elements, and BF16 multiplications by scales, are computed on packed
// pairs; otherwise arithmetic instead of memory would limit the speed. Scales are padded to tiles
// of 128 x 128 elements, and the kernel's tiles cover that padding.
#pragma once

#include "common/pairs.cuh"
#include "common/tile.cuh"

namespace te_fl::cuda {

// Extents of a block's tile.
constexpr int kMxfp8Rows = kMxfp8Block, kMxfp8Cols = kWarps * kTileCols;
constexpr int kMxfp8LaneRows = 8;

// Collects the row-wise scales of a thread block, so that they are stored to global memory four
// bytes at a time.
struct Mxfp8Shared {
  __align__(4) uint8_t row_scales[kMxfp8Rows][kMxfp8Cols / kMxfp8Block];
  float warp_amax[kWarps];
};

// ---- a lane's eight elements of a row, and their factors

template <class T>
struct Mxfp8Row {
  static constexpr int kBytes = sizeof(T), kWords = 2 * kBytes;
  uint32_t words[kWords];

  __device__ explicit Mxfp8Row(const uint4 (&raw)[Piece<kBytes>::kCount]) {
#pragma unroll
    for (int p = 0; p < Piece<kBytes>::kCount; ++p) {
      words[4 * p] = raw[p].x, words[4 * p + 1] = raw[p].y;
      words[4 * p + 2] = raw[p].z, words[4 * p + 3] = raw[p].w;
    }
  }
  __device__ void values(float (&v)[8]) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if constexpr (kBytes == 4) {
        v[w] = __uint_as_float(words[w]);
      } else {
        const float2 pair = values_of_pair<T>(words[w]);
        v[2 * w] = pair.x, v[2 * w + 1] = pair.y;
      }
    }
  }
};

// The factors by which eight columns are multiplied before conversion to FP8.
template <class T>
struct Mxfp8Factors {
  float of[8];

  __device__ void set_pair(int w, uint32_t first, uint32_t second) {
    of[2 * w] = mxfp8_factor(first), of[2 * w + 1] = mxfp8_factor(second);
  }
  template <bool kE5m2>
  __device__ void codes(const Mxfp8Row<T>& row, uint32_t (&codes)[2]) const {
    float v[8];
    row.values(v);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      codes[h] = encode_four(v[4 * h] * of[4 * h], v[4 * h + 1] * of[4 * h + 1],
                          v[4 * h + 2] * of[4 * h + 2], v[4 * h + 3] * of[4 * h + 3], kE5m2);
    }
  }
};
// The factors are powers of two, which BF16 represents exactly. Elements are multiplied in BF16: no
// result overflows, and results that are subnormal in BF16 become zero in both FP8 types.
template <>
struct Mxfp8Factors<bf16> {
  uint32_t pairs[4];

  __device__ void set_pair(int w, uint32_t first, uint32_t second) {
    pairs[w] = __byte_perm(mxfp8_factor_bits(first), mxfp8_factor_bits(second), 0x7632);
  }
  template <bool kE5m2>
  __device__ void codes(const Mxfp8Row<bf16>& row, uint32_t (&codes)[2]) const {
    float2 v[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const __nv_bfloat162 scaled = __hmul2(reinterpret_cast<const __nv_bfloat162&>(row.words[w]),
                                            reinterpret_cast<const __nv_bfloat162&>(pairs[w]));
      v[w] = values_of_pair<bf16>(reinterpret_cast<const uint32_t&>(scaled));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      codes[h] = encode_four(v[2 * h].x, v[2 * h].y, v[2 * h + 1].x, v[2 * h + 1].y, kE5m2);
    }
  }
};

// ---- largest magnitudes; NaN is ignored

// The largest magnitudes of eight columns over the rows added so far.
template <class T>
struct Mxfp8Columns {
  uint32_t most[2 * sizeof(T)] = {};

  // Adds a row. For 16-bit elements, returns a word with the row's maxima: of even elements in one
  // half, of odd elements in the other. For FP32 the returned value is not used.
  __device__ uint32_t add(const Mxfp8Row<T>& row) {
    uint32_t row_most = 0;
#pragma unroll
    for (int w = 0; w < Mxfp8Row<T>::kWords; ++w) {
      const uint32_t own = larger_here(row.words[w], most[w]);
      most[w] = own;
      if constexpr (sizeof(T) == 2) {
        row_most = larger_pair<T>(row_most, absolute_pair(row.words[w]));
      }
    }
    return row_most;
  }
  // Reduces the maxima over the lanes that hold the warp's 32 rows.
  __device__ void join() {
#pragma unroll
    for (int w = 0; w < Mxfp8Row<T>::kWords; ++w) {
#pragma unroll
      for (int step = 8; step <= 16; step *= 2) {
        most[w] = larger_here(__shfl_xor_sync(0xFFFFFFFFu, most[w], step), most[w]);
      }
    }
  }
  __device__ float value(int column) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(most[column]);
    } else {
      const float2 pair = values_of_pair<T>(most[column / 2]);
      return column % 2 == 0 ? pair.x : pair.y;
    }
  }
  __device__ static uint32_t larger_here(uint32_t word, uint32_t most) {
    if constexpr (sizeof(T) == 2) {
      return larger_pair<T>(absolute_pair(word), most);
    } else {
      return __float_as_uint(fmaxf(fabsf(__uint_as_float(word)), __uint_as_float(most)));
    }
  }
};

// Computes the amaxes of the row-wise blocks of two rows. Every lane that holds elements of a block
// receives its amax. `pairs`: the results of Mxfp8Columns::add() for the two rows.
template <class T>
__device__ inline void find_row_amaxes(const Mxfp8Row<T> (&rows)[2], const uint32_t (&pairs)[2],
                                       float (&amax)[2][sizeof(T) / 2]) {
  if constexpr (sizeof(T) == 2) {
    // The first row's maximum is in the low half, the second row's in the high half.
    uint32_t both = larger_halves<T>(pairs[0], pairs[1]);
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
      both = larger_pair<T>(both, __shfl_xor_sync(0xFFFFFFFFu, both, step));
    }
    const float2 values = values_of_pair<T>(both);
    amax[0][0] = values.x, amax[1][0] = values.y;
  } else {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int run = 0; run < 2; ++run) {
        float most = 0.0f;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          most = fmaxf(most, fabsf(__uint_as_float(rows[j].words[4 * run + e])));
        }
#pragma unroll
        for (int step = 1; step <= 4; step *= 2) {
          most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
        }
        amax[j][run] = most;
      }
    }
  }
}

// ---- tiles

// The position of a warp's tile. If rows_left or cols_left is not positive, the tile lies entirely
// in the padding. Loads clamp their indices to the matrix's last row and column.
struct Mxfp8Tile {
  int64_t row0, col0;
  int rows_left, cols_left, warp;

  __device__ Mxfp8Tile(const TileGrid& g, int64_t row0_, int64_t tile0, int warp_)
      : row0(row0_), col0(tile0 + warp_ * kTileCols), warp(warp_) {
    rows_left = static_cast<int>(g.rows - row0 < kMxfp8Rows ? g.rows - row0 : kMxfp8Rows);
    cols_left = static_cast<int>(g.cols - col0 < kTileCols ? g.cols - col0 : kTileCols);
  }
};

template <class T, bool kE5m2, bool kSums>
__device__ inline void quantise_mxfp8_warp(const TileSources<1>& in, const Quantised& q,
                                           const Mxfp8Tile& tile, const Place<sizeof(T)>& at,
                                           Mxfp8Shared& shared, float (&sum)[8], float& most) {
  constexpr int kBytes = sizeof(T), kPieces = Piece<kBytes>::kCount;
  // kRun: elements of a lane's row in one block. kLanes: lanes that share a block. kRuns: blocks
  // per lane.
  constexpr int kRun = kBytes == 2 ? 8 : 4, kLanes = kMxfp8Block / kRun, kRuns = 8 / kRun;
  const int first = at.group * 4;
  uint4 raw[kMxfp8LaneRows][kPieces];
  const char* const from = in.base[0] + tile.row0 * in.row_bytes[0] + tile.col0 * kBytes;
#pragma unroll
  for (int i = 0; i < kMxfp8LaneRows; ++i) {
    const char* const row = from + min(first + i, tile.rows_left - 1) * in.row_bytes[0];
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int col = min(at.col(p * 4), tile.cols_left - Piece<kBytes>::kElements);
      raw[i][p] = *reinterpret_cast<const uint4*>(row + col * kBytes);
    }
  }
  const int64_t place = (tile.row0 + first) * q.k + tile.col0;
  const auto scale_of = [&](float amax) {
    return mxfp8_code(__float_as_uint(fmaxf(amax, q.epsilon)), kE5m2);
  };
  Mxfp8Columns<T> columns;
#pragma unroll
  for (int i = 0; i < kMxfp8LaneRows; i += 2) {
    const Mxfp8Row<T> rows[2] = {Mxfp8Row<T>(raw[i]), Mxfp8Row<T>(raw[i + 1])};
    const uint32_t pairs[2] = {columns.add(rows[0]), columns.add(rows[1])};
    float amax[2][kRuns];
    if (q.rows != nullptr) find_row_amaxes(rows, pairs, amax);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int r = first + i + j;
      if (kSums && r < tile.rows_left) {
        float v[8];
        rows[j].values(v);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[e] += v[e];
      }
      if (q.rows == nullptr) continue;
      Mxfp8Factors<T> factors;
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        const uint32_t scale = scale_of(amax[j][run]);
#pragma unroll
        for (int w = run * kRun / 2; w < (run + 1) * kRun / 2; ++w) {
          factors.set_pair(w, scale, scale);
        }
        const int block = at.col(run * kRun) / kMxfp8Block;
        const bool inside = r < tile.rows_left && block * kMxfp8Block < tile.cols_left;
        if (at.c % kLanes == 0) {
          shared.row_scales[r][tile.warp * (kTileCols / kMxfp8Block) + block] =
              static_cast<uint8_t>(inside ? scale : 0);
        }
      }
      uint32_t codes[2];
      factors.template codes<kE5m2>(rows[j], codes);
      if (r < tile.rows_left) {
        write_row<kBytes>(static_cast<uint8_t*>(q.rows) + place + (i + j) * q.k, tile.cols_left, at,
                          codes);
      }
    }
  }
  if (q.running_amax != nullptr) {
#pragma unroll
    for (int e = 0; e < 8; ++e) most = fmaxf(most, columns.value(e));
  }
  if (q.columns == nullptr) return;
  columns.join();
  Mxfp8Factors<T> factors;
  uint32_t scales[2] = {};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t low = scale_of(columns.value(2 * w)), high = scale_of(columns.value(2 * w + 1));
    factors.set_pair(w, low, high);
    scales[w / 2] |= (low | high << 8) << (w % 2 * 16);
  }
  if (at.group == 0) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (tile.rows_left <= 0 || at.col(4 * h) >= tile.cols_left) scales[h] = 0;
    }
    const int64_t padded = mxfp8_column_pitch(q.k) - tile.col0;
    write_row<kBytes>(q.mxfp8_column_block(tile.row0 / kMxfp8Block, tile.col0),
                      static_cast<int>(padded < kTileCols ? padded : kTileCols), at, scales);
  }
#pragma unroll
  for (int i = 0; i < kMxfp8LaneRows; ++i) {
    uint32_t codes[2];
    factors.template codes<kE5m2>(Mxfp8Row<T>(raw[i]), codes);
    if (first + i < tile.rows_left) {
      write_row<kBytes>(static_cast<uint8_t*>(q.columns) + place + i * q.k, tile.cols_left, at,
                        codes);
    }
  }
}

template <class T, bool kE5m2, bool kSums>
__device__ inline void quantise_mxfp8_tiles(const TileSources<1>& in, const TileGrid& g,
                                            const Quantised& q, float* partials, unsigned block,
                                            Mxfp8Shared& shared) {
  unsigned step, strip;
  place_block(g, block, step, strip);
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5;
  Place<sizeof(T)> at(thread & 31);
  at.group *= kMxfp8LaneRows / 4;
  const int64_t tile0 = int64_t{strip} * kMxfp8Cols;
  float most = 0.0f, sum[8] = {};
  const int each = kSums ? g.each : 1;
  for (int t = 0; t < each; ++t) {
    const int64_t row0 = (int64_t{step} * each + t) * kMxfp8Rows;
    if (row0 >= mxfp8_padded_rows(g.rows)) break;
    if (t > 0) __syncthreads();
    quantise_mxfp8_warp<T, kE5m2, kSums>(in, q, Mxfp8Tile(g, row0, tile0, warp), at, shared, sum,
                                         most);
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
    const int64_t col = tile0 + warp * kTileCols + pair_col(at);
    if (col < g.cols) *reinterpret_cast<float2*>(&partials[step * g.cols + col]) = pair;
  }
}

// Quantises the elements of `in`, which have kBytes bytes.
template <int kBytes, bool kSums>
__device__ inline void quantise_mxfp8(const TileSources<1>& in, const TileGrid& g,
                                      const Quantised& q, float* partials, unsigned block) {
  __shared__ Mxfp8Shared shared;
  const auto of_type = [&](auto type) {
    using T = decltype(type);
    if (q.is_e5m2) return quantise_mxfp8_tiles<T, true, kSums>(in, g, q, partials, block, shared);
    quantise_mxfp8_tiles<T, false, kSums>(in, g, q, partials, block, shared);
  };
  if constexpr (kBytes == 4) {
    of_type(float{});
  } else {
    if (in.is_half) return of_type(fp16{});
    of_type(bf16{});
  }
}

// The launch bound is three blocks per multiprocessor for 16-bit elements, which need few
// registers, else two.
template <int kBytes, bool kSums>
__global__ void __launch_bounds__(kThreads, kBytes == 2 && !kSums ? 3 : 2)
    mxfp8_kernel(const __grid_constant__ TileSources<1> in, const __grid_constant__ TileGrid g,
                 const __grid_constant__ Quantised q, float* partials) {
  if (q.skip()) return;
  quantise_mxfp8<kBytes, kSums>(in, g, q, partials, blockIdx.x);
}

}  // namespace te_fl::cuda
