// Elementwise kernels at memory bandwidth. An op is a function of the elements at one position of a
// few row-major sources:
//
//   struct Math {
//     static constexpr int kSources, kOutputs;  // kOutputs 2: the left and right halves of a row
//     __device__ void operator()(const float (&x)[kSources], float (&v)[kOutputs]) const;
//   };
//
// A Math with one source whose results are the source's elements sets `static constexpr bool
// kCopies = true`. Kernels that work on the bits of the elements then accept it.
//
// A block processes tiles of 128 rows x 64 columns. Each thread loads eight columns of four rows of
// every source before it computes, and writes the row-wise result from registers. Column-wise FP8
// data passes through shared memory, four rows per word, so that a column is written in runs of 128
// bytes. The sources, outputs and shapes must allow aligned accesses (elementwise.cuh checks this).
#pragma once

#include "common/element.cuh"
#include "common/quantised.cuh"

namespace te_fl::cuda {

constexpr int kTileRows = 128, kTileCols = 64, kWarps = kThreads / 32;

template <class Math>
concept Copies = Math::kCopies;

template <int kSources>
struct TileSources {
  const char* base[kSources];
  int64_t row_bytes[kSources];
  bool is_half;  // 16-bit elements are FP16, else BF16
};

// The division of a matrix into tiles. A block processes `each` vertically consecutive tiles of a
// strip of columns. `each` is 1 if no column sums are computed.
struct TileGrid {
  int64_t rows, cols;  // extents of one output
  unsigned row_steps;  // ceil(rows / (kTileRows * each))
  unsigned col_tiles;
  int each;
  bool backwards;  // starts with the rows that an earlier pass read last, which may still be in the
                   // cache
};

// Computes the row step and the column strip of a block. Consecutive blocks process adjacent
// strips, so the blocks that run at once cover complete rows.
__device__ inline void place_block(const TileGrid& g, unsigned block, unsigned& step,
                                   unsigned& strip) {
  if (g.backwards) block = g.row_steps * g.col_tiles - 1 - block;
  step = block / g.col_tiles;
  strip = block - step * g.col_tiles;
}

// Layout of the eight columns that a thread loads from each row of a source.
template <int kBytes>
struct Piece {
  // kCount: number of 16-byte loads. kElements: elements per load.
  static constexpr int kCount = kBytes * 8 / 16, kElements = 16 / kBytes;
};

// Converts 16 bytes to FP32 elements.
template <int kBytes>
__device__ inline void unpack_piece(const uint4& raw, bool is_half,
                                    float (&x)[Piece<kBytes>::kElements]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (kBytes == 4) {
      x[w] = __uint_as_float(words[w]);
    } else if (is_half) {
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[w]));
      x[2 * w] = pair.x, x[2 * w + 1] = pair.y;
    } else {
      x[2 * w] = __uint_as_float(words[w] << 16);
      x[2 * w + 1] = __uint_as_float(words[w] & 0xFFFF0000u);
    }
  }
}
template <int kBytes>
__device__ inline void unpack(const uint4 (&raw)[Piece<kBytes>::kCount], bool is_half,
                              float (&x)[8]) {
#pragma unroll
  for (int p = 0; p < Piece<kBytes>::kCount; ++p) {
    float part[Piece<kBytes>::kElements];
    unpack_piece<kBytes>(raw[p], is_half, part);
#pragma unroll
    for (int e = 0; e < Piece<kBytes>::kElements; ++e)
      x[p * Piece<kBytes>::kElements + e] = part[e];
  }
}

