// Activations with a scale per row, and SiTU-GLU.
#include <cmath>
#include <vector>

#include "activation.hpp"
#include "element.hpp"
#include "families.hpp"
#include "te_fl/backend/row_layouts.hpp"
#include "te_fl/ops/activation.h"

namespace te_fl::reference {
namespace {

// The value of a gated activation of (a, b) and its derivatives with respect to a and b.
// Activations without b have kHalves 1.
struct GateAt {
  double value, by_a, by_b;
};

struct SreluGate {
  static constexpr int64_t kHalves = 1;
  GateAt operator()(double a, double) const { return {Srelu::value(a), Srelu::derivative(a), 0.0}; }
};
struct SwigluGate {
  static constexpr int64_t kHalves = 2;
  GateAt operator()(double a, double b) const {
    return {Silu::value(a) * b, Silu::derivative(a) * b, Silu::value(a)};
  }
};
struct ClampedGate {
  static constexpr int64_t kHalves = 2;
  double limit, alpha, offset;
  // Minimum with `limit`, and clamp to [-limit, limit]. Both functions return NaN for NaN.
  double high(double x) const { return x > limit ? limit : x; }
  double both(double x) const { return high(x < -limit ? -limit : x); }
  GateAt operator()(double a, double b) const {
    const double act = swish(high(a), alpha), gate = both(b) + offset;
    return {act * gate, a > limit ? 0.0 : swish_derivative(a, alpha) * gate,
            std::abs(b) > limit ? 0.0 : act};
  }
};
struct SituGate {
  static constexpr int64_t kHalves = 2;
  double beta1, beta2;
  GateAt operator()(double a, double b) const {
    const double ta = std::tanh(a / beta1), tb = std::tanh(b / beta2);
    const double first = beta1 * ta * sigmoid(a), second = beta2 * tb;
    const double slope = (1.0 - ta * ta) * sigmoid(a) + beta1 * ta * sigmoid_derivative(a);
    return {first * second, slope * second, first * (1.0 - tb * tb)};
  }
};

// The rows of a call. The tensor of scales may be NULL.
template <class G>
struct GatedRows {
  G gate;
  backend::HalvesOfRow row;
  int64_t count, width;
  std::vector<double> scales;

