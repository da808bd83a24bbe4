#include "common/column_sums.hpp"

#include "common/store.cuh"
#include "common/tile.cuh"

namespace te_fl::cuda {
namespace {

constexpr int kLanes = 32, kRowsAtOnce = 8, kDepth = 8;

// Blocks have (kLanes, kRowsAtOnce) threads. A thread sums 8 columns and reads kDepth rows per
// iteration.
__global__ void __launch_bounds__(kLanes* kRowsAtOnce)
    row_partials(const uint4* in, bool is_half, int64_t rows, int64_t pieces, int64_t rows_each,
                 float* partials) {
  __shared__ float sums[kRowsAtOnce][kLanes * kGroup + 1];
  const int64_t piece = blockIdx.x * int64_t{kLanes} + threadIdx.x;
  const int64_t begin = blockIdx.y * rows_each, end = min(begin + rows_each, rows);
  float sum[kGroup] = {};
  if (piece < pieces) {
    for (int64_t row = begin + threadIdx.y; row < end; row += kRowsAtOnce * kDepth) {
      uint4 raw[kDepth];
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        const int64_t at = row + kRowsAtOnce * i;
        raw[i] = at < end ? __ldcs(in + at * pieces + piece) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        float v[kGroup];
        unpack_piece<2>(raw[i], is_half, v);
#pragma unroll
        for (int c = 0; c < kGroup; ++c) sum[c] += v[c];
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kGroup; ++c) sums[threadIdx.y][threadIdx.x * kGroup + c] = sum[c];
  __syncthreads();
  const int c = static_cast<int>(threadIdx.y * kLanes + threadIdx.x);
  const int64_t at = blockIdx.x * int64_t{kLanes * kGroup} + c, cols = pieces * kGroup;
  if (at >= cols) return;
  float total = 0.0f;
#pragma unroll
  for (int y = 0; y < kRowsAtOnce; ++y) total += sums[y][c];
  partials[blockIdx.y * cols + at] = total;
}

}  // namespace

void fast_column_sums(const te_fl_context& ctx, const te_fl_tensor& t, float* partials,
                      const te_fl_tensor& out, bool accumulate) {
  const backend::Matrix m = backend::as_matrix(t);
  const int64_t parts = column_parts(m.rows), pieces = m.cols / kGroup;
  const dim3 grid(static_cast<unsigned>(ceil_div(pieces, kLanes)), static_cast<unsigned>(parts));
  row_partials<<<grid, dim3(kLanes, kRowsAtOnce), 0, stream_of(ctx)>>>(
      backend::data<const uint4>(t), dtype_of(t) == TE_FL_F16, m.rows, pieces,
      ceil_div(m.rows, parts), partials);
  check_launch("row_partials");
  add_partials(ctx, partials, parts, m.cols, out, accumulate);
}

}  // namespace te_fl::cuda
