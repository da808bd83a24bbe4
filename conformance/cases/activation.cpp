#include <algorithm>

#include "conformance/case_file.hpp"
#include "conformance/compare.hpp"
#include "conformance/drawn.hpp"
#include "conformance/huge/activation.hpp"
#include "conformance/oracle_activation.hpp"
#include "te_fl/ops/activation.h"

namespace te_fl::conformance {
namespace {

constexpr int kHigh[] = {TE_FL_F32, TE_FL_F16, TE_FL_BF16};

// Gaussian values, with boundary values of the formulas at some indices.
double with_edges(Random& r, int64_t i) {
  static const double edges[] = {0, -0.0, 1e-30, -1e-8, 7, -7, 20, -20, 100, -100, 3e3, -3e3};
  return i % 97 == 5 ? edges[i / 97 % 12] : 2 * r.gaussian();
}

// As with_edges(), with numbers whose square is infinite in FP32.
double with_far(Random& r, int64_t i) {
  static const double far[] = {1e20, -1e20};
  return i % 23 == 5 ? far[i / 23 % 2] : with_edges(r, i);
}

enum class Form {
  kForward,
  kBackward,
  kGatedForward,
  kGatedBackward,
  kClampedForward,
  kClampedBackward,
  kBiasBackward
};

struct Op {
  const char* name;
  Form form;
  Activation act;
};

const Op kOps[] = {
    {"gelu", Form::kForward, kGelu},
    {"qgelu", Form::kForward, kQgelu},
    {"relu", Form::kForward, kRelu},
    {"srelu", Form::kForward, kSrelu},
    {"silu", Form::kForward, kSilu},
    {"dgelu", Form::kBackward, kGelu},
    {"dqgelu", Form::kBackward, kQgelu},
    {"drelu", Form::kBackward, kRelu},
    {"dsrelu", Form::kBackward, kSrelu},
    {"dsilu", Form::kBackward, kSilu},
    {"geglu", Form::kGatedForward, kGelu},
    {"qgeglu", Form::kGatedForward, kQgelu},
    {"reglu", Form::kGatedForward, kRelu},
    {"sreglu", Form::kGatedForward, kSrelu},
    {"swiglu", Form::kGatedForward, kSilu},
    {"glu", Form::kGatedForward, kSigmoid},
    {"dgeglu", Form::kGatedBackward, kGelu},
    {"dqgeglu", Form::kGatedBackward, kQgelu},
    {"dreglu", Form::kGatedBackward, kRelu},
    {"dsreglu", Form::kGatedBackward, kSrelu},
    {"dswiglu", Form::kGatedBackward, kSilu},
    {"dglu", Form::kGatedBackward, kSigmoid},
    {"clamped_swiglu", Form::kClampedForward, kSilu},
    {"clamped_dswiglu", Form::kClampedBackward, kSilu},
    {"dbias_dgelu", Form::kBiasBackward, kGelu},
    {"dbias_dqgelu", Form::kBiasBackward, kQgelu},
    {"dbias_drelu", Form::kBiasBackward, kRelu},
    {"dbias_dsrelu", Form::kBiasBackward, kSrelu},
    {"dbias_dsilu", Form::kBiasBackward, kSilu},
};

bool gated(Form f) { return f >= Form::kGatedForward && f <= Form::kClampedBackward; }
bool backward(Form f) {
  return f == Form::kBackward || f == Form::kGatedBackward || f == Form::kClampedBackward ||
         f == Form::kBiasBackward;
}

struct Variant {
  int in = TE_FL_F32;
  int grad = TE_FL_F32;
  Spec out = TE_FL_F32;
  int dbias = TE_FL_F32;
  Dims shape = {};
  std::string in_place = {};  // name of the input that the output overwrites
  double limit = 7, alpha = 1.702, offset = 1;
  bool large = false;
  bool far = false;  // the input has numbers whose square is infinite in FP32
};

std::string name_of_variant(const Op& op, const Variant& v) {
  std::string name = conformance::name_of(v.in);
  if (backward(op.form)) name += std::string("/grad=") + conformance::name_of(v.grad);
  name += "/" + dims_name(v.shape) + "/out=" + v.out.name();
  if (op.form == Form::kBiasBackward)
    name += std::string("/dbias=") + conformance::name_of(v.dbias);
  if (!v.in_place.empty()) name += "/in_place=" + v.in_place;
  if (v.limit != 7) name += "/limit=" + std::to_string(v.limit).substr(0, 4);
  if (v.alpha != 1.702) name += "/alpha";
  if (v.offset != 1) name += "/offset";
  if (v.far) name += "/far";
  return name;
}

// One gated element: (a, b, dy) -> y or (da, db). Limits and factors are rounded to FP32, as the op
// receives them.
struct Gate {
  double y, da, db;
};
Gate gate(const Op& op, double a, double b, double dy, double limit, double alpha, double offset) {
  if (op.form != Form::kClampedForward && op.form != Form::kClampedBackward)
    return {op.act.f(a) * b, dy * op.act.df(a) * b, dy * op.act.f(a)};
  const double ca = std::min(a, limit), cb = std::clamp(b, -limit, limit), s = sigmoid(alpha * ca);
  return {ca * s * (cb + offset),
          a > limit ? 0 : dy * (s + alpha * ca * s * (1 - s)) * (cb + offset),
          std::fabs(b) > limit ? 0 : dy * ca * s};
}

// A bound on the FP32 rounding error of an activation whose terms cancel. For |x| > 10 the terms do
// not cancel, so the bound does not grow further.
double cancelled(double x) { return 0x1p-22 * std::clamp(std::fabs(x), 1.0, 10.0); }

void expect_gated(Problem& p, const Op& op, const Variant& v, Tensor* x, Tensor* g, Tensor* y) {
  const int64_t h = v.shape.back(), rows = h == 0 ? 0 : x->numel() / (2 * h);
  const double limit = static_cast<double>(static_cast<float>(v.limit)),
               alpha = static_cast<double>(static_cast<float>(v.alpha)),
               offset = static_cast<double>(static_cast<float>(v.offset));
  std::vector<double> want(static_cast<size_t>(y->numel())), extra(want.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < h; ++j) {
      const double dy = g == nullptr ? 0 : g->get(i * h + j);
      const Gate r =
          gate(op, x->get(i * 2 * h + j), x->get(i * 2 * h + h + j), dy, limit, alpha, offset);
      // Near a zero of the activation or of its derivative, FP32 terms cancel, and the other
      // factors magnify the error.
      const double size = cancelled(x->get(i * 2 * h + j)) * std::fabs(x->get(i * 2 * h + h + j));
      if (g == nullptr) {
        extra[i * h + j] = size;
        want[i * h + j] = r.y;
      } else {
        extra[i * 2 * h + j] = std::fabs(dy) * (size + cancelled(1)),
                          extra[i * 2 * h + h + j] =
                              std::fabs(dy) * cancelled(x->get(i * 2 * h + j));
        want[i * 2 * h + j] = r.da, want[i * 2 * h + h + j] = r.db;
      }
    }
  }
  p.expect(y, want, extra);
}

void expect_plain(Problem& p, const Op& op, Tensor* x, Tensor* g, Tensor* y, Tensor* dbias) {
  std::vector<double> want(static_cast<size_t>(x->numel()));
  for (int64_t i = 0; i < x->numel(); ++i)
    want[i] = g == nullptr ? op.act.f(x->get(i)) : g->get(i) * op.act.df(x->get(i));
  std::vector<double> extra(want.size(), 0);
  for (int64_t i = 0; i < x->numel() && g != nullptr; ++i)
    extra[i] = std::fabs(g->get(i)) * cancelled(x->get(i));
  p.expect(y, want, extra);
  if (dbias == nullptr) return;
  const int64_t h = x->cols(), rows = x->rows();
  std::vector<double> sum(static_cast<size_t>(h)), tolerance(static_cast<size_t>(h));
  for (int64_t j = 0; j < h; ++j) {
    double magnitude = 0;
    for (int64_t i = 0; i < rows; ++i)
      sum[j] += want[i * h + j], magnitude += std::fabs(want[i * h + j]);
    // Each term of the sum has the FP32 tolerance of the derivative.
    tolerance[j] = sum_tolerance(static_cast<double>(rows), magnitude) + 1e-6 * magnitude;
  }
  p.expect(dbias, sum, tolerance).widen = 4;
}

std::function<void(Problem&)> builder(const Op& op, const Variant& v) {
  return [op, v](Problem& p) {
    Dims wide = v.shape;
    if (gated(op.form)) wide.back() *= 2;
    Tensor* g = backward(op.form) ? p.in("grad", v.grad, v.shape) : nullptr;
    Tensor* x = p.in("input", v.in, wide, v.far ? with_far : with_edges);
    Tensor* y = v.in_place == "input"  ? p.in_place("output", x)
                : v.in_place == "grad" ? p.in_place("output", g)
                                       : p.out("output", v.out, backward(op.form) ? wide : v.shape);
    Tensor* dbias =
        op.form == Form::kBiasBackward ? p.out("dbias", v.dbias, {v.shape.back()}) : nullptr;
    if (op.form == Form::kClampedForward || op.form == Form::kClampedBackward)
      p.set("limit", v.limit), p.set("alpha", v.alpha);
    if (v.offset != 1) p.set("glu_linear_offset", v.offset);
    p.oracle([&p, op, v, x, g, y, dbias] {
      if (gated(op.form))
        expect_gated(p, op, v, x, g, y);
      else
        expect_plain(p, op, x, g, y, dbias);
    });
  };
}

void add_variant(Table& table, const Op& op, const Variant& v) {
  add(table, "activation", op.name, name_of_variant(op, v), builder(op, v), v.large);
}

void add_op(Table& table, const Op& op) {
  auto variant = [&](const Variant& v) { add_variant(table, op, v); };
  for (int in : kHigh) {
    for (int out : kHigh)
      variant({.in = in, .grad = in, .out = out, .dbias = out, .shape = {7, 33}});
  }
  if (backward(op.form))
    variant({.in = TE_FL_BF16, .grad = TE_FL_F32, .out = TE_FL_F16, .shape = {5, 18}});
  for (int in : {TE_FL_F32, TE_FL_BF16})
    variant({.in = in, .grad = in, .out = in, .dbias = in, .shape = {6, 35}, .far = true});
  const Dims shapes[] = {{0, 5},    {4, 0},   {1, 1},        {17},
                         {1, 1021}, {257, 1}, {3, 5, 2, 19}, {130, 257}};
  for (const Dims& shape : shapes) variant({.shape = shape});
  variant({.in = TE_FL_BF16,
           .grad = TE_FL_BF16,
           .out = TE_FL_BF16,
           .shape = {300, 1024},
           .large = true});
  // Large enough that many threads run the first pass of current scaling.
  variant({.in = TE_FL_BF16,
           .grad = TE_FL_BF16,
           .out = quantised_specs()[7],
           .dbias = TE_FL_BF16,
           .shape = {304, 1024},
           .large = true});
  for (const Spec& spec : quantised_specs()) {
    variant({.in = TE_FL_BF16, .grad = TE_FL_BF16, .out = spec, .shape = {130, 258}});
    if (spec.row && spec.col && spec.dtype != TE_FL_F4E2M1)
      variant({.out = spec, .shape = {3, 7, 37}});
  }
  variant({.out = quantised_specs()[3], .shape = {0, 16}});
  // Multiples of the vector width in both directions, but not of the tile size.
  for (int in : kHigh) {
    variant({.in = in, .grad = in, .out = in, .shape = {144, 136}});
    variant({.in = in, .grad = in, .out = quantised_specs()[3], .shape = {144, 136}});
    variant({.in = in, .grad = in, .out = quantised_specs()[12], .shape = {144, 256}});
  }
  for (size_t s : {7u, 14u, 17u}) {
    variant({.in = TE_FL_BF16,
             .grad = TE_FL_BF16,
             .out = quantised_specs()[s],
             .dbias = TE_FL_BF16,
             .shape = {144, 200}});
  }
  if (op.form == Form::kBiasBackward) {  // few rows: one partial sum
    for (int dbias : kHigh)
      for (const Spec& out : {Spec(TE_FL_BF16), quantised_specs()[7], quantised_specs()[14]})
        variant({.in = TE_FL_BF16,
                 .grad = TE_FL_BF16,
                 .out = out,
                 .dbias = dbias,
                 .shape = {112, 200}});
  }
  if (op.form != Form::kGatedForward && op.form != Form::kClampedForward)
    variant({.shape = {9, 40}, .in_place = "input"});
  if (op.form == Form::kBackward || op.form == Form::kBiasBackward)
    variant({.shape = {9, 40}, .in_place = "grad"});
  if (op.form == Form::kClampedForward || op.form == Form::kClampedBackward) {
    variant({.shape = {33, 65}, .limit = 1.5});
    variant({.shape = {33, 65}, .limit = 0});
    variant({.in = TE_FL_BF16, .shape = {33, 65}, .alpha = 1});
    variant({.shape = {33, 65}, .limit = 1.5, .offset = -0.25});
  }
}

void add_cases(Table& table) {
  for (const Op& op : kOps) add_op(table, op);
}

void draw_cases(Drawn& drawn) {
  for (const Op& op : kOps)
    drawn.cases("activation", op.name, [&](Draw& r) -> DrawnCase {
      Variant v{.in = Drawn::high(r), .grad = Drawn::high(r), .shape = Drawn::shape(r)};
      Dims out = v.shape;
      if (op.form == Form::kGatedBackward || op.form == Form::kClampedBackward) out.back() *= 2;
      v.out = Drawn::output(r, out), v.dbias = Drawn::high(r);
      if (op.form == Form::kClampedForward || op.form == Form::kClampedBackward) {
        static constexpr double kLimits[] = {7, 0.75, 1.5, 20};
        v.limit = kLimits[r.below(4)], v.alpha = Drawn::chance(r, 2) ? 1.702 : 0.5;
        v.offset = Drawn::chance(r, 2) ? 1 : -0.25;
      }
      const bool same_shape = op.form != Form::kGatedForward && op.form != Form::kClampedForward;
      if (same_shape && !v.out.quantised() && Drawn::chance(r, 6)) {
        v.in_place = backward(op.form) && !gated(op.form) && Drawn::chance(r, 2) ? "grad" : "input";
        v.out = v.in_place == "grad" ? v.grad : v.in;
      }
      return {name_of_variant(op, v), builder(op, v)};
    });
}

}  // namespace
}  // namespace te_fl::conformance

