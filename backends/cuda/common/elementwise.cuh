// store_elementwise: an elementwise op (a Math of tile.cuh) into an output of any float dtype or
// quantised, and optionally the sums of the result's columns, through the tile kernels where
// sources, output and shape are aligned, and else through store_output.
#pragma once

#include "common/dtype_bytes.hpp"
#include "common/measure.cuh"
#include "common/store.cuh"
#include "common/tile_block128.cuh"

namespace te_fl::cuda {

// A source as a matrix: element (row, col) at row * stride + first + col.
struct MatrixSource {
  Source source;
  int64_t first = 0, stride = 0;
};
template <class Math>
struct Elementwise {
  MatrixSource in[Math::kSources];
  Math math;
};

// The same for store_output: any dtypes, any alignment.
template <class Math>
struct Anywhere {
  Elementwise<Math> op;
  int64_t cols;  // of one output

  __device__ void part(int output, int64_t row, int64_t col, int n, float* v) const {
    float x[Math::kSources][kGroup];
#pragma unroll
    for (int s = 0; s < Math::kSources; ++s) {
      op.in[s].source.load(row * op.in[s].stride + op.in[s].first + col, n, x[s]);
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      float in[Math::kSources], out[Math::kOutputs];
#pragma unroll
      for (int s = 0; s < Math::kSources; ++s) in[s] = x[s][i];
      op.math(in, out);
      v[i] = output == 0 ? out[0] : out[Math::kOutputs - 1];
    }
  }
  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    if (Math::kOutputs == 1 || col + n <= cols) return part(0, row, col, n, v);
    if (col >= cols) return part(1, row, col - cols, n, v);
#pragma unroll 1
    for (int i = 0; i < n; ++i) {  // across the middle, where cols is no multiple of 8
      float one[kGroup];
      part(col + i < cols ? 0 : 1, row, col + i < cols ? col + i : col + i - cols, 1, one);
#pragma unroll
      for (int j = 0; j < kGroup; ++j) v[j] = j == i ? one[0] : v[j];
    }
  }
};

inline bool aligned(const void* p, int64_t bytes) noexcept {
  return reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes) == 0;
}

constexpr int64_t kFewCols = 16384;

// Whether every source can be read 16 bytes at a time, all of one dtype.
template <class Math>
bool aligned_sources(const Elementwise<Math>& op, int64_t cols) {
  const int dtype = op.in[0].source.dtype;
  if (dtype != TE_FL_F32 && dtype != TE_FL_BF16 && dtype != TE_FL_F16) return false;
  const int64_t bytes = bytes_of(dtype);
  if (cols * bytes % 16 != 0) return false;
  for (const MatrixSource& in : op.in) {
    const bool fits = in.source.dtype == dtype && in.stride * bytes % 16 == 0 &&
                      aligned(static_cast<const char*>(in.source.data) + in.first * bytes, 16);
    if (!fits) return false;
  }
  return true;
}
// Whether the codes can be written in whole pieces.
inline bool aligned_codes(const Quantised& q, int64_t bytes, int outputs) noexcept {
  if (q.rows != nullptr && !(aligned(q.rows, 8) && q.k * bytes % 16 == 0)) return false;
  if (q.columns != nullptr && !(aligned(q.columns, 16) && q.m % 16 == 0)) return false;
  return q.scaling == TE_FL_SCALING_TENSOR || outputs == 1 || q.k / 2 % kBlockTile == 0;
}

template <class Math>
TileSources<Math::kSources> tile_sources(const Elementwise<Math>& op) {
  TileSources<Math::kSources> in;
  const int64_t bytes = bytes_of(op.in[0].source.dtype);
  for (int s = 0; s < Math::kSources; ++s) {
    in.base[s] = static_cast<const char*>(op.in[s].source.data) + op.in[s].first * bytes;
    in.row_bytes[s] = op.in[s].stride * bytes;
  }
  in.is_half = op.in[0].source.dtype == TE_FL_F16;
  return in;
}

