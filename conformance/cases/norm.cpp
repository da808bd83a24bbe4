#include <cstdio>

#include "conformance/case_file.hpp"
#include "conformance/compare.hpp"
#include "conformance/drawn.hpp"
#include "conformance/huge/norm.hpp"
#include "conformance/huge/norm_gradient.hpp"
#include "te_fl/ops/norm.h"

// Cases of norms. Mean and rsigma have a relative tolerance of 5e-5. A result is (x - mu) times
// factors, and FP32 rounds x - mu relative to the size of x. The tolerance of a result is therefore
// a few roundings of (|x| + |mu|) rsigma |g|.
namespace te_fl::conformance {
namespace {

constexpr int kHigh[] = {TE_FL_F32, TE_FL_F16, TE_FL_BF16};
constexpr double kEps = 0x1p-24;

double round_to(int dtype, double x) {
  if (dtype == TE_FL_F32) return static_cast<double>(static_cast<float>(x));
  return decode_bits(format_of(dtype), encode_bits(format_of(dtype), x));
}

struct Variant {
  int x = TE_FL_F32, gamma = TE_FL_F32, dz = TE_FL_F32;
  Spec out = TE_FL_F32;
  int grad = TE_FL_F32;  // dtype of dgamma, dbeta
  Dims shape = {};
  bool zero_centered = false, with_beta = true;
  double epsilon = 1e-5, mean = 0.5, sigma = 1.5;
  std::string in_place = {};
  bool large = false;
  int residual = -1, sum = -1;  // dtypes; < 0: absent
  bool with_add = false;
};

std::string variant_name(const Variant& v, bool backward) {
  std::string name = std::string(name_of(v.x)) + "/gamma=" + name_of(v.gamma);
  if (backward) name += std::string("/dz=") + name_of(v.dz) + "/grad=" + name_of(v.grad);
  name += "/" + dims_name(v.shape) + "/out=" + v.out.name();
  if (v.zero_centered) name += "/zero_centered";
  if (!v.with_beta) name += "/no_beta";
  if (v.epsilon != 1e-5) {
    char text[32];
    std::snprintf(text, sizeof text, "/eps=%g", v.epsilon);
    name += text;
  }
  if (v.mean != 0.5) name += "/mean=" + std::to_string(static_cast<int>(v.mean));
  if (v.sigma < 1) name += v.sigma == 0 ? "/constant" : "/small";
  if (v.residual >= 0) name += std::string("/residual=") + name_of(v.residual);
  if (v.sum >= 0) name += std::string("/sum=") + name_of(v.sum);
  if (v.with_add) name += "/add";
  if (!v.in_place.empty()) name += "/in_place=" + v.in_place;
  return name;
}

struct Statistics {
  double mu, rsigma;
};
// The mean (0 for RMS norm) and rsigma of a row with the elements x(j), j < h.
template <class Row>
Statistics statistics(int64_t h, bool layer, double epsilon, const Row& x) {
  double mu = 0, var = 0;
  if (layer)
    for (int64_t j = 0; j < h; ++j) mu += x(j) / static_cast<double>(h);
  for (int64_t j = 0; j < h; ++j) var += (x(j) - mu) * (x(j) - mu) / static_cast<double>(h);
  return {mu, 1 / std::sqrt(var + epsilon)};
}

Fill rows_fill(const Variant& v) {
  // Rows with different spreads and offsets.
  const int64_t h = std::max<int64_t>(v.shape.empty() ? 1 : v.shape.back(), 1);
  return [=](Random& r, int64_t i) {
    const double g = r.gaussian();
    return v.mean + v.sigma * g * (1.0 + static_cast<double>(i / h % 3));
  };
}

void forward(Problem& p, bool layer, const Variant& v) {
  const int64_t h = v.shape.back();
  Tensor* x = p.in("x", v.x, v.shape, rows_fill(v));
  Tensor* gamma = p.in("gamma", v.gamma, {h}, gaussian(0.5, v.zero_centered ? 0 : 1));
  Tensor* beta = layer && v.with_beta ? p.in("beta", v.gamma, {h}) : nullptr;
  Tensor* residual = v.residual >= 0
                         ? p.in("residual", v.residual, v.shape, gaussian(std::min(v.sigma, 1.0)))
                         : nullptr;
  const int64_t rows = x->rows();
  Tensor* z = v.in_place == "x" ? p.in_place("z", x) : p.out("z", v.out, v.shape);
  Tensor* sum = nullptr;
  if (v.sum >= 0)
    sum = v.in_place == "sum=x"          ? p.in_place("sum", x)
          : v.in_place == "sum=residual" ? p.in_place("sum", residual)
                                         : p.out("sum", v.sum, v.shape);
  Tensor* mu = layer ? p.out("mu", TE_FL_F32, {rows}) : nullptr;
  Tensor* rsigma = p.out("rsigma", TE_FL_F32, {rows});
  p.set("epsilon", v.epsilon), p.set("zero_centered_gamma", v.zero_centered);
  if ((residual == nullptr) != (sum == nullptr))
    return p.expect_error(-1,
                          residual == nullptr ? "sum requires residual" : "residual requires sum");
  p.oracle([&p, layer, v, h, rows, x, residual, gamma, beta, z, sum, mu, rsigma] {
    std::vector<double> want(static_cast<size_t>(x->numel())), extra(want.size()), mus(rows),
        rs(rows), mu_extra(rows), rs_extra(rows), input(want.size());
    for (int64_t i = 0; i < x->numel(); ++i) {
      input[i] = x->get(i);
      if (sum == nullptr) continue;
      const float added = static_cast<float>(x->get(i)) + static_cast<float>(residual->get(i));
      input[i] = round_to(v.sum, static_cast<double>(added));
    }
    const double epsilon = static_cast<double>(static_cast<float>(v.epsilon));
    for (int64_t i = 0; i < rows; ++i) {
      const Statistics s =
          statistics(h, layer, epsilon, [&](int64_t j) { return input[i * h + j]; });
      mus[i] = s.mu, rs[i] = s.rsigma;
      for (int64_t j = 0; j < h; ++j) {
        const double g = gamma->get(j) + (v.zero_centered ? 1 : 0), value = input[i * h + j];
        want[i * h + j] = (value - s.mu) * s.rsigma * g + (beta == nullptr ? 0 : beta->get(j));
        extra[i * h + j] =
            4 * kEps * (std::fabs(value) + std::fabs(s.mu)) * s.rsigma * std::fabs(g);
        mu_extra[i] += sum_tolerance(static_cast<double>(h), std::fabs(value)) /
                       static_cast<double>(std::max<int64_t>(h, 1));
        mu_extra[i] += 1e-9;
      }
      // The error of the mean adds its square to the variance, which counts if the elements of a
      // row are equal and epsilon is small.
      const double added = layer ? mu_extra[i] * mu_extra[i] * s.rsigma * s.rsigma / 2 : 0;
      rs_extra[i] = added * s.rsigma;
      for (int64_t j = 0; j < h; ++j)
        extra[i * h + j] += added * std::fabs(input[i * h + j] - s.mu) * s.rsigma *
                            std::fabs(gamma->get(j) + (v.zero_centered ? 1 : 0));
    }
    p.expect(z, want, extra);
    if (layer) p.expect(mu, mus, mu_extra).relative = 5e-5;
    p.expect(rsigma, rs, rs_extra).relative = 5e-5;
    if (sum != nullptr)
      p.expect_custom(sum, [input](const Tensor& t) -> std::string {
        for (int64_t i = 0; i < t.numel(); ++i)
          if (t.get(i) != input[i] && !(std::isnan(t.get(i)) && std::isnan(input[i])))
            return "sum[" + std::to_string(i) + "] is " + std::to_string(t.get(i)) +
                   ", must be exactly " + std::to_string(input[i]);
        return {};
      });
  });
}

void backward(Problem& p, const std::string& op, const Variant& v) {
  const bool layer = op == "layernorm_bwd", residual = op == "rmsnorm_bwd_add" || v.with_add;
  const int64_t h = v.shape.back();
  Tensor* dz = p.in("dz", v.dz, v.shape);
  Tensor* x = p.in("x", v.x, v.shape, rows_fill(v));
  Tensor* add = residual ? p.in("add", v.x, v.shape) : nullptr;
  const int64_t rows = x->rows();
  auto saved = [=](bool mean) {
    return [=](Random&, int64_t i) {
      const Statistics s =
          statistics(h, layer, v.epsilon, [&](int64_t j) { return x->get(i * h + j); });
      return mean ? s.mu : s.rsigma;
    };
  };
  Tensor* mu = layer ? p.in("mu", TE_FL_F32, {rows}, saved(true)) : nullptr;
  Tensor* rsigma = p.in("rsigma", TE_FL_F32, {rows}, saved(false));
  Tensor* gamma = p.in("gamma", v.gamma, {h}, gaussian(0.5, v.zero_centered ? 0 : 1));
  Tensor* dx = v.in_place == "dz"    ? p.in_place("dx", dz)
               : v.in_place == "add" ? p.in_place("dx", add)
                                     : p.out("dx", v.out, v.shape);
  Tensor* dgamma = p.out("dgamma", v.grad, {h});
  Tensor* dbeta = layer && v.with_beta ? p.out("dbeta", v.grad, {h}) : nullptr;
  p.set("zero_centered_gamma", v.zero_centered);
  p.oracle([&p, v, h, rows, dz, x, add, mu, rsigma, gamma, dx, dgamma, dbeta] {
    const auto n_h = static_cast<double>(h), n_rows = static_cast<double>(rows);
    std::vector<double> want(static_cast<size_t>(x->numel())), extra(want.size()), dg(h), db(h),
        dg_sum(h), db_sum(h);
    for (int64_t i = 0; i < rows; ++i) {
      const double m = mu == nullptr ? 0 : mu->get(i), r = rsigma->get(i);
      double mean_d = 0, mean_dn = 0, abs_d = 0, abs_dn = 0;
      for (int64_t j = 0; j < h; ++j) {
        const double n = (x->get(i * h + j) - m) * r, g = gamma->get(j) + (v.zero_centered ? 1 : 0),
                     d = dz->get(i * h + j) * g;
        mean_d += d / n_h, mean_dn += d * n / n_h, abs_d += std::fabs(d) / n_h;
        abs_dn +=
            std::fabs(d) * (std::fabs(n) + r * (std::fabs(x->get(i * h + j)) + std::fabs(m))) / n_h;
      }
      for (int64_t j = 0; j < h; ++j) {
        const int64_t at = i * h + j;
        const double n = (x->get(at) - m) * r, g = gamma->get(j) + (v.zero_centered ? 1 : 0),
                     d = dz->get(at) * g;
        const double in_n = 4 * kEps * r * (std::fabs(x->get(at)) + std::fabs(m));
        want[at] = r * (d - (mu == nullptr ? 0 : mean_d) - n * mean_dn) +
                   (add == nullptr ? 0 : add->get(at));
        extra[at] =
            r * (sum_tolerance(n_h, abs_d) + (std::fabs(n) + in_n) * sum_tolerance(n_h, abs_dn) +
                 in_n * std::fabs(mean_dn) + 4 * kEps * (std::fabs(d) + std::fabs(n * mean_dn))) +
            (add == nullptr ? 0 : kEps * std::fabs(add->get(at)));
        dg[j] += dz->get(at) * n, db[j] += dz->get(at);
        dg_sum[j] += std::fabs(dz->get(at)) * (std::fabs(n) + in_n / kEps),
            db_sum[j] += std::fabs(dz->get(at));
      }
    }
    for (int64_t j = 0; j < h; ++j)
      dg_sum[j] = sum_tolerance(n_rows, dg_sum[j]), db_sum[j] = sum_tolerance(n_rows, db_sum[j]);
    p.expect(dx, want, extra);
    p.expect(dgamma, dg, dg_sum);
    if (dbeta != nullptr) p.expect(dbeta, db, db_sum);
  });
}

std::vector<Variant> common_variants() {
  std::vector<Variant> all;
  for (int x : kHigh)
    for (int g : kHigh)
      all.push_back({.x = x, .gamma = g, .dz = x, .out = x, .grad = g, .shape = {7, 33}});
  all.push_back(
      {.x = TE_FL_BF16, .gamma = TE_FL_F32, .dz = TE_FL_F32, .out = TE_FL_F32, .shape = {5, 48}});
  all.push_back({.x = TE_FL_F32,
                 .gamma = TE_FL_BF16,
                 .dz = TE_FL_BF16,
                 .out = TE_FL_F16,
                 .grad = TE_FL_F16,
                 .shape = {5, 48}});
  for (const Dims& s :
       {Dims{0, 5}, {1, 1}, {4, 1}, {17}, {1, 1021}, {257, 2}, {3, 5, 2, 19}, {130, 257}})
    all.push_back({.shape = s});
  all.push_back({.x = TE_FL_BF16,
                 .gamma = TE_FL_BF16,
                 .dz = TE_FL_BF16,
                 .out = TE_FL_BF16,
                 .grad = TE_FL_BF16,
                 .shape = {300, 1024},
                 .large = true});
  all.push_back({.shape = {13, 100}, .zero_centered = true});
  all.push_back({.x = TE_FL_BF16,
                 .gamma = TE_FL_BF16,
                 .out = TE_FL_BF16,
                 .shape = {13, 100},
                 .zero_centered = true});
  all.push_back({.shape = {13, 100}, .epsilon = 0.1});
  all.push_back({.shape = {13, 100}, .epsilon = 0});
  all.push_back(
      {.shape = {11, 768}, .mean = 1000});  // a naive E[x^2] - mu^2 would have no correct digit
  return all;
}

// Adds shapes and dtypes that fused kernels support: row lengths that are multiples of the vector
// width, complete and incomplete blocks of rows and columns, few and many blocks of 128 rows, and
// all quantised formats of delayed, current and block scaling.
void add_fused_shapes(std::vector<Variant>& all) {
  for (const int dtype : {TE_FL_BF16, TE_FL_F16}) {
    for (const Dims& shape : {Dims{16, 8},
                              {48, 264},
                              {80, 1024},
                              {176, 1032},
                              {64, 4096},
                              {33, 5120},
                              {48, 8200},
                              {32, 11008},
                              {16, 16384},
                              {16, 16392},
                              {2320, 136}}) {
      if (dtype == TE_FL_F16 && shape[1] > 1024) continue;
      for (const Spec& spec : quantised_specs()) {
        if (spec.scaling == TE_FL_SCALING_MXFP8 || spec.scaling == TE_FL_SCALING_NVFP4) continue;
        if (shape != Dims{80, 1024} && (!spec.row || !spec.col)) continue;
        if (spec.scaling != TE_FL_SCALING_TENSOR &&
            (dtype == TE_FL_F16 || shape[0] < 48 || shape[1] == 4096)) {
          continue;
        }
        all.push_back({.x = dtype,
                       .gamma = shape[1] == 4096 ? TE_FL_F32 : dtype,
                       .out = spec,
                       .shape = shape,
                       .zero_centered = shape[0] == 48,
                       .epsilon = 0.1,
                       .large = true});
      }
    }
  }
  for (const int dtype : kHigh)
    for (const int64_t h : {256, 1032, 4096, 5000, 11008, 16384, 16392})
      all.push_back({.x = dtype,
                     .gamma = dtype,
                     .out = dtype,
                     .shape = {300 * 256 / h + 3, h},
                     .mean = 1000,
                     .large = true});
}

void add_residual(std::vector<Variant>& all) {
  for (const int x : kHigh)
    for (const int r : kHigh)
      all.push_back({.x = x,
                     .gamma = x,
                     .out = x,
                     .shape = {7, 40},
                     .epsilon = 0.1,
                     .residual = r,
                     .sum = x});
  for (const int sum : kHigh)
    all.push_back({.x = TE_FL_BF16, .shape = {5, 33}, .residual = TE_FL_F32, .sum = sum});
  for (const Spec& spec : quantised_specs())
    if (spec.row && spec.col) {
      all.push_back({.x = TE_FL_BF16,
                     .gamma = TE_FL_BF16,
                     .out = spec,
                     .shape = {48, 264},
                     .epsilon = 0.1,
                     .residual = TE_FL_BF16,
                     .sum = TE_FL_BF16});
      if (spec.scaling != TE_FL_SCALING_BLOCK_1X128) continue;
      all.push_back({.x = TE_FL_BF16,
                     .gamma = TE_FL_BF16,
                     .out = spec,
                     .shape = {2320, 136},
                     .large = true,
                     .residual = TE_FL_BF16,
                     .sum = TE_FL_BF16});
    }
  for (const int dtype : kHigh)
    for (const int64_t h : {256, 1032, 4096, 11008})
      all.push_back({.x = dtype,
                     .gamma = dtype,
                     .out = dtype,
                     .shape = {300 * 256 / h + 3, h},
                     .large = true,
                     .residual = dtype,
                     .sum = dtype});
  all.push_back({.shape = {0, 5}, .residual = TE_FL_F32, .sum = TE_FL_F32});
  for (const std::string in_place : {"x", "sum=x", "sum=residual"})
    for (const int64_t h : {33, 40})
      all.push_back(
          {.shape = {9, h}, .in_place = in_place, .residual = TE_FL_F32, .sum = TE_FL_F32});
  all.push_back({.shape = {9, 40}, .residual = TE_FL_F32});
  all.push_back({.shape = {9, 40}, .sum = TE_FL_F32});
}

void add_cases(Table& table) {
  for (const char* op : {"layernorm_fwd", "rmsnorm_fwd"}) {
    const bool layer = op[0] == 'l';
    auto variants = common_variants();
    for (const Spec& spec : quantised_specs()) {
      variants.push_back(
          {.x = TE_FL_BF16, .gamma = TE_FL_BF16, .out = spec, .shape = {130, 258}, .epsilon = 0.1});
      if (spec.row && spec.col && spec.dtype != TE_FL_F4E2M1)
        variants.push_back({.out = spec, .shape = {3, 7, 37}, .zero_centered = true});
    }
    variants.push_back({.out = quantised_specs()[3], .shape = {0, 16}});
    variants.push_back({.shape = {9, 40}, .in_place = "x"});
    variants.push_back({.shape = {4, 40}, .sigma = 0});
    if (layer) variants.push_back({.shape = {9, 40}, .with_beta = false});
    add_fused_shapes(variants);
    add_residual(variants);
    for (const Variant& v : variants)
      add(
          table, "norm", op, variant_name(v, false),
          [layer, v](Problem& p) { forward(p, layer, v); }, v.large);
  }
  for (const std::string op : {"layernorm_bwd", "rmsnorm_bwd", "rmsnorm_bwd_add"}) {
    auto variants = common_variants();
    variants.push_back({.shape = {9, 40}, .in_place = "dz"});
    if (op == "rmsnorm_bwd_add") variants.push_back({.shape = {9, 40}, .in_place = "add"});
    if (op == "layernorm_bwd") {
      variants.push_back({.shape = {9, 40}, .with_beta = false});
      for (Variant v : common_variants()) {
        v.with_add = true;
        variants.push_back(v);
      }
      variants.push_back({.shape = {9, 40}, .in_place = "add", .with_add = true});
    }
    // Cases that fused kernels support: row lengths that are multiples of the vector width. In two
    // of them a thread block handles several rows.
    const bool layer = op == "layernorm_bwd";
    auto fused = [&](int dtype, Dims shape, bool add) {
      variants.push_back({.x = dtype,
                          .gamma = dtype,
                          .dz = dtype,
                          .out = dtype,
                          .grad = dtype,
                          .shape = std::move(shape),
                          .large = true,
                          .with_add = add});
    };
    for (const int dtype : kHigh)
      for (const int64_t h : {256, 1032, 4096, 5000, 11008, 16384})
        fused(dtype, {300 * 256 / h + 3, h}, layer && h > 256);
    if (layer) fused(TE_FL_BF16, {600, 4096}, true);
    if (op == "rmsnorm_bwd_add") fused(TE_FL_BF16, {5000, 256}, false);
    for (const Variant& v : variants)
      add(
          table, "norm", op, variant_name(v, true), [op, v](Problem& p) { backward(p, op, v); },
          v.large);
  }
}

void draw_cases(Drawn& drawn) {
  const auto draw = [](Draw& r) {
    Variant v{.x = Drawn::high(r), .gamma = Drawn::high(r), .dz = Drawn::high(r)};
    v.grad = Drawn::high(r), v.shape = Drawn::shape(r, 2), v.zero_centered = r.below(2) == 1;
    return v;
  };
  for (const char* op : {"layernorm_fwd", "rmsnorm_fwd"}) {
    const bool layer = op[0] == 'l';
    drawn.cases("norm", op, [&](Draw& r) -> DrawnCase {
      Variant v = draw(r);
      v.out = Drawn::output(r, v.shape), v.epsilon = 0.1;
      if (!v.out.quantised()) {
        // The smaller ones show in rows of small numbers.
        static constexpr double kEpsilons[] = {1e-12, 1e-8, 1e-5, 1e-3, 0.1, 1};
        v.epsilon = kEpsilons[r.below(6)];
        if (Drawn::chance(r, 2)) v.mean = 0, v.sigma = 1e-3;
      }
      if (Drawn::chance(r, 3)) v.residual = Drawn::high(r), v.sum = Drawn::high(r);
      v.with_beta = !Drawn::chance(r, 4);
      if (!v.out.quantised() && Drawn::chance(r, 8)) v.in_place = "x", v.out = v.x;
      return {variant_name(v, false), [layer, v](Problem& p) { forward(p, layer, v); }};
    });
  }
  for (const std::string op : {"layernorm_bwd", "rmsnorm_bwd", "rmsnorm_bwd_add"})
    drawn.cases("norm", op, [&](Draw& r) -> DrawnCase {
      Variant v = draw(r);
      v.out = Drawn::high(r), v.with_beta = !Drawn::chance(r, 4);
      v.with_add = op == "layernorm_bwd" && Drawn::chance(r, 2);
      if (Drawn::chance(r, 8)) v.in_place = "dz", v.out = v.dz;
      return {variant_name(v, true), [op, v](Problem& p) { backward(p, op, v); }};
    });
}

}  // namespace
}  // namespace te_fl::conformance

