// quantize, dequantize and their relatives; amax and delayed scaling.
#include "te_fl/ops/quantize.h"

#include <cmath>

#include "elementwise.cuh"
#include "families.hpp"
#include "overlap.hpp"
#include "te_fl/numeric.hpp"

namespace te_fl::cuda {
namespace {

constexpr const char* kInPlace = "the output shares memory with the input";

struct Copy {
  static constexpr int kSources = 1, kOutputs = 1;
  __device__ void operator()(const float (&x)[1], float (&v)[1]) const { v[0] = x[0]; }
};
float largest_finite_of(int dtype) {
  return dtype == TE_FL_F16 ? 65504.0f : dtype == TE_FL_BF16 ? 3.38953139e38f : FLT_MAX;
}
const float* noop_of(const te_fl_tensor* flag) {
  return flag == nullptr ? nullptr : backend::data<const float>(*flag);
}

void quantize_rows(const te_fl_context& ctx, const te_fl_tensor& input, int64_t first_row,
                   const te_fl_tensor& output, const float* noop) {
  const int64_t cols = backend::as_matrix(output).cols;
  store_elementwise<false>(ctx, output,
                           Elementwise<Copy>{{{Source(input), first_row * cols, cols}}, {}},
                           nullptr, noop, largest_finite_of(dtype_of(input)));
}

Refusal refuse_pair(const te_fl_tensor& input, const te_fl_tensor& output) {
  if (!dense(&input)) return kNotContiguous;
  return overlaps(output, input) ? kInPlace : refuse_output(output);
}

void quantize(const te_fl_context& ctx, const te_fl_quantize_args& args) {
  check_output(*args.output, "output");
  quantize_rows(ctx, *args.input, 0, *args.output, noop_of(args.noop_flag));
}
Refusal refuse_quantize(const te_fl_quantize_args& args) {
  return refuse_pair(*args.input, *args.output);
}

// ---- dequantize

struct Decode {
  Source codes;
  const float* scale_inv;
  uint32_t scaling;
  int64_t m, k;
  bool transposed;  // codes and scales are those of the column-wise copy
  __device__ float scale(int64_t row, int64_t col) const {
    const int64_t i = transposed ? col : row, j = transposed ? row : col;
    const int64_t rows = transposed ? k : m, cols = transposed ? m : k;
    if (scaling == TE_FL_SCALING_TENSOR) return *scale_inv;
    if (scaling == TE_FL_SCALING_BLOCK_1X128) return scale_inv[j / 128 * ((rows + 3) / 4 * 4) + i];
    return scale_inv[i / 128 * (((cols + 127) / 128 + 3) / 4 * 4) + j / 128];
  }
  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    if (!transposed) codes.load(row * k + col, n, v);
    for (int i = 0; i < kGroup; ++i) {
      if (i >= n) break;
      if (transposed) v[i] = codes.at((col + i) * m + row);
      v[i] *= scale(row, col + i);
    }
  }
};

void dequantize(const te_fl_context& ctx, const te_fl_dequantize_args& args) {
  const te_fl_tensor& input = *args.input;
  const te_fl_quant& quant = *input.quant;
  const backend::Matrix matrix = backend::as_matrix(input);
  const bool transposed = input.dl.data == nullptr;
  const void* scale_inv = transposed && quant.columnwise_scale_inv != nullptr
                              ? quant.columnwise_scale_inv
                              : quant.scale_inv;
  if (scale_inv == nullptr) scale_inv = quant.columnwise_scale_inv;
  if (scale_inv == nullptr && backend::numel(input) != 0) {
    backend::invalid("input has data but no scale_inv; provide it");
  }
  Decode decode{Source(input), static_cast<const float*>(scale_inv),
                quant.scaling, matrix.rows,
                matrix.cols,   transposed};
  if (transposed) decode.codes.data = quant.columnwise_data;
  store_output(ctx, *args.output, decode);
}
Refusal refuse_dequantize(const te_fl_dequantize_args& args) {
  const uint32_t scaling = backend::scaling(*args.input);
  if (scaling == TE_FL_SCALING_MXFP8 || scaling == TE_FL_SCALING_NVFP4) {
    return "does not read MXFP8 and NVFP4";
  }
  if (!all_dense(args.input, args.output)) return kNotContiguous;
  return overlaps(*args.output, *args.input) ? kInPlace : nullptr;
}

// ---- with a bias gradient, of many tensors, of parts

void bgrad_quantize(const te_fl_context& ctx, const te_fl_bgrad_quantize_args& args) {
  check_output(*args.output, "output");
  const int64_t cols = backend::as_matrix(*args.output).cols;
  store_elementwise<true>(ctx, *args.output, Elementwise<Copy>{{{Source(*args.input), 0, cols}}, {}},
                          args.bias_grad, nullptr, largest_finite_of(dtype_of(*args.input)));
}
Refusal refuse_bgrad_quantize(const te_fl_bgrad_quantize_args& args) {
  return dense(args.bias_grad) ? refuse_pair(*args.input, *args.output) : kNotContiguous;
}
size_t bgrad_workspace(const te_fl_context&, const te_fl_bgrad_quantize_args& args) {
  const backend::Matrix matrix = backend::as_matrix(*args.output);
  return kStoreWorkspace + column_sums_bytes(matrix.rows, matrix.cols);
}

void multi_tensor_quantize(const te_fl_context& ctx, const te_fl_multi_tensor_quantize_args& args) {
  for (int64_t i = 0; i < args.outputs_count; ++i) check_output(*args.outputs[i], "outputs");
  for (int64_t i = 0; i < args.outputs_count; ++i) {
    quantize_rows(ctx, *args.inputs[i], 0, *args.outputs[i], noop_of(args.noop_flag));
  }
}
Refusal refuse_multi_tensor_quantize(const te_fl_multi_tensor_quantize_args& args) {
  for (int64_t i = 0; i < args.outputs_count; ++i) {
    for (int64_t j = 0; j < args.inputs_count; ++j) {
      if (overlaps(*args.outputs[i], *args.inputs[j])) return kInPlace;
    }
    if (const Refusal why = refuse_pair(*args.inputs[i], *args.outputs[i])) return why;
  }
  return nullptr;
}

void split_quantize(const te_fl_context& ctx, const te_fl_split_quantize_args& args) {
  int64_t rows = 0;
  for (int64_t i = 0; i < args.outputs_count; ++i) {
    check_output(*args.outputs[i], "outputs");
    rows += backend::as_matrix(*args.outputs[i]).rows;
  }
  const int64_t have = backend::as_matrix(*args.input).rows;
  if (rows != have) {
    backend::invalid("outputs have " + std::to_string(rows) + " rows together, and input has " +
                     std::to_string(have) + "; they must be equal");
  }
  int64_t first = 0;
  for (int64_t i = 0; i < args.outputs_count; ++i) {
    quantize_rows(ctx, *args.input, first, *args.outputs[i], nullptr);
    first += backend::as_matrix(*args.outputs[i]).rows;
  }
}
Refusal refuse_split_quantize(const te_fl_split_quantize_args& args) {
  for (int64_t i = 0; i < args.outputs_count; ++i) {
    if (const Refusal why = refuse_pair(*args.input, *args.outputs[i])) return why;
  }
  return nullptr;
}

// ---- bare codes

void cast_to_fp8(const te_fl_context& ctx, const te_fl_cast_to_fp8_args& args) {
  te_fl_quant quant;
  quant.scaling = TE_FL_SCALING_TENSOR;
  quant.scale = backend::data<float>(*args.scale);
  if (args.amax != nullptr) quant.amax = backend::data<float>(*args.amax);
  if (args.scale_inv != nullptr) quant.scale_inv = backend::data<float>(*args.scale_inv);
  te_fl_tensor out = *args.output;
  out.quant = &quant;
  quantize_rows(ctx, *args.input, 0, out, nullptr);
}
Refusal refuse_cast(const te_fl_cast_to_fp8_args& args) {
  if (!all_dense(args.input, args.output)) return kNotContiguous;
  return overlaps(*args.output, *args.input) ? kInPlace : nullptr;
}

__global__ void transpose_kernel(const uint8_t* in, uint8_t* out, int64_t m, int64_t k) {
  __shared__ uint8_t tile[64][65];
  const int64_t row0 = blockIdx.y * int64_t{64} + blockIdx.z * int64_t{64} * 65535;
  const int64_t col0 = blockIdx.x * int64_t{64};
  for (int i = threadIdx.x; i < 64 * 64; i += kThreads) {
    const int r = i / 64, c = i % 64;
    if (row0 + r < m && col0 + c < k) tile[r][c] = in[(row0 + r) * k + col0 + c];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 64 * 64; i += kThreads) {
    const int c = i / 64, r = i % 64;
    if (row0 + r < m && col0 + c < k) out[(col0 + c) * m + row0 + r] = tile[r][c];
  }
}
void fp8_transpose(const te_fl_context& ctx, const te_fl_fp8_transpose_args& args) {
  const backend::Matrix matrix = backend::as_matrix(*args.input);
  if (matrix.rows == 0 || matrix.cols == 0) return;
  const int64_t tiles = ceil_div(matrix.rows, 64);
  const dim3 grid(static_cast<unsigned>(ceil_div(matrix.cols, 64)),
                  static_cast<unsigned>(std::min<int64_t>(tiles, 65535)),
                  static_cast<unsigned>(ceil_div(tiles, 65535)));
  transpose_kernel<<<grid, kThreads, 0, stream_of(ctx)>>>(backend::data<const uint8_t>(*args.input),
                                                          backend::data<uint8_t>(*args.output),
                                                          matrix.rows, matrix.cols);
  check_launch("transpose_kernel");
}
Refusal refuse_transpose(const te_fl_fp8_transpose_args& args) {
  if (!all_dense(args.input, args.output)) return kNotContiguous;
  return overlaps(*args.output, *args.input) ? kInPlace : nullptr;
}

void compute_amax(const te_fl_context& ctx, const te_fl_compute_amax_args& args) {
  float* amax = backend::data<float>(*args.amax);
  check(cudaMemsetAsync(amax, 0, sizeof(float), stream_of(ctx)), "cudaMemsetAsync");
  const int64_t n = backend::numel(*args.input);
  if (n == 0) return;
  amax_kernel<<<blocks_for(ceil_div(n, kGroup)), kThreads, 0, stream_of(ctx)>>>(
      nullptr, amax, 1, n, Anywhere<Copy>{{{{Source(*args.input), 0, n}}, {}}, n});
  check_launch("amax_kernel");
}
Refusal refuse_amax(const te_fl_compute_amax_args& args) {
  return all_dense(args.input, args.amax) ? nullptr : kNotContiguous;
}

// ---- delayed scaling: all histories of a call in one launch for each 64 of them

constexpr int kHistories = 64;
struct Histories {
  float* history[kHistories];
  float* scale[kHistories];
  int64_t length[kHistories], tensors[kHistories], first[kHistories + 1];  // first: in the buffer
  int count;
};
__global__ void update_kernel(Histories h, const float* reduced, numeric::DelayedScalingRule rule) {
  const int64_t total = h.first[h.count] - h.first[0];
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < total;
       i += int64_t{gridDim.x} * blockDim.x) {
    int which = 0;
    while (h.first[which + 1] - h.first[0] <= i) ++which;
    const int64_t tensor = i - (h.first[which] - h.first[0]);
    const int64_t stride = h.tensors[which], length = h.length[which];
    float* column = h.history[which] + tensor;
    const float given = reduced != nullptr ? reduced[h.first[0] + i] : 0.0f;
    const float last = given != 0.0f ? given : column[0];
    const bool roll = last != 0.0f;
    float largest = 0.0f;
    for (int64_t r = 0; r < length; ++r) {
      const float entry = r + 1 < length ? column[(r + 1) * stride] : last;
      if (entry > largest) largest = entry;
      if (roll) column[r * stride] = r == 0 ? 0.0f : entry;
    }
    const float amax = rule.algo == numeric::AmaxComputeAlgo::kMax ? largest : last;
    float* scale = h.scale[which] + tensor;
    if (amax > 0.0f && amax < INFINITY) *scale = rule.fp8_max / amax;
    if (isinf(*scale)) *scale = FLT_MAX;
  }
}
void fused_update(const te_fl_context& ctx,
                  const te_fl_fused_amax_and_scale_update_after_reduction_args& args) {
  const float* reduced = args.amax_reduction_buffer == nullptr
                             ? nullptr
                             : backend::data<const float>(*args.amax_reduction_buffer);
  int64_t total = 0;
  for (int64_t i = 0; i < args.scales_count; ++i) total += backend::numel(*args.scales[i]);
  if (reduced != nullptr && backend::numel(*args.amax_reduction_buffer) != total) {
    backend::invalid(
        "amax_reduction_buffer has " + std::to_string(backend::numel(*args.amax_reduction_buffer)) +
        " elements, must have one for each of the " + std::to_string(total) + " tensors");
  }
  numeric::DelayedScalingRule rule;
  // fp8_max * 2^-margin, the factor before the division.
  rule.fp8_max =
      (args.fp8_dtype == 0 ? numeric::kE4m3Max : numeric::kE5m2Max) * std::exp2(-args.margin);
  if (!(std::isnormal(rule.fp8_max) && std::isfinite(args.margin))) {
    backend::invalid(
        "margin is " + std::to_string(args.margin) +
        "; fp8_max * 2^-margin must be a normal FP32 number (margin between about -110 and 130)");
  }
  rule.algo =
      args.algo == 0 ? numeric::AmaxComputeAlgo::kMax : numeric::AmaxComputeAlgo::kMostRecent;
  int64_t first = 0;
  for (int64_t i = 0; i < args.amax_histories_count;) {
    Histories h{};
    h.first[0] = first;
    for (; h.count < kHistories && i < args.amax_histories_count; ++i, ++h.count) {
      const te_fl_tensor& history = *args.amax_histories[i];
      h.history[h.count] = backend::data<float>(history);
      h.scale[h.count] = backend::data<float>(*args.scales[i]);
      h.length[h.count] = history.dl.shape[0];
      h.tensors[h.count] = history.dl.shape[1];
      first += history.dl.shape[1];
      h.first[h.count + 1] = first;
    }
    if (first == h.first[0]) continue;
    update_kernel<<<blocks_for(first - h.first[0], 128), 128, 0, stream_of(ctx)>>>(h, reduced,
                                                                                   rule);
    check_launch("update_kernel");
  }
}
Refusal refuse_update(const te_fl_fused_amax_and_scale_update_after_reduction_args& args) {
  if (!dense(args.amax_reduction_buffer)) return kNotContiguous;
  for (int64_t i = 0; i < args.amax_histories_count; ++i) {
    if (!all_dense(args.amax_histories[i], args.scales[i])) return kNotContiguous;
    if (args.amax_histories[i]->dl.shape[0] < 1) return "an amax history has no rows";
  }
  return nullptr;
}

