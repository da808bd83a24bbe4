// GEMMs with an operand or result of more than 2^31 elements: GEMMs that the vendor's library
// computes alone, and GEMMs with epilogues and conversions.
#pragma once

#include "conformance/huge/cases.hpp"
#include "conformance/huge/quantised.hpp"
#include "conformance/oracle_activation.hpp"

namespace te_fl::huge::gemm_calls {

using conformance::kGelu;

// D [m, n] = A [m, k] B^T with B [n, k]; with `across` A B with B [k, n].
struct Sizes {
  int64_t m, n, k;
};
// Sizes for a D with n columns and more than 2^31 elements. `tiles`: multiples of 256 rows, which a
// backend's own kernels for products with an epilogue need.
Sizes wide_result(const Run& run, int64_t n, int64_t k, bool tiles = false) {
  return {run.rows(n, tiles ? 256 : 16), n, k};
}

struct Inputs {
  Pattern a{1}, b{2};
  double product(const Sizes& s, int64_t i, bool across) const {
    double sum = 0;
    const int64_t row = i / s.n * s.k, col = i % s.n;
    for (int64_t k = 0; k < s.k; ++k) {
      sum += double{a.at(row + k)} * double{b.at(across ? k * s.n + col : col * s.k + k)};
    }
    return sum;
  }
};

struct Epilogue {
  bool bias = false, gelu = false, pre_gelu_in = false, residual = false, accumulate = false,
       d_sum = false, across = false, tiles = false;
  DType b = DType::kBF16, d = DType::kBF16;
};

inline void product(Run& run, const Sizes& s, const Epilogue& e) {
  const Inputs in;
  const Pattern bias_values(3), other(4);
  const Tensor a = run.input({s.m, s.k}, in.a),
               b = run.input(e.across ? Shape{s.k, s.n} : Shape{s.n, s.k}, in.b, e.b);
  const Tensor d = e.accumulate ? run.input({s.m, s.n}, other, e.d) : run.output({s.m, s.n}, e.d);
  Tensor bias, saved, before, residual, sums;
  te_fl_generic_gemm_args args{};
  args.a = a, args.b = b, args.d = d, args.trans_b = !e.across, args.gelu = e.gelu;
  args.accumulate = e.accumulate, args.beta = 0.5f;
  if (e.bias) bias = run.input({s.n}, bias_values), args.bias = bias;
  if (e.gelu) saved = run.output({s.m, s.n}), args.pre_gelu_out = saved;
  if (e.pre_gelu_in) before = run.input({s.m, s.n}, other), args.pre_gelu_in = before;
  if (e.residual) residual = run.input({s.m, s.n}, other), args.residual = residual;
  if (e.d_sum) sums = run.output({s.n}, DType::kF32), args.d_sum = sums;
  run.call("generic_gemm", &args);
  const auto linear = [&](int64_t i) {
    return in.product(s, i, e.across) + (e.bias ? bias_values.at(i % s.n) : 0);
  };
  const auto result = [&](int64_t i) {
    double v = e.gelu ? kGelu.f(linear(i)) : linear(i);
    if (e.pre_gelu_in) v *= kGelu.df(other.at(i));
    if (e.residual) v += other.at(i);
    return e.accumulate ? v + 0.5 * other.at(i) : v;
  };
  // An implementation may round the GEMM's result before it applies GELU or multiplies with GELU's
  // derivative.
  const bool rounded_between = e.gelu || e.pre_gelu_in;
  run.expect(d, "d", result, rounded_between ? 0x1p-6 : 0x1p-8, rounded_between ? 2e-3 : 1e-4);
  if (e.gelu) run.expect(saved, "pre_gelu_out", linear, 0x1p-8, 1e-4);
  if (!e.d_sum || run.failed()) return;
  for (int64_t col : {int64_t{0}, s.n / 2, s.n - 1}) {
    double sum = 0, size = 0;
    for (int64_t row = 0; row < s.m; ++row) {
      const double v = result(row * s.n + col);
      sum += v, size += std::fabs(v);
    }
    const std::vector<float> got = run.read(sums, col, 1);
    if (!run.failed() && !(std::fabs(got[0] - sum) <= 2e-3 * size)) {
      run.fail("d_sum[" + std::to_string(col) + "] is " + std::to_string(got[0]) + ", expected " +
               std::to_string(sum));
    }
  }
}

// A weight gradient: D [m, n] = A^T B, contracted over k rows; A has more than 2^31 elements.
inline void long_contraction(Run& run) {
  const int64_t m = 4096, n = 16, k = run.rows(m);
  const Pattern a(1), b(2);
  const Tensor ta = run.input({k, m}, a), tb = run.input({k, n}, b),
               d = run.output({m, n}, DType::kF32), sums = run.output({m}, DType::kF32);
  te_fl_generic_gemm_args args{};
  args.a = ta, args.b = tb, args.d = d, args.trans_a = 1, args.bias_grad = sums;
  run.call("generic_gemm", &args);
  run.expect_sums(sums, "bias_grad", k, m, [&](int64_t i) { return a.at(i); });
  for (int64_t at : {int64_t{0}, m * n / 2 + 3, m * n - 1}) {
    double sum = 0, size = 0;
    for (int64_t row = 0; row < k; ++row) {
      const double term = double{a.at(row * m + at / n)} * double{b.at(row * n + at % n)};
      sum += term, size += std::fabs(term);
    }
    const std::vector<float> got = run.read(d, at, 1);
    if (!run.failed() && !(std::fabs(got[0] - sum) <= 1e-5 * size)) {
      run.fail("d[" + std::to_string(at) + "] is " + std::to_string(got[0]) + ", expected " +
               std::to_string(sum));
    }
  }
}

// Products of FP8 operands with random data and scales.
enum class Into { kNumbers, kCodes, kGeluCodes };

inline void codes(Run& run, const Sizes& s, Scaling scaling, Into into) {
  const Codes a_codes(1, 4), b_codes(2, 4);
  const Pattern a_scales(3, true), b_scales(4, true);
  const Scaling b_scaling = scaling == Scaling::kTensor ? scaling : Scaling::kBlock128x128;
  const Quantised a(run, {s.m, s.k}, {.scaling = scaling}),
      b(run, {s.n, s.k}, {.scaling = b_scaling});
  if (run.failed()) return;
  a_codes.fill(run, a.tensor().rowwise_codes()), b_codes.fill(run, b.tensor().rowwise_codes());
  run.fill(a.tensor().scale_inv(), a_scales), run.fill(b.tensor().scale_inv(), b_scales);
  const auto scale_of = [&](const Pattern& scales, Scaling mode, int64_t rows, int64_t row,
                            int64_t k) {
    return double{scales.at(scale_index(mode, false, rows, s.k, row, k))};
  };
  const auto value = [&](int64_t i) {
    const int64_t row = i / s.n, col = i % s.n;
    Near v{0, 0};
    for (int64_t k = 0; k < s.k; ++k) {
      const double term = a_codes.at(row * s.k + k) * scale_of(a_scales, scaling, s.m, row, k) *
                          b_codes.at(col * s.k + k) * scale_of(b_scales, b_scaling, s.n, col, k);
      v.value += term, v.tolerance += std::fabs(term);
    }
    // Hopper keeps 14 bits of sums of FP8 products, relative to the largest term (gemm_case.cpp);
    // 1.3e-4 of the magnitudes has been observed.
    v.tolerance *= 0x1p-10;
    v.tolerance += 0x1p-8 * std::fabs(v.value);
    return v;
  };
  te_fl_generic_gemm_args args{};
  args.a = a, args.b = b, args.trans_b = 1, args.use_split_accumulator = into != Into::kGeluCodes;
  if (into == Into::kNumbers) {
    const Tensor d = run.output({s.m, s.n});
    args.d = d;
    run.call("generic_gemm", &args);
    return run.expect_near(d, "d", value);
  }
  const Quantised d(run, {s.m, s.n}, {.columnwise = true}, 0.5f);
  args.d = d;
  if (into == Into::kCodes) {
    run.call("generic_gemm", &args);
    return d.expect(
        run, [&](int64_t i) { return value(i).value; }, NAN, false, 0.1);
  }
  const Pattern bias_values(5);
  const Tensor bias = run.input({s.n}, bias_values), saved = run.output({s.m, s.n});
  args.bias = bias, args.pre_gelu_out = saved, args.gelu = 1;
  run.call("generic_gemm", &args);
  const auto linear = [&](int64_t i) {
    const Near v = value(i);
    return Near{v.value + bias_values.at(i % s.n), v.tolerance + 0x1p-8};
  };
  run.expect_near(saved, "pre_gelu_out", linear);
  d.expect(
      run, [&](int64_t i) { return kGelu.f(linear(i).value); }, NAN, false, 0.25);
}

}  // namespace te_fl::huge::gemm_calls