// A thread's position in a tile. Its elements 0 to 7 are in columns col(0) to col(7) of the tile.
// For 4-byte elements these are two runs of four columns, so that a warp's loads are contiguous.
template <int kBytes>
struct Place {
  int c, group;  // c: 0..7; group: of four rows, 0..31
  __device__ explicit Place(int thread) : c(thread & 7), group(thread >> 3) {}
  __device__ int col(int element) const {
    return kBytes == 2 ? c * 8 + element : (element >> 2) * 32 + c * 4 + (element & 3);
  }
};
// Returns Place::c of the thread that wrote a column's FP8 codes. For kBytes 1, as in a
// transposition, each c has 16 columns.
template <int kBytes>
__device__ inline int writer_index(int col) {
  return (kBytes == 1 ? col >> 4 : kBytes == 2 ? col >> 3 : col >> 2) & 7;
}

// Loads a thread's rows of a tile. Indices outside the matrix are clamped to its last row and
// column, so that every load is valid and the extra values do not change an amax.
template <int kBytes, int kRows, int kSources>
__device__ inline void load_tile(const TileSources<kSources>& in, const TileGrid& g, int64_t row0,
                                 int64_t col0, const Place<kBytes>& at, int first_row,
                                 uint4 (&raw)[kSources][kRows][Piece<kBytes>::kCount]) {
  const int rows = static_cast<int>(g.rows - row0 < kTileRows ? g.rows - row0 : kTileRows);
  const int cols = static_cast<int>(g.cols - col0 < kTileCols ? g.cols - col0 : kTileCols);
#pragma unroll
  for (int s = 0; s < kSources; ++s) {
    const char* tile = in.base[s] + row0 * in.row_bytes[s] + col0 * kBytes;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const char* row = tile + min(at.group * 4 + first_row + i, rows - 1) * in.row_bytes[s];
#pragma unroll
      for (int p = 0; p < Piece<kBytes>::kCount; ++p) {
        const int col = min(at.col(p * 4), cols - Piece<kBytes>::kElements);
        raw[s][i][p] = *reinterpret_cast<const uint4*>(row + col * kBytes);
      }
    }
  }
}

// Applies `math` to row i of the loaded rows; v holds the results of the thread's eight columns.
template <int kBytes, int kRows, class Math>
__device__ inline void compute_row(const uint4 (&raw)[Math::kSources][kRows][Piece<kBytes>::kCount],
                                   int i, bool is_half, const Math& math,
                                   float (&v)[Math::kOutputs][8]) {
  float x[Math::kSources][8];
#pragma unroll
  for (int s = 0; s < Math::kSources; ++s) unpack<kBytes>(raw[s][i], is_half, x[s]);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    float in[Math::kSources], out[Math::kOutputs];
#pragma unroll
    for (int s = 0; s < Math::kSources; ++s) in[s] = x[s][e];
    math(in, out);
#pragma unroll
    for (int o = 0; o < Math::kOutputs; ++o) v[o][e] = out[o];
  }
}

// Transposes a 4 x 4 matrix of FP8 codes (bytes). On entry w[r] holds row r; on return w[c] holds
// column c.
__device__ inline void transpose_codes(uint32_t (&w)[4]) {
  const uint32_t a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
  const uint32_t c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(a, b, 0x5410), w[1] = __byte_perm(a, b, 0x7632);
  w[2] = __byte_perm(c, d, 0x5410), w[3] = __byte_perm(c, d, 0x7632);
}

