// Activations, their gradients, and gradients with a bias gradient on huge tensors. Each op runs
// once in BF16; quantised outputs and odd extents are tested with one op each.
#pragma once

#include "conformance/huge/cases.hpp"
#include "conformance/huge/quantised.hpp"
#include "conformance/oracle_activation.hpp"

namespace te_fl::huge::activation_calls {

using conformance::Activation;
using conformance::kGelu;
using conformance::kQgelu;
using conformance::kRelu;
using conformance::kSigmoid;
using conformance::kSilu;
using conformance::kSrelu;
using conformance::sigmoid;

constexpr const Activation* kPlain[] = {&kGelu, &kQgelu, &kRelu, &kSrelu, &kSilu};

struct Gate {
  const char* name;
  const Activation* act;
};
constexpr Gate kGates[] = {{"geglu", &kGelu},   {"qgeglu", &kQgelu}, {"reglu", &kRelu},
                           {"sreglu", &kSrelu}, {"swiglu", &kSilu},  {"glu", &kSigmoid}};

// The largest input element of cases with FP8 output. The index of the result in the output is
// above 2^31.
constexpr float kOutlier = 20;

// A pattern of input values with one element replaced by kOutlier.
struct Marked {
  Pattern pattern{1};
  int64_t place = -1;
  double operator()(int64_t i) const { return i == place ? kOutlier : double{pattern.at(i)}; }
};
inline Tensor marked_input(Run& run, const Shape& shape, const Marked& x) {
  const Tensor t = run.input(shape, x.pattern);
  run.set(t, x.place, kOutlier);
  return t;
}

inline void forward(Run& run, const Activation& act, int64_t cols) {
  const Pattern pattern(1);
  const Shape shape = {run.rows(cols, 1), cols};
  const Tensor x = run.input(shape, pattern), y = run.output(shape);
  te_fl_activation_act_fwd_args args{};
  args.input = x, args.output = y;
  run.call(act.name, &args);
  run.expect(
      y, "output", [&](int64_t i) { return act.f(pattern.at(i)); }, 0x1p-8, 1e-4);
}

// Runs a forward on one row whose length is not a multiple of a vector or block size.
inline void forward_of_one_row(Run& run) {
  const Pattern pattern(1);
  const Tensor x = run.input({run.elements()}, pattern), y = run.output({run.elements()});
  te_fl_relu_args args{};
  args.input = x, args.output = y;
  run.call("relu", &args);
  run.expect(y, "output", [&](int64_t i) { return std::max(pattern.at(i), 0.0f); });
}

inline void forward_into_codes(Run& run, const char* op, double (*f)(double), int64_t cols,
                               const QuantSpec& spec) {
  const Shape shape = {run.rows(cols, cols == kCols ? 16 : 1), cols};
  Marked x;
  x.place = shape[0] * cols - 3;
  const Tensor input = marked_input(run, shape, x);
  const Quantised out(run, shape, spec);
  te_fl_activation_act_fwd_args args{};
  args.input = input, args.output = out;
  run.call(op, &args);
  out.expect(
      run, [&](int64_t i) { return f(x(i)); }, f(kOutlier), false);
}

inline void backward(Run& run, const Activation& act, int64_t cols, bool in_place) {
  const Pattern grad(2), input(1);
  const Shape shape = {run.rows(cols, 1), cols};
  const Tensor dy = run.input(shape, grad), x = run.input(shape, input);
  const Tensor dx = in_place ? dy : run.output(shape);
  te_fl_activation_act_bwd_args args{};
  args.grad = dy, args.input = x, args.output = dx;
  run.call(("d" + std::string(act.name)).c_str(), &args);
  run.expect(
      dx, "output", [&](int64_t i) { return grad.at(i) * act.df(input.at(i)); }, 0x1p-8, 1e-4);
}

inline void backward_with_bias(Run& run, const Activation& act, int64_t cols,
                               const QuantSpec* spec) {
  const Pattern grad(2);
  Marked input;
  const int64_t rows = run.rows(cols, cols == kCols ? 16 : 1);
  const Shape shape = {rows, cols};
  const Tensor dy = run.input(shape, grad);
  input.place = rows * cols - 5;  // where the derivative of all but srelu is 1
  const Tensor x = marked_input(run, shape, input), dbias = run.output({cols}, DType::kF32);
  run.set(dy, input.place, 16);
  const auto dx = [&](int64_t i) {
    return (i == input.place ? 16.0 : grad.at(i)) * act.df(input(i));
  };
  te_fl_activation_dbias_act_args args{};
  args.grad = dy, args.input = x, args.dbias = dbias;
  const std::string op = "dbias_d" + std::string(act.name);
  if (spec == nullptr) {
    const Tensor out = run.output(shape);
    args.output = out;
    run.call(op.c_str(), &args);
    run.expect(out, "output", dx, 0x1p-8, 1e-4);
  } else {
    const Quantised out(run, shape, *spec);
    args.output = out;
    run.call(op.c_str(), &args);
    out.expect(run, dx, std::fabs(dx(input.place)), false);
  }
  run.expect_sums(dbias, "dbias", rows, cols, dx);
}

// The result of act(a) b, or of clamped_swiglu if `act` is null.
inline double gated_value(const Activation* act, double a, double b) {
  if (act != nullptr) return act->f(a) * b;
  const double x = std::min(a, 7.0), y = std::clamp(b, -7.0, 7.0);
  return x * sigmoid(1.702 * x) * (y + 1);
}

inline void gated(Run& run, const std::string& op, const Activation* act, int64_t half) {
  const Pattern pattern(1);
  const int64_t rows = run.rows(2 * half, 1);
  const Tensor x = run.input({rows, 2 * half}, pattern), y = run.output({rows, half});
  te_fl_activation_clamped_fwd_args args{};  // the other ops' arguments are its first members
  te_fl_activation_glu_fwd_args plain{};
  args.input = plain.input = x, args.output = plain.output = y;
  run.call(op.c_str(), act == nullptr ? static_cast<void*>(&args) : &plain);
  run.expect(
      y, "output",
      [&](int64_t i) {
        const int64_t at = i / half * 2 * half + i % half;
        return gated_value(act, pattern.at(at), pattern.at(at + half));
      },
      0x1p-8, 1e-4);
}

inline void gated_into_codes(Run& run, const QuantSpec& spec) {
  const Pattern pattern(1);
  const int64_t half = kCols, rows = run.rows(half);  // the FP8 data alone exceed 2^31 elements
  const Tensor x = run.input({rows, 2 * half}, pattern);
  run.set(x, rows * 2 * half - half - 1, kOutlier);
  run.set(x, rows * 2 * half - 1, 16);
  const Quantised out(run, {rows, half}, spec);
  te_fl_swiglu_args args{};
  args.input = x, args.output = out;
  run.call("swiglu", &args);
  const auto value = [&](int64_t i) {
    if (i == rows * half - 1) return kSilu.f(kOutlier) * 16;
    const int64_t at = i / half * 2 * half + i % half;
    return kSilu.f(pattern.at(at)) * pattern.at(at + half);
  };
  out.expect(run, value, value(rows * half - 1), false);
}

// Element i of the gradient, which is a [rows, 2 half] matrix.
inline double gated_slope(const Activation* act, const Pattern& grad, const Pattern& x,
                          int64_t half, int64_t i) {
  const int64_t row = i / (2 * half), col = i % (2 * half);
  const double dy = grad.at(row * half + col % half), a = x.at(row * 2 * half + col % half),
               b = x.at(row * 2 * half + col % half + half);
  const bool first = col < half;
  if (act != nullptr) return first ? dy * act->df(a) * b : dy * act->f(a);
  const double u = std::min(a, 7.0), s = sigmoid(1.702 * u);
  if (!first) return std::fabs(b) > 7 ? 0 : dy * u * s;
  return a > 7 ? 0 : dy * (s + u * 1.702 * s * (1 - s)) * (std::clamp(b, -7.0, 7.0) + 1);
}

inline void gated_backward(Run& run, const std::string& op, const Activation* act, int64_t half,
                           const QuantSpec* spec) {
  const Pattern grad(2), pattern(1);
  const int64_t rows = run.rows(2 * half, half == kCols / 2 ? 16 : 1);
  const Tensor dy = run.input({rows, half}, grad), x = run.input({rows, 2 * half}, pattern);
  te_fl_activation_clamped_bwd_args args{};
  te_fl_activation_glu_bwd_args plain{};
  args.grad = plain.grad = dy, args.input = plain.input = x;
  const void* call_args = act == nullptr ? static_cast<void*>(&args) : &plain;
  const auto value = [&](int64_t i) { return gated_slope(act, grad, pattern, half, i); };
  if (spec == nullptr) {
    const Tensor dx = run.output({rows, 2 * half});
    args.output = plain.output = dx;
    run.call(op.c_str(), call_args);
    run.expect(dx, "output", value, 0x1p-8, 1e-4);
    return;
  }
  const Quantised out(run, {rows, 2 * half}, *spec);
  args.output = plain.output = out;
  run.call(op.c_str(), call_args);
  out.expect(run, value, 0, false);  // block-scaled, so there is no common amax
}

constexpr QuantSpec kTensor{.columnwise = true};
constexpr QuantSpec kGradient{.dtype = DType::kF8E5M2, .columnwise = true};
constexpr QuantSpec kCurrent{.columnwise = true, .compute_scale = true};
constexpr QuantSpec kLines{.scaling = Scaling::kBlock1x128, .columnwise = true};
constexpr QuantSpec kSquares{.scaling = Scaling::kBlock128x128, .columnwise = true};

}  // namespace te_fl::huge::activation_calls
