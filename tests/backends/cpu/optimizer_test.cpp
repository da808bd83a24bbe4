// Optimizers of the CPU backend against the reference backend, over lists of tensors whose sizes
// cross the boundaries of blocks and of the threads' ranges.
#include "te_fl/ops/optimizer.h"

#include <cmath>
#include <deque>

#include "support/cpu_call.hpp"
#include "support/expect.hpp"

namespace te_fl::testing::optimizer_test {
namespace {

// A list of tensors, and a copy of it for the oracle.
struct Lists {
  Lists(const std::vector<int64_t>& sizes, const std::vector<int>& dtypes, uint32_t seed,
        double low = -1, double high = 1) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      const auto values = random_values(sizes[i], seed + static_cast<uint32_t>(i), low, high);
      const int dtype = dtypes[i % dtypes.size()];
      own.emplace_back(Shape{sizes[i]}, dtype, values);
      want.emplace_back(Shape{sizes[i]}, dtype, values);
      mine.push_back(own.back()), oracle.push_back(want.back());
    }
  }
  int64_t count() const { return static_cast<int64_t>(mine.size()); }
  std::deque<HostTensor> own, want;
  std::vector<const te_fl_tensor*> mine, oracle;
};

double tolerance(int64_t, const te_fl_tensor& t) {
  return t.dl.dtype.bits == 32 ? 5e-6 : t.dl.dtype.code == TE_FL_CODE_BFLOAT ? 8e-3 : 1e-3;
}

void expect_lists_near(Lists& l, const char* what) {
  for (size_t i = 0; i < l.own.size(); ++i) {
    expect_near(l.own[i].values(), l.want[i].values(), 1e-6, tolerance(0, *l.own[i].c()), what);
  }
}

const std::vector<int64_t> kSizes = {5, 0, 1, 70000, 17, 1024, 66000};
const std::vector<int> kAll = {TE_FL_F32, TE_FL_BF16, TE_FL_F16};

TEST(CpuOptimizer, Adam) {
  for (int mode : {TE_FL_ADAM_MODE_L2, TE_FL_ADAM_MODE_ADAMW}) {
    for (bool master : {false, true}) {
      Lists g(kSizes, {TE_FL_F32, TE_FL_F16, TE_FL_BF16}, 1), p(kSizes, kAll, 20);
      Lists m(kSizes, {TE_FL_F32}, 40), v(kSizes, {TE_FL_F32}, 60, 0, 1),
          w(kSizes, {TE_FL_F32}, 80);
      te_fl_multi_tensor_adam_args a, b;
      for (te_fl_multi_tensor_adam_args* x : {&a, &b}) {
        x->grads_count = x->params_count = x->exp_avgs_count = x->exp_avg_sqs_count = g.count();
        x->grads = g.mine.data();
        x->lr = 0.01f, x->weight_decay = 0.1f, x->step = 3, x->mode = mode;
        x->bias_correction = master;
        if (master) x->master_params_count = g.count();
      }
      a.params = p.mine.data(), b.params = p.oracle.data();
      a.exp_avgs = m.mine.data(), b.exp_avgs = m.oracle.data();
      a.exp_avg_sqs = v.mine.data(), b.exp_avg_sqs = v.oracle.data();
      a.master_params = w.mine.data(), b.master_params = w.oracle.data();
      ASSERT_OK(run_cpu("multi_tensor_adam", a));
      ASSERT_OK(run_reference("multi_tensor_adam", b));
      expect_lists_near(m, "m");
      expect_lists_near(v, "v");
      expect_lists_near(p, "p");
      if (!master) continue;
      expect_lists_near(w, "master");
      for (size_t i = 0; i < kSizes.size(); ++i) {  // the BF16 parameter is exactly the rounded
                                                    // master weight
        HostTensor rounded({kSizes[i]}, kAll[i % 3], w.own[i].values());
        EXPECT_EQ(p.own[i].bytes(), rounded.bytes());
      }
    }
  }
}

