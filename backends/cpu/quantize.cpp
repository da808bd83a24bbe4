// The quantisation ops, amax and delayed scaling.
#include "te_fl/ops/quantize.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <string>

#include "quant_store.hpp"
#include "te_fl/numeric.hpp"

namespace te_fl::cpu {
namespace {

constexpr const char* kInPlace = "the output shares memory with the input";

Refusal refuse_pair(const te_fl_tensor& input, const te_fl_tensor& output) {
  if (!dense(&input)) return kNotContiguous;
  if (overlaps(output, input)) return kInPlace;
  return refuse_output(output);
}

// Quantises rows of `input`, from row_offset on, into an output with the same last extent.
void quantize_rows(const te_fl_tensor& input, int64_t row_offset, const te_fl_tensor& output,
                   ColumnSums* sums = nullptr) {
  const int dtype = dtype_of(input);
  const int64_t bytes = element_bytes(input);
  const char* from =
      backend::data<const char>(input) + row_offset * backend::as_matrix(output).cols * bytes;
  const auto values = [&](const Piece& piece, float* out) {
    load_f32(dtype, from + piece.col * bytes, piece.n, out);
  };
  store_output(output, values, {.inf_scale = largest_finite_of(dtype), .sums = sums, .flat = true});
}

bool is_noop(const te_fl_tensor* flag) {
  return flag != nullptr && *backend::data<const float>(*flag) != 0.0f;
}

void quantize(const te_fl_context&, const te_fl_quantize_args& args) {
  if (!is_noop(args.noop_flag)) quantize_rows(*args.input, 0, *args.output);
}
Refusal refuse_quantize(const te_fl_quantize_args& args) {
  return refuse_pair(*args.input, *args.output);
}

// ---- dequantize

struct Scales {
  uint32_t mode;
  const float* inverse;
  backend::Matrix matrix;

