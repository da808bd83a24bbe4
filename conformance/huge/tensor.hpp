// Additions, dropout, copies, fills, embedding and cross-entropy of huge tensors.
#pragma once

#include "conformance/huge/cases.hpp"
#include "conformance/oracle_philox.hpp"

namespace te_fl::huge::tensor_calls {

using conformance::keeps;

constexpr te_fl_rng kRandom{.seed = 17, .offset = 1000};
constexpr float kDropped = 0.25f;

inline void add(Run& run, int64_t cols, bool drop) {
  const Pattern a(1), b(2);
  const Shape shape = {run.rows(cols, 1), cols};
  const Tensor ta = run.input(shape, a), tb = run.input(shape, b);
  const Tensor mask = run.output({(shape[0] * cols + 7) / 8}, DType::kU8);
  te_fl_add_args args{};
  args.a = ta, args.b = tb, args.output = tb;  // the output overwrites b
  if (drop) args.mask = mask, args.p = kDropped;
  run.call("add", &args, kRandom);
  const auto kept = [&](int64_t i) { return !drop || keeps(kRandom, i, kDropped); };
  run.expect(
      tb, "output",
      [&](int64_t i) { return a.at(i) + (kept(i) ? double{b.at(i)} : 0.0) / (drop ? 0.75 : 1); },
      0x1p-8, 1e-5);
  if (!drop) return;
  run.expect(
      mask, "mask",
      [&](int64_t byte) {
        int bits = 0;
        for (int64_t i = 0; i < 8 && 8 * byte + i < tb.numel(); ++i)
          bits |= kept(8 * byte + i) << i;
        return bits;
      },
      0, 0);
}

// Adds FP32 and BF16 into BF16.
inline void add_mixed(Run& run) {
  const Pattern a(1), b(2);
  const Shape shape = {run.elements()};
  const Tensor ta = run.input(shape, a, DType::kF32), tb = run.input(shape, b),
               sum = run.output(shape);
  te_fl_add_args args{};
  args.a = ta, args.b = tb, args.output = sum;
  run.call("add", &args);
  run.expect(
      sum, "output", [&](int64_t i) { return double{a.at(i)} + double{b.at(i)}; }, 0x1p-8, 1e-5);
}

inline void dropout(Run& run, int64_t size, bool in_place) {
  const Pattern pattern(1);
  const Shape shape = {size};
  const Tensor x = run.input(shape, pattern), y = in_place ? x : run.output(shape);
  const Tensor mask = run.output({(size + 7) / 8}, DType::kU8);
  te_fl_dropout_fwd_args args{};
  args.input = x, args.output = y, args.mask = mask, args.p = kDropped;
  run.call("dropout_fwd", &args, kRandom);
  run.expect(y, "output",
             [&](int64_t i) { return keeps(kRandom, i, kDropped) ? pattern.at(i) / 0.75 : 0.0; });
  run.expect(
      mask, "mask",
      [&](int64_t byte) {
        int bits = 0;
        for (int64_t i = 0; i < 8 && 8 * byte + i < size; ++i) {
          bits |= keeps(kRandom, 8 * byte + i, kDropped) << i;
        }
        return bits;
      },
      0, 0);
}

inline void dropout_gradient(Run& run, int64_t size) {
  const Pattern pattern(1);
  const Tensor dy = run.input({size}, pattern), dx = run.output({size});
  const Tensor mask = run.output({(size + 7) / 8}, DType::kU8);
  std::vector<uint8_t> bytes;
  const Pattern random(5, true);
  for (const float v : random.values()) bytes.push_back(static_cast<int>(v * 128) & 0xff);
  run.repeat(mask, bytes);
  te_fl_dropout_bwd_args args{};
  args.grad_output = dy, args.mask = mask, args.grad_input = dx, args.p = kDropped;
  run.call("dropout_bwd", &args);
  run.expect(dx, "grad_input", [&](int64_t i) {
    const bool kept = (bytes[static_cast<size_t>(i / 8 % Pattern::kPeriod)] >> i % 8 & 1) != 0;
    return kept ? pattern.at(i) / 0.75 : 0.0;
  });
}

// ---- cases of copies and fills

inline void copy(Run& run, const Tensor& from, const Tensor& to) {
  te_fl_strided_copy_args args{};
  args.input = from, args.output = to;
  run.call("strided_copy", &args);
}

inline void dense_copy(Run& run) {
  const Pattern pattern(1);
  const Tensor x = run.input({run.elements()}, pattern), y = run.output({run.elements()});
  copy(run, x, y);
  run.expect(
      y, "output", [&](int64_t i) { return pattern.at(i); }, 0, 0);
}

inline void transposed_copy(Run& run, int64_t cols, DType to) {
  const Pattern pattern(1);
  const int64_t rows = run.rows(cols, cols % 16 == 0 ? 16 : 1);
  const Tensor x = run.input({rows, cols}, pattern), y = run.output({cols, rows}, to);
  if (run.failed()) return;
  copy(run, x.transpose(0, 1).value(), y);
  run.expect(
      y, "output", [&](int64_t i) { return pattern.at(i % rows * cols + i / rows); }, 0, 0);
}

// Copies [s, b, h] to [b, s, h], or rows without their last columns.
inline void permuted_copy(Run& run, int64_t width, DType to) {
  constexpr int64_t kS = 256;
  const Pattern pattern(1);
  const int64_t b = (run.rows(width, 1) + kS - 1) / kS;
  const Tensor x = run.input({kS, b, width}, pattern), y = run.output({b, kS, width}, to);
  if (run.failed()) return;
  copy(run, x.transpose(0, 1).value(), y);
  run.expect(
      y, "output",
      [&](int64_t i) {
        const int64_t col = i % width, s = i / width % kS, n = i / width / kS;
        return pattern.at((s * b + n) * width + col);
      },
      0, 0);
}

// Copies a range of columns into a range of columns of a wider tensor, whose other columns must not
// change.
inline void part_of_rows(Run& run, DType from) {
  constexpr int64_t kWidth = 4000, kOut = 4096;
  const Pattern pattern(1);
  const int64_t rows = run.rows(kWidth, 1);
  const Tensor x = run.input({rows, kCols}, pattern, from), y = run.output({rows, kOut});
  te_fl_fill_args fill{};
  fill.output = y, fill.value = 100;
  run.call("fill", &fill);
  if (run.failed()) return;
  copy(run, x.slice(1, 8, 8 + kWidth).value(), y.slice(1, 16, 16 + kWidth).value());
  run.expect(
      y, "output",
      [&](int64_t i) {
        const int64_t row = i / kOut, col = i % kOut;
        if (col < 16 || col >= 16 + kWidth) return 100.0;
        return double{pattern.at(row * kCols + col - 8)};
      },
      0, 0);
}

inline void fill(Run& run, bool part) {
  const int64_t cols = kOddCols, rows = run.rows(cols - 9, 1);
  const Tensor y = run.output({rows, cols});
  te_fl_fill_args args{};
  args.output = y, args.value = -3;
  run.call("fill", &args);
  if (!part) {
    run.expect(
        y, "output", [](int64_t) { return -3; }, 0, 0);
    return;
  }
  if (run.failed()) return;
  const Tensor inner = y.slice(1, 5, cols - 4).value();
  args.output = inner, args.value = 2.5;
  run.call("fill", &args);
  run.expect(
      y, "output", [&](int64_t i) { return i % cols >= 5 && i % cols < cols - 4 ? 2.5 : -3; }, 0,
      0);
}

// ---- cases of embedding and cross-entropy

// Indices that look up most rows of a table once or twice, and row 0 many times.
inline std::vector<int32_t> lookups(int64_t positions, int64_t rows) {
  std::vector<int32_t> indices;
  for (int64_t i = 0; i < positions; ++i) {
    indices.push_back(static_cast<int32_t>(i % 4096 == 7 ? 0 : (i / 2 * 7919 + i % 2 * 3) % rows));
  }
  return indices;
}

inline void embedding(Run& run, int64_t width) {
  const Pattern pattern(1);
  const int64_t rows = run.rows(width, 1), positions = rows + 10;
  const std::vector<int32_t> rows_of = lookups(positions, rows);
  const Tensor table = run.input({rows, width}, pattern), indices = run.integers(rows_of);
  const Tensor y = run.output({positions, width});
  te_fl_embedding_fwd_args args{};
  args.weight = table, args.indices = indices, args.output = y;
  run.call("embedding_fwd", &args);
  run.expect(
      y, "output",
      [&](int64_t i) {
        return pattern.at(rows_of[static_cast<size_t>(i / width)] * width + i % width);
      },
      0, 0);
}

inline void embedding_gradient(Run& run, int64_t width, bool accumulate) {
  const Pattern grad(1), before(2);
  const int64_t rows = run.rows(width, 1), positions = rows + 10;
  const std::vector<int32_t> rows_of = lookups(positions, rows);
  const Tensor dy = run.input({positions, width}, grad), indices = run.integers(rows_of);
  const Tensor table = run.input({rows, width}, before, DType::kF32);
  te_fl_embedding_bwd_args args{};
  args.indices = indices, args.grad_output = dy, args.grad_weight = table;
  args.accumulate = accumulate;
  run.call("embedding_bwd", &args);
  int64_t row = -1;
  std::vector<int64_t> mine;
  run.expect(
      table, "grad_weight",
      [&](int64_t i) {
        if (i / width != row) {
          row = i / width;
          mine.clear();
          for (int64_t p = 0; p < positions; ++p) {
            if (rows_of[static_cast<size_t>(p)] == row) mine.push_back(p);
          }
        }
        double sum = accumulate ? before.at(i) : 0;
        for (int64_t p : mine) sum += grad.at(p * width + i % width);
        return sum;
      },
      1e-5, 1e-4);
}

inline void cross_entropy(Run& run, int64_t classes) {
  const Pattern pattern(1);
  const int64_t rows = run.rows(classes, 1);
  std::vector<int32_t> at;
  for (int64_t i = 0; i < rows; ++i) at.push_back(static_cast<int32_t>(i * 7919 % classes));
  const Tensor x = run.input({rows, classes}, pattern), targets = run.integers(at);
  const Tensor loss = run.output({rows}, DType::kF32), lse = run.output({rows}, DType::kF32);
  te_fl_cross_entropy_fwd_args args{};
  args.logits = x, args.targets = targets, args.loss = loss, args.lse = lse;
  args.label_smoothing = 0.1f;
  run.call("cross_entropy_fwd", &args);
  for (int64_t row : {int64_t{0}, int64_t{1}, rows / 2, rows - 2, rows - 1}) {
    double sum = 0, plain = 0;
    for (int64_t c = 0; c < classes; ++c) {
      sum += std::exp(double{pattern.at(row * classes + c)}),
          plain += pattern.at(row * classes + c);
    }
    const double want_lse = std::log(sum),
                 target = pattern.at(row * classes + at[static_cast<size_t>(row)]),
                 want = want_lse - 0.9 * target - 0.1 * plain / static_cast<double>(classes);
    const std::vector<float> got = run.read(loss, row, 1), got_lse = run.read(lse, row, 1);
    if (run.failed()) return;
    if (std::fabs(got[0] - want) > 1e-5 * std::fabs(want) + 1e-5 ||
        std::fabs(got_lse[0] - want_lse) > 1e-5 * want_lse) {
      run.fail("loss[" + std::to_string(row) + "] is " + std::to_string(got[0]) + ", expected " +
               std::to_string(want) + "; lse " + std::to_string(got_lse[0]) + ", expected " +
               std::to_string(want_lse));
    }
  }
}

// The gradient, with arbitrary numbers as log-sum-exps, and with ignored rows.
inline void cross_entropy_gradient(Run& run, int64_t classes) {
  const Pattern pattern(1), grad(2), sums(3, true);
  const int64_t rows = run.rows(classes, 1);
  std::vector<int32_t> at;
  for (int64_t i = 0; i < rows; ++i) {
    at.push_back(static_cast<int32_t>(i % 5 == 4 ? -100 : i * 7919 % classes));
  }
  const Tensor x = run.input({rows, classes}, pattern), targets = run.integers(at);
  const Tensor g = run.input({rows}, grad, DType::kF32), lse = run.input({rows}, sums, DType::kF32);
  const Tensor dx = run.output({rows, classes});
  te_fl_cross_entropy_bwd_args args{};
  args.logits = x, args.targets = targets, args.grad_loss = g, args.lse = lse;
  args.grad_logits = dx, args.label_smoothing = 0.1f;
  run.call("cross_entropy_bwd", &args);
  run.expect(
      dx, "grad_logits",
      [&](int64_t i) {
        const int64_t row = i / classes, target = at[static_cast<size_t>(row)];
        if (target == -100) return 0.0;
        const double less = 0.1 / static_cast<double>(classes) + (i % classes == target ? 0.9 : 0);
        return grad.at(row) * (std::exp(double{pattern.at(i)} - sums.at(row)) - less);
      },
      0x1p-8, 1e-5);
}

}  // namespace te_fl::huge::tensor_calls