// The tiles of a [rows, cols] matrix. Sums keep at most column_parts() steps.
inline TileGrid tile_grid(int64_t rows, int64_t cols, int64_t tile_cols, bool sums) {
  TileGrid g{};
  g.rows = rows;
  g.cols = cols;
  const int64_t row_tiles = ceil_div(rows, kTileRows);
  const int64_t each = sums ? ceil_div(row_tiles, column_parts(rows)) : 1;
  g.each = static_cast<int>(each);
  g.row_steps = static_cast<unsigned>(ceil_div(row_tiles, each));
  g.col_tiles = static_cast<unsigned>(ceil_div(cols, tile_cols));
  return g;
}

// *found = the amax of the results. Leaves `q` as it was.
template <class Math, int kBytes>
void launch_measure(const te_fl_context& ctx, const TileSources<Math::kSources>& in, Quantised q,
                    const Math& math, float* found) {
  const cudaStream_t stream = stream_of(ctx);
  check(cudaMemsetAsync(found, 0, sizeof(float), stream), "cudaMemsetAsync");
  const int64_t cols = q.k / Math::kOutputs;
  if constexpr (Math::kSources == 1 || Bounded<Math>) {  // the others read halves of rows
    bool compact = true;
    for (const int64_t row_bytes : in.row_bytes) compact = compact && row_bytes == cols * kBytes;
    if (compact) {
      const int64_t pieces = q.m * cols * kBytes / 16;
      constexpr int kAtOnce = Math::kSources == 1 ? 4 : 2;
      measure_kernel<Math, kBytes><<<blocks_for(ceil_div(pieces, kAtOnce)), kThreads, 0, stream>>>(
          in, pieces, math, q.noop, found);
      return check_launch("measure_kernel");
    }
  }
  const TileGrid g = tile_grid(q.m, cols, kTileCols, false);
  q.running_amax = found;
  q.measure = true;
  tensor_kernel<Math, kBytes, false>
      <<<g.row_steps * g.col_tiles, kThreads, 0, stream>>>(in, g, q, math, {});
  check_launch("tensor_kernel");
}

template <class Math, int kBytes, bool kSums>
void launch_quantise(const te_fl_context& ctx, const Elementwise<Math>& op, Quantised q,
                     bool compute_scale, bool measured, const BiasOut& sums) {
  const cudaStream_t stream = stream_of(ctx);
  float* const partials = sums.partials;
  const auto in = tile_sources(op);
  const int64_t cols = q.k / Math::kOutputs;
  if (q.scaling != TE_FL_SCALING_TENSOR) {
    const TileGrid g = tile_grid(q.m, cols, kBlockTile, kSums);
    clear_amax(ctx, q);
    q.running_amax = q.amax;
    block_kernel<Math, kBytes, kSums>
        <<<g.row_steps * g.col_tiles * Math::kOutputs, kBlockThreads, 0, stream>>>(
            in, g, q, op.math, partials);
    return check_launch("block_kernel");
  }
  TileGrid g = tile_grid(q.m, cols, kTileCols, kSums);
  if (compute_scale) {
    auto* const found = static_cast<float*>(ctx.workspace);
    if (!measured) launch_measure<Math, kBytes>(ctx, in, q, op.math, found);
    q.found = found;
    g.backwards = true;
  } else {
    q.running_amax = q.amax;
  }
  tensor_kernel<Math, kBytes, kSums>
      <<<g.row_steps * g.col_tiles, kThreads, 0, stream>>>(in, g, q, op.math, sums);
  check_launch("tensor_kernel");
}

template <class Math, int kBytes, bool kSums>
void launch_plain(const te_fl_context& ctx, const Elementwise<Math>& op, const te_fl_tensor& out,
                  const BiasOut& sums) {
  const backend::Matrix m = backend::as_matrix(out);
  const TileGrid g = tile_grid(m.rows, m.cols / Math::kOutputs, kTileCols, kSums);
  plain_kernel<Math, kBytes, kSums><<<g.row_steps * g.col_tiles, kThreads, 0, stream_of(ctx)>>>(
      tile_sources(op), g, Target(out), op.math, sums);
  check_launch("plain_kernel");
}

