#include "conformance/compare.hpp"
#include "conformance/drawn.hpp"

namespace te_fl::conformance {
namespace {

constexpr int kHigh[] = {TE_FL_F32, TE_FL_F16, TE_FL_BF16};
constexpr double kEps = 0x1p-24;

using Shapes = std::vector<Dims>;
const Shapes kFew = {{7, 33}, {1}, {0, 4}, {5, 3, 2}};

Shapes many() {
  Shapes all;
  for (int64_t i = 0; i < 300; ++i) all.push_back({i % 7, i % 5 + 1});
  return all;
}

std::string shapes_name(const Shapes& s) {
  return s.empty()       ? "none"
         : s.size() == 1 ? dims_name(s[0])
                         : std::to_string(s.size()) + "_tensors";
}

std::string shift_name(int64_t shift) {
  return shift == 0 ? "" : "/shift=" + std::to_string(shift);
}

using Maker = std::function<Tensor*(const std::string&, const Dims&, size_t)>;
std::vector<Tensor*> make_list(Problem& p, const std::string& name, const Shapes& shapes,
                               const Maker& make) {
  std::vector<Tensor*> list;
  for (size_t i = 0; i < shapes.size(); ++i)
    list.push_back(p.unnamed(make(name + "[" + std::to_string(i) + "]", shapes[i], i)));
  p.list(name, list);
  return list;
}
// `shift`: the tensors do not begin where their memory does, but that many elements later, one more
// for each tensor, so that every alignment that their dtype allows comes up.
std::vector<Tensor*> make_list(Problem& p, const std::string& name, Role role, int dtype,
                               const Shapes& shapes, int64_t shift, const Fill& fill) {
  return make_list(p, name, shapes, [&](const std::string& n, const Dims& d, size_t i) {
    if (shift == 0) return p.strided(n, role, dtype, d, {}, fill);
    const int64_t offset = (shift + static_cast<int64_t>(i)) % 16;
    int64_t elements = offset;
    for (int64_t rest = 1; const int64_t e : d) elements = offset + (rest *= e);
    return p.strided(n, role, dtype, d, {}, fill, nullptr, offset, elements);
  });
}
std::vector<Tensor*> list_in(Problem& p, const std::string& name, int dtype, const Shapes& shapes,
                             const Fill& fill = gaussian(), int64_t shift = 0) {
  return make_list(p, name, Role::kIn, dtype, shapes, shift, fill);
}
std::vector<Tensor*> list_inout(Problem& p, const std::string& name, int dtype,
                                const Shapes& shapes, const Fill& fill = gaussian(),
                                int64_t shift = 0) {
  return make_list(p, name, Role::kInOut, dtype, shapes, shift, fill);
}
std::vector<Tensor*> list_out(Problem& p, const std::string& name, int dtype, const Shapes& shapes,
                              int64_t shift = 0) {
  return make_list(p, name, Role::kOut, dtype, shapes, shift, constant(0));
}

// ---- scale and norms

struct ScaleVariant {
  int in, out;
  Shapes shapes;
  double scale;
  double bad;  // 0: all finite; else put into the last tensor
  int flag_before;
  bool in_place = false;
  bool large = false;
  double norm = 0, max_norm = 0;  // clip only if max_norm is set
  int64_t shift = 0;
};

std::string scale_name(const ScaleVariant& v) {
  std::string name =
      std::string(name_of(v.in)) + "/" + shapes_name(v.shapes) + "/out=" + name_of(v.out);
  if (v.bad != 0)
    name += std::isnan(v.bad)   ? "/nan"
            : std::isinf(v.bad) ? (v.bad < 0 ? "/minus_infinity" : "/infinity")
                                : "/overflow";
  if (v.flag_before != 0) name += "/flag_set";
  if (v.in_place) name += "/in_place";
  if (v.max_norm != 0) {
    name += std::isfinite(v.norm) ? "/norm=" + std::to_string(v.norm).substr(0, 3)
            : std::isnan(v.norm)  ? "/norm=nan"
                                  : "/norm=inf";
  }
  return name + shift_name(v.shift);
}

void scale(Problem& p, const ScaleVariant& v) {
  auto inputs = list_in(p, "inputs", v.in, v.shapes, gaussian(), v.shift);
  if (v.bad != 0) {
    inputs.back()->put(inputs.back()->numel() - 1, v.bad);
    inputs.back()->data->freeze();
  }
  const auto over = [&](const std::string& n, const Dims&, size_t i) {
    return p.in_place(n, inputs[i]);
  };
  auto outputs = v.in_place ? make_list(p, "outputs", v.shapes, over)
                            : list_out(p, "outputs", v.out, v.shapes, 3 * v.shift);
  Tensor* flag = p.inout("noop_flag", TE_FL_I32, {1}, constant(v.flag_before));
  p.set("scale", v.scale);
  if (v.max_norm != 0) {
    p.in("norm", TE_FL_F32, {1}, constant(v.norm));
    p.set("max_norm", v.max_norm);
  }
  p.oracle([&p, v, inputs, outputs, flag] {
    double s = static_cast<double>(static_cast<float>(v.scale));
    bool bad = v.max_norm != 0 && !std::isfinite(v.norm);
    if (v.max_norm != 0 && std::isfinite(v.norm) && v.norm > v.max_norm) s *= v.max_norm / v.norm;
    for (size_t i = 0; i < inputs.size(); ++i) {
      auto want = inputs[i]->values();
      for (double& x : want) {
        bad = bad || !std::isfinite(x) || !std::isfinite(static_cast<float>(x * s));
        x *= s;
        if (std::fabs(x) > largest(TE_FL_F32) && std::isfinite(x)) x = std::copysign(infinity(), x);
      }
      p.expect(outputs[i], want);
    }
    p.expect_exact(flag, {bad ? 1.0 : static_cast<double>(v.flag_before)}, TE_FL_I32);
  });
}

void norm(Problem& p, int dtype, const Shapes& shapes, bool per_tensor, bool unscale, double sigma,
          int64_t shift = 0) {
  auto inputs = list_in(p, "inputs", dtype, shapes, gaussian(sigma), shift);
  Tensor* inv = unscale ? p.in("inv_scale", TE_FL_F32, {1}, constant(0.037)) : nullptr;
  Tensor* out = p.out("norm", TE_FL_F32, {1});
  Tensor* each = per_tensor
                     ? p.out("per_tensor_norms", TE_FL_F32, {static_cast<int64_t>(shapes.size())})
                     : nullptr;
  p.oracle([&p, inputs, inv, out, each] {
    double total = 0, n = 0;
    std::vector<double> norms, slack;
    for (Tensor* t : inputs) {
      double sum = 0;
      for (double x : t->values()) sum += std::pow(x * (inv == nullptr ? 1 : inv->get(0)), 2);
      norms.push_back(std::sqrt(sum)),
          slack.push_back(sum_slack(static_cast<double>(t->numel()), std::sqrt(sum)));
      total += sum, n += static_cast<double>(t->numel());
    }
    p.expect(out, {std::sqrt(total)}, {sum_slack(n, std::sqrt(total))});
    if (each != nullptr) p.expect(each, norms, slack);
  });
}

// Values whose squares FP32 cannot hold. The tolerance is relative: next to 1e-6 all small norms
// are right.
struct RangeVariant {
  const char* name;
  int dtype;
  double unit;        // of the norms, a power of 2
  double factor = 1;  // of multi_tensor_unscale_l2norm, a power of 2
};

void norm_in_range(Problem& p, const RangeVariant& v, bool per_tensor, bool unscale) {
  const auto tensor = [&](const std::string& n, const Dims& d, const Fill& fill) {
    return p.unnamed(p.in(n, v.dtype, d, fill));
  };
  const double unit = v.unit / v.factor;
  Tensor* legs =
      tensor("inputs[0]", {2}, [unit](Random&, int64_t i) { return (3 + double(i)) * unit; });
  Tensor* one = tensor("inputs[1]", {1}, constant(-12 * unit));
  Tensor* same = tensor("inputs[2]", {64, 64}, constant(unit / 4));  // 4096 times: 16
  p.list("inputs", {legs, one, same});
  if (unscale) p.in("inv_scale", TE_FL_F32, {1}, constant(v.factor));
  Tensor* out = p.out("norm", TE_FL_F32, {1});
  Tensor* each = per_tensor ? p.out("per_tensor_norms", TE_FL_F32, {3}) : nullptr;
  p.oracle([&p, v, out, each] {
    p.expect(out, {std::sqrt(425.0) * v.unit}).relative = 1e-6;  // 25 + 144 + 256
    if (each != nullptr) p.expect(each, {5 * v.unit, 12 * v.unit, 16 * v.unit}).relative = 1e-6;
  });
}

// ---- Adam and SGD

struct AdamVariant {
  int grad = TE_FL_F32, param = TE_FL_F32;
  Shapes shapes = kFew;
  bool master = false;
  int noop = -1;  // no flag
  double weight_decay = 0, epsilon = 1e-8;
  int64_t step = 1;
  int mode = TE_FL_ADAM_MODE_L2;
  bool bias_correction = true, large = false;
  double beta1 = 0.9, beta2 = 0.999, lr = 1e-2;
  bool lr_tensor = false, step_tensor = false;  // the scalars are then others, to be ignored
  std::vector<Spec> fp8 = {};                   // of fp8_params, in turn; empty: none
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
      // 1 - b and 1 - b^t in FP32 lose relative accuracy where b is near 1; the terms of m may
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

// Each has to be, bit for bit, what quantize makes of the parameter that the call left.
std::vector<Tensor*> fp8_params(Problem& p, const AdamVariant& v) {
  return make_list(p, "fp8_params", v.shapes, [&](const std::string& n, const Dims& d, size_t i) {
    Spec spec = v.fp8[i % v.fp8.size()];
    if (!spec.current()) spec.scale = 40.0f + static_cast<float>(i % 100) * 3;
    spec.amax_before = i % 3 == 0 ? 9.0f : 0.25f;  // above and below what the parameters have
    return p.out(n, spec, d);
  });
}

void adam(Problem& p, const AdamVariant& v) {
  Lists l;
  l.a = list_in(p, "grads", v.grad, v.shapes, gaussian(), v.shift);
  // With master weights the parameters are only written: what stands there before must not matter,
  // unless FP8 copies are made of it because nothing else is done.
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
    for (size_t i = 0; i < copies.size(); ++i) p.expect_exact_of(copies[i], l.b[i]);
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
  bool lr_tensor = false;  // the scalar is then another, to be ignored
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

// Copies are written from the parameters as they are stored: a copy of more precision shows their
// rounding.
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
  all.push_back({.weight_decay = 0.1, .lr = 0});  // the moments move, the parameters stay
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

void add_scale(Table& table) {
  std::vector<ScaleVariant> all;
  for (int in : kHigh)
    for (int out : kHigh) all.push_back({in, out, kFew, 0.37, 0, 0});
  for (double bad : {infinity(), -infinity(), nan_value()})
    all.push_back({TE_FL_F32, TE_FL_F32, kFew, 2, bad, 0});
  all.push_back({TE_FL_F32, TE_FL_F32, kFew, 4, 3e38, 0});  // finite input, result overflows
  all.push_back({TE_FL_F32, TE_FL_F32, kFew, 0.5, 0, 1});   // the flag is never cleared
  all.push_back({TE_FL_F32, TE_FL_F32, {}, 0.5, 0, 0});
  all.push_back({TE_FL_F32, TE_FL_F32, {{130, 257}}, 0.5, 0, 0});
  all.push_back({TE_FL_BF16, TE_FL_F32, many(), 0.5, 0, 0});
  all.push_back({TE_FL_F32, TE_FL_F32, kFew, 3, 0, 0, true});
  for (double norm : {0.0, 1.0, 1.5, 8.0, infinity(), nan_value()})
    for (bool in_place : {false, true})
      all.push_back({TE_FL_F32, TE_FL_F32, kFew, 1, 0, 0, in_place, false, norm, 1.5});
  all.push_back({TE_FL_BF16, TE_FL_F32, kFew, 0.5, 0, 0, false, false, 6.0, 1.5});
  all.push_back({TE_FL_F32, TE_FL_F32, kFew, 1, 0, 1, true, false, 6.0, 1.5});
  // The norm is finite and asks for nothing, the inputs are not what it was taken of.
  for (int dtype : kHigh)
    for (double bad : {infinity(), nan_value()})
      all.push_back({dtype, dtype, kFew, 1, bad, 0, true, false, 0.5, 1});
  for (const ScaleVariant& v : all)
    add(
        table, "optimizer", "multi_tensor_scale", scale_name(v), [v](Problem& p) { scale(p, v); },
        v.large);
}

// ---- drawn

// Lists of any length, of tensors that are often empty or have one element.
Shapes draw_shapes(Draw& r) {
  if (r.swept != nullptr) return {{r.swept->columns}, {r.swept->rows, r.swept->columns}};
  Shapes shapes(static_cast<size_t>(Drawn::chance(r, 6) ? 100 + r.below(100) : r.below(24)));
  int64_t left = 40000;
  for (Dims& dims : shapes) {
    dims = Drawn::chance(r, 5)   ? Dims{0}
           : Drawn::chance(r, 5) ? Dims{1}
           : Drawn::chance(r, 3)
               ? Dims{1 + r.below(5), Drawn::extent(r, std::min<int64_t>(left, 1025))}
               : Dims{Drawn::extent(r, std::min<int64_t>(left, 4097))};
    left = std::max<int64_t>(1, left - dims[0] * dims.back());
  }
  return shapes;
}

int64_t draw_shift(Draw& r) { return Drawn::chance(r, 3) ? 0 : 1 + r.below(15); }

AdamVariant draw_adam(Draw& r) {
  AdamVariant v{.grad = Drawn::high(r), .param = Drawn::high(r), .shapes = draw_shapes(r)};
  v.master = Drawn::chance(r, 2), v.noop = Drawn::chance(r, 4) ? static_cast<int>(r.below(2)) : -1;
  v.weight_decay = Drawn::chance(r, 2) ? 0.1 : 0, v.step = 1 + r.below(1000);
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
  v.noop = Drawn::chance(r, 4) ? static_cast<int>(r.below(2)) : -1;
  v.lr_tensor = Drawn::chance(r, 4), v.shift = draw_shift(r);
  return v;
}

ScaleVariant draw_scale(Draw& r) {
  ScaleVariant v{Drawn::high(r), Drawn::high(r), draw_shapes(r), 0.37, 0, 0};
  v.in_place = Drawn::chance(r, 3), v.flag_before = static_cast<int>(r.below(2));
  if (v.in_place) v.out = v.in;
  if (!v.shapes.empty() && v.shapes.back() != Dims{0} && Drawn::chance(r, 4)) v.bad = infinity();
  if (Drawn::chance(r, 3)) v.norm = static_cast<double>(r.below(4)), v.max_norm = 1.5;
  v.shift = draw_shift(r);
  return v;
}

}  // namespace

void fuzz_optimizer(Drawn& drawn) {
  drawn.cases("optimizer", "multi_tensor_adam", [](Draw& r) -> DrawnCase {
    const AdamVariant v = draw_adam(r);
    return {adam_name(v), [v](Problem& p) { adam(p, v); }};
  });
  drawn.cases("optimizer", "multi_tensor_sgd", [](Draw& r) -> DrawnCase {
    const SgdVariant v = draw_sgd(r);
    return {sgd_name(v), [v](Problem& p) { sgd(p, v); }};
  });
  drawn.cases("optimizer", "multi_tensor_scale", [](Draw& r) -> DrawnCase {
    const ScaleVariant v = draw_scale(r);
    return {scale_name(v), [v](Problem& p) { scale(p, v); }};
  });
  for (const bool unscale : {false, true}) {
    const char* op = unscale ? "multi_tensor_unscale_l2norm" : "multi_tensor_l2norm";
    drawn.cases("optimizer", op, [unscale](Draw& r) -> DrawnCase {
      const int dtype = Drawn::high(r);
      const Shapes shapes = draw_shapes(r);
      const bool each = Drawn::chance(r, 2);
      const int64_t shift = draw_shift(r);
      return {std::string(name_of(dtype)) + "/" + shapes_name(shapes) + (each ? "/each" : "") +
                  shift_name(shift),
              [=](Problem& p) { norm(p, dtype, shapes, each, unscale, 1, shift); }};
    });
  }
}

void add_optimizer_cases(Table& table) {
  add_scale(table);
  add_adam(table);
  add_sgd(table);
  for (bool unscale : {false, true}) {
    const std::string op = unscale ? "multi_tensor_unscale_l2norm" : "multi_tensor_l2norm";
    auto one = [&](int dtype, const Shapes& shapes, bool each, double sigma, bool large) {
      std::string name =
          std::string(name_of(dtype)) + "/" + shapes_name(shapes) + (each ? "/each" : "");
      if (sigma != 1) name += "/sigma=" + std::to_string(static_cast<int>(sigma));
      add(
          table, "optimizer", op, name,
          [=](Problem& p) { norm(p, dtype, shapes, each, unscale, sigma); }, large);
    };
    for (int d : kHigh)
      for (bool each : {false, true}) one(d, kFew, each, 1, false);
    one(TE_FL_F32, {}, false, 1, false);
    one(TE_FL_F32, {}, true, 1, false);
    one(TE_FL_F32, {{1}}, true, 1, false);
    one(TE_FL_F32, {{0}}, true, 1, false);
    one(TE_FL_F16, {{64, 64}}, true, 1000, false);  // squares overflow FP16
    one(TE_FL_BF16, many(), true, 1, false);
    one(TE_FL_F32, {{512, 513}}, true, 1, true);
    std::vector<RangeVariant> ranges = {{"squares_overflow", TE_FL_F32, 0x1p+65},
                                        {"squares_overflow", TE_FL_BF16, 0x1p+65},
                                        {"squares_underflow", TE_FL_F32, 0x1p-77},
                                        {"squares_underflow", TE_FL_BF16, 0x1p-77}};
    if (unscale) {  // with the factor no longer, or only then
      ranges = {{"products_overflow", TE_FL_F32, 0x1p+65, 0x1p+60},
                {"products_underflow", TE_FL_F32, 0x1p-77, 0x1p-70},
                {"inputs_overflow", TE_FL_F32, 1, 0x1p-100},
                {"inputs_underflow", TE_FL_BF16, 1, 0x1p+100}};
    }
    for (const RangeVariant& v : ranges)
      for (bool each : {false, true})
        add(table, "optimizer", op,
            std::string(name_of(v.dtype)) + "/" + v.name + (each ? "/each" : ""),
            [=](Problem& p) { norm_in_range(p, v, each, unscale); });
  }
}

}  // namespace te_fl::conformance