namespace te_fl::huge {
namespace {

void add_cases(Cases& cases) {
  using namespace activation_calls;
  for (const Activation* act : kPlain) {
    const std::string name = act->name;
    cases.push_back({name, "", [act](Run& r) { forward(r, *act, kCols); }});
    cases.push_back({"d" + name, "", [act](Run& r) { backward(r, *act, kCols, false); }});
    cases.push_back(
        {"dbias_d" + name, "", [act](Run& r) { backward_with_bias(r, *act, kCols, nullptr); }});
  }
  for (const Gate& gate : kGates) {
    const std::string name = gate.name;
    const Activation* act = gate.act;
    cases.push_back({name, "", [=](Run& r) { gated(r, name, act, kCols / 2); }});
    cases.push_back(
        {"d" + name, "", [=](Run& r) { gated_backward(r, "d" + name, act, kCols / 2, nullptr); }});
  }
  const Cases more = {
      {"clamped_swiglu", "", [](Run& r) { gated(r, "clamped_swiglu", nullptr, kCols / 2); }},
      {"clamped_dswiglu", "",
       [](Run& r) { gated_backward(r, "clamped_dswiglu", nullptr, kCols / 2, nullptr); }},
      {"relu", "one row", forward_of_one_row},
      {"silu", "odd rows", [](Run& r) { forward(r, kSilu, kOddCols); }},
      {"dgelu", "odd rows, in place", [](Run& r) { backward(r, kGelu, kOddCols, true); }},
      {"dbias_dgelu", "odd rows", [](Run& r) { backward_with_bias(r, kGelu, kOddCols, nullptr); }},
      {"swiglu", "odd rows", [](Run& r) { gated(r, "swiglu", &kSilu, kOddCols); }},
      {"dswiglu", "odd rows",
       [](Run& r) { gated_backward(r, "dswiglu", &kSilu, kOddCols, nullptr); }},
      {"gelu", "codes", [](Run& r) { forward_into_codes(r, "gelu", kGelu.f, kCols, kTensor); }},
      {"gelu", "codes, odd rows",
       [](Run& r) { forward_into_codes(r, "gelu", kGelu.f, kOddCols, kTensor); }},
      {"srelu", "codes, current scaling",
       [](Run& r) { forward_into_codes(r, "srelu", kSrelu.f, kCols, kCurrent); }},
      {"silu", "codes, current scaling",
       [](Run& r) { forward_into_codes(r, "silu", kSilu.f, kCols, kCurrent); }},
      {"gelu", "codes in 1x128",
       [](Run& r) { forward_into_codes(r, "gelu", kGelu.f, kCols, kLines); }},
      {"relu", "codes in 128x128",
       [](Run& r) { forward_into_codes(r, "relu", kRelu.f, kCols, kSquares); }},
      {"dbias_dgelu", "codes", [](Run& r) { backward_with_bias(r, kGelu, kCols, &kGradient); }},
      {"dbias_dsilu", "codes, current scaling",
       [](Run& r) { backward_with_bias(r, kSilu, kCols, &kCurrent); }},
      {"dbias_dgelu", "codes in 1x128",
       [](Run& r) { backward_with_bias(r, kGelu, kCols, &kLines); }},
      {"swiglu", "codes", [](Run& r) { gated_into_codes(r, kTensor); }},
      {"swiglu", "codes, current scaling", [](Run& r) { gated_into_codes(r, kCurrent); }},
      {"swiglu", "codes in 1x128", [](Run& r) { gated_into_codes(r, kLines); }},
      {"dswiglu", "codes in 1x128",
       [](Run& r) { gated_backward(r, "dswiglu", &kSilu, kCols / 2, &kLines); }},
  };
  cases.insert(cases.end(), more.begin(), more.end());
}

}  // namespace
}  // namespace te_fl::huge

