// Activations with a factor for each row, on huge tensors.
#pragma once

#include "conformance/huge/cases.hpp"
#include "conformance/oracle_activation.hpp"
#include "te_fl/ops/activation.h"

namespace te_fl::huge::scaled_calls {

using conformance::ScaledKind;
using conformance::ScaledOp;
using conformance::ScaledResult;

struct ScaledTensors {
  Tensor grad, input, scales, output, grad_scales;
};

template <class Args>
void call_with(Run& run, const char* op, const ScaledTensors& t) {
  Args args{};
  args.input = t.input, args.output = t.output;
  if constexpr (requires { args.grad; }) args.grad = t.grad;
  if constexpr (requires { args.act_scales; }) args.act_scales = t.scales;
  if constexpr (requires { args.grad_scales; }) args.grad_scales = t.grad_scales;
  run.call(op, &args);
}

inline void call(Run& run, const ScaledOp& op, bool backward, const ScaledTensors& t) {
  const char* const name = backward ? op.gradient : op.name;
  const auto either = [&]<class Forward, class Backward>(Forward, Backward) {
    if (backward) return call_with<Backward>(run, name, t);
    call_with<Forward>(run, name, t);
  };
  switch (op.kind) {
    case ScaledKind::kSrelu:
      return either(te_fl_scaled_srelu_args{}, te_fl_scaled_dsrelu_args{});
    case ScaledKind::kSwiglu:
      return either(te_fl_scaled_swiglu_args{}, te_fl_scaled_dswiglu_args{});
    case ScaledKind::kClamped:
      return either(te_fl_scaled_clamped_swiglu_args{}, te_fl_scaled_clamped_dswiglu_args{});
    default:
      if (op.scaled) return either(te_fl_scaled_situglu_args{}, te_fl_scaled_dsituglu_args{});
      either(te_fl_situglu_args{}, te_fl_dsituglu_args{});
  }
}

inline void scaled(Run& run, const ScaledOp& op, bool backward, int64_t half) {
  const Pattern pattern(1), grads(2), weights(3);
  const int64_t halves = op.kind == ScaledKind::kSrelu ? 1 : 2, width = halves * half;
  const int64_t rows = run.rows(backward ? width : half, 1);
  ScaledTensors t;
  t.input = run.input({rows, width}, pattern);
  if (backward) t.grad = run.input({rows, half}, grads);
  t.scales = run.input({rows}, weights, DType::kF32);
  t.output = run.output({rows, backward ? width : half});
  t.grad_scales = run.output({rows}, DType::kF32);
  if (run.failed()) return;
  call(run, op, backward, t);
  const auto at = [&](int64_t row, int64_t col) {
    const int64_t a = row * width + col;
    return scaled_result(op.kind, {}, pattern.at(a), halves == 2 ? pattern.at(a + half) : 0);
  };
  const auto scale = [&](int64_t row) { return op.scaled ? double{weights.at(row)} : 1.0; };
  if (!backward) {
    run.expect(
        t.output, "output", [&](int64_t i) { return scale(i / half) * at(i / half, i % half).y; },
        0x1p-8, 1e-4);
    return;
  }
  run.expect(
      t.output, "output",
      [&](int64_t i) {
        const int64_t row = i / width, col = i % width % half;
        const ScaledResult r = at(row, col);
        return scale(row) * grads.at(row * half + col) * (i % width < half ? r.da : r.db);
      },
      0x1p-8, 1e-4);
  if (!op.scaled) return;
  const auto sum = [&](int64_t row) {
    double total = 0, size = 0;
    for (int64_t c = 0; c < half; ++c) {
      const double term = grads.at(row * half + c) * at(row, c).y;
      total += term, size += std::fabs(term);
    }
    return Near{total, 2e-6 * size + 1e-6};
  };
  run.expect_near(t.grad_scales, "grad_scales", sum, Run::kFew);
}

}  // namespace te_fl::huge::scaled_calls