  // Returns the scale of element (row, col). Stores in `length` the number of elements of the row,
  // from col on, that share this scale.
  float of(int64_t row, int64_t col, int64_t* length) const {
    switch (mode) {
      case TE_FL_SCALING_BLOCK_1X128:
        *length = 128 - col % 128;
        return inverse[col / 128 * round_up(matrix.rows, 4) + row];
      default:
        *length = 128 - col % 128;
        return inverse[row / 128 * round_up(ceil_div(matrix.cols, 128), 4) + col / 128];
    }
  }
};

void dequantize(const te_fl_context&, const te_fl_dequantize_args& args) {
  const te_fl_tensor& input = *args.input;
  const int dtype = dtype_of(input);
  const auto* codes = backend::data<const char>(input);
  const bool flat = backend::scaling(input) == TE_FL_SCALING_TENSOR;
  const Scales scales{backend::scaling(input), static_cast<const float*>(input.quant->scale_inv),
                      backend::as_matrix(input)};
  const auto values = [&](const Piece& piece, float* out) {
    load_f32(dtype, codes + piece.row * scales.matrix.cols + piece.col, piece.n, out);
    if (flat) return scale_f32(out, piece.n, *scales.inverse);
    for (int64_t i = 0; i < piece.n;) {
      int64_t length;
      const float scale = scales.of(piece.row, piece.col + i, &length);
      const int64_t end = std::min(piece.n, i + length);
      for (; i < end; ++i) out[i] *= scale;
    }
  };
  store_output(*args.output, values, {.flat = flat});
}

Refusal refuse_dequantize(const te_fl_dequantize_args& args) {
  const te_fl_tensor& input = *args.input;
  const uint32_t mode = backend::scaling(input);
  if (mode == TE_FL_SCALING_MXFP8 || mode == TE_FL_SCALING_NVFP4 || mode == TE_FL_SCALING_NONE) {
    return "reads per-tensor and block scaling only";
  }
  if (input.dl.data == nullptr) return "reads row-wise data only";
  return refuse_pair(input, *args.output);
}

void bgrad_quantize(const te_fl_context&, const te_fl_bgrad_quantize_args& args) {
  ColumnSums sums(backend::as_matrix(*args.input).cols);
  quantize_rows(*args.input, 0, *args.output, &sums);
  sums.store(*args.bias_grad);
}
Refusal refuse_bgrad_quantize(const te_fl_bgrad_quantize_args& args) {
  return dense(args.bias_grad) ? refuse_pair(*args.input, *args.output) : kNotContiguous;
}

void multi_tensor_quantize(const te_fl_context&, const te_fl_multi_tensor_quantize_args& args) {
  if (is_noop(args.noop_flag)) return;
  for (int64_t i = 0; i < args.outputs_count; ++i) {
    quantize_rows(*args.inputs[i], 0, *args.outputs[i]);
  }
}
Refusal refuse_multi_tensor_quantize(const te_fl_multi_tensor_quantize_args& args) {
  for (int64_t i = 0; i < std::min(args.inputs_count, args.outputs_count); ++i) {
    const Refusal refusal = refuse_pair(*args.inputs[i], *args.outputs[i]);
    if (refusal != nullptr) return refusal;
  }
  return nullptr;
}

void split_quantize(const te_fl_context&, const te_fl_split_quantize_args& args) {
  int64_t rows = 0;
  for (int64_t i = 0; i < args.outputs_count; ++i) {
    quantize_rows(*args.input, rows, *args.outputs[i]);
    rows += backend::as_matrix(*args.outputs[i]).rows;
  }
}
Refusal refuse_split_quantize(const te_fl_split_quantize_args& args) {
  for (int64_t i = 0; i < args.outputs_count; ++i) {
    const Refusal refusal = refuse_pair(*args.input, *args.outputs[i]);
    if (refusal != nullptr) return refusal;
  }
  return nullptr;
}

void cast_to_fp8(const te_fl_context&, const te_fl_cast_to_fp8_args& args) {
  // Describes the output as a quantised tensor with a supplied scale; the op passes its parts as
  // separate tensors.
  te_fl_quant quant;
  float scale_inv = 0.0f;
  quant.scaling = TE_FL_SCALING_TENSOR;
  quant.scale = backend::data<float>(*args.scale);
  quant.amax = args.amax != nullptr ? backend::data<float>(*args.amax) : nullptr;
  quant.scale_inv = args.scale_inv != nullptr ? backend::data<float>(*args.scale_inv) : &scale_inv;
  te_fl_tensor output = *args.output;
  output.quant = &quant;
  quantize_rows(*args.input, 0, output);
}
Refusal refuse_cast_to_fp8(const te_fl_cast_to_fp8_args& args) {
  if (!all_dense(args.input, args.output)) return kNotContiguous;
  return overlaps(*args.output, *args.input) ? kInPlace : nullptr;
}

void fp8_transpose(const te_fl_context&, const te_fl_fp8_transpose_args& args) {
  constexpr int64_t kRows = 64;  // a cache line of every output row
  const backend::Matrix m = backend::as_matrix(*args.input);
  const auto* input = backend::data<const uint8_t>(*args.input);
  auto* output = backend::data<uint8_t>(*args.output);
  if (m.rows == 0 || m.cols == 0) return;
  const int64_t across = ceil_div(m.cols, 512), down = ceil_div(m.rows, kRows);
  const bool stream = exceeds_cache(m.rows * m.cols);
  Parts(down * across, 2).run([&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t row = t / across * kRows, col = t % across * 512;
      transpose_bytes(input + row * m.cols + col, m.cols, std::min(kRows, m.rows - row),
                      std::min<int64_t>(512, m.cols - col), output + col * m.rows + row, m.rows,
                      stream);
    }
    store_fence();
  });
}
Refusal refuse_fp8_transpose(const te_fl_fp8_transpose_args& args) {
  if (!all_dense(args.input, args.output)) return kNotContiguous;
  return overlaps(*args.output, *args.input) ? kInPlace : nullptr;
}

void compute_amax(const te_fl_context&, const te_fl_compute_amax_args& args) {
  const int64_t bytes = element_bytes(*args.input);
  const auto* from = backend::data<const char>(*args.input);
  const Parts parts(backend::numel(*args.input), kGrain);
  std::vector<float> amax(static_cast<size_t>(std::max<int64_t>(parts.count(), 1)), 0.0f);
  parts.run([&](int64_t part, int64_t begin, int64_t end) {
    amax[static_cast<size_t>(part)] =
        amax_of(dtype_of(*args.input), from + begin * bytes, end - begin);
  });
  *backend::data<float>(*args.amax) = *std::max_element(amax.begin(), amax.end());
}
Refusal refuse_compute_amax(const te_fl_compute_amax_args& args) {
  return dense(args.input) ? nullptr : kNotContiguous;
}

// ---- the delayed-scaling update

using UpdateArgs = te_fl_fused_amax_and_scale_update_after_reduction_args;

void update_scales(const te_fl_context&, const UpdateArgs& args) {
  numeric::DelayedScalingRule rule;
  rule.fp8_max =
      numeric::delayed_scaling_numerator(args.fp8_dtype == TE_FL_FP8_FORMAT_E5M2, args.margin);
  rule.algo = args.algo == TE_FL_AMAX_ALGO_MOST_RECENT ? numeric::AmaxComputeAlgo::kMostRecent
                                                       : numeric::AmaxComputeAlgo::kMax;
  const float* reduced = args.amax_reduction_buffer != nullptr
                             ? backend::data<const float>(*args.amax_reduction_buffer)
                             : nullptr;
  for (int64_t i = 0; i < args.amax_histories_count; ++i) {
    const te_fl_tensor& history = *args.amax_histories[i];
    const auto length = static_cast<size_t>(history.dl.shape[0]);
    const int64_t tensors = history.dl.shape[1];
    auto* rows = backend::data<float>(history);
    auto* scales = backend::data<float>(*args.scales[i]);
    const int64_t grain = grain_of_rows(static_cast<int64_t>(length));
    ThreadPool::instance().parallel_for(tensors, grain, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        scales[t] = numeric::delayed_scaling_update(
            {rows + t, length, static_cast<size_t>(tensors)},
            reduced != nullptr ? reduced[t] : 0.0f, scales[t], rule);
      }
    });
    if (reduced != nullptr) reduced += tensors;
  }
}