// Whether the tile kernels serve the call. Of few rows most of a tile would lie outside.
template <class Math>
bool tiles(const Elementwise<Math>& op, const te_fl_tensor& out, const Quantised* q) {
  const backend::Matrix m = backend::as_matrix(out);
  const int64_t cols = m.cols / Math::kOutputs;
  if (m.rows < 16 && cols > kFewCols) return false;
  if (!aligned_sources(op, cols)) return false;
  if (ceil_div(m.rows, kTileRows) * ceil_div(cols, kTileCols) > INT32_MAX) return false;
  if (q == nullptr) return aligned(backend::data<const void>(out), 16);
  return aligned_codes(*q, bytes_of(op.in[0].source.dtype), Math::kOutputs);
}

// Lets the kernel write the bias gradient if a row of sums is all of it; false: the partial sums
// are to be added up. Kernels of blocks write FP32 only.
inline bool sums_at_once(BiasOut& sums, const te_fl_tensor& bias, unsigned row_steps, bool blocks) {
  const bool is_f32 = dtype_of(bias) == TE_FL_F32;
  if (row_steps != 1 || (blocks && !is_f32)) return false;
  if (is_f32) {
    sums.partials = backend::data<float>(bias);
  } else {
    sums.bias = Target(bias);
  }
  return true;
}

// `out` passed refuse_output(); ctx.workspace holds kStoreWorkspace bytes for it. With kSums, bias
// = the sums of the result's columns, and the workspace holds column_sums_bytes() more; the output
// may then have the memory of an input. `measured`: the workspace begins with the results' amax,
// for an output that finds its own scale.
template <bool kSums, class Math>
void store_elementwise(const te_fl_context& ctx, const te_fl_tensor& out,
                       const Elementwise<Math>& op, const te_fl_tensor* bias = nullptr,
                       const float* noop = nullptr, float inf_scale = FLT_MAX,
                       bool measured = false) {
  const backend::Matrix m = backend::as_matrix(out);
  const bool plain = backend::scaling(out) == TE_FL_SCALING_NONE;
  const bool is_f32 = op.in[0].source.dtype == TE_FL_F32;
  auto* partials =
      kSums ? reinterpret_cast<float*>(static_cast<char*>(ctx.workspace) + kStoreWorkspace)
            : nullptr;
  const Quantised q = plain ? Quantised() : quantised(out, noop, inf_scale);
  const bool empty = m.rows == 0 || m.cols == 0;
  if (empty || !tiles(op, out, plain ? nullptr : &q)) {
    const Anywhere<Math> general{op, m.cols / Math::kOutputs};
    if constexpr (kSums) column_sums(ctx, m.rows, m.cols, partials, *bias, false, general);
    return store_output(ctx, out, general, noop, inf_scale);
  }
  BiasOut sums{partials, {}};
  const bool blocks = !plain && q.scaling != TE_FL_SCALING_TENSOR;
  const unsigned row_steps =
      tile_grid(m.rows, m.cols, blocks ? kBlockTile : kTileCols, kSums).row_steps;
  const bool at_once = kSums && sums_at_once(sums, *bias, row_steps, blocks);
  if (plain) {
    is_f32 ? launch_plain<Math, 4, kSums>(ctx, op, out, sums)
           : launch_plain<Math, 2, kSums>(ctx, op, out, sums);
  } else {
    const bool compute_scale = (out.quant->flags & TE_FL_QUANT_COMPUTE_SCALE) != 0;
    is_f32 ? launch_quantise<Math, 4, kSums>(ctx, op, q, compute_scale, measured, sums)
           : launch_quantise<Math, 2, kSums>(ctx, op, q, compute_scale, measured, sums);
  }
  if (kSums && !at_once) add_partials(ctx, partials, row_steps, m.cols, *bias, false);
}

}  // namespace te_fl::cuda