namespace te_fl::huge {
namespace {

void add_norms(Cases& cases) {
  using namespace norm_calls;
  const auto add = [&](const char* what, const Forward& f, const QuantSpec* spec) {
    const std::string op = f.layer ? "layernorm_fwd" : "rmsnorm_fwd";
    if (spec == nullptr) {
      cases.push_back({op, what, [=](Run& r) { plain(r, f); }});
    } else {
      cases.push_back({op, what, [=, s = *spec](Run& r) { codes(r, f, s); }});
    }
  };
  add("in place", {.in_place = true}, nullptr);
  add("", {.layer = false}, nullptr);
  add("residual", {.residual = true}, nullptr);
  add("residual, zero-centred", {.layer = false, .residual = true, .zero_centred = true}, nullptr);
  add("from F32", {.layer = false, .dtype = DType::kF32}, nullptr);
  add("odd rows", {.cols = kOddCols}, nullptr);
  add("odd rows, residual", {.layer = false, .cols = kOddCols, .residual = true}, nullptr);
  add("long rows", {.cols = kLong}, nullptr);
  add("short rows", {.cols = 8}, nullptr);
  add("short odd rows", {.layer = false, .cols = 7}, nullptr);
  add("codes row-wise", {.layer = false}, &kRows);
  add("codes", {}, &kBoth);
  add("codes, residual", {.layer = false, .residual = true}, &kBoth);
  add("codes, current scaling, row-wise", {}, &kCurrentRows);
  add("codes, current scaling", {}, &kCurrent);
  add("codes, current scaling, residual", {.layer = false, .residual = true}, &kCurrent);
  add("codes, odd rows", {.cols = kOddCols}, &kBoth);
  add("codes, long rows", {.layer = false, .cols = kLong}, &kBoth);
  add("codes in 1x128", {}, &kLines);
  add("codes in 1x128, residual", {.layer = false, .residual = true}, &kLines);
  add("codes in 128x128", {.layer = false}, &kSquares);
  add("codes in 1x128, odd rows", {.layer = false, .cols = kOddCols}, &kLines);
}

void add_norm_gradients(Cases& cases) {
  using namespace norm_gradient_calls;
  const auto add = [&](const char* what, const Backward& b) {
    const char* op = b.layer ? "layernorm_bwd" : b.add ? "rmsnorm_bwd_add" : "rmsnorm_bwd";
    cases.push_back({op, what, [=](Run& r) { backward(r, b); }});
  };
  add("", {});
  add("residual", {.add = true});
  add("F32", {.dtype = DType::kF32});
  add("odd rows", {.add = true, .cols = kOddCols});
  add("long rows", {.cols = kLong});
  add("", {.layer = false});
  add("odd rows", {.layer = false, .cols = kOddCols});
  add("long rows", {.layer = false, .cols = kLong});
  add("", {.layer = false, .add = true});
  add("odd rows", {.layer = false, .add = true, .cols = kOddCols});
}

}  // namespace
}  // namespace te_fl::huge