  GatedRows(const G& g, const te_fl_tensor& narrow, const te_fl_tensor* factors, int64_t interleave)
      : gate(g), row{backend::as_matrix(narrow).cols, interleave} {
    count = backend::as_matrix(narrow).rows, width = G::kHalves * row.half;
    if (factors != nullptr) scales = Reader(*factors).all_double();
  }
  double scale(int64_t i) const { return scales.empty() ? 1.0 : scales[static_cast<size_t>(i)]; }
  GateAt at(const std::vector<double>& x, int64_t col) const {
    const auto a = static_cast<size_t>(row.place_of_a(col));
    const size_t b = a + static_cast<size_t>(row.distance());
    return gate(x[a], G::kHalves == 2 ? x[b] : 0.0);
  }
};

template <class G>
void gate_forward(const G& gate, const te_fl_tensor& input, const te_fl_tensor* scales,
                  const te_fl_tensor& output, int64_t interleave) {
  const GatedRows<G> rows(gate, output, scales, interleave);
  const int64_t half = rows.row.half;
  if (rows.count == 0) return;
  std::vector<double> x(static_cast<size_t>(rows.width)), y(static_cast<size_t>(half));
  for (int64_t i = 0; i < rows.count; ++i) {
    Reader(input).read(i * rows.width, rows.width, x.data());
    for (int64_t c = 0; c < half; ++c) {
      y[static_cast<size_t>(c)] = rows.scale(i) * rows.at(x, c).value;
    }
    Writer(output).write(i * half, half, y.data());
  }
}

struct ScaledGradient {
  // `scales` and `grad_scales` may be NULL.
  const te_fl_tensor *grad, *input, *scales, *output, *grad_scales;
};
template <class G>
void gate_backward(const G& gate, const ScaledGradient& g, int64_t interleave) {
  const GatedRows<G> rows(gate, *g.grad, g.scales, interleave);
  const int64_t half = rows.row.half;
  if (rows.count == 0) return;
  std::vector<double> x(static_cast<size_t>(rows.width)), dx(x.size());
  std::vector<double> dy(static_cast<size_t>(half)), sums(static_cast<size_t>(rows.count));
  for (int64_t i = 0; i < rows.count; ++i) {
    Reader(*g.input).read(i * rows.width, rows.width, x.data());
    Reader(*g.grad).read(i * half, half, dy.data());
    for (int64_t c = 0; c < half; ++c) {
      const GateAt at = rows.at(x, c);
      const double grad = dy[static_cast<size_t>(c)], scaled = grad * rows.scale(i);
      const auto a = static_cast<size_t>(rows.row.place_of_a(c));
      dx[a] = scaled * at.by_a;
      if (G::kHalves == 2) dx[a + static_cast<size_t>(rows.row.distance())] = scaled * at.by_b;
      sums[static_cast<size_t>(i)] += grad * at.value;
    }
    Writer(*g.output).write(i * rows.width, rows.width, dx.data());
  }
  if (g.grad_scales != nullptr) Writer(*g.grad_scales).write(0, rows.count, sums.data());
}

// ---- calls

template <class Args>
auto gate_of(const Args& a) {
  if constexpr (requires { a.beta1; }) {
    return SituGate{a.beta1, a.beta2};
  } else if constexpr (requires { a.limit; }) {
    return ClampedGate{a.limit, a.alpha, a.glu_linear_offset};
  } else if constexpr (requires { a.glu_interleave_size; }) {
    return SwigluGate{};
  } else {
    return SreluGate{};
  }
}
template <class Args>
int64_t interleave_of(const Args& a) {
  if constexpr (requires { a.glu_interleave_size; }) {
    return a.glu_interleave_size;
  } else {
    return 0;
  }
}

template <class Args>
void run_forward(const te_fl_context&, const Args& a) {
  const te_fl_tensor* scales = nullptr;
  if constexpr (requires { a.act_scales; }) scales = a.act_scales;
  gate_forward(gate_of(a), *a.input, scales, *a.output, interleave_of(a));
}
template <class Args>
void run_backward(const te_fl_context&, const Args& a) {
  ScaledGradient g{a.grad, a.input, nullptr, a.output, nullptr};
  if constexpr (requires { a.act_scales; }) g.scales = a.act_scales, g.grad_scales = a.grad_scales;
  gate_backward(gate_of(a), g, interleave_of(a));
}

template <class Forward, class Backward>
void append_gate(std::vector<te_fl_op_desc>& ops, const char* name, const char* gradient) {
  ops.push_back(descriptor<Forward, run_forward<Forward>>(name));
  ops.push_back(descriptor<Backward, run_backward<Backward>>(gradient));
}

}  // namespace

void append_scaled_activation(std::vector<te_fl_op_desc>& ops) {
  append_gate<te_fl_situglu_args, te_fl_dsituglu_args>(ops, "situglu", "dsituglu");
  append_gate<te_fl_scaled_swiglu_args, te_fl_scaled_dswiglu_args>(ops, "scaled_swiglu",
                                                                   "scaled_dswiglu");
  append_gate<te_fl_scaled_clamped_swiglu_args, te_fl_scaled_clamped_dswiglu_args>(
      ops, "scaled_clamped_swiglu", "scaled_clamped_dswiglu");
  append_gate<te_fl_scaled_srelu_args, te_fl_scaled_dsrelu_args>(ops, "scaled_srelu",
                                                                 "scaled_dsrelu");
  append_gate<te_fl_scaled_situglu_args, te_fl_scaled_dsituglu_args>(ops, "scaled_situglu",
                                                                     "scaled_dsituglu");
}

}  // namespace te_fl::reference
