#include "conformance/compare.hpp"
#include "conformance/drawn.hpp"
#include "conformance/oracle_activation.hpp"
#include "conformance/oracle_quantize.hpp"

namespace te_fl::conformance {
namespace {

constexpr int kHigh[] = {TE_FL_F32, TE_FL_F16, TE_FL_BF16};
constexpr int kE4 = TE_FL_F8E4M3, kE5 = TE_FL_F8E5M2;
constexpr uint32_t kPow2 = TE_FL_QUANT_POW2_SCALE;

struct Variant {
  Spec a = TE_FL_F32, b = TE_FL_F32, d = TE_FL_F32;
  int64_t m = 13, n = 21, k = 17;
  bool trans_a = false, trans_b = true;
  double alpha = 1, beta = 1;
  bool accumulate = false, split = false, gelu = false;
  int bias = -1;                        // dtype
  std::vector<Spec> pre_gelu_out = {};  // none or one
  std::vector<Spec> pre_gelu_in = {};
  int residual = -1;
  bool in_place = false;  // the result takes the residual's memory
  int bias_grad = -1;
  bool accumulate_bias_grad = false, large = false;
  std::string refusal = {};  // the implementation may refuse, saying this
  bool error = false;        // it must
  int d_sum = -1;
};

std::string variant_name(const Variant& v) {
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

// The values of op(X) in the copy that a product along the contracted dimension reads: the one
// whose blocks lie along it. Matters for block scaling only, where the cases give that copy alone.
std::vector<double> operand(const Tensor& t) { return dequantised(t); }

struct Matrices {
  std::vector<double> product, size;  // alpha op(A) op(B) + bias, and the magnitudes behind it
  std::vector<double> row_sum, row_size;
};

Matrices multiply(const Variant& v, const std::vector<double>& a, const std::vector<double>& b,
                  double alpha, Tensor* bias) {
  Matrices r;
  r.product.assign(static_cast<size_t>(v.m * v.n), 0), r.size = r.product;
  r.row_sum.assign(static_cast<size_t>(v.m), 0), r.row_size = r.row_sum;
  std::vector<double> bt(b);  // [N, K]
  for (int64_t j = 0; j < v.n && !v.trans_b; ++j)
    for (int64_t l = 0; l < v.k; ++l) bt[j * v.k + l] = b[l * v.n + j];
  std::vector<double> row(static_cast<size_t>(v.k));
  for (int64_t i = 0; i < v.m; ++i) {
    for (int64_t l = 0; l < v.k; ++l) {
      row[l] = v.trans_a ? a[l * v.m + i] : a[i * v.k + l];
      r.row_sum[i] += row[l], r.row_size[i] += std::fabs(row[l]);
    }
    for (int64_t j = 0; j < v.n; ++j) {
      double sum = 0, size = 0;
      for (int64_t l = 0; l < v.k; ++l)
        sum += row[l] * bt[j * v.k + l], size += std::fabs(row[l] * bt[j * v.k + l]);
      const double add = bias == nullptr ? 0 : bias->get(j);
      r.product[i * v.n + j] = alpha * sum + add;
      r.size[i * v.n + j] = std::fabs(alpha) * size + std::fabs(add);
    }
  }
  return r;
}

// Factor of the slack for FP8 products. Hopper's matrix unit aligns the 32 products of an
// instruction before it adds them, and drops what lies below 14 bits; partial sums are kept so too,
// for all of K or, with the split accumulator, for 128 of it.
double accumulation(const Variant& v) {
  if (!v.a.quantised()) return 1;
  return v.split && v.k > 128 ? 64 : 128;
}

// Half a step of F16 or BF16 at x; 0 of F32.
double half_step(int dtype, double x) {
  if (dtype == TE_FL_BF16) return 0x1p-8 * std::fabs(x);
  return dtype == TE_FL_F16 ? 0x1p-11 * std::fabs(x) + 0x1p-25 : 0;
}

// How far GELU moves if its argument moves by `by`.
double moves_gelu(double x, double by) {
  const double y = kGelu.f(x);
  return std::max(std::fabs(kGelu.f(x + by) - y), std::fabs(kGelu.f(x - by) - y));
}

// The type that the product may be rounded to before GELU, or its gradient's factor: what it is
// stored in, or what the gradient reads beside it, unless D is finer (docs/numerics.md, GEMM). FP32
// if it may not.
int rounded_before(const Variant& v) {
  if (v.accumulate || v.residual >= 0) return TE_FL_F32;
  const std::vector<Spec>& pre = v.gelu ? v.pre_gelu_out : v.pre_gelu_in;
  if (pre.empty() || pre[0].quantised() || v.d.dtype == TE_FL_F32) return TE_FL_F32;
  return pre[0].dtype;
}

// Of the result's columns. The terms carry their own slack.
void expect_sums(Problem& p, const Variant& v, Tensor* d_sum, const std::vector<double>& want,
                 const std::vector<double>& slack) {
  std::vector<double> sum(static_cast<size_t>(v.n)), extra(sum.size());
  for (int64_t j = 0; j < v.n; ++j) {
    double magnitude = 0;
    for (int64_t i = 0; i < v.m; ++i) {
      const size_t at = static_cast<size_t>(i * v.n + j);
      sum[j] += want[at], magnitude += std::fabs(want[at]), extra[j] += slack[at];
    }
    extra[j] += sum_slack(static_cast<double>(v.m), magnitude) + 1e-6 * magnitude;
  }
  p.expect(d_sum, sum, extra).widen = 4;
}

void expect_results(Problem& p, const Variant& v, Tensor* a, Tensor* b, Tensor* d, Tensor* bias,
                    Tensor* out, Tensor* in, Tensor* residual, Tensor* grad, Tensor* d_sum) {
  const double alpha = static_cast<double>(static_cast<float>(v.alpha)),
               beta = static_cast<double>(static_cast<float>(v.beta));
  Matrices r = multiply(v, operand(*a), operand(*b), alpha, bias);
  std::vector<double> slack(r.size.size());
  for (size_t i = 0; i < slack.size(); ++i)
    slack[i] = accumulation(v) * sum_slack(static_cast<double>(v.k), r.size[i]);
  if (out != nullptr) p.expect(out, r.product, slack);
  std::vector<double> want = r.product;
  const std::vector<double> pre = in == nullptr ? std::vector<double>() : operand(*in);
  const int rounded = rounded_before(v);
  for (size_t i = 0; i < want.size(); ++i) {
    const double step = half_step(rounded, want[i]);
    if (v.gelu) {
      slack[i] = slack[i] * 1.2 + moves_gelu(want[i], step);
      want[i] = kGelu.f(want[i]);
    }
    if (in != nullptr) {
      const double factor = kGelu.df(pre[i]);
      slack[i] += step, slack[i] = slack[i] * std::fabs(factor) + 1e-6 * std::fabs(want[i]),
                        want[i] *= factor;
    }
    if (residual != nullptr) {
      const double add = residual->get(static_cast<int64_t>(i));
      want[i] += add, slack[i] += 0x1p-22 * (std::fabs(add) + std::fabs(want[i]));
    }
    if (!v.accumulate) continue;
    const double before = d->get(static_cast<int64_t>(i));
    want[i] += beta * before, slack[i] += 0x1p-22 * std::fabs(beta * before);
  }
  p.expect(d, want, slack);
  if (d_sum != nullptr) expect_sums(p, v, d_sum, want, slack);
  if (grad == nullptr) return;
  for (int64_t i = 0; i < v.m; ++i) {
    if (v.accumulate_bias_grad)
      r.row_sum[i] += grad->get(i), r.row_size[i] += std::fabs(grad->get(i));
    r.row_size[i] = sum_slack(static_cast<double>(v.k), r.row_size[i]);
  }
  p.expect(grad, r.row_sum, r.row_size).widen = 4;
}

void gemm(Problem& p, const Variant& v) {
  Tensor* a = p.quantised_in("a", v.a, v.trans_a ? Dims{v.k, v.m} : Dims{v.m, v.k});
  Tensor* b = p.quantised_in("b", v.b, v.trans_b ? Dims{v.n, v.k} : Dims{v.k, v.n});
  Tensor* residual = v.residual >= 0 ? p.in("residual", v.residual, {v.m, v.n}) : nullptr;
  Tensor* d = v.in_place     ? p.in_place("d", residual)
              : v.accumulate ? p.inout("d", v.d, {v.m, v.n})
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

void add_plain(std::vector<Variant>& all) {
  for (int d : kHigh)
    for (int ta = 0; ta < 2; ++ta)
      for (int tb = 0; tb < 2; ++tb)
        all.push_back({.a = d, .b = d, .d = d, .trans_a = ta == 1, .trans_b = tb == 1});
  all.push_back({.a = TE_FL_BF16, .b = TE_FL_BF16, .d = TE_FL_F32});
  all.push_back(
      {.a = TE_FL_F16, .b = TE_FL_F16, .d = TE_FL_F32, .trans_a = true, .trans_b = false});
  all.push_back({.a = TE_FL_F32, .b = TE_FL_BF16, .d = TE_FL_F32});
  all.push_back({.a = TE_FL_F32, .b = TE_FL_F32, .d = TE_FL_BF16});
  const int64_t shapes[][3] = {{1, 1, 1},    {0, 5, 3},     {5, 0, 3},    {5, 3, 0},
                               {1, 257, 31}, {257, 1, 31},  {2, 3, 1021}, {130, 65, 67},
                               {64, 64, 64}, {97, 101, 103}};
  for (const auto& s : shapes)
    for (bool tb : {true, false}) all.push_back({.m = s[0], .n = s[1], .k = s[2], .trans_b = tb});
  all.push_back({.a = TE_FL_BF16,
                 .b = TE_FL_BF16,
                 .d = TE_FL_BF16,
                 .m = 256,
                 .n = 512,
                 .k = 384,
                 .large = true});
  all.push_back({.m = 300, .n = 200, .k = 700, .trans_a = true, .trans_b = false, .large = true});
}

void add_epilogues(std::vector<Variant>& all) {
  // The residual with a bias, whose sum must be rounded once: sizes that vector units like.
  for (int t : {TE_FL_F16, TE_FL_BF16})
    for (int64_t n : {64, 256})
      for (bool in_place : {false, true})
        all.push_back({.a = t,
                       .b = t,
                       .d = t,
                       .m = 128,
                       .n = n,
                       .k = 192,
                       .bias = t,
                       .residual = t,
                       .in_place = in_place});
  for (int t : {TE_FL_F32, TE_FL_BF16}) {
    Variant v{.a = t, .b = t, .d = t, .m = 19, .n = 34, .k = 50};
    auto with = [&](auto change) {
      Variant c = v;
      change(c);
      all.push_back(c);
    };
    with([](Variant& c) { c.alpha = -0.37; });
    with([](Variant& c) {
      c.alpha = 0;
      c.bias = TE_FL_F32;
    });
    with([](Variant& c) { c.accumulate = true; });
    with([](Variant& c) {
      c.accumulate = true;
      c.beta = 0.5;
      c.alpha = 2;
    });
    with([](Variant& c) {
      c.accumulate = true;
      c.beta = 0;
    });
    with([](Variant& c) {
      c.accumulate = true;
      c.k = 0;
      c.beta = 0.25;
    });
    with([](Variant& c) {
      c.accumulate = true;
      c.d = TE_FL_F32;
      c.trans_a = true;
      c.trans_b = false;
    });  // weight gradient
    with([](Variant& c) { c.bias = TE_FL_F32; });
    with([](Variant& c) {
      c.bias = TE_FL_BF16;
      c.alpha = 0.5;
    });
    with([](Variant& c) {
      c.bias = TE_FL_F32;
      c.k = 0;
    });
    with([](Variant& c) {
      c.bias = TE_FL_F32;
      c.accumulate = true;
    });
    if (t != TE_FL_F32) {
      with([t](Variant& c) {
        c.bias = t;
        c.accumulate = true;
      });
    }
    with([](Variant& c) { c.gelu = true; });
    with([](Variant& c) {
      c.gelu = true;
      c.bias = TE_FL_BF16;
    });
    with([t](Variant& c) {
      c.gelu = true;
      c.bias = TE_FL_F32;
      c.pre_gelu_out = {t};
    });
    with([](Variant& c) {
      c.gelu = true;
      c.pre_gelu_out = {TE_FL_F16};
    });
    with([](Variant& c) {
      c.gelu = true;
      c.accumulate = true;
    });
    with([](Variant& c) {
      c.gelu = true;
      c.pre_gelu_out = {Spec(kE4, TE_FL_SCALING_TENSOR, true, false)};
    });
    with([t](Variant& c) {
      c.pre_gelu_in = {t};
      c.trans_b = false;
    });
    with([t](Variant& c) {
      c.pre_gelu_in = {t};
      c.accumulate = true;
      c.beta = 0.5;
      c.alpha = 1.5;
    });
    with([](Variant& c) { c.pre_gelu_in = {Spec(kE4, TE_FL_SCALING_TENSOR, true, false)}; });
    with([t](Variant& c) { c.residual = t; });
    with([t](Variant& c) {
      c.residual = t;
      c.in_place = true;
      c.bias = t;
    });
    with([t](Variant& c) {
      c.residual = t == TE_FL_F32 ? TE_FL_BF16 : TE_FL_F32;
      c.gelu = true;
      c.bias = TE_FL_F32;
    });
    with([](Variant& c) {
      c.residual = TE_FL_F16;
      c.accumulate = true;
      c.beta = 0.5;
    });
    with([](Variant& c) {
      c.residual = TE_FL_BF16;
      c.k = 0;
    });
    with([](Variant& c) {
      c.residual = TE_FL_BF16;
      c.d = Spec(kE4, TE_FL_SCALING_TENSOR, true, false);
    });
    with([](Variant& c) { c.split = true; });
    with([](Variant& c) {
      c.bias = TE_FL_F16;
      c.gelu = true;
      c.pre_gelu_out = {Spec(kE5, TE_FL_SCALING_TENSOR, true, false)};
    });
    with([](Variant& c) {
      c.pre_gelu_in = {TE_FL_F16};
      c.bias_grad = TE_FL_F16;
    });
    with([](Variant& c) { c.pre_gelu_in = {Spec(kE5, TE_FL_SCALING_TENSOR, true, false)}; });
    for (bool ta : {false, true}) {
      with([ta, t](Variant& c) {
        c.bias_grad = t;
        c.trans_a = ta;
        c.trans_b = false;
      });
      with([ta](Variant& c) {
        c.bias_grad = TE_FL_F32;
        c.accumulate_bias_grad = true;
        c.trans_a = ta;
        c.trans_b = false;
      });
    }
    with([t](Variant& c) {
      c.bias_grad = t;
      c.accumulate = true;
      c.trans_a = true;
      c.trans_b = false;
    });
    with([t](Variant& c) {
      c.bias_grad = t;
      c.trans_a = true;
      c.trans_b = false;
      c.k = 0;
    });
    for (const Spec& s :
         {quantised_specs()[0], quantised_specs()[1], quantised_specs()[3], quantised_specs()[7]}) {
      with([&](Variant& c) { c.d = s; });
      with([&](Variant& c) {
        c.d = s;
        c.bias = TE_FL_F32;
        c.gelu = true;
      });
    }
  }
}

// What the two products around an MLP's activation ask for: the pre-activation in 16 bits beside a
// quantised result, and the gradient with its columns' sums.
void add_activations(std::vector<Variant>& all) {
  const auto codes = [](int dtype, bool row, bool col, uint32_t flags = 0) {
    return Spec(dtype, TE_FL_SCALING_TENSOR, row, col, flags);
  };
  const int64_t shapes[][3] = {{32, 48, 64}, {128, 256, 192}, {129, 80, 96}, {37, 53, 29}};
  for (int t : {TE_FL_F16, TE_FL_BF16})
    for (const auto& shape : shapes)
      all.push_back(
          {.a = t, .b = t, .d = t, .m = shape[0], .n = shape[1], .k = shape[2], .bias = t});
  for (int t : {TE_FL_F16, TE_FL_BF16})
    for (const auto& shape : shapes)
      for (bool fp8 : {false, true}) {
        const bool odd = shape[1] % 16 != 0 || shape[2] % 16 != 0;
        Variant forward{.a = t, .b = t, .d = t, .m = shape[0], .n = shape[1], .k = shape[2]};
        if (fp8) {
          forward.a = forward.b = codes(kE4, true, true, TE_FL_QUANT_COMPUTE_SCALE);
          if (odd) forward.refusal = "multiple";
        }
        Variant backward = forward;
        if (fp8) backward.a = codes(kE5, true, true, TE_FL_QUANT_COMPUTE_SCALE);
        backward.trans_b = false, backward.split = true, backward.pre_gelu_in = {t};
        forward.gelu = true, forward.pre_gelu_out = {t};
        const std::vector<Spec> forms = {t, codes(kE4, true, true), codes(kE4, true, false),
                                         codes(kE4, true, true, TE_FL_QUANT_COMPUTE_SCALE)};
        for (Spec d : forms)
          for (bool more : {true, false}) {
            forward.d = d, forward.bias = more ? t : -1;
            all.push_back(forward);
            if (d.quantised()) d.dtype = kE5;
            backward.d = d, backward.d_sum = more ? t : -1;
            all.push_back(backward);
          }
        backward.d = codes(kE5, true, true), backward.d_sum = TE_FL_F32;
        all.push_back(backward);
        backward.d = codes(kE5, false, true);
        all.push_back(backward);
      }
  // As large as kernels of whole tiles want them; the first with more tiles than a GPU runs at
  // once.
  for (bool fp8 : {false, true})
    for (const auto& [m, n, k] : {std::array<int64_t, 3>{512, 17664, 128}, {8192, 512, 384}}) {
      Variant forward{.a = TE_FL_BF16, .b = TE_FL_BF16, .d = TE_FL_BF16, .m = m, .n = n, .k = k};
      forward.large = true;
      if (fp8) forward.a = forward.b = codes(kE4, true, true, TE_FL_QUANT_COMPUTE_SCALE);
      Variant backward = forward;
      if (fp8) {
        forward.d = codes(kE4, true, true);
        backward.a = codes(kE5, true, true, TE_FL_QUANT_COMPUTE_SCALE);
        backward.d = codes(kE5, true, true);
      }
      forward.gelu = true, forward.bias = TE_FL_BF16, forward.pre_gelu_out = {TE_FL_BF16};
      forward.alpha = 0.75;
      all.push_back(forward);
      backward.trans_b = false, backward.split = true, backward.pre_gelu_in = {TE_FL_BF16};
      backward.d_sum = TE_FL_BF16;
      all.push_back(backward);
      if (k > 128) continue;
      forward.bias = -1, backward.d_sum = -1;
      if (fp8) {
        forward.d = codes(kE4, true, false);
        all.push_back(forward);
        forward.d = codes(kE4, false, true), backward.d = codes(kE5, true, false);
      }
      all.push_back(forward);
      all.push_back(backward);
    }
  Variant v{.m = 19, .n = 34, .k = 50};
  const auto with = [&](auto change) {
    Variant c = v;
    c.d_sum = TE_FL_F32;
    change(c);
    all.push_back(c);
  };
  with([](Variant&) {});
  with([](Variant& c) { c.d_sum = TE_FL_BF16, c.alpha = -0.5; });
  with([](Variant& c) { c.pre_gelu_in = {TE_FL_F32}; });
  with([](Variant& c) { c.pre_gelu_in = {TE_FL_BF16}; });
  with([](Variant& c) { c.pre_gelu_in = {Spec(kE4, TE_FL_SCALING_TENSOR, true, false)}; });
  with([](Variant& c) { c.gelu = true, c.bias = TE_FL_BF16, c.pre_gelu_out = {TE_FL_F32}; });
  with([](Variant& c) { c.residual = TE_FL_F32; });
  with([](Variant& c) { c.residual = TE_FL_F32, c.in_place = true, c.bias = TE_FL_F32; });
  with([](Variant& c) { c.bias_grad = TE_FL_F32, c.trans_a = true; });
  with([](Variant& c) { c.a = c.b = c.d = TE_FL_BF16, c.bias_grad = TE_FL_BF16; });
  with([](Variant& c) { c.a = c.b = c.d = TE_FL_BF16; });
  with([](Variant& c) { c.m = 0; });
  with([](Variant& c) { c.m = 0, c.pre_gelu_in = {TE_FL_F32}; });
  with([](Variant& c) { c.n = 0; });
  with([](Variant& c) { c.k = 0, c.bias = TE_FL_F32; });
  with([](Variant& c) { c.m = 700, c.n = 257; });
  with([](Variant& c) { c.accumulate = true, c.refusal = "d_sum", c.error = true; });
}

void add_fp8(std::vector<Variant>& all) {
  auto tensor = [](int dtype, bool row, bool col) {
    return Spec(dtype, TE_FL_SCALING_TENSOR, row, col, TE_FL_QUANT_COMPUTE_SCALE);
  };
  const Spec both4 = tensor(kE4, true, true), both5 = tensor(kE5, true, true);
  for (int ta = 0; ta < 2; ++ta)
    for (int tb = 0; tb < 2; ++tb)
      for (bool split : {false, true}) {
        all.push_back({.a = both4,
                       .b = both4,
                       .d = TE_FL_BF16,
                       .m = 48,
                       .n = 80,
                       .k = 64,
                       .trans_a = ta == 1,
                       .trans_b = tb == 1,
                       .split = split});
        all.push_back({.a = both5,
                       .b = both4,
                       .d = TE_FL_F32,
                       .m = 48,
                       .n = 80,
                       .k = 64,
                       .trans_a = ta == 1,
                       .trans_b = tb == 1,
                       .split = split});
      }
  const Variant base{
      .a = both4, .b = both4, .d = TE_FL_BF16, .m = 32, .n = 48, .k = 64, .split = true};
  auto with = [&](auto change) {
    Variant c = base;
    change(c);
    all.push_back(c);
  };
  for (bool bias : {false, true}) {
    with([bias](Variant& c) {
      c.residual = TE_FL_BF16;
      c.bias = bias ? TE_FL_BF16 : -1;
    });
    with([bias](Variant& c) {
      c.residual = TE_FL_BF16;
      c.in_place = true;
      c.bias = bias ? TE_FL_BF16 : -1;
    });
  }
  with([](Variant& c) { c.residual = TE_FL_F32; });
  for (int64_t n : {64, 256}) {
    with([n](Variant& c) {
      c.m = 128, c.n = n, c.k = 192, c.split = false;
      c.residual = c.bias = TE_FL_BF16;
    });
  }
  // A product of two rows-along-K operands needs the row-wise copies only; others the column-wise
  // one.
  with([&](Variant& c) { c.a = tensor(kE4, true, false), c.b = tensor(kE4, true, false); });
  with([&](Variant& c) {
    c.a = tensor(kE4, false, true), c.b = tensor(kE4, false, true), c.trans_a = true,
    c.trans_b = false;
  });
  with([&](Variant& c) {
    c.a = tensor(kE4, true, false), c.b = tensor(kE4, true, false), c.trans_a = true,
    c.trans_b = false, c.refusal = "column-wise data missing";
  });
  with([&](Variant& c) {
    c.a = tensor(kE5, true, false), c.b = tensor(kE4, true, false), c.trans_b = false,
    c.refusal = "column-wise data missing";
  });
  with([](Variant& c) { c.m = 13, c.n = 21, c.k = 17, c.refusal = "multiple"; });
  with([](Variant& c) { c.m = 1, c.n = 1, c.k = 1, c.refusal = "multiple"; });
  with([&](Variant& c) { c.b = both5; });
  with([](Variant& c) { c.m = 0; });
  with([](Variant& c) { c.m = 0, c.pre_gelu_in = {TE_FL_F32}; });
  with([](Variant& c) { c.k = 0; });
  with([](Variant& c) { c.b = TE_FL_BF16; });  // one operand plain
  with([](Variant& c) { c.bias = TE_FL_BF16; });
  with([](Variant& c) { c.bias = TE_FL_BF16, c.gelu = true, c.pre_gelu_out = {TE_FL_BF16}; });
  with([](Variant& c) { c.pre_gelu_in = {TE_FL_BF16}; });
  with([&](Variant& c) {
    c.a = both5, c.d = TE_FL_F32, c.accumulate = true, c.trans_a = true, c.trans_b = false;
  });
  with([&](Variant& c) {
    c.a = both5, c.bias_grad = TE_FL_BF16, c.trans_a = true, c.trans_b = false;
  });
  with([](Variant& c) { c.alpha = 0.5, c.beta = 0.25, c.accumulate = true; });
  with([](Variant& c) { c.d = quantised_specs()[0]; });
  with([](Variant& c) { c.d = quantised_specs()[7], c.bias = TE_FL_F32; });
  with([](Variant& c) { c.m = 256, c.n = 256, c.k = 512, c.large = true; });
}

void add_blocks(std::vector<Variant>& all) {
  auto one = [](bool col, uint32_t flags = kPow2) {
    return Spec(kE4, TE_FL_SCALING_BLOCK_1X128, !col, col, flags);
  };
  auto two = [](bool col) { return Spec(kE4, TE_FL_SCALING_BLOCK_128X128, !col, col, kPow2); };
  for (int ta = 0; ta < 2; ++ta)
    for (int tb = 0; tb < 2; ++tb) {
      // The copy whose blocks lie along K: row-wise unless A is stored [K, M] or B [K, N].
      const bool a_col = ta == 1, b_col = tb == 0;
      all.push_back({.a = one(a_col),
                     .b = two(b_col),
                     .d = TE_FL_BF16,
                     .m = 136,
                     .n = 144,
                     .k = 256,
                     .trans_a = ta == 1,
                     .trans_b = tb == 1,
                     .split = true});
      all.push_back({.a = one(a_col),
                     .b = one(b_col),
                     .d = TE_FL_F32,
                     .m = 136,
                     .n = 144,
                     .k = 256,
                     .trans_a = ta == 1,
                     .trans_b = tb == 1,
                     .split = true});
      all.push_back({.a = Spec(kE4, TE_FL_SCALING_MXFP8, !a_col, a_col),
                     .b = Spec(kE4, TE_FL_SCALING_MXFP8, !b_col, b_col),
                     .d = TE_FL_BF16,
                     .m = 64,
                     .n = 96,
                     .k = 128,
                     .trans_a = ta == 1,
                     .trans_b = tb == 1,
                     .split = true});
    }
  all.push_back({.a = two(false),
                 .b = one(false),
                 .d = TE_FL_BF16,
                 .m = 136,
                 .n = 144,
                 .k = 256,
                 .split = true});
  all.push_back({.a = one(false, 0),
                 .b = two(false),
                 .d = TE_FL_F32,
                 .m = 8,
                 .n = 16,
                 .k = 128,
                 .split = true});
  all.push_back({.a = one(false),
                 .b = two(false),
                 .d = TE_FL_BF16,
                 .m = 13,
                 .n = 37,
                 .k = 131,
                 .split = true,
                 .refusal = "multiple"});
  all.push_back({.a = one(false),
                 .b = two(false),
                 .d = TE_FL_BF16,
                 .m = 16,
                 .n = 32,
                 .k = 128,
                 .split = true,
                 .bias = TE_FL_BF16});
  all.push_back({.a = one(false),
                 .b = two(true),
                 .d = TE_FL_BF16,
                 .m = 16,
                 .n = 32,
                 .k = 128,
                 .trans_b = false,
                 .split = true,
                 .pre_gelu_in = {TE_FL_BF16}});
  all.push_back({.a = one(true),
                 .b = one(true),
                 .d = TE_FL_F32,
                 .m = 16,
                 .n = 32,
                 .k = 128,
                 .trans_a = true,
                 .trans_b = false,
                 .accumulate = true,
                 .split = true});
  all.push_back({.a = two(false),
                 .b = two(false),
                 .d = TE_FL_BF16,
                 .m = 128,
                 .n = 128,
                 .k = 128,
                 .split = true,
                 .refusal = "128",
                 .error = true});
}

}  // namespace

void add_gemm_cases(Table& table) {
  std::vector<Variant> all;
  add_plain(all);
  add_epilogues(all);
  add_activations(all);
  add_fp8(all);
  add_blocks(all);
  for (const Variant& v : all)
    add(
        table, "gemm", "generic_gemm", variant_name(v), [v](Problem& p) { gemm(p, v); }, v.large);
}

void fuzz_gemm(Drawn& drawn) {
  drawn.cases("gemm", "generic_gemm", [](Random& r) -> DrawnCase {
    const int dtype = Drawn::high(r);
    Variant v{.a = dtype, .b = dtype, .d = dtype};
    v.trans_a = r.below(2) == 1, v.trans_b = r.below(2) == 1;
    v.m = Drawn::extent(r, 130), v.n = Drawn::extent(r, 130), v.k = Drawn::extent(r, 260);
    if (r.below(2) == 1) v.bias = dtype;
    return {variant_name(v), [v](Problem& p) { gemm(p, v); }};
  });
}

}  // namespace te_fl::conformance
