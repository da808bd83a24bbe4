// store_output() writes FP32 values that a functor computes to an output of any float dtype. The
// output may be quantised to FP8 per tensor, in 128-element blocks or as MXFP8, row-wise,
// column-wise or both. Column-wise data is transposed, except for MXFP8.
//
// A Produce functor is copied to the device. `void operator()(int64_t row, int64_t col, int n,
// float* v)` computes elements [col, col + n) of a row of the output's matrix view, n <= kGroup. It
// may be called more than once for an element.
#pragma once

#include "common/quantised.cuh"
#include "device/shared_memory.hpp"
#include "te_fl/backend/refusal.hpp"

namespace te_fl::cuda {

using backend::Refusal;
inline constexpr size_t kStoreWorkspace = 256;  // bytes at the start of ctx.workspace

// Returns why store_output() does not accept `out`; nullptr if it does.
inline Refusal refuse_output(const te_fl_tensor& out) noexcept {
  if (backend::scaling(out) == TE_FL_SCALING_NVFP4) return "does not write NVFP4";
  if (!backend::is_contiguous(out)) return "writes compact outputs only";
  return nullptr;
}

template <class Produce>
__global__ void __launch_bounds__(kThreads)
    store_kernel(Target out, int64_t rows, int64_t cols, Produce produce) {
  const int64_t per_row = (cols + kGroup - 1) / kGroup;
  const int64_t groups = rows * per_row;
  for (int64_t g = blockIdx.x * int64_t{kThreads} + threadIdx.x; g < groups;
       g += int64_t{gridDim.x} * kThreads) {
    const int64_t row = g / per_row, col = (g - row * per_row) * kGroup;
    const int n = static_cast<int>(cols - col < kGroup ? cols - col : kGroup);
    float v[kGroup];
    produce(row, col, n, v);
    out.store(row * cols + col, n, v);
  }
}

template <class Produce>
__global__ void __launch_bounds__(kThreads)
    amax_kernel(const float* noop, float* amax, int64_t rows, int64_t cols, Produce produce) {
  if (noop != nullptr && *noop != 0.0f) return;
  const int64_t per_row = (cols + kGroup - 1) / kGroup;
  const int64_t groups = rows * per_row;
  float most = 0.0f;
  for (int64_t g = blockIdx.x * int64_t{kThreads} + threadIdx.x; g < groups;
       g += int64_t{gridDim.x} * kThreads) {
    const int64_t row = g / per_row, col = (g - row * per_row) * kGroup;
    const int n = static_cast<int>(cols - col < kGroup ? cols - col : kGroup);
    float v[kGroup];
    produce(row, col, n, v);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (i < n) most = fold_amax(most, v[i]);
    }
  }
  most = warp_max(most);
  if (threadIdx.x % 32 == 0) atomic_amax(amax, most);
}

constexpr int kTile = 128;
constexpr int kPitch = kTile + 1;
constexpr size_t kTileBytes = kTile * kPitch * sizeof(float);

__device__ inline void write_codes(void* codes, int64_t first, int n, const float* v,
                                   bool is_e5m2) {
  if (is_e5m2) return store_group(static_cast<e5m2*>(codes) + first, n, v);
  store_group(static_cast<e4m3*>(codes) + first, n, v);
}

