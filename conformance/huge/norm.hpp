// Layer and RMS norms of huge tensors with all kinds of outputs, for several row lengths and
// options.
#pragma once

#include <unordered_map>

#include "conformance/format.hpp"
#include "conformance/huge/cases.hpp"
#include "conformance/huge/quantised.hpp"

namespace te_fl::huge::norm_calls {

using conformance::bits_float;
using conformance::float_bits;

constexpr double kEpsilon = double{1e-5f};
constexpr int64_t kLong = 40000;  // exceeds the registers of every kernel
// A weight, and an input in the same column of the last row, whose product is the largest result.
constexpr float kWeight = 24, kInput = 40;
constexpr int64_t kPlace = 3;  // column of kWeight and kInput

struct Forward {
  bool layer = true;  // false: RMS norm
  int64_t cols = kCols;
  DType dtype = DType::kBF16;
  bool residual = false, zero_centred = false, in_place = false;
};

// Rounds to FP32 and then to BF16, ties to even.
inline double rounded(double x) {
  const uint32_t bits = float_bits(static_cast<float>(x));
  return double{bits_float((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u)};
}

// The inputs of a call and the expected results.
class Norm {
 public:
  Norm(Run& run, const Forward& f) : f_(f), rows_(run.rows(f.cols, f.cols % 16 == 0 ? 16 : 1)) {
    last_ = (rows_ - 1) * f.cols + kPlace;
    x_ = run.input({rows_, f.cols}, x_pattern_, f.dtype);
    gamma_ = run.input({f.cols}, gamma_pattern_), beta_ = run.input({f.cols}, beta_pattern_);
    run.set(gamma_, kPlace, kWeight), run.set(x_, last_, kInput);
    mu_ = run.output({rows_}, DType::kF32), rsigma_ = run.output({rows_}, DType::kF32);
    if (!f.residual) return;
    residual_ = run.input({rows_, f.cols}, residual_pattern_, f.dtype);
    sum_ = run.output({rows_, f.cols});
  }
  const Tensor& x() const { return x_; }
  Shape shape() const { return {rows_, f_.cols}; }

  void call(Run& run, const te_fl_tensor* z) {
    te_fl_layernorm_fwd_args layer{};
    te_fl_rmsnorm_fwd_args rms{};
    layer.x = rms.x = x_, layer.gamma = rms.gamma = gamma_, layer.z = rms.z = z;
    layer.beta = beta_, layer.mu = mu_, layer.rsigma = rms.rsigma = rsigma_;
    layer.residual = rms.residual = residual_, layer.sum = rms.sum = sum_;
    layer.zero_centered_gamma = rms.zero_centered_gamma = f_.zero_centred;
    f_.layer ? run.call("layernorm_fwd", &layer) : run.call("rmsnorm_fwd", &rms);
  }
  double operator()(int64_t i) {
    const int64_t col = i % f_.cols;
    const Row& row = find_row(i / f_.cols);
    const double weight = col == kPlace ? kWeight : double{gamma_pattern_.at(col)};
    const double z = (normalised(i) - row.mean) * row.rsigma * (weight + (f_.zero_centred ? 1 : 0));
    return f_.layer ? z + beta_pattern_.at(col) : z;
  }
  double largest_result() { return std::fabs((*this)(last_)); }
  void expect_rest(Run& run) {
    const auto near = [](double x) { return Near{x, 5e-5 * std::fabs(x) + 1e-5}; };
    run.expect_near(
        rsigma_, "rsigma", [&](int64_t row) { return near(find_row(row).rsigma); }, Run::kFew);
    if (f_.layer) {
      run.expect_near(
          mu_, "mu", [&](int64_t row) { return near(find_row(row).mean); }, Run::kFew);
    }
    if (f_.residual)
      run.expect(
          sum_, "sum", [&](int64_t i) { return normalised(i); }, 0, 0);
  }

 private:
  struct Row {
    double mean, rsigma;
  };
  double normalised(int64_t i) const {
    const double x = i == last_ ? kInput : x_pattern_.at(i);
    return f_.residual ? rounded(x + residual_pattern_.at(i)) : x;
  }
  const Row& find_row(int64_t row) {
    const auto known = known_.find(row);
    if (known != known_.end()) return known->second;
    double sum = 0, squares = 0;
    const int64_t begin = row * f_.cols;
    for (int64_t c = 0; f_.layer && c < f_.cols; ++c) sum += normalised(begin + c);
    const auto count = static_cast<double>(f_.cols);
    const double mean = sum / count;
    for (int64_t c = 0; c < f_.cols; ++c) {
      const double d = normalised(begin + c) - mean;
      squares += d * d;
    }
    return known_[row] = {mean, 1 / std::sqrt(squares / count + kEpsilon)};
  }

  Forward f_;
  int64_t rows_, last_;
  Pattern x_pattern_{1}, gamma_pattern_{3}, beta_pattern_{4}, residual_pattern_{5};
  Tensor x_, gamma_, beta_, mu_, rsigma_, residual_, sum_;
  std::unordered_map<int64_t, Row> known_;
};

inline void plain(Run& run, const Forward& f) {
  Norm norm(run, f);
  const Tensor z = f.in_place ? norm.x() : run.output(norm.shape());
  norm.call(run, z);
  run.expect(
      z, "z", [&](int64_t i) { return norm(i); }, 0x1p-8, 1e-4);
  norm.expect_rest(run);
}

inline void codes(Run& run, const Forward& f, const QuantSpec& spec) {
  Norm norm(run, f);
  const Quantised z(run, norm.shape(), spec, 4);
  norm.call(run, z);
  z.expect(
      run, [&](int64_t i) { return norm(i); }, norm.largest_result(), false);
  norm.expect_rest(run);
}

constexpr QuantSpec kRows{}, kBoth{.columnwise = true};
constexpr QuantSpec kCurrentRows{.compute_scale = true};
constexpr QuantSpec kCurrent{.columnwise = true, .compute_scale = true};
constexpr QuantSpec kLines{.scaling = Scaling::kBlock1x128, .columnwise = true};
constexpr QuantSpec kSquares{.scaling = Scaling::kBlock128x128, .columnwise = true};

}  // namespace te_fl::huge::norm_calls
