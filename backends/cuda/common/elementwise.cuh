// store_elementwise() computes an elementwise op (a Math of tile.cuh) into an output of any float
// dtype, quantised or not, and optionally the column sums of the result. choose_store()
// (store_choice.hpp) decides between the tile kernels and store_output().
#pragma once

#include "common/dtype_bytes.hpp"
#include "common/measure.cuh"
#include "common/store.cuh"
#include "common/store_choice.hpp"
#include "common/tile_block128.cuh"
#include "common/tile_mxfp8.cuh"

namespace te_fl::cuda {

// An input of an elementwise op as a matrix: element (row, col) is at index row * stride + first +
// col.
struct MatrixSource {
  Source source;
  int64_t first = 0, stride = 0;
};
template <class Math>
struct Elementwise {
  MatrixSource in[Math::kSources];
  Math math;
};

// Computes the op for store_output() (its Produce functor), with sources of any dtype and
// alignment.
template <class Math>
struct Anywhere {
  Elementwise<Math> op;
  int64_t cols;  // of one of the outputs

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
    for (int i = 0; i < n; ++i) {  // a group of columns that spans both outputs
      float one[kGroup];
      part(col + i < cols ? 0 : 1, row, col + i < cols ? col + i : col + i - cols, 1, one);
#pragma unroll
      for (int j = 0; j < kGroup; ++j) v[j] = j == i ? one[0] : v[j];
    }
  }
};

// A Math for which self_scaled_kernel is compiled. It has one source and one result, and sets
// kSelfScaled to true. The opt-in is explicit because self_scaled_kernel adds two kernels per Math
// to the binary.
template <class Math>
concept SelfScaled = Math::kSelfScaled;

static_assert(store_choice::kTileRows == kTileRows && store_choice::kTileCols == kTileCols &&
              store_choice::kBlockTile == kBlockTile && store_choice::kMxfp8Rows == kMxfp8Rows &&
              store_choice::kMxfp8Cols == kMxfp8Cols);

