#include "conformance/gemm_case.hpp"

#include <cmath>

#include "conformance/compare.hpp"
#include "conformance/oracle_activation.hpp"
#include "conformance/oracle_quantize.hpp"

namespace te_fl::conformance {

std::string name_of_case(const GemmCase& v) {
  std::string name =
      v.a.name() + "*" + v.b.name() + "->" + v.d.name() + "/" + dims_name({v.m, v.n, v.k}) + "/";
  name += v.trans_a ? "T" : "N";
  name += v.trans_b ? "T" : "N";
  if (v.alpha != 1) name += v.alpha == 0 ? "/alpha=0" : "/alpha";
  if (v.accumulate)
    name += v.beta == 1 ? "/accumulate" : v.beta == 0 ? "/accumulate.beta=0" : "/accumulate.beta";
  if (v.split) name += "/split";
  if (v.bias >= 0) name += std::string("/bias=") + name_of(v.bias);
  if (v.gelu) name += "/gelu";
  if (!v.pre_gelu_out.empty()) name += "/pre_gelu_out=" + v.pre_gelu_out[0].name();
  if (!v.pre_gelu_in.empty()) name += "/pre_gelu_in=" + v.pre_gelu_in[0].name();
  if (v.residual >= 0) {
    name += std::string("/residual=") + name_of(v.residual) + (v.in_place ? ".in_place" : "");
  }
  if (v.bias_grad >= 0)
    name += std::string("/bias_grad=") + name_of(v.bias_grad) +
            (v.accumulate_bias_grad ? ".accumulate" : "");
  if (v.d_sum >= 0) name += std::string("/d_sum=") + name_of(v.d_sum);
  return name;
}

namespace {

// Returns the elements of op(X), dequantised from the data whose blocks lie along the contracted
// dimension. For block scaling the cases provide only these data.
std::vector<double> operand(const Tensor& t) { return dequantised(t); }

struct Matrices {
  std::vector<double> product, size;  // alpha op(A) op(B) + bias, and the sum of magnitudes
  std::vector<double> row_sum, row_size;
};

Matrices multiply(const GemmCase& v, const std::vector<double>& a, const std::vector<double>& b,
                  double alpha, Tensor* bias) {
  Matrices r;
  r.product.assign(static_cast<size_t>(v.m * v.n), 0), r.size = r.product;
  r.row_sum.assign(static_cast<size_t>(v.m), 0), r.row_size = r.row_sum;
  std::vector<double> bt(
      b);  // [K, N], so that the innermost loop runs over columns, whose sums are independent
  for (int64_t l = 0; l < v.k && v.trans_b; ++l)
    for (int64_t j = 0; j < v.n; ++j) bt[l * v.n + j] = b[j * v.k + l];
  for (int64_t i = 0; i < v.m; ++i) {
    double* const sum = r.product.data() + i * v.n;
    double* const size = r.size.data() + i * v.n;
    for (int64_t l = 0; l < v.k; ++l) {
      const double factor = v.trans_a ? a[l * v.m + i] : a[i * v.k + l];
      r.row_sum[i] += factor, r.row_size[i] += std::fabs(factor);
      const double* const line = bt.data() + l * v.n;
      for (int64_t j = 0; j < v.n; ++j) {
        const double term = factor * line[j];
        sum[j] += term, size[j] += std::fabs(term);
      }
    }
    for (int64_t j = 0; j < v.n; ++j) {
      const double add = bias == nullptr ? 0 : bias->get(j);
      sum[j] = alpha * sum[j] + add, size[j] = std::fabs(alpha) * size[j] + std::fabs(add);
    }
  }
  return r;
}

// The factor on the error tolerance of FP8 GEMMs. Hopper's tensor cores align the 32 products of an
// instruction before they add them, and keep 14 bits. Their accumulator has this precision too:
// over all of K, or, with the split accumulator, over 128 elements of K. With the split accumulator
// the error does not grow with K, but the base tolerance does, so the factor is smaller for a
// larger K.
double accumulation(const GemmCase& v) {
  if (!v.a.quantised()) return 1;
  constexpr double kMost =
      192;  // of an H200's sums over 144 products, one in 140,000 is off by 173
  if (!v.split) return kMost;
  return std::clamp(kMost * 128 / static_cast<double>(std::max<int64_t>(v.k, 1)), 64.0, kMost);
}

// Half a step of F16 or BF16 at x; 0 for F32.
double half_step(int dtype, double x) {
  if (dtype == TE_FL_BF16) return 0x1p-8 * std::fabs(x);
  return dtype == TE_FL_F16 ? 0x1p-11 * std::fabs(x) + 0x1p-25 : 0;
}

// The largest change of GELU if its argument changes by `by`.
double moves_gelu(double x, double by) {
  const double y = kGelu.f(x);
  return std::max(std::fabs(kGelu.f(x + by) - y), std::fabs(kGelu.f(x - by) - y));
}

// The dtype to which the GEMM's result may be rounded before GELU, or before the multiplication
// with GELU's derivative. This is the dtype of the pre-activation that is stored or read, unless D
// is more precise (docs/numerics.md, GEMM). F32 if rounding is not allowed.
int rounded_before(const GemmCase& v) {
  if (v.accumulate || v.residual >= 0) return TE_FL_F32;
  const std::vector<Spec>& pre = v.gelu ? v.pre_gelu_out : v.pre_gelu_in;
  if (pre.empty() || pre[0].quantised() || v.d.dtype == TE_FL_F32) return TE_FL_F32;
  return pre[0].dtype;
}

// True for GEMMs of FP8 operands, whose result may be rounded to D's dtype before it is added to
// D's contents.
bool may_round_twice(const GemmCase& v) { return v.a.quantised() && v.b.quantised(); }

// Expects the column sums of the result. `tolerance` is the error tolerance of each term.
void expect_sums(Problem& p, const GemmCase& v, Tensor* d_sum, const std::vector<double>& want,
                 const std::vector<double>& tolerance) {
  std::vector<double> sum(static_cast<size_t>(v.n)), extra(sum.size());
  for (int64_t j = 0; j < v.n; ++j) {
    double magnitude = 0;
    for (int64_t i = 0; i < v.m; ++i) {
      const size_t at = static_cast<size_t>(i * v.n + j);
      sum[j] += want[at], magnitude += std::fabs(want[at]), extra[j] += tolerance[at];
    }
    extra[j] += sum_tolerance(static_cast<double>(v.m), magnitude) + 1e-6 * magnitude;
  }
  p.expect(d_sum, sum, extra).widen = 4;
}

void expect_results(Problem& p, const GemmCase& v, Tensor* a, Tensor* b, Tensor* d, Tensor* bias,
                    Tensor* out, Tensor* in, Tensor* residual, Tensor* grad, Tensor* d_sum) {
  const double alpha = static_cast<double>(static_cast<float>(v.alpha)),
               beta = static_cast<double>(static_cast<float>(v.beta));
  Matrices r = multiply(v, operand(*a), operand(*b), alpha, bias);
  std::vector<double> tolerance(r.size.size());
  for (size_t i = 0; i < tolerance.size(); ++i)
    tolerance[i] = accumulation(v) * sum_tolerance(static_cast<double>(v.k), r.size[i]);
  if (out != nullptr) p.expect(out, r.product, tolerance);
  std::vector<double> want = r.product;
  const std::vector<double> pre = in == nullptr ? std::vector<double>() : operand(*in);
  const int rounded = rounded_before(v);
  for (size_t i = 0; i < want.size(); ++i) {
    const double step = half_step(rounded, want[i]);
    if (v.gelu) {
      tolerance[i] = tolerance[i] * 1.2 + moves_gelu(want[i], step);
      want[i] = kGelu.f(want[i]);
    }
    if (in != nullptr) {
      const double factor = kGelu.df(pre[i]);
      tolerance[i] += step,
          tolerance[i] = tolerance[i] * std::fabs(factor) + 1e-6 * std::fabs(want[i]),
          want[i] *= factor;
    }
    if (residual != nullptr) {
      const double add = residual->get(static_cast<int64_t>(i));
      want[i] += add, tolerance[i] += 0x1p-22 * (std::fabs(add) + std::fabs(want[i]));
    }
    if (!v.accumulate) continue;
    if (may_round_twice(v)) tolerance[i] += half_step(v.d.dtype, want[i]);
    if (beta == 0) continue;
    const double before = d->get(static_cast<int64_t>(i));
    want[i] += beta * before, tolerance[i] += 0x1p-22 * std::fabs(beta * before);
  }
  p.expect(d, want, tolerance);
  if (d_sum != nullptr) expect_sums(p, v, d_sum, want, tolerance);
  if (grad == nullptr) return;
  for (int64_t i = 0; i < v.m; ++i) {
    if (v.accumulate_bias_grad)
      r.row_sum[i] += grad->get(i), r.row_size[i] += std::fabs(grad->get(i));
    r.row_size[i] = sum_tolerance(static_cast<double>(v.k), r.row_size[i]);
  }
  p.expect(grad, r.row_sum, r.row_size).widen = 4;
}

}  // namespace

void set_up(Problem& p, const GemmCase& v) {
  Tensor* a = p.quantised_in("a", v.a, v.trans_a ? Dims{v.k, v.m} : Dims{v.m, v.k});
  Tensor* b = p.quantised_in("b", v.b, v.trans_b ? Dims{v.n, v.k} : Dims{v.k, v.n});
  Tensor* residual = v.residual >= 0 ? p.in("residual", v.residual, {v.m, v.n}) : nullptr;
  // With a beta of 0 the previous result has no effect, not even if it is NaN.
  Tensor* d = v.in_place ? p.in_place("d", residual)
              : v.accumulate
                  ? p.inout("d", v.d, {v.m, v.n}, v.beta == 0 ? constant(nan_value()) : gaussian())
                  : p.out("d", v.d, {v.m, v.n});
  Tensor* bias = v.bias >= 0 ? p.in("bias", v.bias, {v.n}) : nullptr;
  Tensor* out =
      v.pre_gelu_out.empty() ? nullptr : p.out("pre_gelu_out", v.pre_gelu_out[0], {v.m, v.n});
  Tensor* in =
      v.pre_gelu_in.empty() ? nullptr : p.quantised_in("pre_gelu_in", v.pre_gelu_in[0], {v.m, v.n});
  Tensor* grad = v.bias_grad < 0          ? nullptr
                 : v.accumulate_bias_grad ? p.inout("bias_grad", v.bias_grad, {v.m})
                                          : p.out("bias_grad", v.bias_grad, {v.m});
  Tensor* d_sum = v.d_sum >= 0 ? p.out("d_sum", v.d_sum, {v.n}) : nullptr;
  p.set("trans_a", v.trans_a), p.set("trans_b", v.trans_b), p.set("gelu", v.gelu),
      p.set("accumulate", v.accumulate);
  p.set("accumulate_bias_grad", v.accumulate_bias_grad), p.set("use_split_accumulator", v.split);
  p.set("alpha", v.alpha), p.set("beta", v.beta);
  p.may_refuse = v.refusal;
  if (v.error) p.expect_error(-1, v.refusal);
  p.oracle([&p, v, a, b, d, bias, out, in, residual, grad, d_sum] {
    if (v.error) return p.expect_unchanged(d);
    expect_results(p, v, a, b, d, bias, out, in, residual, grad, d_sum);
  });
}

std::string name_of_case(const GroupCase& v) {
  GemmCase first = v.product;
  first.m = first.n = first.k = 0;
  std::string name = name_of_case(first);
  const std::string none = dims_name({0, 0, 0});
  return name.replace(name.find(none), none.size(), v.what);
}

void set_up(Problem& p, const GroupCase& group) {
  const auto count = group.sizes.size();
  const auto list = [&](const std::string& name, const auto& make) {
    std::vector<Tensor*> all;
    for (size_t i = 0; i < count; ++i) {
      GemmCase v = group.product;
      v.m = group.sizes[i][0], v.n = group.sizes[i][1], v.k = group.sizes[i][2];
      all.push_back(p.unnamed(make(name + "[" + std::to_string(i) + "]", v)));
    }
    p.list(name, all);
    return all;
  };
  using Name = const std::string&;
  using Product = const GemmCase&;
  const GemmCase& g = group.product;
  const auto written = [&p](Name name, bool read, const Spec& spec, const Dims& dims,
                            double beta = 1) {
    if (!read) return p.out(name, spec, dims);
    return p.inout(name, spec, dims, beta == 0 ? constant(nan_value()) : gaussian());
  };
  const std::vector<Tensor*> none(count, nullptr);
  const auto a = list("a", [&](Name n, Product v) {
    return p.quantised_in(n, v.a, v.trans_a ? Dims{v.k, v.m} : Dims{v.m, v.k});
  });
  const auto b = list("b", [&](Name n, Product v) {
    return p.quantised_in(n, v.b, v.trans_b ? Dims{v.n, v.k} : Dims{v.k, v.n});
  });
  const auto d = list("d", [&](Name n, Product v) {
    return written(n, v.accumulate, v.d, {v.m, v.n}, v.beta);
  });
  const auto bias =
      g.bias < 0 ? none : list("bias", [&](Name n, Product v) { return p.in(n, v.bias, {v.n}); });
  const auto grad = g.bias_grad < 0 ? none : list("bias_grad", [&](Name n, Product v) {
    return written(n, v.accumulate_bias_grad, v.bias_grad, {v.m});
  });
  for (const auto& [name, value] : {std::pair{"trans_a", g.trans_a},
                                    {"trans_b", g.trans_b},
                                    {"accumulate", g.accumulate},
                                    {"accumulate_bias_grad", g.accumulate_bias_grad},
                                    {"use_split_accumulator", g.split}})
    p.set(name, value);
  p.set("alpha", g.alpha), p.set("beta", g.beta);
  p.may_refuse = g.refusal;
  if (g.error) p.expect_error(-1, g.refusal);
  p.oracle([&p, group, a, b, d, bias, grad] {
    for (size_t i = 0; i < a.size(); ++i) {
      GemmCase v = group.product;
      if (v.error) {
        p.expect_unchanged(d[i]);
        continue;
      }
      v.m = group.sizes[i][0], v.n = group.sizes[i][1], v.k = group.sizes[i][2];
      expect_results(p, v, a[i], b[i], d[i], bias[i], nullptr, nullptr, nullptr, grad[i], nullptr);
    }
  });
}

}  // namespace te_fl::conformance
