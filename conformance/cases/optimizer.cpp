#include "conformance/huge/optimizer.hpp"
#include "conformance/case_file.hpp"
#include "conformance/compare.hpp"
#include "conformance/tensor_lists.hpp"
#include "te_fl/ops/optimizer.h"

namespace te_fl::conformance {
namespace {

constexpr int kHigh[] = {TE_FL_F32, TE_FL_F16, TE_FL_BF16};
constexpr double kEps = 0x1p-24;

// ---- cases of Adam and SGD

struct AdamVariant {
  int grad = TE_FL_F32, param = TE_FL_F32;
  Shapes shapes = kFew;
  bool master = false;
  int noop = -1;  // -1: no flag
  double weight_decay = 0, epsilon = 1e-8;
  int64_t step = 1;
  int mode = TE_FL_ADAM_MODE_L2;
  bool bias_correction = true, large = false;
  double beta1 = 0.9, beta2 = 0.999, lr = 1e-2;
  bool lr_tensor = false, step_tensor = false;  // the scalars then have other values, to be ignored
  std::vector<Spec> fp8 = {};                   // specs of fp8_params, used cyclically; empty: none
  int64_t shift = 0;
};

std::string adam_name(const AdamVariant& v) {
  std::string name = std::string("grad=") + name_of(v.grad) + "/param=" + name_of(v.param) + "/" +
                     shapes_name(v.shapes);
  name += v.mode == TE_FL_ADAM_MODE_L2 ? "/l2" : "/adamw";
  if (v.weight_decay != 0) name += "/wd";
  if (v.master) name += "/master";
  if (v.noop >= 0) name += "/noop=" + std::to_string(v.noop);
  if (!v.bias_correction) name += "/uncorrected";
  if (v.beta1 == 0) name += "/beta=0";
  if (v.lr == 0) name += "/lr=0";
  if (v.epsilon > 1e-4) name += "/eps";
  if (v.lr_tensor) name += "/lr_tensor";
  if (v.step_tensor) name += "/step_tensor";
  for (const Spec& spec : v.fp8) name += "/fp8=" + spec.name() + (spec.has_amax ? "" : ".no_amax");
  return name + "/step=" + std::to_string(v.step) + shift_name(v.shift);
}

double f(double x) { return static_cast<double>(static_cast<float>(x)); }

struct Lists {
  std::vector<Tensor*> a, b, c, d, e;
};

void adam_oracle(Problem& p, const AdamVariant& v, const Lists& l) {
  const double lr = f(v.lr), b1 = f(v.beta1), b2 = f(v.beta2), eps = f(v.epsilon),
               wd = f(v.weight_decay);
  const double c1 = v.bias_correction ? 1 - std::pow(b1, static_cast<double>(v.step)) : 1;
  const double c2 = v.bias_correction ? 1 - std::pow(b2, static_cast<double>(v.step)) : 1;
  for (size_t n = 0; n < l.a.size(); ++n) {
    const auto count = static_cast<size_t>(l.a[n]->numel());
    std::vector<double> param(count), m(count), sq(count), extra(count), m_extra(count),
        sq_extra(count);
    for (size_t i = 0; i < count; ++i) {
      const auto at = static_cast<int64_t>(i);
      const double p0 = v.master ? l.e[n]->get(at) : l.b[n]->get(at);
      const double g = l.a[n]->get(at) + (v.mode == TE_FL_ADAM_MODE_L2 ? wd * p0 : 0);
      m[i] = b1 * l.c[n]->get(at) + (1 - b1) * g;
      sq[i] = b2 * l.d[n]->get(at) + (1 - b2) * g * g;
      const double step = m[i] / c1 / (std::sqrt(sq[i] / c2) + eps) +
                          (v.mode == TE_FL_ADAM_MODE_ADAMW ? wd * p0 : 0);
      param[i] = p0 - lr * step;
      // 1 - b and 1 - b^t lose relative accuracy in FP32 if b is near 1, and the terms of m may
      // cancel.
      m_extra[i] = 8 * kEps * (std::fabs(l.c[n]->get(at)) + std::fabs(g) + std::fabs(wd * p0));
      sq_extra[i] = 8 * kEps * (l.d[n]->get(at) + g * g) + 5e-5 * (1 - b2) * g * g;
      extra[i] = 2e-4 * lr * std::fabs(step) +
                 lr * m_extra[i] / c1 / (std::sqrt(sq[i] / c2) + eps) + 4 * kEps * std::fabs(p0);
    }
    p.expect(l.b[n], param, extra);
    if (v.master) p.expect(l.e[n], param, extra);
    p.expect(l.c[n], m, m_extra), p.expect(l.d[n], sq, sq_extra);
  }
}

// Makes the outputs for FP8 copies of the parameters. Each must equal, bit for bit, the
// quantisation of the parameter after the call.
std::vector<Tensor*> fp8_params(Problem& p, const AdamVariant& v) {
  return make_list(p, "fp8_params", v.shapes, [&](const std::string& n, const Dims& d, size_t i) {
    Spec spec = v.fp8[i % v.fp8.size()];
    if (!spec.current()) spec.scale = 40.0f + static_cast<float>(i % 100) * 3;
    spec.amax_before = i % 3 == 0 ? 9.0f : 0.25f;  // above and below the amax of the parameters
    return p.out(n, spec, d);
  });
}

void adam(Problem& p, const AdamVariant& v) {
  Lists l;
  l.a = list_in(p, "grads", v.grad, v.shapes, gaussian(), v.shift);
  // With master weights the parameters are output only, so their previous contents must not matter.
  // There is one exception: if a noop flag skips the update, the FP8 copies are made from the
  // previous parameters.
  const bool any = v.master && (v.fp8.empty() || v.noop <= 0);
  l.b = list_inout(p, "params", v.param, v.shapes, any ? constant(nan_value()) : gaussian(),
                   3 * v.shift);
  l.c = list_inout(p, "exp_avgs", TE_FL_F32, v.shapes, gaussian(0.1), 5 * v.shift);
  l.d = list_inout(
      p, "exp_avg_sqs", TE_FL_F32, v.shapes, [](Random& r, int64_t) { return 0.01 + r.uniform(); },
      7 * v.shift);
  if (v.master) l.e = list_inout(p, "master_params", TE_FL_F32, v.shapes, gaussian(), 9 * v.shift);
  if (v.noop >= 0) p.in("noop_flag", TE_FL_I32, {1}, constant(v.noop));
  if (v.lr_tensor) p.in("lr_tensor", TE_FL_F32, {1}, constant(v.lr));
  if (v.step_tensor) {
    p.in("step_tensor", TE_FL_I64, {1}, constant(static_cast<double>(v.step)));
  }
  p.set("lr", v.lr_tensor ? 3.0 : v.lr), p.set("beta1", v.beta1), p.set("beta2", v.beta2);
  p.set("epsilon", v.epsilon), p.set("weight_decay", v.weight_decay), p.set("mode", v.mode);
  p.set("step", v.step_tensor ? 7.0 : static_cast<double>(v.step));
  p.set("bias_correction", v.bias_correction);
  std::vector<Tensor*> copies;
  if (!v.fp8.empty()) copies = fp8_params(p, v);
  p.oracle([&p, v, l, copies] {
    for (size_t i = 0; i < copies.size(); ++i) p.expect_exact_copy(copies[i], l.b[i]);
    if (v.noop <= 0) return adam_oracle(p, v, l);
    for (const auto* list : {&l.b, &l.c, &l.d, &l.e})
      for (Tensor* t : *list) p.expect_unchanged(t);
  });
}

struct SgdVariant {
  int grad = TE_FL_F32, param = TE_FL_F32, copy = -1;
  Shapes shapes = kFew;
  double weight_decay = 0, momentum = 0, dampening = 0, scale = 1;
  bool nesterov = false, first_run = false, late_decay = false;
  int noop = -1;
  double lr = 0.05;
  bool lr_tensor = false;  // the scalar then has another value, to be ignored
  int64_t shift = 0;
};

std::string sgd_name(const SgdVariant& v) {
  std::string name = std::string("grad=") + name_of(v.grad) + "/param=" + name_of(v.param) + "/" +
                     shapes_name(v.shapes);
  if (v.copy >= 0) name += std::string("/copy=") + name_of(v.copy);
  if (v.weight_decay != 0) name += v.late_decay ? "/late_wd" : "/wd";
  if (v.momentum != 0) name += "/momentum";
  if (v.dampening != 0) name += "/dampening";
  if (v.scale != 1) name += "/scale";
  if (v.nesterov) name += "/nesterov";
  if (v.first_run) name += "/first_run";
  if (v.lr == 0) name += "/lr=0";
  if (v.noop >= 0) name += "/noop=" + std::to_string(v.noop);
  if (v.lr_tensor) name += "/lr_tensor";
  return name + shift_name(v.shift);
}

// The tolerance of the copies that SGD writes. A copy is made from the stored parameter, so a copy
// with a more precise dtype contains the parameter's rounding.
std::vector<double> copy_extra(const SgdVariant& v, const std::vector<double>& param,
                               std::vector<double> extra) {
  const auto unit = [](int dtype) {
    return dtype == TE_FL_BF16 ? 0x1p-8 : dtype == TE_FL_F16 ? 0x1p-11 : 0;
  };
  if (unit(v.copy) >= unit(v.param)) return extra;
  for (size_t i = 0; i < extra.size(); ++i)
    extra[i] += unit(v.param) * std::fabs(param[i]) + (v.param == TE_FL_F16 ? 0x1p-25 : 0);
  return extra;
}

void sgd_oracle(Problem& p, const SgdVariant& v, const Lists& l) {
  const double lr = f(v.lr), wd = f(v.weight_decay), mo = f(v.momentum), da = f(v.dampening),
               sc = f(v.scale);
  for (size_t n = 0; n < l.a.size(); ++n) {
    const auto count = static_cast<size_t>(l.a[n]->numel());
    std::vector<double> param(count), m(count), extra(count);
    for (size_t i = 0; i < count; ++i) {
      const auto at = static_cast<int64_t>(i);
      const double p0 = l.b[n]->get(at), m0 = l.c[n]->get(at);
      double g = sc * l.a[n]->get(at) + (v.late_decay ? 0 : wd * p0);
      extra[i] = 8 * kEps *
                 (std::fabs(sc * l.a[n]->get(at)) + std::fabs(wd * p0) +
                  (v.first_run ? 0 : std::fabs(m0)));
      if (mo != 0) {
        m[i] = v.first_run ? g : mo * m0 + (1 - da) * g;
        g = v.nesterov ? g + mo * m[i] : m[i];
      }
      param[i] = p0 - lr * (g + (v.late_decay ? wd * p0 : 0));
      extra[i] += 2 * kEps * std::fabs(p0);
    }
    p.expect(l.b[n], param, extra);
    if (v.copy >= 0) p.expect(l.d[n], param, copy_extra(v, param, extra));
    if (mo == 0)
      p.expect_unchanged(l.c[n]);
    else
      p.expect(l.c[n], m, extra);
  }
}

void sgd(Problem& p, const SgdVariant& v) {
  Lists l;
  l.a = list_in(p, "grads", v.grad, v.shapes, gaussian(), v.shift);
  l.b = list_inout(p, "params", v.param, v.shapes, gaussian(), 3 * v.shift);
  l.c = list_inout(p, "momentums", TE_FL_F32, v.shapes,
                   v.first_run ? constant(nan_value()) : gaussian(), 5 * v.shift);
  if (v.copy >= 0) l.d = list_out(p, "param_copies", v.copy, v.shapes, 7 * v.shift);
  if (v.noop >= 0) p.in("noop_flag", TE_FL_I32, {1}, constant(v.noop));
  if (v.lr_tensor) p.in("lr_tensor", TE_FL_F32, {1}, constant(v.lr));
  p.set("lr", v.lr_tensor ? 3.0 : v.lr), p.set("weight_decay", v.weight_decay);
  p.set("momentum", v.momentum), p.set("dampening", v.dampening);
  p.set("scale", v.scale), p.set("nesterov", v.nesterov), p.set("first_run", v.first_run),
      p.set("wd_after_momentum", v.late_decay);
  p.oracle([&p, v, l] {
    if (v.noop <= 0) return sgd_oracle(p, v, l);
    for (const auto* list : {&l.b, &l.c, &l.d})
      for (Tensor* t : *list) p.expect_unchanged(t);
  });
}

void add_adam_fp8(std::vector<AdamVariant>& all) {
  constexpr int kTensor = TE_FL_SCALING_TENSOR;
  const Spec both(TE_FL_F8E4M3, kTensor, true, true), rows(TE_FL_F8E4M3, kTensor, true, false),
      columns(TE_FL_F8E4M3, kTensor, false, true), e5m2(TE_FL_F8E5M2, kTensor, true, true);
  Spec no_amax = both;
  no_amax.has_amax = false;
  const Shapes even = {{48, 64}, {160, 208}, {16, 16}},
               odd = {{7, 33}, {131, 70}, {48, 68}, {130}, {1, 5}};
  for (int g : kHigh)
    for (int q : kHigh)
      for (bool master : {false, true})
        for (const Shapes& shapes : {even, odd})
          all.push_back({.grad = g,
                         .param = q,
                         .shapes = shapes,
                         .master = master,
                         .weight_decay = 0.1,
                         .step = 3,
                         .mode = TE_FL_ADAM_MODE_ADAMW,
                         .fp8 = {both}});
  for (const Shapes& shapes : {even, odd, kFew})
    for (const Spec& spec : {rows, columns, e5m2, no_amax})
      all.push_back({.param = TE_FL_BF16, .shapes = shapes, .master = true, .fp8 = {spec}});
  for (int noop : {0, 1})
    for (const Shapes& shapes : {even, odd})
      for (bool master : {false, true})
        all.push_back({.param = TE_FL_BF16,
                       .shapes = shapes,
                       .master = master,
                       .noop = noop,
                       .fp8 = {both, rows}});
  all.push_back({.shapes = {}, .fp8 = {both}});
  all.push_back({.shapes = {{0, 16}, {16, 0}}, .fp8 = {both}});
  all.push_back({.param = TE_FL_BF16,
                 .shapes = many(),
                 .master = true,
                 .step = 40,
                 .lr_tensor = true,
                 .step_tensor = true,
                 .fp8 = {both, rows, e5m2, columns}});
  all.push_back({.shapes = even,
                 .weight_decay = 0.1,
                 .step = 2,
                 .lr_tensor = true,
                 .step_tensor = true,
                 .fp8 = {both}});
  const Spec current(TE_FL_F8E4M3, kTensor, true, true, TE_FL_QUANT_COMPUTE_SCALE);
  all.push_back({.param = TE_FL_BF16, .shapes = even, .master = true, .fp8 = {current}});
  all.push_back({.shapes = {{520, 1008}}, .large = true, .fp8 = {both}});
}

void add_adam(Table& table) {
  std::vector<AdamVariant> all;
  for (int g : kHigh)
    for (int q : kHigh)
      for (bool master : {false, true})
        all.push_back({.grad = g, .param = q, .master = master, .weight_decay = 0.1, .step = 3});
  for (int mode : {TE_FL_ADAM_MODE_L2, TE_FL_ADAM_MODE_ADAMW})
    for (bool corrected : {true, false})
      for (int64_t step : {1, 1000})
        all.push_back(
            {.weight_decay = 0.05, .step = step, .mode = mode, .bias_correction = corrected});
  all.push_back({.shapes = {}});
  all.push_back({.shapes = {{0}}});
  all.push_back({.shapes = {{130, 257}}});
  for (int g : kHigh)  // large enough for whole vectors, with a tail
    for (int q : kHigh)
      all.push_back({.grad = g,
                     .param = q,
                     .shapes = {{48, 101}, {3, 1024}},
                     .master = g != TE_FL_F16,
                     .weight_decay = 0.1,
                     .step = 3});
  all.push_back({.param = TE_FL_BF16,
                 .shapes = many(),
                 .master = true,
                 .weight_decay = 0.1,
                 .mode = TE_FL_ADAM_MODE_ADAMW});
  all.push_back({.noop = 0});
  all.push_back({.noop = 1});
  all.push_back({.param = TE_FL_BF16, .master = true, .noop = 1});
  all.push_back({.epsilon = 1e-3});
  all.push_back({.lr_tensor = true});
  for (int64_t step : {1, 2, 1000})
    all.push_back({.step = step, .lr_tensor = true, .step_tensor = true});
  all.push_back({.step = 5, .bias_correction = false, .step_tensor = true});
  all.push_back({.param = TE_FL_BF16,
                 .shapes = many(),
                 .master = true,
                 .weight_decay = 0.1,
                 .step = 40,
                 .mode = TE_FL_ADAM_MODE_ADAMW,
                 .lr_tensor = true,
                 .step_tensor = true});
  all.push_back({.beta1 = 0, .beta2 = 0});
  all.push_back({.weight_decay = 0.1, .lr = 0});  // moments change, parameters do not
  all.push_back({.shapes = {{512, 512}}, .mode = TE_FL_ADAM_MODE_ADAMW, .large = true});
  add_adam_fp8(all);
  for (const AdamVariant& v : all)
    add(
        table, "optimizer", "multi_tensor_adam", adam_name(v), [v](Problem& p) { adam(p, v); },
        v.large);
}

void add_sgd(Table& table) {
  std::vector<SgdVariant> all;
  for (int g : kHigh)
    for (int q : kHigh)
      all.push_back(
          {.grad = g, .param = q, .copy = TE_FL_BF16, .weight_decay = 0.1, .momentum = 0.9});
  all.push_back({});
  all.push_back({.weight_decay = 0.1});
  all.push_back({.momentum = 0.9, .first_run = true});
  all.push_back({.momentum = 0.9, .dampening = 0.3});
  all.push_back({.weight_decay = 0.1, .momentum = 0.9, .nesterov = true});
  all.push_back({.weight_decay = 0.1, .momentum = 0.9, .nesterov = true, .first_run = true});
  all.push_back({.weight_decay = 0.1, .momentum = 0.9, .late_decay = true});
  all.push_back({.weight_decay = 0.1, .late_decay = true});
  all.push_back({.weight_decay = 0.1, .momentum = 0.9, .scale = 0.125});
  all.push_back({.copy = TE_FL_F16, .momentum = 0.9, .noop = 1});
  all.push_back({.momentum = 0.9, .noop = 0});
  all.push_back({.param = TE_FL_BF16, .copy = TE_FL_F32, .momentum = 0.9, .lr = 0});
  all.push_back({.shapes = {}});
  all.push_back({.weight_decay = 0.1, .momentum = 0.9, .lr_tensor = true});
  all.push_back({.shapes = {{130, 257}}, .momentum = 0.9});
  all.push_back({.copy = TE_FL_BF16, .shapes = many(), .momentum = 0.9});
  for (const SgdVariant& v : all)
    add(table, "optimizer", "multi_tensor_sgd", sgd_name(v), [v](Problem& p) { sgd(p, v); });
}

// ---- random cases

AdamVariant draw_adam(Draw& r) {
  AdamVariant v{.grad = Drawn::high(r), .param = Drawn::high(r), .shapes = draw_shapes(r)};
  v.master = Drawn::chance(r, 2), v.noop = Drawn::chance(r, 4) ? static_cast<int>(r.below(3)) : -1;
  // Beyond 10,000 steps the correction of the default beta2 is 1.
  static constexpr int64_t kSteps[] = {10, 1000, 8000, 100'000, int64_t{1} << 40};
  v.weight_decay = Drawn::chance(r, 2) ? 0.1 : 0, v.step = 1 + r.below(kSteps[r.below(5)]);
  if (Drawn::chance(r, 4)) v.beta1 = 0.5, v.beta2 = 0.9999;
  if (Drawn::chance(r, 3)) v.epsilon = Drawn::chance(r, 2) ? 1e-3 : 0;
  v.mode = Drawn::chance(r, 2) ? TE_FL_ADAM_MODE_L2 : TE_FL_ADAM_MODE_ADAMW;
  v.bias_correction = !Drawn::chance(r, 4), v.lr_tensor = Drawn::chance(r, 4);
  v.step_tensor = Drawn::chance(r, 4), v.shift = draw_shift(r);
  return v;
}

SgdVariant draw_sgd(Draw& r) {
  SgdVariant v{.grad = Drawn::high(r), .param = Drawn::high(r), .shapes = draw_shapes(r)};
  v.copy = Drawn::chance(r, 2) ? Drawn::high(r) : -1;
  v.weight_decay = Drawn::chance(r, 2) ? 0.1 : 0, v.momentum = Drawn::chance(r, 3) ? 0 : 0.9;
  v.late_decay = Drawn::chance(r, 3), v.scale = Drawn::chance(r, 3) ? 0.125 : 1;
  v.first_run = v.momentum != 0 && Drawn::chance(r, 3);
  v.nesterov = v.momentum != 0 && Drawn::chance(r, 3);
  v.dampening = v.momentum != 0 && !v.nesterov && Drawn::chance(r, 3) ? 0.3 : 0;
  v.noop = Drawn::chance(r, 4) ? static_cast<int>(r.below(3)) : -1;
  v.lr_tensor = Drawn::chance(r, 4), v.shift = draw_shift(r);
  return v;
}

void draw_cases(Drawn& drawn) {
  drawn.cases("optimizer", "multi_tensor_adam", [](Draw& r) -> DrawnCase {
    const AdamVariant v = draw_adam(r);
    return {adam_name(v), [v](Problem& p) { adam(p, v); }};
  });
  drawn.cases("optimizer", "multi_tensor_sgd", [](Draw& r) -> DrawnCase {
    const SgdVariant v = draw_sgd(r);
    return {sgd_name(v), [v](Problem& p) { sgd(p, v); }};
  });
}

void add_cases(Table& table) {
  add_adam(table);
  add_sgd(table);
}

}  // namespace
}  // namespace te_fl::conformance

namespace te_fl::huge {
namespace {

void add_cases(Cases& cases) {
  using namespace optimizer_calls;
  const Cases all = {
      {"multi_tensor_adam", "", [](Run& r) { adam(r, false); }},
      {"multi_tensor_adam", "master weights", [](Run& r) { adam(r, true); }},
      {"multi_tensor_adam", "FP8 copies", [](Run& r) { adam_into_codes(r, kCols); }},
      {"multi_tensor_adam", "FP8 copies, odd rows", [](Run& r) { adam_into_codes(r, kOddCols); }},
      {"multi_tensor_sgd", "", sgd},
  };
  cases.insert(cases.end(), all.begin(), all.end());
}

}  // namespace
}  // namespace te_fl::huge

namespace te_fl::bench {
namespace {

void add_cases(Cases& cases) {
  constexpr int kTensors = 24;
  const auto many = [](Case& c, int64_t rows, int dtype, bool both) {
    std::vector<const te_fl_tensor*> list;
    for (int i = 0; i < kTensors; ++i) {
      const Shape shape = {rows_each(rows, kTensors), c.cols()};
      list.push_back(both ? c.inout(shape, dtype) : c.in(shape, dtype));
    }
    return c.list(list);
  };
  const auto adam = [many](Case& c, int64_t rows, bool low) {
    auto& a = c.args<te_fl_multi_tensor_adam_args>();
    const int dtype = low ? TE_FL_BF16 : TE_FL_F32;
    a.grads = many(c, rows, dtype, false), a.grads_count = kTensors;
    a.params = many(c, rows, dtype, !low), a.params_count = kTensors;
    a.exp_avgs = many(c, rows, TE_FL_F32, true), a.exp_avgs_count = kTensors;
    a.exp_avg_sqs = many(c, rows, TE_FL_F32, true), a.exp_avg_sqs_count = kTensors;
    if (low) {
      a.master_params = many(c, rows, TE_FL_F32, true), a.master_params_count = kTensors;
    }
    for (int i = 0; i < kTensors; ++i) {  // v is a mean of squares, so non-negative
      const te_fl_tensor& v = *a.exp_avg_sqs[i];
      float* x = static_cast<float*>(v.dl.data);
      for (int64_t e = 0; e < v.dl.shape[0] * v.dl.shape[1]; ++e) x[e] *= x[e];
    }
    a.lr = 1e-3f, a.weight_decay = 0.1f, a.mode = TE_FL_ADAM_MODE_ADAMW;
    return &a;
  };
  cases.push_back(
      {"multi_tensor_adam", "f32", [adam](Case& c, int64_t rows) { adam(c, rows, false); }});
  cases.push_back({"multi_tensor_adam", "bf16, f32 master",
                   [adam](Case& c, int64_t rows) { adam(c, rows, true); }});
  cases.push_back(
      {"multi_tensor_adam", "bf16, f32 master, fp8 copies", [adam](Case& c, int64_t rows) {
         auto* a = adam(c, rows, true);
         std::vector<const te_fl_tensor*> copies;
         const Shape shape = {rows_each(rows, kTensors), c.cols()};
         for (int i = 0; i < kTensors; ++i) {
           copies.push_back(c.fp8(shape, TE_FL_F8E4M3, TE_FL_SCALING_TENSOR, true));
         }
         a->fp8_params = c.list(copies), a->fp8_params_count = kTensors;
       }});
  cases.push_back({"multi_tensor_sgd", "f32, momentum", [many](Case& c, int64_t rows) {
                     auto& a = c.args<te_fl_multi_tensor_sgd_args>();
                     a.grads = many(c, rows, TE_FL_F32, false), a.grads_count = kTensors;
                     a.params = many(c, rows, TE_FL_F32, true), a.params_count = kTensors;
                     a.momentums = many(c, rows, TE_FL_F32, true), a.momentums_count = kTensors;
                     a.lr = 1e-3f, a.momentum = 0.9f;
                   }});
}

}  // namespace
}  // namespace te_fl::bench

namespace te_fl::conformance {

extern const CaseFile optimizer_cases{
    .cases = add_cases, .drawn = draw_cases, .huge = huge::add_cases, .bench = bench::add_cases};

}  // namespace te_fl::conformance
