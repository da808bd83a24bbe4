// Optimisers over lists with a small tensor and one of more than 2^31 elements.
#pragma once

#include "conformance/huge/cases.hpp"
#include "conformance/huge/multi_tensor.hpp"
#include "conformance/huge/quantised.hpp"

namespace te_fl::huge::optimizer_calls {

using multi_tensor_calls::kSmall;
using multi_tensor_calls::List;

// The third step of AdamW for one element.
struct Adam {
  double m, v, p;
  Adam(double g, double m0, double v0, double p0) {
    m = 0.9f * m0 + (1 - double{0.9f}) * g;
    v = 0.999f * v0 + (1 - double{0.999f}) * g * g;
    const double m_hat = m / (1 - std::pow(double{0.9f}, 3)),
                 v_hat = v / (1 - std::pow(double{0.999f}, 3));
    p = p0 - double{0.01f} * (m_hat / (std::sqrt(v_hat) + 1e-8) + double{0.1f} * p0);
  }
};

struct AdamState {
  Pattern grad{1}, weight{2}, mean{3}, square{4, true};
  Adam at(int64_t i) const { return {grad.at(i), mean.at(i), square.at(i), weight.at(i)}; }
};

inline void set_constants(te_fl_multi_tensor_adam_args& args, int64_t count) {
  args.grads_count = args.params_count = args.exp_avgs_count = args.exp_avg_sqs_count = count;
  args.lr = 0.01f, args.weight_decay = 0.1f, args.step = 3, args.mode = TE_FL_ADAM_MODE_ADAMW;
}

// Adam. `master`: BF16 parameters with FP32 master weights.
inline void adam(Run& run, bool master) {
  const AdamState state;
  const int64_t size = run.elements();
  const DType weights = master ? DType::kBF16 : DType::kF32;
  const List g(run, size, state.grad, DType::kBF16), m(run, size, state.mean, DType::kF32),
      v(run, size, state.square, DType::kF32), p(run, size, state.weight, weights);
  const List full(run.input({kSmall}, state.weight, DType::kF32),
                  master ? run.input({size}, state.weight, DType::kF32) : Tensor());
  te_fl_multi_tensor_adam_args args{};
  args.grads = g.views, args.params = p.views, args.exp_avgs = m.views, args.exp_avg_sqs = v.views;
  set_constants(args, 2);
  if (master) args.master_params = full.views, args.master_params_count = 2;
  run.call("multi_tensor_adam", &args);
  const auto weight = [&](int64_t i) { return state.at(i).p; };
  for (int i = 0; i < 2; ++i) {
    run.expect(p.tensors[i], "params", weight, master ? 0x1p-8 : 1e-5, 1e-5);
    run.expect(
        m.tensors[i], "exp_avgs", [&](int64_t at) { return state.at(at).m; }, 1e-5, 1e-6);
    run.expect(
        v.tensors[i], "exp_avg_sqs", [&](int64_t at) { return state.at(at).v; }, 1e-5, 1e-6);
    if (master) run.expect(full.tensors[i], "master_params", weight, 1e-5, 1e-5);
  }
}

inline void adam_into_codes(Run& run, int64_t cols) {
  const AdamState state;
  const int64_t rows = run.rows(cols, cols % 16 == 0 ? 16 : 1), place = rows * cols - 5;
  const Shape shape = {rows, cols};
  const Tensor g = run.input(shape, state.grad), p = run.input(shape, state.weight, DType::kF32),
               m = run.input(shape, state.mean, DType::kF32),
               v = run.input(shape, state.square, DType::kF32);
  run.set(p, place, 24);
  const Quantised codes(run, shape, {.columnwise = true});
  const te_fl_tensor *grads[] = {g}, *params[] = {p}, *means[] = {m}, *squares[] = {v},
                     *outs[] = {codes};
  te_fl_multi_tensor_adam_args args{};
  args.grads = grads, args.params = params, args.exp_avgs = means, args.exp_avg_sqs = squares;
  args.fp8_params = outs, args.fp8_params_count = 1;
  set_constants(args, 1);
  run.call("multi_tensor_adam", &args);
  const auto weight = [&](int64_t i) {
    return Adam(state.grad.at(i), state.mean.at(i), state.square.at(i),
                i == place ? 24 : state.weight.at(i))
        .p;
  };
  run.expect(p, "params", weight, 1e-5, 1e-5);
  codes.expect(run, weight, weight(place), false);
}

// SGD with Nesterov momentum, weight decay and a BF16 copy.
inline void sgd(Run& run) {
  const Pattern grad(1), weight(2), moment(3);
  const int64_t size = run.elements();
  const List g(run, size, grad, DType::kBF16), p(run, size, weight, DType::kF32),
      m(run, size, moment, DType::kF32);
  const List copies(run.output({kSmall}), run.output({size}));
  te_fl_multi_tensor_sgd_args args{};
  args.grads = g.views, args.params = p.views, args.momentums = m.views,
  args.param_copies = copies.views;
  args.grads_count = args.params_count = args.momentums_count = args.param_copies_count = 2;
  args.lr = 0.1f, args.weight_decay = 0.01f, args.momentum = 0.9f, args.dampening = 0.1f;
  args.scale = 0.5f, args.nesterov = 1;
  run.call("multi_tensor_sgd", &args);
  const auto with_decay = [&](int64_t i) {
    return 0.5 * grad.at(i) + double{0.01f} * weight.at(i);
  };
  const auto momentum = [&](int64_t i) {
    return double{0.9f} * moment.at(i) + (1 - double{0.1f}) * with_decay(i);
  };
  const auto updated = [&](int64_t i) {
    return weight.at(i) - double{0.1f} * (with_decay(i) + double{0.9f} * momentum(i));
  };
  for (int i = 0; i < 2; ++i) {
    run.expect(m.tensors[i], "momentums", momentum, 1e-5, 1e-6);
    run.expect(p.tensors[i], "params", updated, 1e-5, 1e-6);
    run.expect(copies.tensors[i], "param_copies", updated);
  }
}

}  // namespace te_fl::huge::optimizer_calls