// Writes MXFP8 from a tile in shared memory; each thread handles one block of 32 elements at a
// time. Scales are padded to a multiple of the tile, so this function also zeroes the scales
// outside the matrix.
__device__ inline void store_mxfp8_tile(const Quantised& q, const float* tile, int64_t row0,
                                        int64_t col0, int rows, int cols) {
  constexpr int kBlocks = kTile * (kTile / kMxfp8Block);
  for (int b = static_cast<int>(threadIdx.x); q.rows != nullptr && b < kBlocks; b += kThreads) {
    const int r = b / 4, first = b % 4 * kMxfp8Block;
    const int count = r < rows ? min(cols - first, kMxfp8Block) : 0;
    const float* const x = tile + r * kPitch + first;
    float most = 0.0f;
    for (int c = 0; c < count; ++c) most = fold_amax(most, x[c]);
    const uint32_t code = count > 0 ? q.mxfp8_scale(most) : 0;
    const float factor = mxfp8_factor(code);
    *q.mxfp8_row_block(row0 + r, (col0 + first) / kMxfp8Block) = static_cast<uint8_t>(code);
    for (int c = 0; c < count; c += kGroup) {
      float v[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) v[i] = c + i < count ? x[c + i] * factor : 0.0f;
      write_codes(q.rows, (row0 + r) * q.k + col0 + first + c, min(count - c, kGroup), v,
                  q.is_e5m2);
    }
  }
  for (int b = static_cast<int>(threadIdx.x); q.columns != nullptr && b < kBlocks; b += kThreads) {
    const int c = b % kTile, first = b / kTile * kMxfp8Block;
    const int count = c < cols ? min(rows - first, kMxfp8Block) : 0;
    const float* const x = tile + first * kPitch + c;
    float most = 0.0f;
    for (int r = 0; r < count; ++r) most = fold_amax(most, x[r * kPitch]);
    const uint32_t code = count > 0 ? q.mxfp8_scale(most) : 0;
    const float factor = mxfp8_factor(code);
    *q.mxfp8_column_block((row0 + first) / kMxfp8Block, col0 + c) = static_cast<uint8_t>(code);
    for (int r = 0; r < count; ++r) {
      const float v[kGroup] = {x[r * kPitch] * factor};
      write_codes(q.columns, (row0 + first + r) * q.k + col0 + c, 1, v, q.is_e5m2);
    }
  }
}

// Each thread block quantises one 128 x 128 tile.
template <class Produce>
__global__ void __launch_bounds__(kThreads) quantise_kernel(Quantised q, Produce produce) {
  if (q.skip()) return;
  extern __shared__ float tile[];
  __shared__ float scales[kTile];
  __shared__ float warp_amax[kThreads / 32];
  const int64_t row0 = blockIdx.y * int64_t{kTile} + blockIdx.z * int64_t{kTile} * 65535;
  const int64_t col0 = blockIdx.x * int64_t{kTile};
  if (row0 >= q.m) return;
  const int rows = static_cast<int>(q.m - row0 < kTile ? q.m - row0 : kTile);
  const int cols = static_cast<int>(q.k - col0 < kTile ? q.k - col0 : kTile);
  const int thread = static_cast<int>(threadIdx.x);
  constexpr int kPerRow = kTile / kGroup, kRowsAtOnce = kThreads / kPerRow;
  const int lane_col = thread % kPerRow * kGroup, lane_row = thread / kPerRow;

  float most = 0.0f;
  for (int r = lane_row; r < rows; r += kRowsAtOnce) {
    const int n = cols - lane_col < kGroup ? cols - lane_col : kGroup;
    if (n <= 0) continue;
    float v[kGroup];
    produce(row0 + r, col0 + lane_col, n, v);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (i < n) {
        most = fold_amax(most, v[i]);
        tile[r * kPitch + lane_col + i] = v[i];
      }
    }
  }
  most = warp_max(most);
  if (thread % 32 == 0) warp_amax[thread / 32] = most;
  __syncthreads();
  most = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) most = fmaxf(most, warp_amax[i]);

  float scale = 1.0f;
  if (q.scaling == TE_FL_SCALING_TENSOR) {
    scale = q.tensor_scale();
    const bool lead = blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 && thread == 0;
    if (lead) q.write_tensor_scale(scale);
  }
  if (thread == 0 && q.running_amax != nullptr) atomic_amax(q.running_amax, most);
  if (q.scaling == TE_FL_SCALING_MXFP8) {
    return store_mxfp8_tile(q, tile, row0, col0, rows, cols);
  }
  if (q.scaling == TE_FL_SCALING_BLOCK_128X128) {
    scale = q.block_scale(most);
    if (thread == 0) {
      const int64_t i = row0 / kTile, j = col0 / kTile;
      if (q.rows != nullptr) *q.square_block(i, j) = 1.0f / scale;
      if (q.columns != nullptr) *q.column_square_block(i, j) = 1.0f / scale;
    }
  }

  if (q.rows != nullptr) {
    if (q.scaling == TE_FL_SCALING_BLOCK_1X128) {
      if (thread < rows) {
        float row_most = 0.0f;
        for (int c = 0; c < cols; ++c) row_most = fold_amax(row_most, tile[thread * kPitch + c]);
        const float s = q.block_scale(row_most);
        scales[thread] = s;
        *q.row_block(row0 + thread, col0 / kTile) = 1.0f / s;
      }
      __syncthreads();
    }
    for (int r = lane_row; r < rows; r += kRowsAtOnce) {
      const int n = cols - lane_col < kGroup ? cols - lane_col : kGroup;
      if (n <= 0) continue;
      const float s = q.scaling == TE_FL_SCALING_BLOCK_1X128 ? scales[r] : scale;
      float v[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) v[i] = i < n ? tile[r * kPitch + lane_col + i] * s : 0.0f;
      write_codes(q.rows, (row0 + r) * q.k + col0 + lane_col, n, v, q.is_e5m2);
    }
  }
  if (q.columns == nullptr) return;
  if (q.scaling == TE_FL_SCALING_BLOCK_1X128) {
    __syncthreads();
    if (thread < cols) {
      float column_most = 0.0f;
      for (int r = 0; r < rows; ++r) column_most = fold_amax(column_most, tile[r * kPitch + thread]);
      const float s = q.block_scale(column_most);
      scales[thread] = s;
      *q.column_block(row0 / kTile, col0 + thread) = 1.0f / s;
    }
    __syncthreads();
  }
  for (int c = lane_row; c < cols; c += kRowsAtOnce) {
    const int n = rows - lane_col < kGroup ? rows - lane_col : kGroup;
    if (n <= 0) continue;
    const float s = q.scaling == TE_FL_SCALING_BLOCK_1X128 ? scales[c] : scale;
    float v[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] = i < n ? tile[(lane_col + i) * kPitch + c] * s : 0.0f;
    write_codes(q.columns, (col0 + c) * q.m + row0 + lane_col, n, v, q.is_e5m2);
  }
}