namespace te_fl::bench {
namespace {

void add_cases(Cases& cases) {
  both_dtypes(cases, "layernorm_fwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_layernorm_fwd_args>();
    a.x = c.in({rows, c.cols()}, dtype), a.gamma = c.in({c.cols()}, dtype);
    a.beta = c.in({c.cols()}, dtype), a.z = c.out({rows, c.cols()}, dtype);
    a.mu = c.out({rows}, TE_FL_F32), a.rsigma = c.out({rows}, TE_FL_F32);
  });
  const auto backward = [](auto& a, Case& c, int64_t rows, int dtype) {
    a.dz = c.in({rows, c.cols()}, dtype), a.x = c.in({rows, c.cols()}, dtype);
    a.rsigma = c.in({rows}, TE_FL_F32), a.gamma = c.in({c.cols()}, dtype);
    a.dx = c.out({rows, c.cols()}, dtype), a.dgamma = c.out({c.cols()}, dtype);
  };
  both_dtypes(cases, "layernorm_bwd", [backward](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_layernorm_bwd_args>();
    backward(a, c, rows, dtype);
    a.mu = c.in({rows}, TE_FL_F32), a.dbeta = c.out({c.cols()}, dtype);
  });
  both_dtypes(cases, "rmsnorm_fwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_rmsnorm_fwd_args>();
    a.x = c.in({rows, c.cols()}, dtype), a.gamma = c.in({c.cols()}, dtype);
    a.z = c.out({rows, c.cols()}, dtype), a.rsigma = c.out({rows}, TE_FL_F32);
  });
  both_dtypes(cases, "rmsnorm_bwd", [backward](Case& c, int64_t rows, int dtype) {
    backward(c.args<te_fl_rmsnorm_bwd_args>(), c, rows, dtype);
  });
  both_dtypes(cases, "rmsnorm_bwd_add", [backward](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_rmsnorm_bwd_add_args>();
    backward(a, c, rows, dtype);
    a.add = c.in({rows, c.cols()}, dtype);
  });
}

}  // namespace
}  // namespace te_fl::bench

namespace te_fl::conformance {

extern const CaseFile norm_cases{
    .cases = add_cases,
    .drawn = draw_cases,
    .huge = [](huge::Cases& cases) { huge::add_norms(cases), huge::add_norm_gradients(cases); },
    .bench = bench::add_cases};

}  // namespace te_fl::conformance
