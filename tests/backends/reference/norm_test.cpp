#include <functional>

#include "support/expect.hpp"
#include "support/reference_ops.hpp"
#include "te_fl/ops/norm.h"

namespace te_fl::testing {
namespace {

using Values = std::vector<double>;

TEST(ReferenceNorm, LayernormByHand) {
  // Row 0 has mean 2 and variance 2/3; variance + epsilon = 2/3 + 1/3 = 1. Row 1 is constant.
  Array x(TE_FL_F32, {2, 3}, {1, 2, 3, 5, 5, 5}), gamma(TE_FL_BF16, {3}, {1, 2, 3});
  Array beta(TE_FL_BF16, {3}, {0.5, 0, -1}), z(TE_FL_F32, {2, 3}), mu(TE_FL_F32, {2}),
      rsigma(TE_FL_F32, {2});
  te_fl_layernorm_fwd_args args;
  args.x = x;
  args.gamma = gamma;
  args.beta = beta;
  args.z = z;
  args.mu = mu;
  args.rsigma = rsigma;
  args.epsilon = 1.0f / 3;
  EXPECT_OK(call("layernorm_fwd", args));
  expect_near(z.values(), {-0.5, 0, 2, 0.5, 0, -1}, 1e-6, 0);
  expect_near(mu.values(), {2, 5}, 0, 0);
  expect_near(rsigma.values(), {1, std::sqrt(3)}, 1e-6, 0);
  args.zero_centered_gamma = 1;
  args.beta = nullptr;
  args.z = x;  // in place
  EXPECT_OK(call("layernorm_fwd", args));
  expect_near(x.values(), {-2, 0, 4, 0, 0, 0}, 1e-6, 0);
}

TEST(ReferenceNorm, VarianceDoesNotCancel) {
  Array x(TE_FL_F32, {1, 4}, {1e6, 1e6 + 1, 1e6 + 2, 1e6 + 3}), gamma(TE_FL_F32, {4}, {1, 1, 1, 1});
  Array z(TE_FL_F32, {1, 4}), mu(TE_FL_F32, {1}), rsigma(TE_FL_F32, {1});
  te_fl_layernorm_fwd_args args;
  args.x = x;
  args.gamma = gamma;
  args.z = z;
  args.mu = mu;
  args.rsigma = rsigma;
  args.epsilon = 0;
  EXPECT_OK(call("layernorm_fwd", args));
  expect_near(rsigma.values(), {1 / std::sqrt(1.25)}, 1e-7, 1e-7);
}

TEST(ReferenceNorm, RmsnormQuantisesFromFp32) {
  // rms = 5 / sqrt(2) with epsilon 0, so z = (3/5, 4/5) sqrt(2). Under scale 4, E4M3 has steps of
  // 1/4 between 2 and 4, and of 1/2 between 4 and 8.
  Array x(TE_FL_BF16, {1, 2}, {3, 4}), gamma(TE_FL_F32, {2}, {1, 1}), z(TE_FL_F8E4M3, {1, 2});
  Array rsigma(TE_FL_F32, {1});
  te_fl_rmsnorm_fwd_args args;
  args.x = x;
  args.gamma = gamma;
  args.z = z.quantised(TE_FL_SCALING_TENSOR, 0, 1, 1, 4.0f);
  args.rsigma = rsigma;
  args.epsilon = 0;
  EXPECT_OK(call("rmsnorm_fwd", args));
  EXPECT_EQ(z.values(), (Values{3.5, 4.5}));  // 3.394 and 4.525
  EXPECT_EQ(z.columns(), z.bytes());
  EXPECT_NEAR(z.amax(), 1.1313708, 1e-6);
  expect_near(rsigma.values(), {std::sqrt(2) / 5}, 1e-7, 0);
}

TEST(ReferenceNorm, Empty) {
  Array x(TE_FL_F32, {0, 3}), gamma(TE_FL_F32, {3}, {1, 1, 1}), rsigma(TE_FL_F32, {0});
  Array no_columns(TE_FL_F32, {2, 0}), no_gamma(TE_FL_F32, {0}), two(TE_FL_F32, {2});
  te_fl_rmsnorm_fwd_args args;
  args.x = x;
  args.gamma = gamma;
  args.z = x;
  args.rsigma = rsigma;
  EXPECT_OK(call("rmsnorm_fwd", args));
  args.x = args.z = no_columns;
  args.gamma = no_gamma;
  args.rsigma = two;
  args.epsilon = 0.25f;
  EXPECT_OK(call("rmsnorm_fwd", args));
  EXPECT_EQ(two.values(), (Values{2, 2}));
}

// The loss is the sum of w z; central differences in double give its derivative by every x, gamma
// and beta.
struct NormProblem {
  static constexpr int kRows = 3, kCols = 5;
  Values x, gamma, w;
  bool centered, zero_centered;
  double epsilon = 0.01;