// Collects the kernels' parameters.
Quantised quantised(const te_fl_tensor& out, const float* noop, float inf_scale);
// clear_scales() zeroes q.amax and all scale_inv including their padding, except those of MXFP8,
// whose padding the quantisation kernels zero. clear_amax() zeroes only q.amax.
void clear_scales(const te_fl_context& ctx, const Quantised& q);
void clear_amax(const te_fl_context& ctx, const Quantised& q);
// Called for an output without elements: writes its scale_inv and amax.
void finish_empty(const te_fl_context& ctx, const Quantised& q, bool compute_scale);

template <class Produce>
void quantise(const te_fl_context& ctx, Quantised q, bool compute_scale, const Produce& produce) {
  const cudaStream_t stream = stream_of(ctx);
  const auto kernel = quantise_kernel<Produce>;
  static SharedMemory shared;
  shared.require(ctx.device.index, kernel, kTileBytes);
  if (q.scaling == TE_FL_SCALING_TENSOR) {
    if (compute_scale) {
      float* found = static_cast<float*>(ctx.workspace);
      check(cudaMemsetAsync(found, 0, sizeof(float), stream), "cudaMemsetAsync");
      amax_kernel<<<blocks_for(q.m * ceil_div(q.k, kGroup)), kThreads, 0, stream>>>(
          q.noop, found, q.m, q.k, produce);
      check_launch("amax_kernel");
      q.found = found;
    }
  } else {
    clear_scales(ctx, q);
  }
  if (q.found == nullptr) q.running_amax = q.amax;
  const int64_t row_tiles = ceil_div(q.m, kTile);
  const dim3 grid(static_cast<unsigned>(ceil_div(q.k, kTile)),
                  static_cast<unsigned>(std::min<int64_t>(row_tiles, 65535)),
                  static_cast<unsigned>(ceil_div(row_tiles, 65535)));
  kernel<<<grid, kThreads, kTileBytes, stream>>>(q, produce);
  check_launch("quantise_kernel");
}

