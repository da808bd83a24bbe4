#include <algorithm>

#include "conformance/case_file.hpp"
#include "conformance/compare.hpp"
#include "conformance/drawn.hpp"
#include "conformance/huge/scaled_activation.hpp"
#include "conformance/oracle_activation.hpp"
#include "te_fl/ops/activation.h"

namespace te_fl::conformance {
namespace {

constexpr int kHighTypes[] = {TE_FL_F32, TE_FL_F16, TE_FL_BF16};

struct ScaledVariant {
  const ScaledOp* op = nullptr;
  bool backward = false;
  int in = TE_FL_F32, grad = TE_FL_F32, out = TE_FL_F32, scales = TE_FL_F32;
  Dims shape = {7, 33};  // of the result
  int64_t interleave = 0;
  bool grad_scales = true;
  ScaledParameters numbers = {};
  bool wrong = false;  // the columns are no multiple of the interleave size
  bool large = false;
};

std::string scaled_name(const ScaledVariant& v) {
  std::string name = name_of(v.in);
  if (v.backward) name += std::string("/grad=") + name_of(v.grad);
  name += "/" + dims_name(v.shape) + "/out=" + name_of(v.out);
  if (v.op->scaled) name += std::string("/scales=") + name_of(v.scales);
  if (v.interleave != 0) name += "/interleave=" + std::to_string(v.interleave);
  if (!v.grad_scales) name += "/no_grad_scales";
  if (v.numbers.limit != 7) name += "/limit=" + std::to_string(v.numbers.limit);
  if (v.numbers.beta1 != 4) name += "/beta=" + std::to_string(v.numbers.beta1);
  return name;
}

// Gaussian values, with boundary values of the formulas at some indices.
double edged(Random& r, int64_t i) {
  static const double edges[] = {0, -0.0, 1e-30, -1e-8, 7, -7, 20, -20, 100, -100, 0.9, -1.1};
  return i % 97 == 5 ? edges[i / 97 % 12] : 2 * r.gaussian();
}

void set_numbers(Problem& p, const ScaledVariant& v) {
  if (v.op->kind == ScaledKind::kClamped) {
    p.set("limit", v.numbers.limit), p.set("alpha", v.numbers.alpha);
    p.set("glu_linear_offset", v.numbers.offset);
  }
  if (v.op->kind == ScaledKind::kSitu) {
    p.set("beta1", v.numbers.beta1), p.set("beta2", v.numbers.beta2);
  }
  if (v.interleave != 0) p.set("glu_interleave_size", static_cast<double>(v.interleave));
}

struct ScaledTensors {
  Tensor *x, *scales, *dy, *y, *dscales;
};

// A bound on the FP32 rounding error of activations with terms in `a` that cancel.
double lost(double a, double b) {
  return 0x1p-21 * (1 + std::min(std::fabs(a), 10.0)) * (1 + std::min(std::fabs(b), 30.0));
}

void expect_scaled(Problem& p, const ScaledVariant& v, const ScaledTensors& t) {
  const int64_t h = v.shape.back(), halves = v.op->kind == ScaledKind::kSrelu ? 1 : 2;
  const int64_t rows = h == 0 ? 0 : t.x->numel() / (halves * h);
  std::vector<double> want(static_cast<size_t>(t.y->numel())), extra(want.size());
  std::vector<double> sums(static_cast<size_t>(t.dscales != nullptr ? t.dscales->numel() : 0));
  std::vector<double> sizes(sums.size());
  for (int64_t i = 0; i < rows; ++i) {
    const double s = t.scales != nullptr ? t.scales->get(i) : 1;
    for (int64_t j = 0; j < h; ++j) {
      const int64_t turn = v.interleave == 0 ? h : v.interleave;
      const int64_t a = i * halves * h + (halves == 1 ? j : j / turn * 2 * turn + j % turn);
      const double xa = t.x->get(a), xb = halves == 1 ? 0 : t.x->get(a + turn);
      const ScaledResult r = scaled_result(v.op->kind, v.numbers, xa, xb);
      if (!v.backward) {
        want[i * h + j] = s * r.y, extra[i * h + j] = std::fabs(s) * lost(xa, xb) / 2;
        continue;
      }
      const double g = t.dy->get(i * h + j), size = std::fabs(s * g);
      want[a] = s * g * r.da, extra[a] = size * lost(xa, xb);
      if (halves == 2) want[a + turn] = s * g * r.db, extra[a + turn] = size * lost(xa, 0);
      if (sums.empty()) continue;
      sums[i] += g * r.y, sizes[i] += std::fabs(g * r.y) + 0x1p-3 * std::fabs(g) * lost(xa, xb);
    }
  }
  p.expect(t.y, want, extra);
  if (t.dscales == nullptr) return;
  for (size_t i = 0; i < sizes.size(); ++i)
    sizes[i] = sum_tolerance(static_cast<double>(h), sizes[i]) + 1e-6 * sizes[i];
  p.expect(t.dscales, sums, sizes).widen = 4;
}

void scaled_problem(Problem& p, const ScaledVariant& v) {
  Dims wide = v.shape;
  if (v.op->kind != ScaledKind::kSrelu) wide.back() *= 2;
  int64_t rows = 1;
  for (size_t d = 0; d + 1 < v.shape.size(); ++d) rows *= v.shape[d];
  ScaledTensors t{};
  if (v.backward) t.dy = p.in("grad", v.grad, v.shape);
  t.x = p.in("input", v.in, wide, edged);
  if (v.op->scaled) t.scales = p.in("act_scales", v.scales, {rows});
  t.y = p.out("output", v.out, v.backward ? wide : v.shape);
  if (v.op->scaled && v.backward && v.grad_scales)
    t.dscales = p.out("grad_scales", v.scales, {rows});
  set_numbers(p, v);
  if (v.wrong) {
    p.expect_error(TE_FL_INVALID_ARGUMENT,
                   "'glu_interleave_size' is " + std::to_string(v.interleave));
  }
  p.oracle([&p, v, t] {
    if (v.wrong) return p.expect_unchanged(t.y);
    ScaledVariant rounded = v;  // rounded to FP32, as the op receives them
    for (double* x : {&rounded.numbers.limit, &rounded.numbers.alpha, &rounded.numbers.offset,
                      &rounded.numbers.beta1, &rounded.numbers.beta2})
      *x = static_cast<double>(static_cast<float>(*x));
    expect_scaled(p, rounded, t);
  });
}

std::vector<ScaledVariant> list_variants(const ScaledOp& op, bool backward) {
  std::vector<ScaledVariant> all;
  const auto put = [&](ScaledVariant v) {
    v.op = &op, v.backward = backward;
    all.push_back(v);
  };
  for (int in : kHighTypes) {
    for (int out : kHighTypes) put({.in = in, .grad = in, .out = out, .scales = out});
    put({.in = in, .grad = in, .out = in, .shape = {44, 136}});  // complete groups of eight
  }
  put({.in = TE_FL_BF16,
       .grad = TE_FL_F32,
       .out = TE_FL_F16,
       .scales = TE_FL_BF16,
       .shape = {5, 18}});
  for (const Dims& shape : std::vector<Dims>{
           {0, 5}, {4, 0}, {1, 1}, {17}, {1, 2061}, {57, 1}, {3, 5, 2, 19}, {3, 1048}})
    put({.shape = shape});
  put({.in = TE_FL_BF16,
       .grad = TE_FL_BF16,
       .out = TE_FL_BF16,
       .shape = {300, 1024},
       .large = true});
  if (op.scaled && backward) put({.grad_scales = false});
  if (op.scaled && op.kind != ScaledKind::kSrelu) {
    for (int64_t turn : {1, 4, 11}) put({.shape = {5, 44}, .interleave = turn});
    for (int64_t turn : {8, 32})
      put({.in = TE_FL_BF16, .grad = TE_FL_BF16, .shape = {5, 1056}, .interleave = turn});
    put({.shape = {5, 44}, .interleave = 5, .wrong = true});
  }
  if (op.kind == ScaledKind::kClamped)
    put({.shape = {33, 65}, .numbers = {.limit = 1.5, .alpha = 1, .offset = -0.25}});
  if (op.kind == ScaledKind::kSitu) put({.numbers = {.beta1 = 0.5, .beta2 = 0.25}});
  return all;
}

void add_cases(Table& table) {
  for (const ScaledOp& op : kScaledOps)
    for (bool backward : {false, true})
      for (const ScaledVariant& v : list_variants(op, backward))
        add(
            table, "activation", backward ? op.gradient : op.name, scaled_name(v),
            [v](Problem& p) { scaled_problem(p, v); }, v.large);
}

void draw_cases(Drawn& drawn) {
  for (const ScaledOp& op : kScaledOps)
    for (bool backward : {false, true})
      drawn.cases("activation", backward ? op.gradient : op.name, [&](Draw& r) -> DrawnCase {
        ScaledVariant v{.op = &op, .backward = backward, .in = Drawn::high(r)};
        v.grad = Drawn::high(r), v.out = Drawn::high(r), v.scales = Drawn::high(r);
        v.shape = Drawn::shape(r);
        if (op.scaled && op.kind != ScaledKind::kSrelu && v.shape.back() % 4 == 0 &&
            Drawn::chance(r, 2)) {
          v.interleave = v.shape.back() / (Drawn::chance(r, 2) ? 2 : 4);
        }
        static constexpr double kFactors[] = {1, 0.125, 8};
        v.numbers.beta1 *= kFactors[r.below(3)], v.numbers.beta2 *= kFactors[r.below(3)];
        if (Drawn::chance(r, 2)) v.numbers.limit = Drawn::chance(r, 2) ? 1.5 : 20;
        if (Drawn::chance(r, 2)) v.numbers.alpha = 1, v.numbers.offset = -0.25;
        v.grad_scales = !Drawn::chance(r, 6);
        return {scaled_name(v), [v](Problem& p) { scaled_problem(p, v); }};
      });
}

}  // namespace
}  // namespace te_fl::conformance

