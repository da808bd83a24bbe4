// FP8 attention of the reference backend, and the query for the implementation that a call would
// use.
#include <algorithm>
#include <cmath>

#include "support/expect.hpp"
#include "support/reference_call.hpp"
#include "te_fl/ops/attention.h"

namespace te_fl::testing {
namespace {

// FP8 attention by the same formula as in high precision, with P and dS rounded under their scales.
struct Fp8Case {
  Fp8Case()
      : q({1, s, 1, d}, TE_FL_F8E4M3, random_values(s * d, 21), 64),
        k({1, s, 1, d}, TE_FL_F8E4M3, random_values(s * d, 22), 128),
        v({1, s, 1, d}, TE_FL_F8E4M3, random_values(s * d, 23), 200),
        o({1, s, 1, d}, TE_FL_F8E4M3),
        d_o({1, s, 1, d}, TE_FL_F8E5M2, random_values(s * d, 24), 1000),
        dq({1, s, 1, d}, TE_FL_F8E5M2),
        dk({1, s, 1, d}, TE_FL_F8E5M2),
        dv({1, s, 1, d}, TE_FL_F8E5M2),
        s_quant({1}, TE_FL_F8E4M3),
        dp_quant({1}, TE_FL_F8E5M2),
        lse({1, 1, s}, TE_FL_F32) {
    o.set_scale(100);
    dq.set_scale(500);
    dk.set_scale(500);
    dv.set_scale(500);
    s_quant.set_scale(240);
    dp_quant.set_scale(3000);
    fwd.q = bwd.q = q, fwd.k = bwd.k = k, fwd.v = bwd.v = v, fwd.o = bwd.o = o;
    fwd.softmax_lse = bwd.softmax_lse = lse;
    fwd.s_quant = bwd.s_quant = s_quant;
    fwd.layout = bwd.layout = TE_FL_LAYOUT_BSHD;
    bwd.d_o = d_o, bwd.dq = dq, bwd.dk = dk, bwd.dv = dv, bwd.dp_quant = dp_quant;
  }
  // Returns row i of P in double.
  std::vector<double> probabilities(int64_t i) const {
    const std::vector<double> qv = q.values(), kv = k.values();
    std::vector<double> p;
    double total = 0;
    for (int64_t j = 0; j < s; ++j) {
      double dot = 0;
      for (int64_t e = 0; e < d; ++e) dot += qv[i * d + e] * kv[j * d + e];
      p.push_back(std::exp(dot));
      total += p.back();
    }
    for (double& x : p) x /= total;
    return p;
  }
  static constexpr int64_t s = 6, d = 4;
  HostTensor q, k, v, o, d_o, dq, dk, dv, s_quant, dp_quant, lse;
  te_fl_fused_attn_fwd_args fwd;
  te_fl_fused_attn_bwd_args bwd;
};

double e4m3(double x, float scale) {
  return double{numeric::e4m3_to_float(numeric::double_to_e4m3(x * scale))} / scale;
}
double e5m2(double x, float scale) {
  return double{numeric::e5m2_to_float(numeric::double_to_e5m2(x * scale))} / scale;
}

// The matrix product with V reads FP8 codes of each row's exp(score - row maximum), which is at
// most 1. The scale of these codes is limited so that the value 1 does not overflow.
class Fp8Forward : public ::testing::TestWithParam<float> {};

TEST_P(Fp8Forward, RoundsProbabilitiesAndOutput) {
  Fp8Case c;
  const float scale = std::min(GetParam(), 448.0f);
  c.s_quant.set_scale(GetParam());
  c.o.amax = 1000;  // larger than any value here, so the running amax does not change
  ASSERT_OK(run_reference("fused_attn_fwd", c.fwd));
  const std::vector<double> v = c.v.values(), o = c.o.values();
  double amax = 0;
  int differ_from_exact = 0;
  for (int64_t i = 0; i < c.s; ++i) {
    const std::vector<double> p = c.probabilities(i);
    const double top = *std::max_element(p.begin(), p.end());
    for (int64_t e = 0; e < c.d; ++e) {
      double rounded = 0, exact = 0;
      for (int64_t j = 0; j < c.s; ++j) {
        rounded += top * e4m3(p[j] / top, scale) * v[j * c.d + e];
        exact += p[j] * v[j * c.d + e];
        amax = std::max(amax, p[j]);
      }
      EXPECT_NEAR(o[i * c.d + e], e4m3(rounded, 100), 1e-7);
      differ_from_exact += e4m3(exact, 100) != e4m3(rounded, 100);
    }
  }
  EXPECT_GT(differ_from_exact, 0) << "rounding P makes no difference: the test shows nothing";
  EXPECT_NEAR(c.s_quant.amax, amax, 1e-6);
  EXPECT_EQ(c.s_quant.scale_inv, 1.0f / GetParam());
  EXPECT_EQ(c.o.amax, 1000);
  c.o.amax = 0;
  c.fwd.s_quant = nullptr;
  ASSERT_OK(run_reference("fused_attn_fwd", c.fwd));
  EXPECT_GT(c.o.amax, 0);
  EXPECT_LT(c.o.amax, 1000);
}
INSTANTIATE_TEST_SUITE_P(ReferenceAttention, Fp8Forward, ::testing::Values(1, 240, 4096));

TEST(ReferenceAttention, Fp8BackwardRoundsPAndDs) {
  Fp8Case c;
  ASSERT_OK(run_reference("fused_attn_fwd", c.fwd));
  c.s_quant.amax = c.dp_quant.amax = 0;
  c.dp_quant.scale_inv = 0;
  ASSERT_OK(run_reference("fused_attn_bwd", c.bwd));
  const std::vector<double> q = c.q.values(), k = c.k.values(), v = c.v.values(), o = c.o.values();
  const std::vector<double> d_o = c.d_o.values();
  std::vector<double> dq(q.size(), 0), dk(q.size(), 0), dv(q.size(), 0);
  double amax = 0;
  for (int64_t i = 0; i < c.s; ++i) {
    const std::vector<double> p = c.probabilities(i);
    for (int64_t j = 0; j < c.s; ++j) {
      double ds = 0;
      for (int64_t e = 0; e < c.d; ++e) {
        ds += p[j] * d_o[i * c.d + e] * (v[j * c.d + e] - o[i * c.d + e]);
      }
      amax = std::max(amax, std::abs(ds));
      for (int64_t e = 0; e < c.d; ++e) {
        dq[i * c.d + e] += e5m2(ds, 3000) * k[j * c.d + e];
        dk[j * c.d + e] += e5m2(ds, 3000) * q[i * c.d + e];
        dv[j * c.d + e] += e4m3(p[j], 240) * d_o[i * c.d + e];
      }
    }
  }
  // Compares with a tolerance of one step of E5M2, because a value next to a rounding boundary may
  // round either way.
  const auto near_step = [](const std::vector<double>& got, const std::vector<double>& want) {
    int exact = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_NEAR(got[i], want[i], 0.13 * std::abs(want[i]) + 1e-6);
      exact += std::abs(got[i] - e5m2(want[i], 500)) < 1e-7;
    }
    EXPECT_GE(exact, static_cast<int>(got.size()) - 1);
  };
  near_step(c.dq.values(), dq);
  near_step(c.dk.values(), dk);
  near_step(c.dv.values(), dv);
  EXPECT_NEAR(c.dp_quant.amax, amax, 1e-6);
  EXPECT_EQ(c.dp_quant.scale_inv, 1.0f / 3000);
  EXPECT_EQ(c.s_quant.amax, 0) << "an input of the backward";
}

TEST(ReferenceAttention, EnquiryAnswers) {
  Fp8Case fp8;
  HostTensor dense({1, 2, 3, 4}, TE_FL_F32);
  HostTensor answer({1}, TE_FL_I32);
  te_fl_get_fused_attn_backend_args a;
  a.layout = TE_FL_LAYOUT_BSHD, a.backend = answer;
  a.q = a.k = a.v = dense;
  ASSERT_OK(run_reference("get_fused_attn_backend", a));
  EXPECT_EQ(answer.values()[0], 1);
  a.q = fp8.q, a.k = fp8.k, a.v = fp8.v;
  ASSERT_OK(run_reference("get_fused_attn_backend", a));
  EXPECT_EQ(answer.values()[0], 2);
  HostTensor tokens({3, 1, 2}, TE_FL_F32);
  a.q = a.k = a.v = tokens;
  a.layout = TE_FL_LAYOUT_THD, a.mask_type = TE_FL_MASK_TYPE_ARBITRARY;
  ASSERT_OK(run_reference("get_fused_attn_backend", a));
  EXPECT_EQ(answer.values()[0], -1);
}

}  // namespace
}  // namespace te_fl::testing