// Writes `out`, which must have passed refuse_output(). ctx.workspace must have kStoreWorkspace
// bytes.
template <class Produce>
void store_output(const te_fl_context& ctx, const te_fl_tensor& out, const Produce& produce,
                  const float* noop = nullptr, float inf_scale = FLT_MAX) {
  const backend::Matrix matrix = backend::as_matrix(out);
  if (backend::scaling(out) == TE_FL_SCALING_NONE) {
    if (matrix.rows == 0 || matrix.cols == 0) return;
    store_kernel<<<blocks_for(matrix.rows * ceil_div(matrix.cols, kGroup)), kThreads, 0,
                   stream_of(ctx)>>>(Target(out), matrix.rows, matrix.cols, produce);
    return check_launch("store_kernel");
  }
  const Quantised q = quantised(out, noop, inf_scale);
  const bool compute_scale = (out.quant->flags & TE_FL_QUANT_COMPUTE_SCALE) != 0;
  if (matrix.rows == 0 || matrix.cols == 0) {
    return finish_empty(ctx, q, compute_scale);
  }
  quantise(ctx, q, compute_scale, produce);
}

// Column sums in FP32, in a fixed order. This kernel writes partial sums, each over `rows_each`
// consecutive rows, which add_partials() then adds.
template <class Produce>
__global__ void column_partials(int64_t rows, int64_t cols, int64_t rows_each, float* partials,
                                Produce produce) {
  __shared__ float sums[8][32 * kGroup + 1];
  const int64_t col = (blockIdx.x * int64_t{32} + threadIdx.x) * kGroup;
  const int64_t begin = blockIdx.y * rows_each;
  const int64_t end = begin + rows_each < rows ? begin + rows_each : rows;
  float sum[kGroup] = {};
  const int n = static_cast<int>(cols - col < kGroup ? cols - col : kGroup);
  if (n > 0) {
    for (int64_t row = begin + threadIdx.y; row < end; row += 8) {
      float v[kGroup];
      produce(row, col, n, v);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) sum[i] += i < n ? v[i] : 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < kGroup; ++i) sums[threadIdx.y][threadIdx.x * kGroup + i] = sum[i];
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.y * 32 + threadIdx.x); c < 32 * kGroup; c += 256) {
    const int64_t at = blockIdx.x * int64_t{32 * kGroup} + c;
    if (at >= cols) continue;
    float total = 0.0f;
    for (int y = 0; y < 8; ++y) total += sums[y][c];
    partials[blockIdx.y * cols + at] = total;
  }
}
// Computes out[cols] = the sum of `parts` rows of partial sums, in order, plus out's previous
// values if `accumulate`.
void add_partials(const te_fl_context& ctx, const float* partials, int64_t parts, int64_t cols,
                  const te_fl_tensor& out, bool accumulate);

inline int64_t column_parts(int64_t rows) {
  return std::max<int64_t>(1, std::min<int64_t>(ceil_div(rows, 64), 128));
}
inline size_t column_sums_bytes(int64_t rows, int64_t cols) {
  return static_cast<size_t>(column_parts(rows) * cols) * sizeof(float);
}
// Computes out[cols] = the column sums, plus out's previous values if `accumulate`. `partials` must
// have column_sums_bytes() bytes.
template <class Produce>
void column_sums(const te_fl_context& ctx, int64_t rows, int64_t cols, float* partials,
                 const te_fl_tensor& out, bool accumulate, const Produce& produce) {
  if (cols == 0) return;
  const int64_t parts = column_parts(rows);
  const dim3 grid(static_cast<unsigned>(ceil_div(cols, 32 * kGroup)), static_cast<unsigned>(parts));
  column_partials<<<grid, dim3(32, 8), 0, stream_of(ctx)>>>(rows, cols, ceil_div(rows, parts),
                                                            partials, produce);
  check_launch("column_partials");
  add_partials(ctx, partials, parts, cols, out, accumulate);
}

}  // namespace te_fl::cuda