// Returns the index of a word in a column of FP8 codes in shared memory. A tile's column has 32
// words of four rows each. The 16-byte chunks of a column are permuted so that neither 4-byte
// writes nor 16-byte reads have bank conflicts.
__device__ inline int code_word(int group, int writer) {
  return ((group >> 2) ^ writer) * 4 + (group & 3);
}
template <int kBytes>
__device__ inline void stage_columns(uint32_t (*columns)[32], const uint32_t (&codes)[4][2],
                                     const Place<kBytes>& at, int first_col) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t w[4] = {codes[0][h], codes[1][h], codes[2][h], codes[3][h]};
    transpose_codes(w);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      columns[first_col + at.col(4 * h + j)][code_word(at.group, at.c)] = w[j];
    }
  }
}
// Writes the first `count` of the kCols columns in shared memory to a matrix with rows of m bytes.
// m must be a multiple of 16.
template <int kBytes, int kBlock, int kCols>
__device__ inline void write_columns(const uint32_t (*columns)[32], uint8_t* to, int64_t m,
                                     int64_t row0, int count) {
  static_assert(kCols * 8 % kBlock == 0);
  const int piece = static_cast<int>(threadIdx.x) & 7, first = static_cast<int>(threadIdx.x) >> 3;
  if (row0 + piece * 16 >= m) return;
#pragma unroll
  for (int begin = 0; begin < kCols; begin += kBlock / 8) {
    const int col = begin + first;
    if (col >= count) return;
    *reinterpret_cast<uint4*>(to + col * m + row0 + piece * 16) =
        *reinterpret_cast<const uint4*>(&columns[col][(piece ^ writer_index<kBytes>(col)) * 4]);
  }
}
template <int kBytes>
__device__ inline void write_row(uint8_t* row, int cols_left, const Place<kBytes>& at,
                                 const uint32_t (&codes)[2]) {
  if constexpr (kBytes == 2) {
    if (at.col(0) < cols_left) {
      *reinterpret_cast<uint2*>(row + at.col(0)) = make_uint2(codes[0], codes[1]);
    }
  } else {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (at.col(4 * h) < cols_left) *reinterpret_cast<uint32_t*>(row + at.col(4 * h)) = codes[h];
    }
  }
}

// Combines 2 * kHalf values with those of the lane whose index differs in the bit kStep. Each of
// the two lanes receives kHalf of the results: the lane with the bit set receives the upper half.
template <int kStep, int kHalf, class V, class F>
__device__ inline void fold(const V (&v)[2 * kHalf], V (&r)[kHalf], F&& combine) {
  const bool upper = (threadIdx.x & kStep) != 0;
#pragma unroll
  for (int j = 0; j < kHalf; ++j) {
    const V mine = upper ? v[kHalf + j] : v[j], other = upper ? v[j] : v[kHalf + j];
    r[j] = combine(mine, __shfl_xor_sync(0xFFFFFFFFu, other, kStep));
  }
}
// Combines a warp's values per column. Each lane receives the results of columns pair_col() and
// pair_col() + 1.
template <class F>
__device__ inline float2 combine_columns(const float (&v)[8], F&& combine) {
  float half[4], pair[2];
  fold<8>(v, half, combine);
  fold<16>(half, pair, combine);
  return make_float2(pair[0], pair[1]);
}
template <int kBytes>
__device__ inline int pair_col(const Place<kBytes>& at) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  return at.col((lane & 8) / 2 + (lane & 16) / 8);
}

// Sums `sum` of all threads per column of the tile, in a fixed order. Thread col < 64 returns the
// sum of column col.
template <int kBytes>
__device__ inline float tile_sums(const float (&sum)[8], const Place<kBytes>& at,
                                  float (*shared)[kTileCols]) {
  const int thread = static_cast<int>(threadIdx.x);
  *reinterpret_cast<float2*>(&shared[thread >> 5][pair_col(at)]) =
      combine_columns(sum, [](float a, float b) { return a + b; });
  __syncthreads();
  float total = 0.0f;
  if (thread < kTileCols) {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += shared[w][thread];
  }
  return total;
}
// The maximum over a warp of values that are neither negative nor NaN.
__device__ inline float warp_most(float most) {
  return __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(most)));
}
__device__ inline float block_amax(float most, float* shared) {
  most = warp_most(most);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = most;
  __syncthreads();
  most = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) most = fmaxf(most, shared[i]);
  return most;
}

// The destination of column sums: rows of partial sums [row_steps, cols] or, if there is only one
// step, the bias gradient. An FP32 bias gradient is also written through `partials`.
struct BiasOut {
  float* partials = nullptr;
  Target bias;  // a 16-bit bias gradient; without data, sums go to `partials`