using Ops = std::vector<te_fl_op_desc>;
template <class Args, auto F, auto Refuses>
void append(Ops& ops, const char* name) {
  ops.push_back(descriptor<Args, F, Refuses>(name));
  ops.back().workspace = [](void*, const te_fl_context*, const void*, size_t* bytes) {
    *bytes = kStoreWorkspace;
    return te_fl_status{TE_FL_OK};
  };
}

}  // namespace

void append_quantize(Ops& ops) {
  append<te_fl_quantize_args, quantize, refuse_quantize>(ops, "quantize");
  append<te_fl_dequantize_args, dequantize, refuse_dequantize>(ops, "dequantize");
  append<te_fl_bgrad_quantize_args, bgrad_quantize, refuse_bgrad_quantize>(ops, "bgrad_quantize");
  ops.back().workspace = backend::workspace_thunk<te_fl_bgrad_quantize_args, bgrad_workspace>;
  append<te_fl_multi_tensor_quantize_args, multi_tensor_quantize, refuse_multi_tensor_quantize>(
      ops, "multi_tensor_quantize");
  append<te_fl_split_quantize_args, split_quantize, refuse_split_quantize>(ops, "split_quantize");
  append<te_fl_cast_to_fp8_args, cast_to_fp8, refuse_cast>(ops, "cast_to_fp8");
  append<te_fl_fp8_transpose_args, fp8_transpose, refuse_transpose>(ops, "fp8_transpose");
  append<te_fl_compute_amax_args, compute_amax, refuse_amax>(ops, "compute_amax");
  append<te_fl_fused_amax_and_scale_update_after_reduction_args, fused_update, refuse_update>(
      ops, "fused_amax_and_scale_update_after_reduction");
}

}  // namespace te_fl::cuda
