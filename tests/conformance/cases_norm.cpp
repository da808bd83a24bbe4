#include "conformance/compare.hpp"

// Norms. Statistics: 5e-5 relative. A result is x - mu times factors, and FP32 rounds x - mu at the
// size of x: the slack of a result is a few roundings of (|x| + |mu|) rsigma |g|.
namespace te_fl::conformance {
namespace {

constexpr int kHigh[] = {TE_FL_F32, TE_FL_F16, TE_FL_BF16};
constexpr double kEps = 0x1p-24;

struct Variant {
  int x = TE_FL_F32, gamma = TE_FL_F32, dz = TE_FL_F32;
  Spec out = TE_FL_F32;
  int grad = TE_FL_F32;  // dtype of dgamma, dbeta
  Dims shape = {};
  bool zero_centered = false, with_beta = true;
  double epsilon = 1e-5, mean = 0.5, sigma = 1.5;
  std::string in_place = {};
  bool large = false;
};

std::string variant_name(const Variant& v, bool backward) {
  std::string name = std::string(name_of(v.x)) + "/gamma=" + name_of(v.gamma);
  if (backward) name += std::string("/dz=") + name_of(v.dz) + "/grad=" + name_of(v.grad);
  name += "/" + dims_name(v.shape) + "/out=" + v.out.name();
  if (v.zero_centered) name += "/zero_centered";
  if (!v.with_beta) name += "/no_beta";
  if (v.epsilon != 1e-5) name += v.epsilon == 0 ? "/eps=0" : "/eps=0.1";
  if (v.mean != 0.5) name += "/mean=" + std::to_string(static_cast<int>(v.mean));
  if (v.sigma == 0) name += "/constant";
  if (!v.in_place.empty()) name += "/in_place=" + v.in_place;
  return name;
}

struct Statistics {
  double mu, rsigma;
};
Statistics statistics(Tensor* x, int64_t row, bool layer, double epsilon) {
  const int64_t h = x->cols();
  double mu = 0, var = 0;
  if (layer)
    for (int64_t j = 0; j < h; ++j) mu += x->get(row * h + j) / static_cast<double>(h);
  for (int64_t j = 0; j < h; ++j) {
    const double d = x->get(row * h + j) - mu;
    var += d * d / static_cast<double>(h);
  }
  return {mu, 1 / std::sqrt(var + epsilon)};
}

Fill rows_fill(const Variant& v) {
  // Rows of different spread and offset.
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
  const int64_t rows = x->rows();
  Tensor* z = v.in_place.empty() ? p.out("z", v.out, v.shape) : p.in_place("z", x);
  Tensor* mu = layer ? p.out("mu", TE_FL_F32, {rows}) : nullptr;
  Tensor* rsigma = p.out("rsigma", TE_FL_F32, {rows});
  p.set("epsilon", v.epsilon), p.set("zero_centered_gamma", v.zero_centered);
  p.oracle([&p, layer, v, h, rows, x, gamma, beta, z, mu, rsigma] {
    std::vector<double> want(static_cast<size_t>(x->numel())), extra(want.size()), mus(rows),
        rs(rows), mu_extra(rows);
    const double epsilon = static_cast<double>(static_cast<float>(v.epsilon));
    for (int64_t i = 0; i < rows; ++i) {
      const Statistics s = statistics(x, i, layer, epsilon);
      mus[i] = s.mu, rs[i] = s.rsigma;
      for (int64_t j = 0; j < h; ++j) {
        const double g = gamma->get(j) + (v.zero_centered ? 1 : 0), value = x->get(i * h + j);
        want[i * h + j] = (value - s.mu) * s.rsigma * g + (beta == nullptr ? 0 : beta->get(j));
        extra[i * h + j] =
            4 * kEps * (std::fabs(value) + std::fabs(s.mu)) * s.rsigma * std::fabs(g);
        mu_extra[i] += sum_slack(static_cast<double>(h), std::fabs(value)) /
                       static_cast<double>(std::max<int64_t>(h, 1));
        mu_extra[i] += 1e-9;
      }
    }
    p.expect(z, want, extra);
    if (layer) p.expect(mu, mus, mu_extra).relative = 5e-5;
    p.expect(rsigma, rs).relative = 5e-5;
  });
}

void backward(Problem& p, const std::string& op, const Variant& v) {
  const bool layer = op == "layernorm_bwd", residual = op == "rmsnorm_bwd_add";
  const int64_t h = v.shape.back();
  Tensor* dz = p.in("dz", v.dz, v.shape);
  Tensor* x = p.in("x", v.x, v.shape, rows_fill(v));
  Tensor* add = residual ? p.in("add", v.x, v.shape) : nullptr;
  const int64_t rows = x->rows();
  auto saved = [=](bool mean) {
    return [=](Random&, int64_t i) {
      const Statistics s = statistics(x, i, layer, v.epsilon);
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
            r * (sum_slack(n_h, abs_d) + (std::fabs(n) + in_n) * sum_slack(n_h, abs_dn) +
                 in_n * std::fabs(mean_dn) + 4 * kEps * (std::fabs(d) + std::fabs(n * mean_dn))) +
            (add == nullptr ? 0 : kEps * std::fabs(add->get(at)));
        dg[j] += dz->get(at) * n, db[j] += dz->get(at);
        dg_sum[j] += std::fabs(dz->get(at)) * (std::fabs(n) + in_n / kEps),
            db_sum[j] += std::fabs(dz->get(at));
      }
    }
    for (int64_t j = 0; j < h; ++j)
      dg_sum[j] = sum_slack(n_rows, dg_sum[j]), db_sum[j] = sum_slack(n_rows, db_sum[j]);
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
      {.shape = {11, 768}, .mean = 1000});  // a naive E[x^2] - mu^2 has no correct digit left here
  return all;
}

}  // namespace

void add_norm_cases(Table& table) {
  for (const char* op : {"layernorm_fwd", "rmsnorm_fwd"}) {
    const bool layer = op[0] == 'l';
    auto variants = common_variants();
    for (const Spec& spec : quantised_specs()) {
      variants.push_back({.x = TE_FL_BF16, .gamma = TE_FL_BF16, .out = spec, .shape = {130, 258}});
      if (spec.row && spec.col && spec.dtype != TE_FL_F4E2M1)
        variants.push_back({.out = spec, .shape = {3, 7, 37}, .zero_centered = true});
    }
    variants.push_back({.out = quantised_specs()[3], .shape = {0, 16}});
    variants.push_back({.shape = {9, 40}, .in_place = "x"});
    variants.push_back({.shape = {4, 40}, .sigma = 0});
    if (layer) variants.push_back({.shape = {9, 40}, .with_beta = false});
    for (const Variant& v : variants)
      add(
          table, "norm", op, variant_name(v, false),
          [layer, v](Problem& p) { forward(p, layer, v); }, v.large);
  }
  for (const std::string op : {"layernorm_bwd", "rmsnorm_bwd", "rmsnorm_bwd_add"}) {
    auto variants = common_variants();
    variants.push_back({.shape = {9, 40}, .in_place = "dz"});
    if (op == "rmsnorm_bwd_add") variants.push_back({.shape = {9, 40}, .in_place = "add"});
    if (op == "layernorm_bwd") variants.push_back({.shape = {9, 40}, .with_beta = false});
    for (const Variant& v : variants)
      add(
          table, "norm", op, variant_name(v, true), [op, v](Problem& p) { backward(p, op, v); },
          v.large);
  }
}

}  // namespace te_fl::conformance