// Chooses the kernels of a call that writes `out`. `bias` and `measured` are those of
// store_elementwise().
template <class Math>
StoreChoice choose_store(const Elementwise<Math>& op, const te_fl_tensor& out,
                         const te_fl_tensor* bias, bool measured) {
  StoreSource sources[Math::kSources];
  for (int s = 0; s < Math::kSources; ++s) {
    const MatrixSource& in = op.in[s];
    const int64_t bytes = bytes_of(in.source.dtype);
    sources[s] = {in.source.dtype, static_cast<const char*>(in.source.data) + in.first * bytes,
                  in.stride};
  }
  // measure_kernel cannot read one half of each row, as other Maths require.
  constexpr bool kMeasures = Math::kSources == 1 || Bounded<Math>;
  return choose_store(
      {sources, &out, Math::kOutputs, bias, kMeasures, measured, SelfScaled<Math>, Copies<Math>});
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

// Returns the tiles of a [rows, cols] matrix. With `sums`, row_steps is at most column_parts(), so
// the partial sums fit in the workspace.
inline TileGrid tile_grid(int64_t rows, int64_t cols, int64_t row_tiles, int64_t tile_cols,
                          bool sums) {
  TileGrid g{};
  g.rows = rows;
  g.cols = cols;
  const int64_t each = sums ? ceil_div(row_tiles, column_parts(rows)) : 1;
  g.each = static_cast<int>(each);
  g.row_steps = static_cast<unsigned>(ceil_div(row_tiles, each));
  g.col_tiles = static_cast<unsigned>(ceil_div(cols, tile_cols));
  return g;
}
inline TileGrid tile_grid(int64_t rows, int64_t cols, int64_t tile_cols, bool sums) {
  return tile_grid(rows, cols, ceil_div(rows, kTileRows), tile_cols, sums);
}
inline TileGrid mxfp8_grid(int64_t rows, int64_t cols, bool sums) {
  return tile_grid(rows, cols, mxfp8_padded_rows(rows) / kMxfp8Rows, kMxfp8Cols, sums);
}
// Returns the tiles of the kernel that writes FP8 with this scaling mode, for a Math with one
// result.
inline TileGrid codes_grid(uint32_t scaling, int64_t rows, int64_t cols, bool sums) {
  if (scaling == TE_FL_SCALING_MXFP8) return mxfp8_grid(rows, cols, sums);
  return tile_grid(rows, cols, scaling == TE_FL_SCALING_TENSOR ? kTileCols : kBlockTile, sums);
}

// Computes *found, the amax of the results, with measure_kernel or tensor_kernel.
template <class Math, int kBytes>
void launch_measure(const te_fl_context& ctx, const TileSources<Math::kSources>& in, Quantised q,
                    const Math& math, StoreKernel by, float* found) {
  const cudaStream_t stream = stream_of(ctx);
  check(cudaMemsetAsync(found, 0, sizeof(float), stream), "cudaMemsetAsync");
  const int64_t cols = q.k / Math::kOutputs;
  if constexpr (Math::kSources == 1 || Bounded<Math>) {
    if (by == StoreKernel::kMeasure) {
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
                     bool compute_scale, const StoreChoice& choice, const BiasOut& sums) {
  const cudaStream_t stream = stream_of(ctx);
  float* const partials = sums.partials;
  const auto in = tile_sources(op);
  const int64_t cols = q.k / Math::kOutputs;
  if (choice.result == StoreKernel::kBlock) {
    const TileGrid g = tile_grid(q.m, cols, kBlockTile, kSums);
    clear_amax(ctx, q);
    q.running_amax = q.amax;
    block_kernel<Math, kBytes, kSums>
        <<<g.row_steps * g.col_tiles * Math::kOutputs, kBlockThreads, 0, stream>>>(
            in, g, q, op.math, partials);
    return check_launch("block_kernel");
  }
  if constexpr (Copies<Math>) {
    if (choice.result == StoreKernel::kMxfp8) {
      const TileGrid g = mxfp8_grid(q.m, cols, kSums);
      clear_amax(ctx, q);
      q.running_amax = q.amax;
      mxfp8_kernel<kBytes, kSums>
          <<<g.row_steps * g.col_tiles, kThreads, 0, stream>>>(in, g, q, partials);
      return check_launch("mxfp8_kernel");
    }
  }
  TileGrid g = tile_grid(q.m, cols, kTileCols, kSums);
  if constexpr (SelfScaled<Math> && !kSums) {
    if (choice.result == StoreKernel::kSelfScaled) {
      self_scaled_kernel<Math, kBytes><<<g.row_steps * g.col_tiles, kThreads, 0, stream>>>(
          in, q.m * cols * kBytes / 16, g, q, op.math);
      return check_launch("self_scaled_kernel");
    }
  }
  if (compute_scale) {
    auto* const found = static_cast<float*>(ctx.workspace);
    if (choice.amax != StoreKernel::kNone) {
      launch_measure<Math, kBytes>(ctx, in, q, op.math, choice.amax, found);
    }
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

// Makes the kernel that writes the result also write the bias gradient (StoreSums::kResult).
inline void sum_at_once(BiasOut& sums, const te_fl_tensor& bias) {
  if (dtype_of(bias) == TE_FL_F32) {
    sums.partials = backend::data<float>(bias);
  } else {
    sums.bias = Target(bias);
  }
}

// Computes `op` into `out`, which must have passed refuse_output(). ctx.workspace must have
// kStoreWorkspace bytes. kSums: also writes the column sums of the result to `bias`; the workspace
// then needs column_sums_bytes() more, and `out` may have the memory of an input. `measured`: the
// scale of `out` is computed from the amax, which is already at the start of the workspace.
template <bool kSums, class Math>
void store_elementwise(const te_fl_context& ctx, const te_fl_tensor& out,
                       const Elementwise<Math>& op, const te_fl_tensor* bias = nullptr,
                       const float* noop = nullptr, float inf_scale = FLT_MAX,
                       bool measured = false) {
  const backend::Matrix m = backend::as_matrix(out);
  const StoreChoice choice = choose_store(op, out, kSums ? bias : nullptr, measured);
  auto* partials =
      kSums ? reinterpret_cast<float*>(static_cast<char*>(ctx.workspace) + kStoreWorkspace)
            : nullptr;
  if (!choice.tiles()) {
    const Anywhere<Math> general{op, m.cols / Math::kOutputs};
    if constexpr (kSums) column_sums(ctx, m.rows, m.cols, partials, *bias, false, general);
    return store_output(ctx, out, general, noop, inf_scale);
  }
  const bool is_f32 = op.in[0].source.dtype == TE_FL_F32;
  BiasOut sums{partials, {}};
  if (choice.sums == StoreSums::kResult) sum_at_once(sums, *bias);
  if (choice.result == StoreKernel::kPlain) {
    is_f32 ? launch_plain<Math, 4, kSums>(ctx, op, out, sums)
           : launch_plain<Math, 2, kSums>(ctx, op, out, sums);
  } else {
    const Quantised q = quantised(out, noop, inf_scale);
    const bool compute_scale = (out.quant->flags & TE_FL_QUANT_COMPUTE_SCALE) != 0;
    is_f32 ? launch_quantise<Math, 4, kSums>(ctx, op, q, compute_scale, choice, sums)
           : launch_quantise<Math, 2, kSums>(ctx, op, q, compute_scale, choice, sums);
  }
  if (choice.sums == StoreSums::kPartials) {
    const TileGrid g = choice.result == StoreKernel::kMxfp8
                           ? mxfp8_grid(m.rows, m.cols, kSums)
                           : tile_grid(m.rows, m.cols, kTileCols, kSums);
    add_partials(ctx, partials, g.row_steps, m.cols, *bias, false);
  }
}

}  // namespace te_fl::cuda