  __device__ void store(int64_t step, int64_t cols, int64_t col, float total) const {
    if (bias.data != nullptr) return bias.store(col, 1, &total);
    partials[step * cols + col] = total;
  }
};

// Writes FP8 with per-tensor scaling. With q.measure, computes only the amax and, with kSums, the
// column sums.
template <class Math, int kBytes, bool kSums>
__device__ inline void quantise_tiles(const TileSources<Math::kSources>& in, const TileGrid& g,
                                      const Quantised& q, const Math& math, const BiasOut& sums,
                                      unsigned block) {
  __shared__ __align__(16) uint32_t columns[Math::kOutputs][kTileCols][32];
  __shared__ float warp_amax[kWarps];
  __shared__ __align__(8) float warp_sums[kSums ? kWarps : 1][kTileCols];
  unsigned step, strip;
  place_block(g, block, step, strip);
  const int64_t col0 = int64_t{strip} * kTileCols;
  const int cols_left = static_cast<int>(g.cols - col0 < kTileCols ? g.cols - col0 : kTileCols);
  const Place<kBytes> at(static_cast<int>(threadIdx.x));
  const float scale = q.measure ? 1.0f : q.tensor_scale();
  if (block == 0 && threadIdx.x == 0) q.write_tensor_scale(scale);
  float most = 0.0f, sum[8] = {};
  const int each = kSums ? g.each : 1;
  for (int t = 0; t < each; ++t) {
    const int64_t row0 = (int64_t{step} * each + t) * kTileRows;
    if (row0 >= g.rows) break;
    uint4 raw[Math::kSources][4][Piece<kBytes>::kCount];
    load_tile<kBytes>(in, g, row0, col0, at, 0, raw);
    uint32_t codes[Math::kOutputs][4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = row0 + at.group * 4 + i;
      float v[Math::kOutputs][8];
      compute_row<kBytes>(raw, i, in.is_half, math, v);
#pragma unroll
      for (int o = 0; o < Math::kOutputs; ++o) {
#pragma unroll
        for (int e = 0; e < 8; ++e) most = fmaxf(most, fabsf(v[o][e]));
        if (kSums && row < g.rows) {
#pragma unroll
          for (int e = 0; e < 8; ++e) sum[e] += v[o][e];
        }
        if (q.measure) continue;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          codes[o][i][h] = encode_four(v[o][4 * h] * scale, v[o][4 * h + 1] * scale,
                                    v[o][4 * h + 2] * scale, v[o][4 * h + 3] * scale, q.is_e5m2);
        }
        if (q.rows != nullptr && row < g.rows) {
          write_row<kBytes>(static_cast<uint8_t*>(q.rows) + row * q.k + o * g.cols + col0,
                            cols_left, at, codes[o][i]);
        }
      }
    }
    if (q.measure || q.columns == nullptr) continue;
    if (t > 0) __syncthreads();
#pragma unroll
    for (int o = 0; o < Math::kOutputs; ++o) stage_columns<kBytes>(columns[o], codes[o], at, 0);
    __syncthreads();
#pragma unroll
    for (int o = 0; o < Math::kOutputs; ++o) {
      write_columns<kBytes, kThreads, kTileCols>(
          columns[o], static_cast<uint8_t*>(q.columns) + (o * g.cols + col0) * q.m, q.m, row0,
          cols_left);
    }
  }
  if (q.running_amax != nullptr) {
    most = block_amax(most, warp_amax);
    if (threadIdx.x == 0) atomic_amax(q.running_amax, most);
  }
  if constexpr (kSums) {
    const float total = tile_sums<kBytes>(sum, at, warp_sums);
    if (threadIdx.x < kTileCols && col0 + threadIdx.x < g.cols) {
      sums.store(step, g.cols, col0 + threadIdx.x, total);
    }
  }
}

