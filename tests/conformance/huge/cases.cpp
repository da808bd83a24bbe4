// What is run on tensors of more than 2^31 elements: one op for each way in which the backends walk
// their tensors.
#include "cases.hpp"

#include <algorithm>
#include <cmath>

#include "conformance/oracle_philox.hpp"
#include "te_fl/numeric.hpp"

namespace te_fl::conformance::huge {
namespace {

constexpr int64_t kCols = 4096;

int64_t rows_for(const Run& run, int64_t cols, int64_t multiple = 16) {
  const int64_t rows = (run.elements() + cols - 1) / cols;
  return (rows + multiple - 1) / multiple * multiple;
}

double gelu(double x) {
  return 0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

void relu(Run& run) {
  const Pattern pattern(1);
  const Shape shape = {run.elements()};  // not a multiple of anything
  const Tensor x = run.input(shape, pattern), y = run.output(shape);
  te_fl_relu_args args{};
  args.input = x, args.output = y;
  run.call("relu", &args);
  run.expect(y, "output", [&](int64_t i) { return std::max(pattern.at(i), 0.0f); });
}

void add(Run& run) {
  const Pattern a(1), b(2);
  const Shape shape = {rows_for(run, kCols), kCols};
  const Tensor ta = run.input(shape, a), tb = run.input(shape, b);
  te_fl_add_args args{};
  args.a = ta, args.b = tb, args.output = tb;  // in place
  run.call("add", &args);
  run.expect(tb, "output", [&](int64_t i) { return double{a.at(i)} + double{b.at(i)}; });
}

// Per-tensor FP8 with a given scale: row-wise codes, the transposed ones, and the largest
// magnitude, which lies beyond 2^31.
struct Quantised {
  Tensor tensor;
  float scale = 16;

  Quantised(Run& run, const Shape& shape) {
    if (const Status status = make(run, shape); !status.ok()) run.fail(status.to_string());
  }
  Status make(Run& run, const Shape& shape) {
    TE_FL_ASSIGN_OR_RETURN(const Tensor state, Tensor::empty({1}, DType::kF32, run.device()));
    run.set(state, 0, scale);
    TE_FL_ASSIGN_OR_RETURN(
        tensor, Tensor::empty_quantized(shape, {.columnwise = true}, run.device(), &state));
    return {};
  }
  void expect(Run& run, const std::function<double(int64_t)>& value, double amax) const {
    if (run.failed()) return;
    const int64_t rows = tensor.size(0), cols = tensor.size(1);
    const Tensor row = tensor.rowwise_codes(), column = tensor.columnwise_codes();
    // Codes by value: one step of E4M3 lies within 1/8.
    const auto check = [&](const Tensor& codes, const char* name, auto&& index) {
      for (int64_t begin : run.windows(rows * cols)) {
        const std::vector<float> got = run.read(codes, begin, Run::kWindow);
        for (int64_t i = 0; i < Run::kWindow && !run.failed(); ++i) {
          const double want = std::clamp(value(index(begin + i)) * scale, -448.0, 448.0);
          const double found =
              numeric::e4m3_to_float(static_cast<uint8_t>(got[static_cast<size_t>(i)]));
          if (!(std::fabs(found - want) <= std::fabs(want) / 15 + 0.002)) {
            run.fail(std::string(name) + "[" + std::to_string(begin + i) + "] is " +
                     std::to_string(found) + ", expected " + std::to_string(want));
          }
        }
      }
    };
    check(row, "row-wise codes", [](int64_t i) { return i; });
    check(column, "column-wise codes", [&](int64_t i) { return i % rows * cols + i / rows; });
    const std::vector<float> found = run.read(tensor.amax(), 0, 1);
    if (!run.failed() && std::fabs(double{found[0]} - amax) > 1e-5 * amax) {
      run.fail("amax is " + std::to_string(found[0]) + ", expected " + std::to_string(amax));
    }
  }
};

void bgrad_quantize(Run& run) {
  const Pattern pattern(1);
  const int64_t rows = rows_for(run, kCols);
  const Tensor x = run.input({rows, kCols}, pattern), sums = run.output({kCols}, DType::kF32);
  const int64_t outlier = rows * kCols - 7;
  run.set(x, outlier, 24.0f);
  const Quantised out(run, {rows, kCols});
  te_fl_bgrad_quantize_args args{};
  args.input = x, args.output = out.tensor, args.bias_grad = sums;
  run.call("bgrad_quantize", &args);
  const auto value = [&](int64_t i) { return i == outlier ? 24.0 : double{pattern.at(i)}; };
  out.expect(run, value, 24.0);
  for (int64_t col : {int64_t{0}, int64_t{1}, int64_t{63}, int64_t{2048}, kCols - 7, kCols - 1}) {
    double sum = 0, size = 0;
    for (int64_t r = 0; r < rows; ++r) {
      sum += value(r * kCols + col), size += std::fabs(value(r * kCols + col));
    }
    const std::vector<float> got = run.read(sums, col, 1);
    if (!run.failed() && std::fabs(double{got[0]} - sum) > 1e-5 * size) {
      run.fail("bias_grad[" + std::to_string(col) + "] is " + std::to_string(got[0]) +
               ", expected " + std::to_string(sum));
    }
  }
}

void gelu_quantised(Run& run) {
  const Pattern pattern(1);
  const Shape shape = {rows_for(run, kCols), kCols};
  const Tensor x = run.input(shape, pattern);
  run.set(x, shape[0] * shape[1] - 3, 20.0f);
  const Quantised out(run, shape);
  te_fl_gelu_args args{};
  args.input = x, args.output = out.tensor;
  run.call("gelu", &args);
  const int64_t outlier = shape[0] * shape[1] - 3;
  out.expect(
      run, [&](int64_t i) { return i == outlier ? 20.0 : gelu(pattern.at(i)); }, 20.0);
}

void layernorm(Run& run) {
  const Pattern pattern(1), weight(3);
  const int64_t rows = rows_for(run, kCols, 1);
  const Tensor x = run.input({rows, kCols}, pattern), gamma = run.input({kCols}, weight);
  const Tensor mu = run.output({rows}, DType::kF32), rsigma = run.output({rows}, DType::kF32);
  te_fl_layernorm_fwd_args args{};
  args.x = x, args.gamma = gamma, args.z = x, args.mu = mu, args.rsigma = rsigma;  // in place
  run.call("layernorm_fwd", &args);
  int64_t row = -1;
  double mean = 0, scale = 0;
  run.expect(
      x, "z",
      [&](int64_t i) {
        if (i / kCols != row) {
          row = i / kCols;
          double sum = 0, squares = 0;
          for (int64_t c = 0; c < kCols; ++c) sum += pattern.at(row * kCols + c);
          mean = sum / kCols;
          for (int64_t c = 0; c < kCols; ++c) {
            const double d = pattern.at(row * kCols + c) - mean;
            squares += d * d;
          }
          scale = 1 / std::sqrt(squares / kCols + 1e-5);
        }
        return (pattern.at(i) - mean) * scale * weight.at(i % kCols);
      },
      0x1p-8, 1e-5);
}

void softmax(Run& run) {
  const Pattern pattern(1);
  constexpr int64_t kWidth = 2048;
  const int64_t batch = (run.elements() + kWidth * kWidth * 4 - 1) / (kWidth * kWidth * 4);
  const Shape shape = {batch, 4, kWidth, kWidth};
  const Tensor x = run.input(shape, pattern), y = run.output(shape);
  te_fl_scaled_softmax_forward_args args{};
  args.input = x, args.output = y, args.scale = 0.5f;
  run.call("scaled_softmax_forward", &args);
  int64_t row = -1;
  double sum = 0;
  run.expect(
      y, "output",
      [&](int64_t i) {
        if (i / kWidth != row) {
          row = i / kWidth, sum = 0;
          for (int64_t c = 0; c < kWidth; ++c) sum += std::exp(0.5 * pattern.at(row * kWidth + c));
        }
        return std::exp(0.5 * pattern.at(i)) / sum;
      },
      0x1p-7, 1e-9);
}

void dropout(Run& run) {
  const Pattern pattern(1);
  const Shape shape = {run.elements()};
  const Tensor x = run.input(shape, pattern);
  const Tensor mask = run.output({(run.elements() + 7) / 8}, DType::kU8);
  const te_fl_rng rng = {17, 1000, nullptr};
  te_fl_dropout_fwd_args args{};
  args.input = x, args.output = x, args.mask = mask, args.p = 0.25f;  // in place
  run.call("dropout_fwd", &args, rng);
  run.expect(x, "output",
             [&](int64_t i) { return keeps(rng, i, 0.25f) ? pattern.at(i) / 0.75 : 0.0; });
}

void amax(Run& run) {
  const Pattern pattern(1);
  const Tensor x = run.input({run.elements()}, pattern), out = run.output({1}, DType::kF32);
  run.set(x, run.elements() - 1, -40.0f);
  te_fl_compute_amax_args args{};
  args.input = x, args.amax = out;
  run.call("compute_amax", &args);
  run.expect(
      out, "amax", [](int64_t) { return 40.0; }, 0, 0);
}

void norm_of_list(Run& run) {
  const Pattern pattern(1);
  const Tensor x = run.input({run.elements()}, pattern), out = run.output({1}, DType::kF32);
  const te_fl_tensor* list[] = {x};
  te_fl_multi_tensor_l2norm_args args{};
  args.inputs = list, args.inputs_count = 1, args.norm = out;
  run.call("multi_tensor_l2norm", &args);
  double period = 0, rest = 0;
  for (float v : pattern.values()) period += double{v} * v;
  for (int64_t i = 0; i < run.elements() % Pattern::kPeriod; ++i) {
    rest += double{pattern.at(i)} * pattern.at(i);
  }
  const double whole = static_cast<double>(run.elements() / Pattern::kPeriod) * period + rest;
  run.expect(
      out, "norm", [&](int64_t) { return std::sqrt(whole); }, 1e-5, 0);
}

void transposed_copy(Run& run) {
  const Pattern pattern(1);
  const int64_t rows = rows_for(run, kCols);
  const Tensor x = run.input({rows, kCols}, pattern), y = run.output({kCols, rows});
  if (run.failed()) return;
  const Tensor turned = x.transpose(0, 1).value();
  te_fl_strided_copy_args args{};
  args.input = turned, args.output = y;
  run.call("strided_copy", &args);
  run.expect(
      y, "output", [&](int64_t i) { return pattern.at(i % rows * kCols + i / rows); }, 0, 0);
}

void cross_entropy(Run& run) {
  const Pattern pattern(1);
  constexpr int64_t kVocabulary = 32768;
  const int64_t rows = rows_for(run, kVocabulary, 1);
  const Tensor x = run.input({rows, kVocabulary}, pattern);
  const Tensor targets = run.output({rows}, DType::kI32);
  const Tensor loss = run.output({rows}, DType::kF32), lse = run.output({rows}, DType::kF32);
  if (run.failed()) return;
  te_fl_fill_args fill{};
  fill.output = targets, fill.value = kVocabulary - 1;
  run.call("fill", &fill);
  te_fl_cross_entropy_fwd_args args{};
  args.logits = x, args.targets = targets, args.loss = loss, args.lse = lse;
  run.call("cross_entropy_fwd", &args);
  for (int64_t row : {int64_t{0}, rows / 2, rows - 2, rows - 1}) {
    double sum = 0;
    for (int64_t c = 0; c < kVocabulary; ++c) sum += std::exp(pattern.at(row * kVocabulary + c));
    const double want = std::log(sum) - pattern.at(row * kVocabulary + kVocabulary - 1);
    const std::vector<float> got = run.read(loss, row, 1);
    if (!run.failed() && std::fabs(double{got[0]} - want) > 1e-5 * std::fabs(want) + 1e-5) {
      run.fail("loss[" + std::to_string(row) + "] is " + std::to_string(got[0]) + ", expected " +
               std::to_string(want));
    }
  }
}

void gemm(Run& run) {
  const Pattern a(1), b(2);
  constexpr int64_t kN = 32768, kK = 32;
  const int64_t m = rows_for(run, kN);
  const Tensor ta = run.input({m, kK}, a), tb = run.input({kN, kK}, b), d = run.output({m, kN});
  te_fl_generic_gemm_args args{};
  args.a = ta, args.b = tb, args.d = d, args.trans_b = 1;
  run.call("generic_gemm", &args);
  run.expect(
      d, "d",
      [&](int64_t i) {
        double sum = 0;
        for (int64_t k = 0; k < kK; ++k) {
          sum += double{a.at(i / kN * kK + k)} * double{b.at(i % kN * kK + k)};
        }
        return sum;
      },
      0x1p-8, 1e-4);
}

}  // namespace

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"relu", relu},
      {"add", add},
      {"bgrad_quantize", bgrad_quantize},
      {"gelu", gelu_quantised},
      {"layernorm_fwd", layernorm},
      {"scaled_softmax_forward", softmax},
      {"dropout_fwd", dropout},
      {"compute_amax", amax},
      {"multi_tensor_l2norm", norm_of_list},
      {"strided_copy", transposed_copy},
      {"cross_entropy_fwd", cross_entropy},
      {"generic_gemm", gemm},
  };
  return all;
}

}  // namespace te_fl::conformance::huge
