// The reference backend's attention against a formula in double that stores every matrix, and its
// gradients against central differences of that formula.
#include <functional>

#include "support/attention_problem.hpp"
#include "support/expect.hpp"
#include "te_fl/attention.hpp"

namespace te_fl::testing {
namespace {

class AttentionCase : public ::testing::TestWithParam<Case> {};

TEST_P(AttentionCase, ForwardIsTheFormulaAndBackwardItsDerivative) {
  AttentionCall call(GetParam());
  Problem& p = call.p;
  // Fills the padding of bshd and sbhd tensors with NaN, which must not reach any result. For thd,
  // scatter() fills the padding.
  if (p.varlen() && !call.thd()) {
    p.spoil_padding(p.q, p.c.h, p.c.sq, p.c.d, &Problem::q_len);
    p.spoil_padding(p.weight, p.c.h, p.c.sq, p.c.dv, &Problem::q_len);
    p.spoil_padding(p.k, p.c.g, p.c.sk, p.c.d, &Problem::kv_len);
    p.spoil_padding(p.v, p.c.g, p.c.sk, p.c.dv, &Problem::kv_len);
    call.scatter(p.q, call.q, true);
    call.scatter(p.weight, call.d_o, true);
    call.scatter(p.k, call.k, false);
    call.scatter(p.v, call.v, false);
  }
  ASSERT_OK(run_reference("fused_attn_fwd", call.fwd, p.rng));
  std::vector<double> o, lse;
  p.forward(o, lse);
  expect_near(call.gather(call.o, true), o, 1e-6, 5e-6, "o");
  expect_near(call.lse.values(), lse_in_layout(call, lse), 1e-6, 5e-6, "lse");

  ASSERT_OK(run_reference("fused_attn_bwd", call.bwd, p.rng));
  for (double& w : p.weight) w = std::isnan(w) ? 0 : w;  // o is zero there
  expect_near(call.gather(call.dq, true), p.gradient(&Problem::q), 2e-6, 1e-5, "dq");
  expect_near(call.gather(call.dk, false), p.gradient(&Problem::k), 2e-6, 1e-5, "dk");
  expect_near(call.gather(call.dv, false), p.gradient(&Problem::v), 2e-6, 1e-5, "dv");
  if (!p.c.bias.empty()) {
    expect_near(call.dbias.values(), p.gradient(&Problem::bias), 2e-6, 1e-5, "dbias");
  }
  if (p.c.softmax == TE_FL_SOFTMAX_TYPE_LEARNABLE) {
    expect_near(call.dsink.values(), p.gradient(&Problem::sink), 2e-6, 1e-5, "dsink");
  }
}

std::vector<Case> cases() {
  const int padding = TE_FL_MASK_TYPE_PADDING, arbitrary = TE_FL_MASK_TYPE_ARBITRARY;
  const int causal = TE_FL_MASK_TYPE_CAUSAL, bottom = TE_FL_MASK_TYPE_CAUSAL_BOTTOM_RIGHT;
  const int padding_causal = TE_FL_MASK_TYPE_PADDING_CAUSAL;
  const int padding_bottom = TE_FL_MASK_TYPE_PADDING_CAUSAL_BOTTOM_RIGHT;
  const int sbhd = TE_FL_LAYOUT_SBHD, thd = TE_FL_LAYOUT_THD;
  return {
      {.name = "none"},
      {.name = "sbhd", .layout = sbhd},
      {.name = "causal", .mask = causal},
      {.name = "causal_more_queries", .mask = causal, .sq = 5, .sk = 3},
      {.name = "bottom_right", .mask = bottom},
      {.name = "bottom_right_more_queries", .mask = bottom, .sq = 5, .sk = 3},
      {.name = "window", .left = 1, .right = 0},
      {.name = "window_right", .right = 2},
      {.name = "window_bottom_right", .mask = bottom, .left = 1, .right = 3},
      {.name = "window_causal", .layout = sbhd, .mask = causal, .left = 2, .right = 1},
      {.name = "window_arbitrary", .mask = arbitrary, .left = 2, .right = 2},
      {.name = "window_padding",
       .mask = padding,
       .left = 1,
       .right = 1,
       .q_lens = {4, 2},
       .kv_lens = {2, 5}},
      {.name = "padding", .mask = padding, .q_lens = {3, 0}, .kv_lens = {4, 2}},
      {.name = "padding_no_keys",
       .layout = sbhd,
       .mask = padding,
       .q_lens = {3, 4},
       .kv_lens = {5, 0}},
      {.name = "padding_causal", .mask = padding_causal, .q_lens = {4, 2}, .kv_lens = {5, 3}},
      {.name = "padding_bottom",
       .mask = padding_bottom,
       .left = 2,
       .q_lens = {4, 3},
       .kv_lens = {5, 2}},
      {.name = "arbitrary", .mask = arbitrary},
      {.name = "off_by_one",
       .mask = bottom,
       .softmax = TE_FL_SOFTMAX_TYPE_OFF_BY_ONE,
       .sq = 5,
       .sk = 3},
      {.name = "sink", .mask = causal, .softmax = TE_FL_SOFTMAX_TYPE_LEARNABLE},
      {.name = "sink_dropout",
       .mask = arbitrary,
       .softmax = TE_FL_SOFTMAX_TYPE_LEARNABLE,
       .dropout = 0.3f},
      {.name = "bias", .bias = {2, 4, 4, 5}},
      {.name = "bias_1h", .layout = sbhd, .mask = causal, .bias = {1, 4, 4, 5}},
      {.name = "bias_b1", .bias = {2, 1, 4, 5}, .dropout = 0.25f},
      {.name = "bias_11", .mask = bottom, .bias = {1, 1, 4, 5}},
      {.name = "alibi", .mask = bottom, .alibi = 1},
      {.name = "alibi_bh", .mask = padding, .q_lens = {4, 2}, .kv_lens = {3, 5}, .alibi = 2},
      {.name = "dropout", .dropout = 0.5f},
      {.name = "softcap", .mask = causal, .softcap = 0.75f},
      {.name = "softcap_bias", .bias = {2, 4, 4, 5}, .dropout = 0.25f, .softcap = 0.75f},
      {.name = "softcap_alibi_sink",
       .mask = padding,
       .softmax = TE_FL_SOFTMAX_TYPE_LEARNABLE,
       .q_lens = {4, 2},
       .kv_lens = {3, 5},
       .alibi = 2,
       .softcap = 0.75f},
      {.name = "thd", .layout = thd, .mask = padding, .q_lens = {4, 2}, .kv_lens = {3, 5}},
      {.name = "thd_none", .layout = thd, .q_lens = {4, 2}, .kv_lens = {3, 5}},
      {.name = "thd_gaps",
       .layout = thd,
       .mask = padding_bottom,
       .q_lens = {3, 2},
       .kv_lens = {3, 5},
       .q_starts = {1, 5, 8},
       .kv_starts = {0, 5, 10},
       .alibi = 1},
      {.name = "thd_dropout",
       .layout = thd,
       .mask = padding_causal,
       .q_lens = {4, 2},
       .kv_lens = {4, 5},
       .dropout = 0.4f},
      {.name = "thd_dropout_max",
       .layout = thd,
       .mask = padding,
       .q_lens = {4, 2},
       .kv_lens = {3, 5},
       .dropout = 0.4f,
       .max_q = 6,
       .max_kv = 9},
      {.name = "one_element", .sq = 1, .sk = 1, .b = 1, .h = 1, .g = 1, .d = 1, .dv = 1},
      {.name = "multi_query", .mask = causal, .h = 3, .g = 1},
      {.name = "empty_batch", .b = 0},
      {.name = "no_queries", .sq = 0},
      {.name = "no_keys", .sk = 0},
  };
}
INSTANTIATE_TEST_SUITE_P(Reference, AttentionCase, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

// Hand-computed: both scores are 0, so each key has probability 1/2; with a sink logit of 0 it is
// 1/3, with a sink logit of log 2 it is 1/4.
TEST(ReferenceAttention, HandDerived) {
  HostTensor q({1, 1, 1, 2}, TE_FL_F32, {1, 0}), k({1, 2, 1, 2}, TE_FL_F32, {0, 5, 0, -7});
  HostTensor v({1, 2, 1, 1}, TE_FL_F32, {12, 24}), o({1, 1, 1, 1}, TE_FL_F32),
      lse({1, 1, 1}, TE_FL_F32);
  HostTensor sink({1}, TE_FL_F32, {std::log(2.0)});
  te_fl_saved saved;
  saved.opaque = 1;
  te_fl_fused_attn_fwd_args a;
  a.q = q, a.k = k, a.v = v, a.o = o, a.softmax_lse = lse, a.saved = &saved;
  a.layout = TE_FL_LAYOUT_BSHD;
  ASSERT_OK(run_reference("fused_attn_fwd", a));
  EXPECT_EQ(o.values()[0], 18);
  EXPECT_NEAR(lse.values()[0], std::log(2.0), 1e-7);
  EXPECT_EQ(saved.opaque, 0u);
  a.softmax_type = TE_FL_SOFTMAX_TYPE_OFF_BY_ONE;
  ASSERT_OK(run_reference("fused_attn_fwd", a));
  EXPECT_NEAR(o.values()[0], 12, 1e-6);
  EXPECT_NEAR(lse.values()[0], std::log(3.0), 1e-7);
  a.softmax_type = TE_FL_SOFTMAX_TYPE_LEARNABLE;
  a.softmax_sink = sink;
  ASSERT_OK(run_reference("fused_attn_fwd", a));
  EXPECT_NEAR(o.values()[0], 9, 1e-6);
  EXPECT_NEAR(lse.values()[0], std::log(4.0), 1e-7);
}

TEST(ReferenceAttention, InfiniteBiasMasksAndNanShows) {
  HostTensor q({1, 2, 1, 1}, TE_FL_F32, {1, 1}), k({1, 2, 1, 1}, TE_FL_F32, {1, 1});
  HostTensor v({1, 2, 1, 1}, TE_FL_F32, {3, 5}), o({1, 2, 1, 1}, TE_FL_F32),
      lse({1, 1, 2}, TE_FL_F32);
  HostTensor bias({1, 1, 2, 2}, TE_FL_F32, {-kInf, -kInf, NAN, -kInf});
  te_fl_fused_attn_fwd_args a;
  a.q = q, a.k = k, a.v = v, a.o = o, a.softmax_lse = lse, a.bias = bias;
  EXPECT_REFUSED(run_reference("fused_attn_fwd", a),
                 "bias has shape [1,1,2,2], expected [1 or 2, 1 or 1, 1, 1]");
  a.layout = TE_FL_LAYOUT_BSHD;
  ASSERT_OK(run_reference("fused_attn_fwd", a));
  EXPECT_EQ(o.values()[0], 0);
  EXPECT_EQ(lse.values()[0], -kInf);
  EXPECT_TRUE(std::isnan(o.values()[1]));
}

TEST(ReferenceAttention, PackedQkvThroughStrides) {
  const int64_t b = 2, s = 3, h = 2, d = 4;
  HostTensor packed({b, s, 3, h, d}, TE_FL_BF16, random_values(b * s * 3 * h * d, 11));
  HostTensor packed_grad({b, s, 3, h, d}, TE_FL_F32);
  const Shape shape = {b, s, h, d}, strides = {s * 3 * h * d, 3 * h * d, d, 1};
  HostTensor q(packed, shape, strides, 0), k(packed, shape, strides, h * d),
      v(packed, shape, strides, 2 * h * d);
  HostTensor dq(packed_grad, shape, strides, 0), dk(packed_grad, shape, strides, h * d),
      dv(packed_grad, shape, strides, 2 * h * d);
  HostTensor q2(shape, TE_FL_F32, q.values()), k2(shape, TE_FL_F32, k.values()),
      v2(shape, TE_FL_F32, v.values());
  HostTensor o(shape, TE_FL_F32), o2(shape, TE_FL_F32), lse({b, h, s}, TE_FL_F32);
  HostTensor d_o(shape, TE_FL_F32, random_values(b * s * h * d, 12));
  HostTensor dq2(shape, TE_FL_F32), dk2(shape, TE_FL_F32), dv2(shape, TE_FL_F32);
  te_fl_fused_attn_fwd_args f;
  f.layout = TE_FL_LAYOUT_BSHD, f.softmax_lse = lse;
  f.q = q, f.k = k, f.v = v, f.o = o;
  ASSERT_OK(run_reference("fused_attn_fwd", f));
  f.q = q2, f.k = k2, f.v = v2, f.o = o2;
  ASSERT_OK(run_reference("fused_attn_fwd", f));
  EXPECT_EQ(o.values(), o2.values());
  te_fl_fused_attn_bwd_args g;
  g.layout = TE_FL_LAYOUT_BSHD, g.softmax_lse = lse, g.d_o = d_o, g.o = o;
  g.q = q, g.k = k, g.v = v, g.dq = dq, g.dk = dk, g.dv = dv;
  ASSERT_OK(run_reference("fused_attn_bwd", g));
  g.q = q2, g.k = k2, g.v = v2, g.dq = dq2, g.dk = dk2, g.dv = dv2;
  ASSERT_OK(run_reference("fused_attn_bwd", g));
  EXPECT_EQ(dq.values(), dq2.values());
  EXPECT_EQ(dk.values(), dk2.values());
  EXPECT_EQ(dv.values(), dv2.values());
}

TEST(ReferenceAttention, RandomStateInMemoryCounts) {
  AttentionCall call({.name = "", .dropout = 0.5f});
  ASSERT_OK(run_reference("fused_attn_fwd", call.fwd, call.p.rng));
  const std::vector<double> want = call.o.values();
  // This offset is added to rng.offset.
  const uint64_t state[2] = {call.p.rng.seed, call.p.rng.offset - 2};
  ASSERT_OK(run_reference(
      "fused_attn_fwd", call.fwd,
      te_fl_rng{.seed = 1, .offset = 2, .seed_address = &state[0], .offset_address = &state[1]}));
  EXPECT_EQ(call.o.values(), want);
  ASSERT_OK(run_reference("fused_attn_fwd", call.fwd, te_fl_rng{.seed = 1, .offset = 2}));
  EXPECT_NE(call.o.values(), want);
}

TEST(ReferenceAttention, RefusesBeforeWriting) {
  const Case base{.name = ""};
  const auto refuse = [&](const Case& c, const std::function<void(AttentionCall&)>& break_it,
                          const char* part) {
    AttentionCall call(c);
    break_it(call);
    EXPECT_REFUSED(run_reference("fused_attn_fwd", call.fwd), part);
    EXPECT_TRUE(call.o.untouched() && call.lse.untouched()) << part;
  };
  HostTensor wrong({2, 5, 3, 3}, TE_FL_F32), wrong_dim({2, 5, 2, 9}, TE_FL_F32),
      flat({5}, TE_FL_F32);
  HostTensor two({2}, TE_FL_I32, {0, 1}), other({2, 4, 4, 9}, TE_FL_F32);
  refuse(
      base, [&](AttentionCall& c) { c.fwd.k = wrong; },
      "k has 3 heads, expected a divisor of q's 4 heads");
  refuse(
      base, [&](AttentionCall& c) { c.fwd.k = wrong_dim; },
      "k has 9 elements per head, expected 3 as q");
  refuse(
      base, [&](AttentionCall& c) { c.fwd.v = wrong; }, "v has 3 heads, expected 2 as k");
  refuse(
      base, [&](AttentionCall& c) { c.fwd.q = flat; },
      "q has shape [5], expected rank 4: [B, S, H, D]");
  refuse(
      base, [&](AttentionCall& c) { c.fwd.o = other; }, "o has shape [2,4,4,9]");
  refuse(
      base, [&](AttentionCall& c) { c.fwd.softmax_lse = flat; },
      "softmax_lse has shape [5], expected [2,4,4]");
  refuse(
      base, [&](AttentionCall& c) { c.fwd.alibi_slopes = flat; },
      "alibi_slopes has shape [5], expected [4]");
  refuse(
      base, [&](AttentionCall& c) { c.fwd.max_seqlen_q = 9; }, "max_seqlen_q");

  const Case thd{.name = "", .layout = TE_FL_LAYOUT_THD, .q_lens = {4, 2}, .kv_lens = {3, 5}};
  refuse(
      thd, [&](AttentionCall& c) { c.fwd.cu_seqlens_kv = two; },
      "cu_seqlens_kv has shape [2], expected [3]");
  refuse(
      thd, [&](AttentionCall& c) { c.fwd.max_seqlen_kv = 4; },
      "more than max_seqlen_q, max_seqlen_kv = 0, 4");
  refuse(
      thd,
      [&](AttentionCall& c) {
        c.cu_q.fill({0, 5, 4});
      },
      "sequence 1 has -1 tokens");
  refuse(
      thd,
      [&](AttentionCall& c) {
        c.cu_q.fill({0, 4, 90});
      },
      "at most 8 tokens");
  Case gaps = thd;
  gaps.q_starts = {0, 3, 6};
  gaps.kv_starts = {0, 3, 8};
  refuse(
      gaps, [](AttentionCall&) {}, "cu_seqlens_q: sequence 0 has 4 tokens from 0");
  const Case padding{
      .name = "", .mask = TE_FL_MASK_TYPE_PADDING, .q_lens = {4, 5}, .kv_lens = {5, 5}};
  refuse(
      padding, [](AttentionCall&) {}, "sequence 1 has 5 true positions, expected at most 4");
}

TEST(ReferenceAttention, BackwardRefusesBeforeWriting) {
  const auto refuse = [&](const std::function<void(AttentionCall&)>& break_it, const char* part) {
    AttentionCall call({.name = ""});
    break_it(call);
    EXPECT_REFUSED(run_reference("fused_attn_bwd", call.bwd), part);
    EXPECT_TRUE(call.dq.untouched() && call.dk.untouched() && call.dv.untouched()) << part;
  };
  HostTensor flat({5}, TE_FL_F32), bias({1, 1, 4, 5}, TE_FL_F32), dbias({1, 4, 4, 5}, TE_FL_F32);
  refuse([&](AttentionCall& c) { c.bwd.dq = flat; },
         "dq has shape [5], expected [2,4,4,3], the shape of q");
  refuse([&](AttentionCall& c) { c.bwd.d_o = flat; }, "d_o has shape [5]");
  refuse([&](AttentionCall& c) { c.bwd.bias = bias, c.bwd.dbias = dbias; },
         "dbias has shape [1,4,4,5]");
  AttentionCall call({.name = ""});
  te_fl_saved saved;
  saved.opaque = 1;
  saved.producer = "vendor.cudnn";
  call.bwd.saved = &saved;
  const Outcome outcome = run_reference("fused_attn_bwd", call.bwd);
  EXPECT_EQ(outcome.status, TE_FL_UNSUPPORTED);
  EXPECT_HAS(outcome.text, "vendor.cudnn");
  EXPECT_TRUE(call.dq.untouched());
}

// Windows at the limits of their integer range must not wrap around.
TEST(MaskRule, ExtremeWindows) {
  const int64_t far = INT64_MAX;
  const auto rule = backend::mask_rule(TE_FL_MASK_TYPE_CAUSAL_BOTTOM_RIGHT, far, far);
  EXPECT_EQ(rule.keys(0, 4, 6).begin, 0);
  EXPECT_EQ(rule.keys(0, 4, 6).end, 3);
  EXPECT_TRUE(backend::mask_rule(TE_FL_MASK_TYPE_NONE, 0, 0).keys(5, 9, 3).empty());
}

}  // namespace
}  // namespace te_fl::testing
