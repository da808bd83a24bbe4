// Optimizers of the reference backend against their formulas in double.
#include "te_fl/ops/optimizer.h"

#include <cmath>
#include <functional>

#include "support/expect.hpp"
#include "support/reference_call.hpp"
#include "te_fl/ops.hpp"

namespace te_fl::testing {
namespace {

using List = std::vector<const te_fl_tensor*>;

TEST(ReferenceOptimizer, ScaleAndItsFlag) {
  HostTensor a({2, 2}, TE_FL_F32, {1, -2, 3, 0}), b({3}, TE_FL_BF16, {4, 8, -16});
  HostTensor out_a({2, 2}, TE_FL_F16), out_b({3}, TE_FL_F32), flag({1}, TE_FL_I32, {0});
  const List in = {a, b}, out = {out_a, out_b};
  te_fl_multi_tensor_scale_args args;
  args.inputs = in.data(), args.inputs_count = 2;
  args.outputs = out.data(), args.outputs_count = 2;
  args.noop_flag = flag, args.scale = 0.5f;
  ASSERT_OK(run_reference("multi_tensor_scale", args));
  EXPECT_EQ(out_a.values(), (std::vector<double>{0.5, -1, 1.5, 0}));
  EXPECT_EQ(out_b.values(), (std::vector<double>{2, 4, -8}));
  EXPECT_EQ(flag.values()[0], 0);

  a.fill({1, 200000, 0, 0});  // 200000 times 0.5 is finite in FP32, but overflows FP16
  ASSERT_OK(run_reference("multi_tensor_scale", args));
  EXPECT_EQ(flag.values()[0], 1);
  a.fill({1, 2, 3, 4});
  ASSERT_OK(run_reference("multi_tensor_scale", args));
  EXPECT_EQ(flag.values()[0], 1) << "never cleared";
  flag.fill({0});
  b.fill({1, NAN, 2});
  args.scale = 0;
  ASSERT_OK(run_reference("multi_tensor_scale", args));
  EXPECT_EQ(flag.values()[0], 1);
  flag.fill({0});
  b.fill({1, -INFINITY, 2});
  args.outputs = in.data();  // in place
  ASSERT_OK(run_reference("multi_tensor_scale", args));
  EXPECT_EQ(flag.values()[0], 1);
  EXPECT_EQ(b.values()[2], 0);
}

// Hand-computed norms: 3-4-5, 5-12-13, and the sum of squares of both, 25 + 169 = 194.
TEST(ReferenceOptimizer, Norms) {
  HostTensor a({2}, TE_FL_F32, {3, -4}), b({1, 2}, TE_FL_F16, {5, 12}), empty({0}, TE_FL_F32);
  HostTensor norm({1}, TE_FL_F32), each({3}, TE_FL_F32), inv({1}, TE_FL_F32, {0.25});
  const List in = {a, b, empty};
  te_fl_multi_tensor_l2norm_args args;
  args.inputs = in.data(), args.inputs_count = 3, args.norm = norm;
  ASSERT_OK(run_reference("multi_tensor_l2norm", args));
  EXPECT_FLOAT_EQ(static_cast<float>(norm.values()[0]), std::sqrt(194.0f));
  args.per_tensor_norms = each;
  ASSERT_OK(run_reference("multi_tensor_l2norm", args));
  EXPECT_EQ(each.values(), (std::vector<double>{5, 13, 0}));
  te_fl_multi_tensor_unscale_l2norm_args unscale;
  unscale.inputs = in.data(), unscale.inputs_count = 3;
  unscale.norm = norm, unscale.per_tensor_norms = each, unscale.inv_scale = inv;
  ASSERT_OK(run_reference("multi_tensor_unscale_l2norm", unscale));
  EXPECT_FLOAT_EQ(static_cast<float>(norm.values()[0]), std::sqrt(194.0f) / 4);
  EXPECT_EQ(each.values(), (std::vector<double>{1.25, 3.25, 0}));

  a.fill({3e30, 4e30});  // their squares overflow FP32
  ASSERT_OK(run_reference("multi_tensor_l2norm", args));
  EXPECT_NEAR(norm.values()[0], 5e30, 1e24);
  args.inputs_count = 0, args.per_tensor_norms = nullptr;
  ASSERT_OK(run_reference("multi_tensor_l2norm", args));
  EXPECT_EQ(norm.values()[0], 0);
  HostTensor two({2}, TE_FL_F32);
  args.inputs_count = 3, args.per_tensor_norms = two;
  EXPECT_REFUSED(ops::multi_tensor_l2norm(args),
                 "argument 'per_tensor_norms' has shape [2], must be [3]", "set by 'inputs'");
  EXPECT_TRUE(two.untouched());
}

struct AdamCase {
  AdamCase()
      : g1({2, 3}, TE_FL_F32, random_values(6, 1)),
        g2({4}, TE_FL_BF16, random_values(4, 2)),
        p1({2, 3}, TE_FL_F32, random_values(6, 3)),
        p2({4}, TE_FL_BF16, random_values(4, 4)),
        m1({2, 3}, TE_FL_F32, random_values(6, 5)),
        m2({4}, TE_FL_F32, random_values(4, 6)),
        v1({2, 3}, TE_FL_F32, random_values(6, 7, 0, 1)),
        v2({4}, TE_FL_F32, random_values(4, 8, 0, 1)),
        w1({2, 3}, TE_FL_F32, random_values(6, 9)),
        w2({4}, TE_FL_F32, random_values(4, 10)),
        g{g1, g2},
        p{p1, p2},
        m{m1, m2},
        v{v1, v2},
        w{w1, w2} {
    args.grads = g.data(), args.grads_count = 2;
    args.params = p.data(), args.params_count = 2;
    args.exp_avgs = m.data(), args.exp_avgs_count = 2;
    args.exp_avg_sqs = v.data(), args.exp_avg_sqs_count = 2;
    args.lr = 0.01f, args.weight_decay = 0.1f, args.step = 3, args.epsilon = 1e-6f;
  }
  HostTensor g1, g2, p1, p2, m1, m2, v1, v2, w1, w2;
  List g, p, m, v, w;
  te_fl_multi_tensor_adam_args args;
};

struct AdamState {
  double m, v, p;
};
AdamState adam(AdamState s, double g, const te_fl_multi_tensor_adam_args& a) {
  const double b1 = a.beta1, b2 = a.beta2, wd = a.weight_decay;
  if (a.mode == TE_FL_ADAM_MODE_L2) g += wd * s.p;
  s.m = b1 * s.m + (1 - b1) * g;
  s.v = b2 * s.v + (1 - b2) * g * g;
  double mh = s.m, vh = s.v;
  if (a.bias_correction) {
    double c1 = 1, c2 = 1;
    for (int64_t t = 0; t < a.step; ++t) c1 *= b1, c2 *= b2;
    mh /= 1 - c1;
    vh /= 1 - c2;
  }
  double update = mh / (std::sqrt(vh) + a.epsilon);
  if (a.mode == TE_FL_ADAM_MODE_ADAMW) update += wd * s.p;
  s.p -= a.lr * update;
  return s;
}

TEST(ReferenceOptimizer, AdamModesAndCorrection) {
  for (int mode : {TE_FL_ADAM_MODE_L2, TE_FL_ADAM_MODE_ADAMW}) {
    for (int correction : {0, 1}) {
      AdamCase c;
      c.args.mode = mode, c.args.bias_correction = correction;
      std::vector<double> m, v, p;
      for (int i = 0; i < 6; ++i) {
        const AdamState s =
            adam({c.m1.values()[i], c.v1.values()[i], c.p1.values()[i]}, c.g1.values()[i], c.args);
        m.push_back(s.m), v.push_back(s.v), p.push_back(s.p);
      }
      const AdamState low =
          adam({c.m2.values()[0], c.v2.values()[0], c.p2.values()[0]}, c.g2.values()[0], c.args);
      ASSERT_OK(run_reference("multi_tensor_adam", c.args));
      expect_near(c.m1.values(), m, 1e-7, 1e-6, "m");
      expect_near(c.v1.values(), v, 1e-7, 1e-6, "v");
      expect_near(c.p1.values(), p, 1e-6, 1e-6, "p");
      EXPECT_NEAR(c.p2.values()[0], low.p, std::abs(low.p) * 0.004) << "a BF16 parameter";
    }
  }
}

// At step 1 from zero state, m^ = g and v^ = g^2, so p falls by lr * sign(g).
TEST(ReferenceOptimizer, AdamFirstStep) {
  HostTensor g({2}, TE_FL_F32, {0.5, -3}), p({2}, TE_FL_F32, {1, 1});
  HostTensor m({2}, TE_FL_F32, {0, 0}), v({2}, TE_FL_F32, {0, 0});
  const List gl = {g}, pl = {p}, ml = {m}, vl = {v};
  te_fl_multi_tensor_adam_args a;
  a.grads = gl.data(), a.params = pl.data(), a.exp_avgs = ml.data(), a.exp_avg_sqs = vl.data();
  a.grads_count = a.params_count = a.exp_avgs_count = a.exp_avg_sqs_count = 1;
  a.lr = 0.25f;
  ASSERT_OK(run_reference("multi_tensor_adam", a));
  expect_near(p.values(), {0.75, 1.25}, 1e-6, 0, "p");
  expect_near(m.values(), {0.05, -0.3}, 1e-6, 0, "m");
}

TEST(ReferenceOptimizer, AdamMasterWeights) {
  AdamCase c;
  c.args.mode = TE_FL_ADAM_MODE_ADAMW;
  c.args.master_params = c.w.data(), c.args.master_params_count = 2;
  c.p2.fill({NAN, NAN, NAN, NAN});  // written, but never read
  std::vector<double> want;
  for (int i = 0; i < 4; ++i) {
    want.push_back(
        adam({c.m2.values()[i], c.v2.values()[i], c.w2.values()[i]}, c.g2.values()[i], c.args).p);
  }
  ASSERT_OK(run_reference("multi_tensor_adam", c.args));
  expect_near(c.w2.values(), want, 1e-6, 1e-6, "master");
  HostTensor rounded({4}, TE_FL_BF16, c.w2.values());
  EXPECT_EQ(c.p2.values(), rounded.values());
  EXPECT_EQ(c.p1.values(), c.w1.values());
}

TEST(ReferenceOptimizer, NoopFlagLeavesEverything) {
  AdamCase c;
  HostTensor flag({1}, TE_FL_I32, {1});
  c.args.noop_flag = flag;
  const auto p = c.p1.values(), m = c.m1.values(), v = c.v2.values();
  ASSERT_OK(run_reference("multi_tensor_adam", c.args));
  EXPECT_EQ(c.p1.values(), p);
  EXPECT_EQ(c.m1.values(), m);
  EXPECT_EQ(c.v2.values(), v);
  te_fl_multi_tensor_sgd_args s;
  s.grads = c.g.data(), s.params = c.p.data(), s.momentums = c.m.data();
  s.grads_count = s.params_count = s.momentums_count = 2;
  s.lr = 1, s.momentum = 0.5f, s.noop_flag = flag;
  ASSERT_OK(run_reference("multi_tensor_sgd", s));
  EXPECT_EQ(c.p1.values(), p);
  EXPECT_EQ(c.m1.values(), m);
  flag.fill({0});
  ASSERT_OK(run_reference("multi_tensor_sgd", s));
  EXPECT_NE(c.p1.values(), p);
}

// Every combination of the switches for two steps, against the formula.
TEST(ReferenceOptimizer, SgdSwitches) {
  for (int bits = 0; bits < 16; ++bits) {
    HostTensor g({3}, TE_FL_F32, {0.5, -1, 2}), p({3}, TE_FL_F32, {1, 2, -3});
    HostTensor m({3}, TE_FL_F32, {0.25, -0.5, 1}), copy({3}, TE_FL_F16);
    const List gl = {g}, pl = {p}, ml = {m}, cl = {copy};
    te_fl_multi_tensor_sgd_args a;
    a.grads = gl.data(), a.params = pl.data(), a.momentums = ml.data(), a.param_copies = cl.data();
    a.grads_count = a.params_count = a.momentums_count = a.param_copies_count = 1;
    a.lr = 0.1f, a.weight_decay = 0.2f, a.scale = 0.5f, a.dampening = 0.25f;
    a.momentum = (bits & 1) != 0 ? 0.9f : 0.0f;
    a.nesterov = (bits & 2) != 0;
    a.first_run = (bits & 4) != 0;
    a.wd_after_momentum = (bits & 8) != 0;
    std::vector<double> want_p = p.values(), want_m = m.values();
    for (int i = 0; i < 3; ++i) {
      double step =
          g.values()[i] * 0.5 + (a.wd_after_momentum ? 0 : double{a.weight_decay} * want_p[i]);
      if (a.momentum != 0) {
        want_m[i] = a.first_run ? step : double{a.momentum} * want_m[i] + 0.75 * step;
        step = a.nesterov ? step + double{a.momentum} * want_m[i] : want_m[i];
      }
      if (a.wd_after_momentum) step += double{a.weight_decay} * want_p[i];
      want_p[i] -= double{a.lr} * step;
    }
    ASSERT_OK(run_reference("multi_tensor_sgd", a));
    expect_near(p.values(), want_p, 1e-6, 1e-6, "p");
    expect_near(m.values(), want_m, 1e-6, 1e-6, "m");
    HostTensor rounded({3}, TE_FL_F16, p.values());
    EXPECT_EQ(copy.values(), rounded.values());
  }
}

}  // namespace
}  // namespace te_fl::testing