// Blocks per multiprocessor. The registers that hold a tile's loads limit it.
template <class Math, int kBytes>
inline constexpr int kResident = Math::kSources* kBytes <= 2   ? 4
                                 : Math::kSources* kBytes <= 4 ? 3
                                                               : 2;

template <class Math, int kBytes, bool kSums>
__global__ void __launch_bounds__(kThreads, kResident<Math, kBytes>)
    tensor_kernel(const __grid_constant__ TileSources<Math::kSources> in,
                  const __grid_constant__ TileGrid g, const __grid_constant__ Quantised q,
                  Math math, BiasOut sums) {
  if (q.skip()) return;
  quantise_tiles<Math, kBytes, kSums>(in, g, q, math, sums, blockIdx.x);
}

// Stores unquantised results as FP32, BF16 or FP16.
template <int kElements>
__device__ inline void store_piece(const Target& out, int64_t i, const float* v) {
  if (out.dtype == TE_FL_F32) {
    float* to = static_cast<float*>(out.data) + i;
#pragma unroll
    for (int p = 0; p < kElements; p += 4) {
      *reinterpret_cast<float4*>(to + p) = make_float4(v[p], v[p + 1], v[p + 2], v[p + 3]);
    }
    return;
  }
  uint32_t words[kElements / 2];
#pragma unroll
  for (int p = 0; p < kElements / 2; ++p) {
    if (out.dtype == TE_FL_BF16) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * p], v[2 * p + 1]);
      words[p] = reinterpret_cast<const uint32_t&>(pair);
    } else {
      const __half2 pair = __floats2half2_rn(v[2 * p], v[2 * p + 1]);
      words[p] = reinterpret_cast<const uint32_t&>(pair);
    }
  }
  auto* to = static_cast<uint16_t*>(out.data) + i;
  if constexpr (kElements == 8) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  }
}

template <class Math, int kBytes, bool kSums>
__global__ void __launch_bounds__(kThreads, kResident<Math, kBytes>)
    plain_kernel(const __grid_constant__ TileSources<Math::kSources> in,
                 const __grid_constant__ TileGrid g, Target out, Math math, BiasOut sums) {
  __shared__ __align__(8) float warp_sums[kSums ? kWarps : 1][kTileCols];
  unsigned step, strip;
  place_block(g, blockIdx.x, step, strip);
  const int64_t col0 = int64_t{strip} * kTileCols;
  const Place<kBytes> at(static_cast<int>(threadIdx.x));
  float sum[8] = {};
  const int each = kSums ? g.each : 1;
  for (int t = 0; t < each; ++t) {
    const int64_t row0 = (int64_t{step} * each + t) * kTileRows;
    if (row0 >= g.rows) break;
    uint4 raw[Math::kSources][4][Piece<kBytes>::kCount];
    load_tile<kBytes>(in, g, row0, col0, at, 0, raw);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = row0 + at.group * 4 + i;
      float v[Math::kOutputs][8];
      compute_row<kBytes>(raw, i, in.is_half, math, v);
      if (row >= g.rows) continue;
#pragma unroll
      for (int o = 0; o < Math::kOutputs; ++o) {
        constexpr int kElements = Piece<kBytes>::kElements;
#pragma unroll
        for (int p = 0; p < 8; p += kElements) {
          const int64_t col = col0 + at.col(p);
          if (col < g.cols) {
            store_piece<kElements>(out, (row * Math::kOutputs + o) * g.cols + col, v[o] + p);
          }
        }
        if constexpr (kSums) {
#pragma unroll
          for (int e = 0; e < 8; ++e) sum[e] += v[o][e];
        }
      }
    }
  }
  if constexpr (kSums) {
    const float total = tile_sums<kBytes>(sum, at, warp_sums);
    if (threadIdx.x < kTileCols && col0 + threadIdx.x < g.cols) {
      sums.store(step, g.cols, col0 + threadIdx.x, total);
    }
  }
}

}  // namespace te_fl::cuda
