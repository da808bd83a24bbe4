// The CPU backend's attention against the formula in double precision and against the reference
// backend, on shapes that span several tiles of 64 queries and 128 keys.
#include "support/attention_problem.hpp"
#include "support/cpu_call.hpp"
#include "support/expect.hpp"

namespace te_fl::testing::attention_test {
namespace {

class CpuAttention : public ::testing::TestWithParam<Case> {};

void spoil_padding(AttentionCall& call) {
  Problem& p = call.p;
  if (!p.varlen() || call.thd()) return;
  p.spoil_padding(p.q, p.c.h, p.c.sq, p.c.d, &Problem::q_len);
  p.spoil_padding(p.weight, p.c.h, p.c.sq, p.c.dv, &Problem::q_len);
  p.spoil_padding(p.k, p.c.g, p.c.sk, p.c.d, &Problem::kv_len);
  p.spoil_padding(p.v, p.c.g, p.c.sk, p.c.dv, &Problem::kv_len);
  call.scatter(p.q, call.q, true);
  call.scatter(p.weight, call.d_o, true);
  call.scatter(p.k, call.k, false);
  call.scatter(p.v, call.v, false);
}

bool broadcast_dbias(const Case& c) {
  return !c.bias.empty() && (c.bias[0] != c.b || c.bias[1] != c.h);
}

TEST_P(CpuAttention, ForwardIsTheFormulaAndBackwardAsTheReference) {
  const Case& c = GetParam();
  AttentionCall call(c), oracle(c);
  spoil_padding(call);
  spoil_padding(oracle);
  ASSERT_OK(run_cpu("fused_attn_fwd", call.fwd, call.p.rng));
  std::vector<double> o, lse;
  call.p.forward(o, lse);
  expect_near(call.gather(call.o, true), o, 2e-6, 1e-5, "o");
  expect_near(call.lse.values(), lse_in_layout(call, lse), 2e-6, 5e-6, "lse");

  ASSERT_OK(run_reference("fused_attn_fwd", oracle.fwd, call.p.rng));
  ASSERT_OK(run_reference("fused_attn_bwd", oracle.bwd, call.p.rng));
  if (broadcast_dbias(c)) {
    EXPECT_FAILS(run_cpu("fused_attn_bwd", call.bwd), kUnsupported, "dbias");
    EXPECT_TRUE(call.dq.untouched());
    call.bwd.dbias = nullptr;
  }
  ASSERT_OK(run_cpu("fused_attn_bwd", call.bwd, call.p.rng));
  expect_near(call.dq.values(), oracle.dq.values(), 5e-6, 2e-5, "dq");
  expect_near(call.dk.values(), oracle.dk.values(), 5e-6, 2e-5, "dk");
  expect_near(call.dv.values(), oracle.dv.values(), 5e-6, 2e-5, "dv");
  if (call.bwd.dbias != nullptr) {
    expect_near(call.dbias.values(), oracle.dbias.values(), 5e-6, 2e-5, "dbias");
  }
  if (c.softmax == TE_FL_SOFTMAX_TYPE_LEARNABLE) {
    expect_near(call.dsink.values(), oracle.dsink.values(), 2e-5, 2e-5, "dsink");
  }
  const auto dq = call.dq.bytes(), dk = call.dk.bytes();
  ASSERT_OK(run_cpu("fused_attn_bwd", call.bwd, call.p.rng));
  EXPECT_EQ(call.dq.bytes(), dq) << "equal calls, equal bits";
  EXPECT_EQ(call.dk.bytes(), dk) << "equal calls, equal bits";
}

Case big(Case c) {
  c.sq = c.sq == 4 ? 150 : c.sq;
  c.sk = c.sk == 5 ? 270 : c.sk;
  c.d = c.d == 3 ? 20 : c.d;
  c.dv = c.dv == 2 ? 35 : c.dv;
  return c;
}

std::vector<Case> cases() {
  const int padding = TE_FL_MASK_TYPE_PADDING, arbitrary = TE_FL_MASK_TYPE_ARBITRARY;
  const int causal = TE_FL_MASK_TYPE_CAUSAL, bottom = TE_FL_MASK_TYPE_CAUSAL_BOTTOM_RIGHT;
  const int padding_causal = TE_FL_MASK_TYPE_PADDING_CAUSAL;
  const int padding_bottom = TE_FL_MASK_TYPE_PADDING_CAUSAL_BOTTOM_RIGHT;
  const int sbhd = TE_FL_LAYOUT_SBHD, thd = TE_FL_LAYOUT_THD;
  const int off_by_one = TE_FL_SOFTMAX_TYPE_OFF_BY_ONE, learnable = TE_FL_SOFTMAX_TYPE_LEARNABLE;
  return {
      big({.name = "none"}),
      big({.name = "sbhd_causal", .layout = sbhd, .mask = causal}),
      big({.name = "causal_more_queries", .mask = causal, .sq = 200, .sk = 70}),
      big({.name = "bottom_right", .mask = bottom}),
      big({.name = "bottom_right_more_queries", .mask = bottom, .sq = 200, .sk = 70}),
      big({.name = "window", .mask = causal, .left = 40}),
      big({.name = "window_both", .layout = sbhd, .left = 130, .right = 3}),
      big({.name = "padding", .mask = padding, .q_lens = {131, 0}, .kv_lens = {129, 7}}),
      big({.name = "padding_no_keys", .mask = padding, .q_lens = {3, 150}, .kv_lens = {270, 0}}),
      big({.name = "padding_causal",
           .layout = sbhd,
           .mask = padding_causal,
           .q_lens = {150, 65},
           .kv_lens = {200, 64}}),
      big({.name = "padding_bottom",
           .mask = padding_bottom,
           .left = 70,
           .q_lens = {150, 65},
           .kv_lens = {200, 64}}),
      big({.name = "arbitrary", .mask = arbitrary}),
      big({.name = "off_by_one", .mask = bottom, .softmax = off_by_one, .sq = 80, .sk = 70}),
      big({.name = "sink_dropout", .mask = causal, .softmax = learnable, .dropout = 0.3f}),
      big({.name = "dropout_odd_keys", .sq = 70, .sk = 133, .dropout = 0.5f}),
      big({.name = "dropout_even_keys", .mask = causal, .sq = 130, .sk = 136, .dropout = 0.1f}),
      big({.name = "bias", .bias = {2, 4, 150, 270}}),
      big({.name = "softcap", .mask = causal, .softcap = 30.0f}),
      big({.name = "softcap_bias",
           .layout = sbhd,
           .bias = {2, 4, 150, 270},
           .dropout = 0.25f,
           .softcap = 2.0f}),
      big({.name = "softcap_padding_alibi",
           .mask = padding,
           .softmax = learnable,
           .q_lens = {140, 2},
           .kv_lens = {3, 265},
           .alibi = 2,
           .softcap = 2.0f}),
      big({.name = "bias_11", .layout = sbhd, .mask = bottom, .bias = {1, 1, 150, 270}}),
      big({.name = "alibi", .mask = bottom, .alibi = 1}),
      big({.name = "alibi_bh",
           .mask = padding,
           .q_lens = {140, 2},
           .kv_lens = {3, 265},
           .alibi = 2}),
      big({.name = "thd_gaps",
           .layout = thd,
           .mask = padding_bottom,
           .q_lens = {100, 64},
           .kv_lens = {130, 200},
           .q_starts = {1, 105, 170},
           .kv_starts = {0, 140, 345},
           .alibi = 1}),
      big({.name = "thd_dropout",
           .layout = thd,
           .mask = padding_causal,
           .q_lens = {70, 150},
           .kv_lens = {71, 130},
           .dropout = 0.4f}),
      big({.name = "thd_dropout_max",
           .layout = thd,
           .q_lens = {4, 90},
           .kv_lens = {130, 5},
           .dropout = 0.4f,
           .max_q = 99,
           .max_kv = 131}),
      {.name = "small"},
      {.name = "one_query", .mask = bottom, .sq = 1, .sk = 300, .d = 64, .dv = 64},
      {.name = "one_element", .sq = 1, .sk = 1, .b = 1, .h = 1, .g = 1, .d = 1, .dv = 1},
      {.name = "multi_query",
       .mask = causal,
       .sq = 65,
       .sk = 129,
       .h = 3,
       .g = 1,
       .d = 128,
       .dv = 80},
      {.name = "empty_batch", .b = 0},
      {.name = "no_queries", .sq = 0},
      {.name = "no_keys", .sk = 0},
  };
}
INSTANTIATE_TEST_SUITE_P(Cases, CpuAttention, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

// Tests FP16 and BF16 with q, k and v as strided views of one packed tensor. The oracle reads the
// same rounded values.
TEST(CpuAttentionTest, LowPrecisionStridedQkv) {
  for (int dtype : {TE_FL_F16, TE_FL_BF16}) {
    const int64_t s = 70, b = 2, h = 2, d = 24;
    HostTensor packed({s, b, h, 3 * d}, dtype, random_values(s * b * h * 3 * d, 1));
    const Shape shape = {s, b, h, d}, strides = {b * h * 3 * d, h * 3 * d, 3 * d, 1};
    HostTensor q(packed, shape, strides, 0), k(packed, shape, strides, d);
    HostTensor v(packed, shape, strides, 2 * d), d_o(shape, dtype, random_values(count(shape), 2));
    HostTensor o(shape, dtype), want(shape, dtype), lse({b, h, s}, TE_FL_F32),
        want_lse({b, h, s}, TE_FL_F32);
    te_fl_fused_attn_fwd_args a;
    a.q = q, a.k = k, a.v = v, a.o = o, a.softmax_lse = lse;
    a.mask_type = TE_FL_MASK_TYPE_CAUSAL, a.scale = 0.2f;
    ASSERT_OK(run_cpu("fused_attn_fwd", a));
    a.o = want, a.softmax_lse = want_lse;
    ASSERT_OK(run_reference("fused_attn_fwd", a));
    const double rtol = dtype == TE_FL_F16 ? 1e-3 : 1e-2;
    expect_near(o.values(), want.values(), 1e-5, rtol, "o");
    expect_near(lse.values(), want_lse.values(), 1e-6, 5e-6, "lse");
    te_fl_fused_attn_bwd_args g;
    HostTensor dq(shape, dtype), dk(shape, dtype), dv(shape, dtype);
    HostTensor wq(shape, dtype), wk(shape, dtype), wv(shape, dtype);
    g.d_o = d_o, g.q = q, g.k = k, g.v = v, g.o = want, g.softmax_lse = want_lse;
    g.dq = dq, g.dk = dk, g.dv = dv;
    g.mask_type = TE_FL_MASK_TYPE_CAUSAL, g.scale = 0.2f;
    ASSERT_OK(run_cpu("fused_attn_bwd", g));
    g.dq = wq, g.dk = wk, g.dv = wv;
    ASSERT_OK(run_reference("fused_attn_bwd", g));
    expect_near(dq.values(), wq.values(), 1e-4, rtol, "dq");
    expect_near(dk.values(), wk.values(), 1e-4, rtol, "dk");
    expect_near(dv.values(), wv.values(), 1e-4, rtol, "dv");
  }
}

TEST(CpuAttentionTest, NanScoresReachTheirRowsOnly) {
  HostTensor q({1, 2, 1, 2}, TE_FL_F32, {1, 0, 1, 0}),
      k({1, 3, 1, 2}, TE_FL_F32, {1, 2, NAN, 1, 0, 1});
  HostTensor v({1, 3, 1, 1}, TE_FL_F32, {3, 4, 5}), o({1, 2, 1, 1}, TE_FL_F32);
  te_fl_fused_attn_fwd_args a;
  a.q = q, a.k = k, a.v = v, a.o = o;
  a.layout = TE_FL_LAYOUT_BSHD, a.mask_type = TE_FL_MASK_TYPE_CAUSAL;
  ASSERT_OK(run_cpu("fused_attn_fwd", a));
  EXPECT_EQ(o.values()[0], 3);
  EXPECT_TRUE(std::isnan(o.values()[1]));
}

TEST(CpuAttentionTest, RefusalsAndErrors) {
  HostTensor q8({1, 1, 1, 2}, TE_FL_F8E4M3, {1, 0}), q({1, 1, 1, 2}, TE_FL_F32, {1, 0});
  HostTensor o({1, 1, 1, 2}, TE_FL_F32), o2({1, 1, 2, 2}, TE_FL_F32), backend({1}, TE_FL_I32);
  te_fl_fused_attn_fwd_args a;
  a.q = a.k = a.v = q8, a.o = o;
  EXPECT_FAILS(run_cpu("fused_attn_fwd", a), kUnsupported, "FP8");
  EXPECT_EQ(cpu_op("fused_attn_fwd")->dtypes & TE_FL_MASK_FP8, 0u) << "refused statically too";
  a.q = a.k = q, a.v = o2;
  EXPECT_REFUSED(run_cpu("fused_attn_fwd", a), "v has 2");
  EXPECT_TRUE(o.untouched());
  HostTensor square({2, 2}, TE_FL_F32, {1, 2, 3, 4});
  HostTensor turned(square, {1, 1, 2, 2}, {4, 4, 1, 2}, 0);
  a.q = turned, a.k = a.v = turned, a.o = o2, a.mask_type = 0;
  EXPECT_FAILS(run_cpu("fused_attn_fwd", a), kUnsupported, "strided_copy");
  te_fl_get_fused_attn_backend_args e;
  e.q = e.k = e.v = q, e.backend = backend;
  ASSERT_OK(run_cpu("get_fused_attn_backend", e));
  EXPECT_EQ(backend.values()[0], 1);
  e.mask_type = TE_FL_MASK_TYPE_ARBITRARY, e.layout = TE_FL_LAYOUT_THD;
  HostTensor t({1, 1, 2}, TE_FL_F32, {1, 0});
  e.q = e.k = e.v = t;
  ASSERT_OK(run_cpu("get_fused_attn_backend", e));
  EXPECT_EQ(backend.values()[0], -1);
}

}  // namespace
}  // namespace te_fl::testing::attention_test
