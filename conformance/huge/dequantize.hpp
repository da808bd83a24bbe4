// Dequantisation from row-wise and column-wise data in all scaling modes, and transposition of FP8
// data, with huge tensors.
#pragma once

#include "conformance/huge/cases.hpp"
#include "conformance/huge/quantised.hpp"

namespace te_fl::huge::dequantize_calls {

inline void dequantize(Run& run, int64_t cols, Scaling scaling, bool columnwise,
                       DType to = DType::kBF16) {
  const Codes codes(1);
  const Pattern scales(2, true);
  const int64_t rows = run.rows(cols, cols % 16 == 0 ? 16 : 1);
  const Quantised x(run, {rows, cols},
                    {.scaling = scaling, .rowwise = !columnwise, .columnwise = columnwise});
  const Tensor y = run.output({rows, cols}, to);
  if (run.failed()) return;
  const Tensor& t = x.tensor();
  codes.fill(run, columnwise ? t.columnwise_codes() : t.rowwise_codes());
  const Tensor own = t.columnwise_scale_inv();
  const Tensor scale_inv = columnwise && own.defined() ? own : t.scale_inv();
  const bool micro = scaling == Scaling::kMXFP8;
  const auto binary_exponent = [&](int64_t at) { return static_cast<int>(scales.at(at) * 8) - 16; };
  if (micro) {
    std::vector<uint8_t> exponents;  // E8M0 codes of the scales
    for (int64_t i = 0; i < Pattern::kPeriod; ++i) {
      exponents.push_back(static_cast<uint8_t>(127 + binary_exponent(i)));
    }
    run.repeat(scale_inv, exponents);
  } else {
    run.fill(scale_inv, scales);
  }
  te_fl_dequantize_args args{};
  args.input = x, args.output = y;
  run.call("dequantize", &args);
  run.expect(
      y, "output",
      [&](int64_t i) {
        const int64_t row = i / cols, col = i % cols;
        const int64_t at = scale_index(scaling, columnwise, rows, cols, row, col);
        if (micro) return std::ldexp(codes.at(i), binary_exponent(at));
        return codes.at(columnwise ? col * rows + row : i) * scales.at(at);
      },
      to == DType::kF32 ? 1e-6 : 0x1p-8, 0);
}

inline void transpose(Run& run, int64_t cols, DType dtype, bool sums) {
  const Codes codes(1, 448, dtype);
  const int64_t rows = run.rows(cols, cols % 16 == 0 ? 16 : 1);
  const Tensor x = run.output({rows, cols}, DType::kU8), y = run.output({cols, rows}, DType::kU8);
  if (run.failed()) return;
  codes.fill(run, x);
  const auto as_codes = [&](const Tensor& t) {
    return Tensor::wrap(t.raw_data(), t.shape(), {}, dtype, run.device(), nullptr).value();
  };
  const Tensor in = as_codes(x), out = as_codes(y);
  const Tensor scale_inv = run.output({1}, DType::kF32), totals = run.output({cols}, DType::kF32);
  run.set(scale_inv, 0, 0.5f);
  te_fl_fp8_transpose_args args{};
  args.input = in, args.output = out;
  if (sums) args.scale_inv = scale_inv, args.column_sums = totals;
  run.call("fp8_transpose", &args);
  run.expect(
      y, "output", [&](int64_t i) { return codes.code(i % rows * cols + i / rows); }, 0, 0);
  if (sums) {
    run.expect_sums(totals, "column_sums", rows, cols,
                    [&](int64_t i) { return 0.5 * codes.at(i); });
  }
}

}  // namespace te_fl::huge::dequantize_calls