  double loss() const {
    double total = 0;
    for (int r = 0; r < kRows; ++r) {
      double mu = 0, var = 0;
      for (int c = 0; c < kCols; ++c) mu += centered ? x[r * kCols + c] / kCols : 0;
      for (int c = 0; c < kCols; ++c) var += std::pow(x[r * kCols + c] - mu, 2) / kCols;
      for (int c = 0; c < kCols; ++c) {
        total += w[r * kCols + c] * (x[r * kCols + c] - mu) / std::sqrt(var + epsilon) *
                 (gamma[c] + (zero_centered ? 1 : 0));
      }
    }
    return total;
  }
  Values gradient(Values NormProblem::*member) {
    Values result((this->*member).size());
    for (size_t i = 0; i < result.size(); ++i) {
      double& v = (this->*member)[i];
      const double saved = v;
      v = saved + 1e-5;
      const double up = loss();
      v = saved - 1e-5;
      result[i] = (up - loss()) / 2e-5;
      v = saved;
    }
    return result;
  }
  void statistics(Array& mu, Array& rsigma) const {
    for (int r = 0; r < kRows; ++r) {
      double m = 0, var = 0;
      for (int c = 0; c < kCols; ++c) m += centered ? x[r * kCols + c] / kCols : 0;
      for (int c = 0; c < kCols; ++c) var += std::pow(x[r * kCols + c] - m, 2) / kCols;
      mu.set(r, m);
      rsigma.set(r, 1 / std::sqrt(var + epsilon));
    }
  }
};

NormProblem problem(bool centered, bool zero_centered) {
  NormProblem p{{}, {}, {}, centered, zero_centered};
  for (int i = 0; i < 15; ++i) p.x.push_back(std::sin(1.7 * i) * (1 + i % 4));
  for (int i = 0; i < 15; ++i) p.w.push_back(std::cos(2.3 * i));
  for (int i = 0; i < 5; ++i) p.gamma.push_back(0.5 + 0.3 * i);
  return p;
}

TEST(ReferenceNorm, LayernormBackwardMatchesDifferences) {
  for (const bool zero_centered : {false, true}) {
    NormProblem p = problem(true, zero_centered);
    Array dz(TE_FL_F32, {3, 5}, p.w), x(TE_FL_F32, {3, 5}, p.x), gamma(TE_FL_F32, {5}, p.gamma);
    Array mu(TE_FL_F32, {3}), rsigma(TE_FL_F32, {3}), dgamma(TE_FL_F32, {5}), dbeta(TE_FL_F32, {5});
    p.statistics(mu, rsigma);
    te_fl_layernorm_bwd_args args;
    args.dz = dz;
    args.x = x;
    args.mu = mu;
    args.rsigma = rsigma;
    args.gamma = gamma;
    args.dx = dz;  // in place
    args.dgamma = dgamma;
    args.dbeta = dbeta;
    args.zero_centered_gamma = zero_centered;
    EXPECT_OK(call("layernorm_bwd", args));
    expect_near(dz.values(), p.gradient(&NormProblem::x), 2e-6, 2e-6);
    expect_near(dgamma.values(), p.gradient(&NormProblem::gamma), 2e-6, 2e-6);
    for (int c = 0; c < 5; ++c) EXPECT_NEAR(dbeta.get(c), p.w[c] + p.w[5 + c] + p.w[10 + c], 1e-6);
  }
}

TEST(ReferenceNorm, RmsnormBackwardMatchesDifferences) {
  for (const bool zero_centered : {false, true}) {
    NormProblem p = problem(false, zero_centered);
    Array dz(TE_FL_F32, {3, 5}, p.w), x(TE_FL_F32, {3, 5}, p.x), gamma(TE_FL_F32, {5}, p.gamma);
    Array mu(TE_FL_F32, {3}), rsigma(TE_FL_F32, {3}), dgamma(TE_FL_F32, {5}), dx(TE_FL_F32, {3, 5});
    p.statistics(mu, rsigma);
    te_fl_rmsnorm_bwd_args args;
    args.dz = dz;
    args.x = x;
    args.rsigma = rsigma;
    args.gamma = gamma;
    args.dx = dx;
    args.dgamma = dgamma;
    args.zero_centered_gamma = zero_centered;
    EXPECT_OK(call("rmsnorm_bwd", args));
    Values expected = p.gradient(&NormProblem::x);
    expect_near(dx.values(), expected, 2e-6, 2e-6);
    expect_near(dgamma.values(), p.gradient(&NormProblem::gamma), 2e-6, 2e-6);

    Array add(TE_FL_F32, {3, 5}, p.x);
    te_fl_rmsnorm_bwd_add_args more;
    more.dz = dz;
    more.x = x;
    more.add = add;
    more.rsigma = rsigma;
    more.gamma = gamma;
    more.dx = add;  // in place
    more.dgamma = dgamma;
    more.zero_centered_gamma = zero_centered;
    EXPECT_OK(call("rmsnorm_bwd_add", more));
    for (int i = 0; i < 15; ++i) expected[i] += p.x[i];
    expect_near(add.values(), expected, 2e-6, 2e-6);
  }
}

}  // namespace
}  // namespace te_fl::testing