namespace te_fl::huge {
namespace {

void add_cases(Cases& cases) {
  for (const conformance::ScaledOp& op : conformance::kScaledOps) {
    for (bool backward : {false, true}) {
      cases.push_back({backward ? op.gradient : op.name, "", [&op, backward](Run& r) {
                         scaled_calls::scaled(r, op, backward, kCols / 2);
                       }});
    }
  }
  cases.push_back({"scaled_dswiglu", "odd rows", [](Run& r) {
                     scaled_calls::scaled(r, conformance::kScaledOps[1], true, kOddCols);
                   }});
}

}  // namespace
}  // namespace te_fl::huge

namespace te_fl::bench {
namespace {

template <class Forward>
void scaled_forward(Cases& cases, const char* op, int64_t halves) {
  both_dtypes(cases, op, [halves](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<Forward>();
    a.input = c.in({rows, halves * c.cols()}, dtype), a.output = c.out({rows, c.cols()}, dtype);
    if constexpr (requires { a.act_scales; }) a.act_scales = c.in({rows}, TE_FL_F32);
  });
}
template <class Backward>
void scaled_backward(Cases& cases, const char* op, int64_t halves) {
  both_dtypes(cases, op, [halves](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<Backward>();
    a.grad = c.in({rows, c.cols()}, dtype), a.input = c.in({rows, halves * c.cols()}, dtype);
    a.output = c.out({rows, halves * c.cols()}, dtype);
    if constexpr (requires { a.act_scales; }) {
      a.act_scales = c.in({rows}, TE_FL_F32), a.grad_scales = c.out({rows}, TE_FL_F32);
    }
  });
}

void add_cases(Cases& cases) {
  scaled_forward<te_fl_situglu_args>(cases, "situglu", 2);
  scaled_backward<te_fl_dsituglu_args>(cases, "dsituglu", 2);
  scaled_forward<te_fl_scaled_swiglu_args>(cases, "scaled_swiglu", 2);
  scaled_backward<te_fl_scaled_dswiglu_args>(cases, "scaled_dswiglu", 2);
  scaled_forward<te_fl_scaled_clamped_swiglu_args>(cases, "scaled_clamped_swiglu", 2);
  scaled_backward<te_fl_scaled_clamped_dswiglu_args>(cases, "scaled_clamped_dswiglu", 2);
  scaled_forward<te_fl_scaled_srelu_args>(cases, "scaled_srelu", 1);
  scaled_backward<te_fl_scaled_dsrelu_args>(cases, "scaled_dsrelu", 1);
  scaled_forward<te_fl_scaled_situglu_args>(cases, "scaled_situglu", 2);
  scaled_backward<te_fl_scaled_dsituglu_args>(cases, "scaled_dsituglu", 2);
}

}  // namespace
}  // namespace te_fl::bench

namespace te_fl::conformance {

extern const CaseFile scaled_activation_cases{
    .cases = add_cases, .drawn = draw_cases, .huge = huge::add_cases, .bench = bench::add_cases};

}  // namespace te_fl::conformance
