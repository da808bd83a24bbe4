#include <random>

#include "support/expect.hpp"
#include "support/reference_ops.hpp"
#include "te_fl/ops.hpp"
#include "te_fl/ops/gemm.h"

namespace te_fl::testing {
namespace {

using Values = std::vector<double>;
constexpr double kUnread = std::numeric_limits<double>::quiet_NaN();

te_fl_generic_gemm_args make(const te_fl_tensor* a, const te_fl_tensor* b, const te_fl_tensor* d,
                             bool trans_a = false, bool trans_b = false) {
  te_fl_generic_gemm_args args;
  args.a = a;
  args.b = b;
  args.d = d;
  args.trans_a = trans_a;
  args.trans_b = trans_b;
  return args;
}
Outcome run(const te_fl_generic_gemm_args& args) { return call("generic_gemm", args); }

double tanh_gelu(double x) {
  return 0.5 * x * (1 + std::tanh(0.7978845608 * (x + 0.044715 * x * x * x)));
}
double tanh_dgelu(double x) { return (tanh_gelu(x + 1e-5) - tanh_gelu(x - 1e-5)) / 2e-5; }

TEST(ReferenceGemm, AllTranspositions) {
  // [[1 2 3], [4 5 6]] times [[1 2], [3 4], [5 6]]
  const Values expected{22, 28, 49, 64};
  Array a(TE_FL_F32, {2, 3}, {1, 2, 3, 4, 5, 6}), a_t(TE_FL_F32, {3, 2}, {1, 4, 2, 5, 3, 6});
  Array b(TE_FL_F16, {3, 2}, {1, 2, 3, 4, 5, 6}), b_t(TE_FL_F16, {2, 3}, {1, 3, 5, 2, 4, 6});
  for (const bool ta : {false, true}) {
    for (const bool tb : {false, true}) {
      Array d(TE_FL_BF16, {2, 2});
      EXPECT_OK(run(make(ta ? a_t : a, tb ? b_t : b, d, ta, tb)));
      EXPECT_EQ(d.values(), expected) << ta << tb;
    }
  }
}

TEST(ReferenceGemm, StridedOperandsAndResult) {
  Array a_base(TE_FL_F32, {2, 4}, {1, 2, -9, -9, 3, 4, -9, -9});
  Array d_base(TE_FL_F32, {2, 3}, {0, 0, 0, 0, 0, 0}), b(TE_FL_F32, {2, 2}, {1, 0, 0, 1});
  Array a(a_base, TE_FL_F32, {2, 2}, {4, 1}), d(d_base, TE_FL_F32, {2, 2}, {3, 1}, 1);
  EXPECT_OK(run(make(a, b, d)));
  EXPECT_EQ(d_base.values(), (Values{0, 1, 2, 0, 3, 4}));
}

TEST(ReferenceGemm, RoundsOnceAtTheEnd) {
  // In FP16 steps 2048 + 1 + 1 would stay 2048; a sum that is rounded once gives 2050.
  Array a(TE_FL_F16, {1, 3}, {2048, 1, 1}), b(TE_FL_F16, {3, 1}, {1, 1, 1}), d(TE_FL_F16, {1, 1});
  EXPECT_OK(run(make(a, b, d)));
  EXPECT_EQ(d.get(0), 2050.0);
}

TEST(ReferenceGemm, EpilogueOrder) {
  Array a(TE_FL_F32, {1, 1}, {2}), b(TE_FL_F32, {1, 2}, {0.5, -1.5}),
      bias(TE_FL_BF16, {2}, {0.25, 1});
  Array d(TE_FL_F32, {1, 2}, {10, 20}), pre(TE_FL_F16, {1, 2});
  auto args = make(a, b, d);
  args.alpha = 0.5f;
  args.beta = 2.0f;
  args.accumulate = 1;
  args.bias = bias;
  args.gelu = 1;
  args.pre_gelu_out = pre;
  EXPECT_OK(run(args));
  EXPECT_EQ(pre.values(), (Values{0.75, -0.5}));
  expect_near(d.values(), {tanh_gelu(0.75) + 20, tanh_gelu(-0.5) + 40}, 1e-6, 1e-6);

  Array saved(TE_FL_F32, {1, 2}, {0.75, -0.5});
  args = make(a, b, d);
  args.pre_gelu_in = saved;
  EXPECT_OK(run(args));
  expect_near(d.values(), {tanh_dgelu(0.75), -3 * tanh_dgelu(-0.5)}, 1e-6, 1e-6);
}

TEST(ReferenceGemm, BetaZeroDoesNotReadD) {
  Array a(TE_FL_F32, {1, 1}, {2}), b(TE_FL_F32, {1, 1}, {3}), d(TE_FL_F32, {1, 1}, {kUnread});
  auto args = make(a, b, d);
  args.accumulate = 1;
  args.beta = 0;
  EXPECT_OK(run(args));
  EXPECT_EQ(d.get(0), 6.0);
}

TEST(ReferenceGemm, BiasGradientSumsOpA) {
  // dY [K = 3 tokens, M = 2] enters transposed.
  Array dy(TE_FL_BF16, {3, 2}, {1, 2, 3, 4, 5, 6}), x(TE_FL_BF16, {3, 1}, {1, 1, 1});
  Array dw(TE_FL_F32, {2, 1}), grad(TE_FL_F32, {2}, {100, 100});
  auto args = make(dy, x, dw, true);
  args.bias_grad = grad;
  EXPECT_OK(run(args));
  EXPECT_EQ(grad.values(), (Values{9, 12}));
  args.accumulate_bias_grad = 1;
  EXPECT_OK(run(args));
  EXPECT_EQ(grad.values(), (Values{18, 24}));
}

TEST(ReferenceGemm, EmptyExtents) {
  Array a(TE_FL_F32, {2, 0}), b(TE_FL_F32, {0, 2}), bias(TE_FL_F32, {2}, {1, 2}),
      d(TE_FL_F32, {2, 2});
  auto args = make(a, b, d);
  args.bias = bias;
  EXPECT_OK(run(args));  // K = 0: the matrix product is zero
  EXPECT_EQ(d.values(), (Values{1, 2, 1, 2}));
  Array none(TE_FL_F32, {0, 2}), b2(TE_FL_F32, {2, 3}), d2(TE_FL_F32, {0, 3});
  EXPECT_OK(run(make(none, b2, d2)));
  Array wide(TE_FL_F32, {2, 1}, {1, 2}), b3(TE_FL_F32, {1, 0}), d3(TE_FL_F32, {2, 0});
  Array grad(TE_FL_F32, {2});
  args = make(wide, b3, d3);
  args.bias_grad = grad;
  EXPECT_OK(run(args));
  EXPECT_EQ(grad.values(), (Values{1, 2}));
}

TEST(ReferenceGemm, PerTensorFp8InAndOut) {
  Array a(TE_FL_F8E4M3, {1, 2}, {16, -32}), b(TE_FL_F8E5M2, {2, 1}, {2, 1}),
      d(TE_FL_F8E4M3, {1, 1});
  const float a_inv = 0.25f, b_inv = 3.0f;
  a.quantised(TE_FL_SCALING_TENSOR, 0, 1, 0).quant().scale_inv = const_cast<float*>(&a_inv);
  b.quantised(TE_FL_SCALING_TENSOR, 0, 1, 0).quant().scale_inv = const_cast<float*>(&b_inv);
  d.quantised(TE_FL_SCALING_TENSOR, 0, 1, 0, 4.0f);
  auto args = make(a, b, d);
  EXPECT_OK(run(args));  // 4 * 6 - 8 * 3 = 0
  EXPECT_EQ(d.get(0), 0.0);
  args.alpha = 1;
  b.set(1, 1.5);  // 24 - 36 = -12, times 4
  EXPECT_OK(run(args));
  EXPECT_EQ(d.get(0), -48.0);
  EXPECT_EQ(d.amax(), 12.0f);
  EXPECT_EQ(d.row_scales()[0], 0.25f);
  // The pre-activation output may be FP8 too, with a scale computed from its own amax.
  Array pre(TE_FL_F8E4M3, {1, 1});
  args.gelu = 1;
  args.pre_gelu_out = pre.quantised(TE_FL_SCALING_TENSOR, TE_FL_QUANT_COMPUTE_SCALE, 1, 0);
  EXPECT_OK(run(args));
  EXPECT_EQ(pre.get(0), -448.0);
  EXPECT_EQ(pre.amax(), 12.0f);
}

// A GEMM reads the row-wise or the column-wise data, whichever has its blocks along the contraction
// dimension. Both hold different values here, so that the result shows which was read.
TEST(ReferenceGemm, BlockOperandsAreReadAlongTheContraction) {
  Array a(TE_FL_F8E4M3, {1, 1}, {1}), b(TE_FL_F32, {1, 1}, {1}), d(TE_FL_F32, {1, 1});
  a.quantised(TE_FL_SCALING_BLOCK_1X128, 0, 4, 4);
  a.columns()[0] = 0x40;  // 2
  const float one[4] = {1, 0, 0, 0};
  std::memcpy(a.row_scale_bytes().data(), one, sizeof one);
  std::memcpy(a.column_scale_bytes().data(), one, sizeof one);
  EXPECT_OK(run(make(a, b, d)));
  EXPECT_EQ(d.get(0), 1.0);
  EXPECT_OK(run(make(a, b, d, true)));
  EXPECT_EQ(d.get(0), 2.0);
  EXPECT_OK(run(make(b, a, d)));
  EXPECT_EQ(d.get(0), 2.0);
  EXPECT_OK(run(make(b, a, d, false, true)));
  EXPECT_EQ(d.get(0), 1.0);
  a.quant().columnwise_data = nullptr;
  EXPECT_OK(run(make(a, b, d, true)));
  EXPECT_EQ(d.get(0), 1.0);
}

TEST(ReferenceGemm, MatchesDoubleOnARandomProblem) {
  constexpr int kM = 37, kN = 29, kK = 65;
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  Array a(TE_FL_BF16, {kK, kM}), b(TE_FL_BF16, {kN, kK}), d(TE_FL_F32, {kM, kN});
  for (int i = 0; i < kM * kK; ++i) a.set(i, normal(random));
  for (int i = 0; i < kN * kK; ++i) b.set(i, normal(random));
  EXPECT_OK(run(make(a, b, d, true, true)));
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kN; ++n) {
      double sum = 0;
      for (int k = kK - 1; k >= 0; --k) sum += a.get(k * kM + m) * b.get(n * kK + k);
      EXPECT_NEAR(d.get(m * kN + n), sum, 1e-6 * std::abs(sum) + 1e-9);
    }
  }
}

TEST(ReferenceGemm, AnOperandWithoutItsScalesIsRefused) {
  Array b(TE_FL_F32, {1, 1}, {1}), d(TE_FL_F32, {1, 1});
  Array q1(TE_FL_F8E4M3, {1, 1}, {1});
  q1.quantised(TE_FL_SCALING_BLOCK_128X128, 0, 4, 0);
  q1.quant().scale_inv = nullptr;
  EXPECT_REFUSED(ops::generic_gemm(make(q1, b, d)), "argument 'a' is f8e4m3[1,1]",
                 "its scale_inv is missing (NULL)");
  EXPECT_TRUE(d.untouched());
}

}  // namespace
}  // namespace te_fl::testing
