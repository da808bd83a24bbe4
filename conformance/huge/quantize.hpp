// Quantisation of huge tensors in all scaling modes, of single tensors and lists; amaxes and scale
// updates.
#pragma once

#include <algorithm>

#include "conformance/format.hpp"
#include "conformance/huge/cases.hpp"
#include "conformance/huge/quantised.hpp"

namespace te_fl::huge::quantize_calls {

using conformance::encode_bits;
using conformance::format_of;

constexpr float kLargest = -24;

// A BF16 or F32 input [rows, cols] whose largest magnitude is near its end.
struct Input {
  Pattern pattern{1};
  int64_t rows, cols, place;
  Tensor tensor;

  Input(Run& run, int64_t r, int64_t c, DType dtype = DType::kBF16)
      : rows(r), cols(c), place(r * c - 7) {
    tensor = run.input({rows, cols}, pattern, dtype);
    run.set(tensor, place, kLargest);
  }
  double operator()(int64_t i) const { return i == place ? kLargest : double{pattern.at(i)}; }
};

inline void quantize(Run& run, int64_t cols, const QuantSpec& spec, DType dtype = DType::kBF16) {
  const Input x(run, run.rows(cols, cols % 16 == 0 ? 16 : 1), cols, dtype);
  const Quantised out(run, {x.rows, cols}, spec);
  te_fl_quantize_args args{};
  args.input = x.tensor, args.output = out;
  run.call("quantize", &args);
  out.expect(run, x, -kLargest);
}

inline void bgrad_quantize(Run& run, int64_t cols, const QuantSpec& spec) {
  const Input x(run, run.rows(cols, cols % 16 == 0 ? 16 : 1), cols);
  const Tensor sums = run.output({cols}, DType::kF32);
  const Quantised out(run, {x.rows, cols}, spec);
  te_fl_bgrad_quantize_args args{};
  args.input = x.tensor, args.output = out, args.bias_grad = sums;
  run.call("bgrad_quantize", &args);
  out.expect(run, x, -kLargest);
  run.expect_sums(sums, "bias_grad", x.rows, cols, x);
}

// FP8 data without a scale struct, as one row.
inline void cast_to_fp8(Run& run) {
  const Input x(run, 1, run.elements());
  const Tensor codes = run.output({1, x.cols}, DType::kU8);
  const Tensor scale = run.output({1}, DType::kF32), amax = run.output({1}, DType::kF32),
               scale_inv = run.output({1}, DType::kF32);
  run.set(scale, 0, 16), run.set(amax, 0, 1);
  if (run.failed()) return;
  const auto out =
      Tensor::wrap(codes.raw_data(), codes.shape(), {}, DType::kF8E4M3, run.device(), nullptr);
  if (!out.ok()) return run.fail(out.status().to_string());
  te_fl_cast_to_fp8_args args{};
  args.input = x.tensor, args.output = out.value(), args.scale = scale, args.amax = amax,
  args.scale_inv = scale_inv;
  run.call("cast_to_fp8", &args);
  run.expect(
      codes, "codes",
      [&](int64_t i) { return double(encode_bits(format_of(TE_FL_F8E4M3), x(i) * 16)); }, 0, 0);
  run.expect(
      amax, "amax", [](int64_t) { return -kLargest; }, 0, 0);
  run.expect(
      scale_inv, "scale_inv", [](int64_t) { return 0.0625; }, 0, 0);
}

// A small tensor, a large one, and another small one after it.
inline void quantize_list(Run& run, const QuantSpec& spec) {
  const Input small(run, 32, 256), large(run, run.rows(kCols), kCols), last(run, 48, 1024);
  const Quantised outs[] = {
      {run, {32, 256}, spec}, {run, {large.rows, kCols}, spec}, {run, {48, 1024}, spec}};
  const te_fl_tensor* const from[] = {small.tensor, large.tensor, last.tensor};
  const te_fl_tensor* const to[] = {outs[0], outs[1], outs[2]};
  te_fl_multi_tensor_quantize_args args{};
  args.inputs = from, args.outputs = to, args.inputs_count = args.outputs_count = 3;
  run.call("multi_tensor_quantize", &args);
  outs[0].expect(run, small, -kLargest);
  outs[1].expect(run, large, -kLargest);
  outs[2].expect(run, last, -kLargest);
}

// Splits the input; the second part begins after 2^31 elements.
inline void split_quantize(Run& run, const QuantSpec& spec) {
  const int64_t first = run.rows(kCols), second = 256;
  const Input x(run, first + second, kCols);
  const Quantised outs[] = {{run, {first, kCols}, spec}, {run, {second, kCols}, spec}};
  const te_fl_tensor* const to[] = {outs[0], outs[1]};
  te_fl_split_quantize_args args{};
  args.input = x.tensor, args.outputs = to, args.outputs_count = 2;
  run.call("split_quantize", &args);
  double amax = 0;  // a few rows do not contain the complete pattern
  const auto period = static_cast<int64_t>(x.pattern.values().size());
  for (int64_t i = 0; i < std::min(period, first * kCols); ++i) {
    amax = std::max(amax, std::fabs(x(i)));
  }
  outs[0].expect(run, x, amax);
  outs[1].expect(
      run, [&](int64_t i) { return x(first * kCols + i); }, -kLargest);
}

inline void compute_amax(Run& run, int64_t size) {
  const Input x(run, 1, size);
  const Tensor out = run.output({1}, DType::kF32);
  te_fl_compute_amax_args args{};
  args.input = x.tensor, args.amax = out;
  run.call("compute_amax", &args);
  run.expect(
      out, "amax", [](int64_t) { return -kLargest; }, 0, 0);
}

// Amax histories of 4 steps for many tensors: more than 2^31 amaxes.
inline void scale_update(Run& run) {
  constexpr int64_t kLength = 4;
  const Pattern amaxes(1, true), before(2, true);
  const int64_t tensors = run.elements() / kLength + 1;
  const Tensor history = run.input({kLength, tensors}, amaxes, DType::kF32);
  const Tensor scales = run.input({tensors}, before, DType::kF32);
  const te_fl_tensor *histories[] = {history}, *all_scales[] = {scales};
  te_fl_fused_amax_and_scale_update_after_reduction_args args{};
  args.amax_histories = histories, args.scales = all_scales;
  args.amax_histories_count = args.scales_count = 1;
  run.call("fused_amax_and_scale_update_after_reduction", &args);
  // The history rolls: the last row receives the step's amax, which was in row 0, and row 0 becomes
  // 0. The scale is computed from the largest amax.
  run.expect(
      history, "amax_history",
      [&](int64_t i) {
        const int64_t row = i / tensors, t = i % tensors;
        if (row == 0) return 0.0;
        return double{row == kLength - 1 ? amaxes.at(t) : amaxes.at((row + 1) * tensors + t)};
      },
      0, 0);
  run.expect(
      scales, "scale",
      [&](int64_t t) {
        double most = 0;
        for (int64_t row = 0; row < kLength; ++row) {
          most = std::max(most, double{amaxes.at(row * tensors + t)});
        }
        return 448.0 / most;
      },
      1e-6, 0);
}

constexpr QuantSpec kTensor{.columnwise = true}, kRows{}, kGradient{.dtype = DType::kF8E5M2};
constexpr QuantSpec kCurrent{.columnwise = true, .compute_scale = true};
constexpr QuantSpec kLines{.scaling = Scaling::kBlock1x128, .columnwise = true};
constexpr QuantSpec kPow2Lines{
    .scaling = Scaling::kBlock1x128, .columnwise = true, .pow2_scale = true};
constexpr QuantSpec kSquares{.scaling = Scaling::kBlock128x128, .columnwise = true};
constexpr QuantSpec kMicro{.scaling = Scaling::kMXFP8, .columnwise = true};
constexpr QuantSpec kMicroRows{.scaling = Scaling::kMXFP8};
constexpr QuantSpec kMicroColumns{.scaling = Scaling::kMXFP8, .rowwise = false, .columnwise = true};

}  // namespace te_fl::huge::quantize_calls
