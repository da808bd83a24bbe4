// The quantisation ops, amax and delayed scaling.
#include "te_fl/ops/quantize.h"

#include <cmath>

#include "dispatch.hpp"
#include "element.hpp"
#include "families.hpp"
#include "te_fl/numeric.hpp"

namespace te_fl::reference {
namespace {

// Quantises rows of `input`, from row_offset on, into an output with the same last extent.
void quantize_rows(const te_fl_tensor& input, int64_t row_offset, const te_fl_tensor& output) {
  const Reader reader(input);
  const int64_t cols = backend::as_matrix(output).cols;
  const Produce values = [&](int64_t row, int64_t col, int64_t n, float* out) {
    reader.read((row_offset + row) * cols + col, n, out);
  };
  store_output(output, {&input}, values, Access::kAnywhere, largest_finite_of(dtype_of(input)));
}

bool is_f32_noop(const te_fl_tensor* flag) { return flag != nullptr && scalar_f32(*flag) != 0.0f; }

void quantize(const te_fl_context&, const te_fl_quantize_args& args) {
  if (!is_f32_noop(args.noop_flag)) quantize_rows(*args.input, 0, *args.output);
}

void dequantize(const te_fl_context&, const te_fl_dequantize_args& args) {
  const Reader reader(*args.input);
  const int64_t cols = backend::as_matrix(*args.output).cols;
  store_output(
      *args.output, {args.input},
      [&](int64_t row, int64_t col, int64_t n, float* out) {
        reader.read(row * cols + col, n, out);
      },
      Access::kAnywhere);
}

void bgrad_quantize(const te_fl_context&, const te_fl_bgrad_quantize_args& args) {
  const Reader reader(*args.input);
  const backend::Matrix matrix = backend::as_matrix(*args.input);
  std::vector<double> sums(static_cast<size_t>(matrix.cols), 0.0);
  std::vector<float> row(static_cast<size_t>(matrix.cols));
  for (int64_t r = 0; r < matrix.rows; ++r) {
    reader.read(r * matrix.cols, matrix.cols, row.data());
    for (int64_t c = 0; c < matrix.cols; ++c) sums[c] += row[c];
  }
  quantize_rows(*args.input, 0, *args.output);
  const std::vector<float> rounded(sums.begin(), sums.end());
  Writer(*args.bias_grad).write(0, matrix.cols, rounded.data());
}

void multi_tensor_quantize(const te_fl_context&, const te_fl_multi_tensor_quantize_args& args) {
  if (is_f32_noop(args.noop_flag)) return;
  for (int64_t i = 0; i < args.outputs_count; ++i) {
    quantize_rows(*args.inputs[i], 0, *args.outputs[i]);
  }
}

void split_quantize(const te_fl_context&, const te_fl_split_quantize_args& args) {
  int64_t rows = 0;
  for (int64_t i = 0; i < args.outputs_count; ++i) {
    quantize_rows(*args.input, rows, *args.outputs[i]);
    rows += backend::as_matrix(*args.outputs[i]).rows;
  }
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

void sum_columns(const te_fl_fp8_transpose_args& args, const backend::Matrix& m) {
  const Reader reader(*args.input);
  const double scale_inv = args.scale_inv != nullptr ? scalar_f32(*args.scale_inv) : 1.0;
  std::vector<double> sums(static_cast<size_t>(m.cols), 0.0), row(sums);
  for (int64_t r = 0; r < m.rows; ++r) {
    reader.read(r * m.cols, m.cols, row.data());
    for (int64_t c = 0; c < m.cols; ++c) sums[c] += row[c] * scale_inv;
  }
  Writer(*args.column_sums).write(0, m.cols, sums.data());
}

void fp8_transpose(const te_fl_context&, const te_fl_fp8_transpose_args& args) {
  const backend::Matrix m = backend::as_matrix(*args.input);
  if (args.column_sums != nullptr) sum_columns(args, m);
  const auto* input = backend::data<const uint8_t>(*args.input);
  auto* output = backend::data<uint8_t>(*args.output);
  for (int64_t k = 0; k < m.cols; ++k) {
    for (int64_t i = 0; i < m.rows; ++i) {
      output[element_offset(*args.output, k * m.rows + i)] =
          input[element_offset(*args.input, i * m.cols + k)];
    }
  }
}

void compute_amax(const te_fl_context&, const te_fl_compute_amax_args& args) {
  constexpr int64_t kChunk = 4096;
  const Reader reader(*args.input);
  std::vector<float> values(kChunk);
  float amax = 0.0f;
  for (int64_t i = 0; i < reader.size(); i += kChunk) {
    const int64_t n = std::min(kChunk, reader.size() - i);
    reader.read(i, n, values.data());
    for (int64_t j = 0; j < n; ++j) amax = numeric::amax_accumulate(amax, values[j]);
  }
  *backend::data<float>(*args.amax) = amax;
}

using UpdateArgs = te_fl_fused_amax_and_scale_update_after_reduction_args;

void update_scales(const te_fl_context&, const UpdateArgs& args) {
  numeric::DelayedScalingRule rule;
  rule.fp8_max =
      numeric::delayed_scaling_numerator(args.fp8_dtype == TE_FL_FP8_FORMAT_E5M2, args.margin);
  rule.algo = args.algo == TE_FL_AMAX_ALGO_MOST_RECENT ? numeric::AmaxComputeAlgo::kMostRecent
                                                       : numeric::AmaxComputeAlgo::kMax;
  int64_t position = 0;
  for (int64_t i = 0; i < args.amax_histories_count; ++i) {
    const te_fl_tensor& history = *args.amax_histories[i];
    const Reader scales(*args.scales[i]);
    const Reader rows(history);
    const int64_t length = history.dl.shape[0];
    const int64_t tensors = history.dl.shape[1];
    std::vector<float> column(static_cast<size_t>(length));
    for (int64_t t = 0; t < tensors; ++t, ++position) {
      const float reduced = args.amax_reduction_buffer != nullptr
                                ? Reader(*args.amax_reduction_buffer)[position]
                                : 0.0f;
      for (int64_t r = 0; r < length; ++r) column[r] = rows[r * tensors + t];
      const float scale = numeric::delayed_scaling_update(
          {column.data(), static_cast<size_t>(length), 1}, reduced, scales[t], rule);
      for (int64_t r = 0; r < length; ++r) Writer(history).set(r * tensors + t, column[r]);
      Writer(*args.scales[i]).set(t, scale);
    }
  }
}

}  // namespace

void append_quantize(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(descriptor<te_fl_quantize_args, quantize>("quantize"));
  ops.push_back(descriptor<te_fl_dequantize_args, dequantize>("dequantize"));
  ops.push_back(descriptor<te_fl_bgrad_quantize_args, bgrad_quantize>("bgrad_quantize"));
  ops.push_back(
      descriptor<te_fl_multi_tensor_quantize_args, multi_tensor_quantize>("multi_tensor_quantize"));
  ops.push_back(descriptor<te_fl_split_quantize_args, split_quantize>("split_quantize"));
  ops.push_back(descriptor<te_fl_cast_to_fp8_args, cast_to_fp8>("cast_to_fp8"));
  ops.push_back(descriptor<te_fl_fp8_transpose_args, fp8_transpose>("fp8_transpose"));
  ops.back().later_args = "scale_inv column_sums";
  ops.push_back(descriptor<te_fl_compute_amax_args, compute_amax>("compute_amax"));
  ops.push_back(
      descriptor<UpdateArgs, update_scales>("fused_amax_and_scale_update_after_reduction"));
}

}  // namespace te_fl::reference
