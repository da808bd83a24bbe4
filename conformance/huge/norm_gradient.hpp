// Gradients of layer and RMS norms of huge tensors. Means and reciprocal deviations are arbitrary
// numbers, since the gradient's formula does not depend on their origin.
#pragma once

#include "conformance/huge/cases.hpp"

namespace te_fl::huge::norm_gradient_calls {

constexpr int64_t kLong = 40000;  // exceeds the registers of every kernel

struct Backward {
  bool layer = true;
  bool add = false;
  int64_t cols = kCols;
  DType dtype = DType::kBF16;
};

struct Inputs {
  Pattern dz{1}, x{2}, gamma{3}, add{4}, mu{5}, rsigma{6, true};
  Backward b;

  double mean(int64_t row) const { return b.layer ? mu.at(row) : 0; }
  double normalised(int64_t i) const {
    const int64_t row = i / b.cols;
    return (x.at(i) - mean(row)) * rsigma.at(row);
  }
  double weighted(int64_t i) const { return double{dz.at(i)} * gamma.at(i % b.cols); }
};

inline void backward(Run& run, const Backward& b) {
  Inputs in;
  in.b = b;
  const int64_t rows = run.rows(b.cols, b.cols % 16 == 0 ? 16 : 1);
  const Shape shape = {rows, b.cols};
  const Tensor dz = run.input(shape, in.dz, b.dtype), x = run.input(shape, in.x, b.dtype),
               gamma = run.input({b.cols}, in.gamma), mu = run.input({rows}, in.mu, DType::kF32),
               rsigma = run.input({rows}, in.rsigma, DType::kF32),
               dgamma = run.output({b.cols}, DType::kF32),
               dbeta = run.output({b.cols}, DType::kF32), dx = run.output(shape, b.dtype);
  const Tensor add = b.add ? run.input(shape, in.add, b.dtype) : Tensor();
  if (b.layer) {
    te_fl_layernorm_bwd_args args{};
    args.dz = dz, args.x = x, args.mu = mu, args.rsigma = rsigma, args.gamma = gamma;
    args.dx = dx, args.dgamma = dgamma, args.dbeta = dbeta, args.add = add;
    run.call("layernorm_bwd", &args);
    run.expect_sums(dbeta, "dbeta", rows, b.cols, [&](int64_t i) { return in.dz.at(i); });
  } else if (b.add) {
    te_fl_rmsnorm_bwd_add_args args{};
    args.dz = dz, args.x = x, args.rsigma = rsigma, args.gamma = gamma, args.add = add;
    args.dx = dx, args.dgamma = dgamma;
    run.call("rmsnorm_bwd_add", &args);
  } else {
    te_fl_rmsnorm_bwd_args args{};
    args.dz = dz, args.x = x, args.rsigma = rsigma, args.gamma = gamma;
    args.dx = dx, args.dgamma = dgamma;
    run.call("rmsnorm_bwd", &args);
  }
  run.expect_sums(dgamma, "dgamma", rows, b.cols,
                  [&](int64_t i) { return in.dz.at(i) * in.normalised(i); });
  int64_t row = -1;
  double mean_d = 0, mean_dn = 0;
  run.expect(
      dx, "dx",
      [&](int64_t i) {
        if (i / b.cols != row) {
          row = i / b.cols, mean_d = mean_dn = 0;
          for (int64_t c = row * b.cols; c < (row + 1) * b.cols; ++c) {
            mean_d += in.weighted(c), mean_dn += in.weighted(c) * in.normalised(c);
          }
          mean_d = b.layer ? mean_d / static_cast<double>(b.cols) : 0;
          mean_dn /= static_cast<double>(b.cols);
        }
        const double own = in.weighted(i) - mean_d - in.normalised(i) * mean_dn;
        return in.rsigma.at(row) * own + (b.add ? in.add.at(i) : 0);
      },
      b.dtype == DType::kF32 ? 1e-4 : 0x1p-8, 1e-3);
}

}  // namespace te_fl::huge::norm_gradient_calls