Refusal refuse_update(const UpdateArgs& args) {
  if (!dense(args.amax_reduction_buffer)) return kNotContiguous;
  for (int64_t i = 0; i < args.amax_histories_count; ++i) {
    if (!dense(args.amax_histories[i])) return kNotContiguous;
  }
  for (int64_t i = 0; i < args.scales_count; ++i) {
    if (!dense(args.scales[i])) return kNotContiguous;
  }
  return nullptr;
}

}  // namespace

void append_quantize(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(descriptor<te_fl_quantize_args, quantize, refuse_quantize>("quantize"));
  ops.push_back(descriptor<te_fl_dequantize_args, dequantize, refuse_dequantize>("dequantize"));
  ops.push_back(descriptor<te_fl_bgrad_quantize_args, bgrad_quantize, refuse_bgrad_quantize>(
      "bgrad_quantize"));
  ops.push_back(descriptor<te_fl_multi_tensor_quantize_args, multi_tensor_quantize,
                           refuse_multi_tensor_quantize>("multi_tensor_quantize"));
  ops.push_back(descriptor<te_fl_split_quantize_args, split_quantize, refuse_split_quantize>(
      "split_quantize"));
  ops.push_back(descriptor<te_fl_cast_to_fp8_args, cast_to_fp8, refuse_cast_to_fp8>("cast_to_fp8"));
  ops.push_back(
      descriptor<te_fl_fp8_transpose_args, fp8_transpose, refuse_fp8_transpose>("fp8_transpose"));
  ops.push_back(
      descriptor<te_fl_compute_amax_args, compute_amax, refuse_compute_amax>("compute_amax"));
  ops.push_back(descriptor<UpdateArgs, update_scales, refuse_update>(
      "fused_amax_and_scale_update_after_reduction"));
}

}  // namespace te_fl::cpu