namespace te_fl::bench {
namespace {

void add_cases(Cases& cases) {
  for (const char* op : {"gelu", "qgelu", "relu", "srelu", "silu"}) {
    both_dtypes(cases, op, [](Case& c, int64_t rows, int dtype) {
      auto& a = c.args<te_fl_activation_act_fwd_args>();
      a.input = c.in({rows, c.cols()}, dtype), a.output = c.out({rows, c.cols()}, dtype);
    });
  }
  for (const char* op : {"geglu", "qgeglu", "reglu", "sreglu", "swiglu", "glu"}) {
    both_dtypes(cases, op, [](Case& c, int64_t rows, int dtype) {
      auto& a = c.args<te_fl_activation_glu_fwd_args>();
      a.input = c.in({rows, 2 * c.cols()}, dtype), a.output = c.out({rows, c.cols()}, dtype);
    });
  }
  both_dtypes(cases, "clamped_swiglu", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_activation_clamped_fwd_args>();
    a.input = c.in({rows, 2 * c.cols()}, dtype), a.output = c.out({rows, c.cols()}, dtype);
  });
  for (const char* op : {"dgelu", "dqgelu", "drelu", "dsrelu", "dsilu"}) {
    both_dtypes(cases, op, [](Case& c, int64_t rows, int dtype) {
      auto& a = c.args<te_fl_activation_act_bwd_args>();
      a.grad = c.in({rows, c.cols()}, dtype), a.input = c.in({rows, c.cols()}, dtype);
      a.output = c.out({rows, c.cols()}, dtype);
    });
  }
  const auto gated = [](auto& a, Case& c, int64_t rows, int dtype) {
    a.grad = c.in({rows, c.cols()}, dtype), a.input = c.in({rows, 2 * c.cols()}, dtype);
    a.output = c.out({rows, 2 * c.cols()}, dtype);
  };
  for (const char* op : {"dgeglu", "dqgeglu", "dreglu", "dsreglu", "dswiglu", "dglu"}) {
    both_dtypes(cases, op, [gated](Case& c, int64_t rows, int dtype) {
      gated(c.args<te_fl_activation_glu_bwd_args>(), c, rows, dtype);
    });
  }
  both_dtypes(cases, "clamped_dswiglu", [gated](Case& c, int64_t rows, int dtype) {
    gated(c.args<te_fl_activation_clamped_bwd_args>(), c, rows, dtype);
  });
  for (const char* op :
       {"dbias_dgelu", "dbias_dsilu", "dbias_drelu", "dbias_dqgelu", "dbias_dsrelu"}) {
    both_dtypes(cases, op, [](Case& c, int64_t rows, int dtype) {
      auto& a = c.args<te_fl_activation_dbias_act_args>();
      a.grad = c.in({rows, c.cols()}, dtype), a.input = c.in({rows, c.cols()}, dtype);
      a.output = c.out({rows, c.cols()}, dtype), a.dbias = c.out({c.cols()}, dtype);
    });
  }
}

}  // namespace
}  // namespace te_fl::bench

namespace te_fl::conformance {

extern const CaseFile activation_cases{
    .cases = add_cases, .drawn = draw_cases, .huge = huge::add_cases, .bench = bench::add_cases};

}  // namespace te_fl::conformance
