#include "common/store.cuh"

namespace te_fl::cuda {

namespace {

__global__ void clear_kernel(Quantised q, int64_t row_scales, int64_t column_scales) {
  if (q.skip()) return;
  const int64_t first = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = first; i < row_scales; i += step) q.scale_inv[i] = 0.0f;
  for (int64_t i = first; i < column_scales; i += step) q.column_scale_inv[i] = 0.0f;
  if (first == 0 && q.amax != nullptr) *q.amax = 0.0f;
}

__global__ void empty_kernel(Quantised q, bool compute_scale) {
  if (q.skip()) return;
  const float none = 0.0f;
  if (compute_scale) q.found = &none;
  q.write_tensor_scale(q.tensor_scale());
}

int64_t scale_count(const Quantised& q, bool columnwise) {
  const int64_t m = columnwise ? q.k : q.m, k = columnwise ? q.m : q.k;
  if (q.scaling == TE_FL_SCALING_BLOCK_1X128) return ceil_div(k, kTile) * round_up(m, 4);
  return ceil_div(m, kTile) * round_up(ceil_div(k, kTile), 4);
}

}  // namespace

// Adds partial sums. Each block sums 32 columns. Its thread row y adds the partial sums y, y + 8,
// ... of a column; then the eight results are added in order.
__global__ void __launch_bounds__(kThreads)
    column_totals(const float* partials, int64_t parts, int64_t cols, Target out, Source previous,
                  bool accumulate) {
  __shared__ float sums[8][32];
  const int64_t c = blockIdx.x * int64_t{32} + threadIdx.x;
  float total = 0.0f;
  if (c < cols) {
#pragma unroll 8
    for (int64_t p = threadIdx.y; p < parts; p += 8) total += partials[p * cols + c];
  }
  sums[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || c >= cols) return;
  total = accumulate ? previous.at(c) : 0.0f;
#pragma unroll
  for (int y = 0; y < 8; ++y) total += sums[y][threadIdx.x];
  out.store(c, 1, &total);
}

void add_partials(const te_fl_context& ctx, const float* partials, int64_t parts, int64_t cols,
                  const te_fl_tensor& out, bool accumulate) {
  column_totals<<<static_cast<unsigned>(ceil_div(cols, 32)), dim3(32, 8), 0, stream_of(ctx)>>>(
      partials, parts, cols, Target(out), Source(out), accumulate);
  check_launch("column_totals");
}

Quantised quantised(const te_fl_tensor& out, const float* noop, float inf_scale) {
  const backend::Matrix matrix = backend::as_matrix(out);
  const te_fl_quant& quant = *out.quant;
  Quantised q;
  q.rows = backend::data<void>(out);
  q.columns = quant.columnwise_data;
  q.scale_inv = static_cast<float*>(quant.scale_inv);
  q.column_scale_inv = static_cast<float*>(quant.columnwise_scale_inv);
  q.amax = quant.amax;
  q.scale = quant.scale;
  q.noop = noop;
  q.m = matrix.rows;
  q.k = matrix.cols;
  q.scaling = quant.scaling;
  q.is_e5m2 = dtype_of(out) == TE_FL_F8E5M2;
  q.pow2 = (quant.flags & TE_FL_QUANT_POW2_SCALE) != 0;
  q.epsilon = quant.amax_epsilon;
  q.inf_scale = inf_scale;
  return q;
}

void clear_scales(const te_fl_context& ctx, const Quantised& q) {
  if (q.scaling == TE_FL_SCALING_MXFP8) return clear_amax(ctx, q);
  const int64_t rows = q.scale_inv != nullptr ? scale_count(q, false) : 0;
  const int64_t columns = q.column_scale_inv != nullptr ? scale_count(q, true) : 0;
  clear_kernel<<<blocks_for(std::max(rows, columns)), kThreads, 0, stream_of(ctx)>>>(q, rows,
                                                                                     columns);
  check_launch("clear_kernel");
}

void clear_amax(const te_fl_context& ctx, const Quantised& q) {
  if (q.amax == nullptr) return;
  clear_kernel<<<1, 1, 0, stream_of(ctx)>>>(q, 0, 0);
  check_launch("clear_kernel");
}

void finish_empty(const te_fl_context& ctx, const Quantised& q, bool compute_scale) {
  if (q.scaling != TE_FL_SCALING_TENSOR) return clear_scales(ctx, q);
  empty_kernel<<<1, 1, 0, stream_of(ctx)>>>(q, compute_scale);
  check_launch("empty_kernel");
}

}  // namespace te_fl::cuda