// At step 1 from zero state, m^ = g and v^ = g^2, so p falls by lr * sign(g).
TEST(CpuOptimizer, AdamFirstStepFlagAndErrors) {
  HostTensor g({2}, TE_FL_F32, {0.5, -3}), p({2}, TE_FL_F32, {1, 1}), flag({1}, TE_FL_I32, {1});
  HostTensor m({2}, TE_FL_F32, {0, 0}), v({2}, TE_FL_F32, {0, 0});
  const std::vector<const te_fl_tensor*> gl = {g}, pl = {p}, ml = {m}, vl = {v};
  te_fl_multi_tensor_adam_args a;
  a.grads = gl.data(), a.params = pl.data(), a.exp_avgs = ml.data(), a.exp_avg_sqs = vl.data();
  a.grads_count = a.params_count = a.exp_avgs_count = a.exp_avg_sqs_count = 1;
  a.lr = 0.25f, a.noop_flag = flag;
  ASSERT_OK(run_cpu("multi_tensor_adam", a));
  EXPECT_EQ(p.values()[0], 1) << "the flag leaves everything";
  flag.fill({0});
  ASSERT_OK(run_cpu("multi_tensor_adam", a));
  expect_near(p.values(), {0.75, 1.25}, 1e-6, 0, "p");
  expect_near(m.values(), {0.05, -0.3}, 1e-6, 0, "m");
}

TEST(CpuOptimizer, Sgd) {
  for (int variant = 0; variant < 8; ++variant) {
    Lists g(kSizes, kAll, 1), p(kSizes, kAll, 20), m(kSizes, {TE_FL_F32}, 40);
    Lists copies(kSizes, {TE_FL_BF16}, 60);
    te_fl_multi_tensor_sgd_args a, b;
    for (te_fl_multi_tensor_sgd_args* x : {&a, &b}) {
      x->grads_count = x->params_count = x->momentums_count = x->param_copies_count = g.count();
      x->grads = g.mine.data();
      x->lr = 0.1f, x->weight_decay = 0.1f, x->scale = 0.5f, x->dampening = 0.2f;
      x->momentum = variant == 7 ? 0.0f : 0.9f;
      x->nesterov = variant & 1, x->first_run = variant >> 1 & 1;
      x->wd_after_momentum = variant >> 2 & 1;
    }
    a.params = p.mine.data(), b.params = p.oracle.data();
    a.momentums = m.mine.data(), b.momentums = m.oracle.data();
    a.param_copies = copies.mine.data(), b.param_copies = copies.oracle.data();
    ASSERT_OK(run_cpu("multi_tensor_sgd", a));
    ASSERT_OK(run_reference("multi_tensor_sgd", b));
    expect_lists_near(p, "p");
    expect_lists_near(m, "m");
    expect_lists_near(copies, "copies");
  }
}

