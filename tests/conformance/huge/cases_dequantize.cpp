// Codes back to numbers, from either copy in every scaling mode; transposition of codes.
#include "cases.hpp"
#include "quantised.hpp"

namespace te_fl::conformance::huge {
namespace {

void dequantize(Run& run, int64_t cols, Scaling scaling, bool columnwise, DType to = DType::kBF16) {
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
  run.fill(columnwise && own.defined() ? own : t.scale_inv(), scales);
  te_fl_dequantize_args args{};
  args.input = x, args.output = y;
  run.call("dequantize", &args);
  run.expect(
      y, "output",
      [&](int64_t i) {
        const int64_t row = i / cols, col = i % cols;
        const int64_t at = scale_index(scaling, columnwise, rows, cols, row, col);
        return codes.at(columnwise ? col * rows + row : i) * scales.at(at);
      },
      to == DType::kF32 ? 1e-6 : 0x1p-8, 0);
}

void transpose(Run& run, int64_t cols, DType dtype, bool sums) {
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

}  // namespace

void add_dequantize(Cases& cases) {
  constexpr Scaling kTensor = Scaling::kTensor, kLines = Scaling::kBlock1x128,
                    kSquares = Scaling::kBlock128x128;
  const Cases all = {
      {"dequantize", "", [](Run& r) { dequantize(r, kCols, kTensor, false); }},
      {"dequantize", "odd rows, to F32",
       [](Run& r) { dequantize(r, kOddCols, kTensor, false, DType::kF32); }},
      {"dequantize", "column-wise", [](Run& r) { dequantize(r, kCols, kTensor, true); }},
      {"dequantize", "1x128", [](Run& r) { dequantize(r, kCols, kLines, false); }},
      {"dequantize", "1x128, column-wise, odd rows",
       [](Run& r) { dequantize(r, kOddCols, kLines, true); }},
      {"dequantize", "128x128", [](Run& r) { dequantize(r, kCols, kSquares, false); }},
      {"dequantize", "128x128, column-wise", [](Run& r) { dequantize(r, kCols, kSquares, true); }},
      {"fp8_transpose", "", [](Run& r) { transpose(r, kCols, DType::kF8E4M3, false); }},
      {"fp8_transpose", "short rows", [](Run& r) { transpose(r, 16, DType::kF8E4M3, false); }},
      {"fp8_transpose", "short odd rows", [](Run& r) { transpose(r, 7, DType::kF8E4M3, false); }},
      {"fp8_transpose", "sums", [](Run& r) { transpose(r, kCols, DType::kF8E5M2, true); }},
      {"fp8_transpose", "sums, odd rows",
       [](Run& r) { transpose(r, kOddCols, DType::kF8E4M3, true); }},
  };
  cases.insert(cases.end(), all.begin(), all.end());
}

}  // namespace te_fl::conformance::huge
