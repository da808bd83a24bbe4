// The activation ops: forward, gradient, and gradient with the bias gradient.
#include "te_fl/ops/activation.h"

#include "activation.hpp"

#include "element.hpp"
#include "families.hpp"

namespace te_fl::reference {
namespace {

template <class Act>
void forward(const te_fl_context&, const te_fl_activation_act_fwd_args& args) {
  const Reader input(*args.input);
  const int64_t cols = backend::as_matrix(*args.output).cols;
  store_output(*args.output, {args.input}, [&](int64_t row, int64_t col, int64_t n, float* out) {
    input.read(row * cols + col, n, out);
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(Act::value(out[i]));
  });
}

// Returns a Produce function that computes the gradient of x. Args must have the tensors grad,
// input and output of equal shape.
template <class Act, class Args>
Produce gradient(const Args& args) {
  const int64_t cols = backend::as_matrix(*args.output).cols;
  return [grad = Reader(*args.grad), input = Reader(*args.input), cols](int64_t row, int64_t col,
                                                                        int64_t n, float* out) {
    std::vector<float> x(static_cast<size_t>(n));
    input.read(row * cols + col, n, x.data());
    grad.read(row * cols + col, n, out);
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(out[i] * Act::derivative(x[i]));
  };
}

template <class Act>
void backward(const te_fl_context&, const te_fl_activation_act_bwd_args& args) {
  store_output(*args.output, {args.grad, args.input}, gradient<Act>(args));
}

template <class Act>
void backward_dbias(const te_fl_context&, const te_fl_activation_dbias_act_args& args) {
  const Produce dx = gradient<Act>(args);
  // Sums the columns before the output is written, because the output may share the inputs' memory.
  const backend::Matrix matrix = backend::as_matrix(*args.output);
  std::vector<double> sums(static_cast<size_t>(matrix.cols), 0.0);
  std::vector<float> values(static_cast<size_t>(matrix.cols));
  for (int64_t row = 0; row < matrix.rows; ++row) {
    dx(row, 0, matrix.cols, values.data());
    for (int64_t c = 0; c < matrix.cols; ++c) sums[c] += values[c];
  }
  store_output(*args.output, {args.grad, args.input}, dx);
  const std::vector<float> rounded(sums.begin(), sums.end());
  Writer(*args.dbias).write(0, matrix.cols, rounded.data());
}

// Computes a gated activation: the output is gate(a, b), where a and b are the halves of an input
// row.
template <class Args, class Gate>
void gated(const Args& args, Gate gate) {
  const Reader input(*args.input);
  const int64_t half = backend::as_matrix(*args.output).cols;
  const Produce values = [&](int64_t row, int64_t col, int64_t n, float* out) {
    std::vector<float> b(static_cast<size_t>(n));
    input.read(row * 2 * half + col, n, out);
    input.read(row * 2 * half + half + col, n, b.data());
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(gate(out[i], b[i]));
  };
  store_output(*args.output, {args.input}, values, Access::kAnywhere);
}

// Computes the gradient of a gated activation's input [a, b]: the first half is da(dy, a, b), the
// second db(dy, a, b).
template <class Args, class GradA, class GradB>
void gated_gradient(const Args& args, GradA da, GradB db) {
  const Reader grad(*args.grad);
  const Reader input(*args.input);
  const int64_t half = backend::as_matrix(*args.output).cols / 2;
  const Produce values = [&](int64_t row, int64_t col, int64_t n, float* out) {
    std::vector<float> dy(static_cast<size_t>(n)), a(dy.size()), b(dy.size());
    while (n > 0) {
      const bool first = col < half;
      const int64_t c = first ? col : col - half;
      const int64_t count = std::min(n, half - c);
      grad.read(row * half + c, count, dy.data());
      input.read(row * 2 * half + c, count, a.data());
      input.read(row * 2 * half + half + c, count, b.data());
      for (int64_t i = 0; i < count; ++i) {
        out[i] = static_cast<float>(first ? da(dy[i], a[i], b[i]) : db(dy[i], a[i], b[i]));
      }
      out += count;
      col += count;
      n -= count;
    }
  };
  store_output(*args.output, {args.grad, args.input}, values, Access::kAnywhere);
}

template <class Act>
void gated_forward(const te_fl_context&, const te_fl_activation_glu_fwd_args& args) {
  gated(args, [](double a, double b) { return Act::value(a) * b; });
}

template <class Act>
void gated_backward(const te_fl_context&, const te_fl_activation_glu_bwd_args& args) {
  gated_gradient(
      args, [](double dy, double a, double b) { return dy * Act::derivative(a) * b; },
      [](double dy, double a, double) { return dy * Act::value(a); });
}

// Minimum with `limit`, and clamp to [-limit, limit]. Both functions return NaN for NaN.
double clamp_high(double x, double limit) { return x > limit ? limit : x; }
double clamp_both(double x, double limit) { return clamp_high(x < -limit ? -limit : x, limit); }

void clamped_forward(const te_fl_context&, const te_fl_activation_clamped_fwd_args& args) {
  const double limit = args.limit, alpha = args.alpha, offset = args.glu_linear_offset;
  gated(args, [=](double a, double b) {
    return swish(clamp_high(a, limit), alpha) * (clamp_both(b, limit) + offset);
  });
}

void clamped_backward(const te_fl_context&, const te_fl_activation_clamped_bwd_args& args) {
  const double limit = args.limit, alpha = args.alpha, offset = args.glu_linear_offset;
  gated_gradient(
      args,
      [=](double dy, double a, double b) {
        if (a > limit) return 0.0;
        return dy * swish_derivative(a, alpha) * (clamp_both(b, limit) + offset);
      },
      [=](double dy, double a, double b) {
        if (std::abs(b) > limit) return 0.0;
        return dy * swish(clamp_high(a, limit), alpha);
      });
}

using Ops = std::vector<te_fl_op_desc>;

template <class Act>
void append_plain(Ops& ops, const char* name, const char* gradient_name, const char* dbias_name) {
  ops.push_back(descriptor<te_fl_activation_act_fwd_args, forward<Act>>(name));
  ops.push_back(descriptor<te_fl_activation_act_bwd_args, backward<Act>>(gradient_name));
  ops.push_back(descriptor<te_fl_activation_dbias_act_args, backward_dbias<Act>>(dbias_name));
}

template <class Act>
void append_gated(Ops& ops, const char* name, const char* gradient_name) {
  ops.push_back(descriptor<te_fl_activation_glu_fwd_args, gated_forward<Act>>(name));
  ops.push_back(descriptor<te_fl_activation_glu_bwd_args, gated_backward<Act>>(gradient_name));
}

}  // namespace

void append_activation(Ops& ops) {
  append_plain<Gelu>(ops, "gelu", "dgelu", "dbias_dgelu");
  append_plain<Qgelu>(ops, "qgelu", "dqgelu", "dbias_dqgelu");
  append_plain<Relu>(ops, "relu", "drelu", "dbias_drelu");
  append_plain<Srelu>(ops, "srelu", "dsrelu", "dbias_dsrelu");
  append_plain<Silu>(ops, "silu", "dsilu", "dbias_dsilu");
  append_gated<Gelu>(ops, "geglu", "dgeglu");
  append_gated<Qgelu>(ops, "qgeglu", "dqgeglu");
  append_gated<Relu>(ops, "reglu", "dreglu");
  append_gated<Srelu>(ops, "sreglu", "dsreglu");
  append_gated<Silu>(ops, "swiglu", "dswiglu");
  append_gated<Sigmoid>(ops, "glu", "dglu");
  ops.push_back(descriptor<te_fl_activation_clamped_fwd_args, clamped_forward>("clamped_swiglu"));
  ops.back().later_args = "glu_linear_offset";
  ops.push_back(descriptor<te_fl_activation_clamped_bwd_args, clamped_backward>("clamped_dswiglu"));
  ops.back().later_args = "glu_linear_offset";
}

}  // namespace te_fl::reference