TEST(CpuOptimizer, ScaleAndItsFlag) {
  Lists in(kSizes, kAll, 1), out(kSizes, {TE_FL_F16, TE_FL_F32}, 20);
  HostTensor flag({1}, TE_FL_I32, {0});
  te_fl_multi_tensor_scale_args a;
  a.inputs = in.mine.data(), a.inputs_count = in.count();
  a.outputs = out.mine.data(), a.outputs_count = in.count();
  a.noop_flag = flag, a.scale = 0.3f;
  ASSERT_OK(run_cpu("multi_tensor_scale", a));
  a.outputs = out.oracle.data();
  ASSERT_OK(run_reference("multi_tensor_scale", a));
  expect_lists_near(out, "scaled");
  EXPECT_EQ(flag.values()[0], 0);
  a.outputs = in.mine.data();
  ASSERT_OK(run_cpu("multi_tensor_scale", a));  // in place
  EXPECT_NEAR(in.own[2].values()[0], in.want[2].values()[0] * 0.3, 1e-3);
  // 100000 is finite in FP32, but overflows FP16. Values that are not finite are found even if the
  // scale is 0.
  HostTensor x({3}, TE_FL_F32, {1, 100000, 2}), half({3}, TE_FL_F16);
  const std::vector<const te_fl_tensor*> xl = {x}, hl = {half};
  a.inputs = xl.data(), a.outputs = hl.data(), a.inputs_count = a.outputs_count = 1, a.scale = 1;
  ASSERT_OK(run_cpu("multi_tensor_scale", a));
  EXPECT_EQ(flag.values()[0], 1);
  for (double bad : {double{NAN}, -double{INFINITY}}) {
    flag.fill({0});
    x.fill({1, 2, bad});
    a.scale = 0;
    ASSERT_OK(run_cpu("multi_tensor_scale", a));
    EXPECT_EQ(flag.values()[0], 1);
  }
  x.fill({1, 2, 3});
  ASSERT_OK(run_cpu("multi_tensor_scale", a));
  EXPECT_EQ(flag.values()[0], 1) << "never cleared";
  HostTensor shifted(x, {2}, {}, 1), front(x, {2}, {}, 0);
  const std::vector<const te_fl_tensor*> sl = {shifted}, fl = {front};
  a.inputs = sl.data(), a.outputs = fl.data();
  EXPECT_FAILS(run_cpu("multi_tensor_scale", a), kUnsupported, "shares memory");
}

// Hand-computed norms: 3-4-5, 5-12-13, and the sum of squares of both, 25 + 169 = 194.
TEST(CpuOptimizer, Norms) {
  HostTensor a({2}, TE_FL_F32, {3, -4}), b({1, 2}, TE_FL_F16, {5, 12}), empty({0}, TE_FL_F32);
  HostTensor norm({1}, TE_FL_F32), each({3}, TE_FL_F32), inv({1}, TE_FL_F32, {-0.25});
  const std::vector<const te_fl_tensor*> in = {a, b, empty};
  te_fl_multi_tensor_l2norm_args args;
  args.inputs = in.data(), args.inputs_count = 3, args.norm = norm, args.per_tensor_norms = each;
  ASSERT_OK(run_cpu("multi_tensor_l2norm", args));
  EXPECT_FLOAT_EQ(static_cast<float>(norm.values()[0]), std::sqrt(194.0f));
  EXPECT_EQ(each.values(), (std::vector<double>{5, 13, 0}));
  te_fl_multi_tensor_unscale_l2norm_args unscale;
  unscale.inputs = in.data(), unscale.inputs_count = 3;
  unscale.norm = norm, unscale.per_tensor_norms = each, unscale.inv_scale = inv;
  ASSERT_OK(run_cpu("multi_tensor_unscale_l2norm", unscale));
  EXPECT_FLOAT_EQ(static_cast<float>(norm.values()[0]), std::sqrt(194.0f) / 4);
  EXPECT_EQ(each.values(), (std::vector<double>{1.25, 3.25, 0}));
  a.fill({3e30, 4e30});  // their squares overflow FP32
  ASSERT_OK(run_cpu("multi_tensor_l2norm", args));
  EXPECT_NEAR(norm.values()[0], 5e30, 1e24);
  a.fill({NAN, 1});
  ASSERT_OK(run_cpu("multi_tensor_l2norm", args));
  EXPECT_TRUE(std::isnan(norm.values()[0]));

  Lists large({70000, 3, 300001}, kAll, 5);
  HostTensor want({1}, TE_FL_F32), want_each({3}, TE_FL_F32);
  args.inputs = large.mine.data();
  ASSERT_OK(run_cpu("multi_tensor_l2norm", args));
  args.norm = want, args.per_tensor_norms = want_each;
  ASSERT_OK(run_reference("multi_tensor_l2norm", args));
  expect_near(norm.values(), want.values(), 0, 2e-7, "norm");
  expect_near(each.values(), want_each.values(), 0, 2e-7, "each");
}

}  // namespace
}  // namespace te_fl::testing::optimizer_test
