// Adam, SGD and gradient clipping against the published formulas in double precision.
#include <limits>

#include "nn_test_util.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::optimizer_test {
namespace {

struct Model {
  std::unique_ptr<Linear> module;
  std::vector<NamedParameter> parameters;
  explicit Model(DType dtype = DType::kF32) {
    module = take(Linear::create({.in_features = 3,
                                  .out_features = 4,
                                  .param_dtype = dtype,
                                  .activation_dtype = dtype,
                                  .seed = 2,
                                  .init_std = 0.5f}));
    parameters = module->parameters();
  }
  void set_grads(uint64_t step) {
    for (const NamedParameter& p : parameters)
      set_values(made_grad(p), random_values(p.value().numel(), step * 10 + p.name.size()));
  }
};

TEST(AdamOptimizer, FollowsTheFormulas) {
  for (bool adamw : {true, false}) {
    for (bool correction : {true, false}) {
      Model s;
      auto adam = take(Adam::create(s.parameters, {.lr = 0.02f,
                                                   .beta1 = 0.8f,
                                                   .beta2 = 0.9f,
                                                   .epsilon = 1e-3f,
                                                   .weight_decay = 0.3f,
                                                   .adamw = adamw,
                                                   .bias_correction = correction,
                                                   .decay = [](std::string_view n, const Tensor&) {
                                                     return n == "weight";
                                                   }}));
      std::vector<Values> p, m, v;
      for (const NamedParameter& q : s.parameters) {
        p.push_back(values_of(q.value()));
        m.push_back(Values(p.back().size()));
        v.push_back(Values(p.back().size()));
      }
      for (int step = 1; step <= 4; ++step) {
        s.set_grads(step);
        const double b1 = 0.8f, b2 = 0.9f;
        for (size_t i = 0; i < p.size(); ++i) {
          const double wd = s.parameters[i].name == "weight" ? 0.3f : 0;
          for (size_t j = 0; j < p[i].size(); ++j) {
            double g = element(s.parameters[i].grad(), static_cast<int64_t>(j));
            if (!adamw) g += wd * p[i][j];
            m[i][j] = b1 * m[i][j] + (1 - b1) * g;
            v[i][j] = b2 * v[i][j] + (1 - b2) * g * g;
            const double mh = m[i][j] / (correction ? 1 - std::pow(b1, step) : 1);
            const double vh = v[i][j] / (correction ? 1 - std::pow(b2, step) : 1);
            p[i][j] -= 0.02f * (mh / (std::sqrt(vh) + 1e-3f) + (adamw ? wd * p[i][j] : 0));
          }
        }
        ASSERT_OK(adam->step());
        for (size_t i = 0; i < p.size(); ++i) {
          for (size_t j = 0; j < p[i].size(); ++j)
            ASSERT_NEAR(element(s.parameters[i].value(), static_cast<int64_t>(j)), p[i][j], 2e-6);
        }
      }
      EXPECT_EQ(adam->steps(), 4);
    }
  }
}

TEST(AdamOptimizer, Bf16ParametersAreCopiesOfF32Masters) {
  Model s(DType::kBF16);
  // Lr is so small that BF16 alone would round each step away.
  auto adam = take(Adam::create(s.parameters, {.lr = 1e-4f}));
  const Values start = values_of(s.parameters[0].value());
  for (int step = 1; step <= 40; ++step) {
    for (const NamedParameter& p : s.parameters)
      set_values(made_grad(p), Values(static_cast<size_t>(p.value().numel()), 1.0));
    ASSERT_OK(adam->step());
  }
  Tensor master;
  for (const NamedTensor& t : adam->state()) {
    if (t.name == "optimizer.master.weight") master = t.tensor;
  }
  ASSERT_TRUE(master.defined());
  const Values now = values_of(s.parameters[0].value());
  for (size_t i = 0; i < now.size(); ++i) {
    EXPECT_NEAR(element(master, static_cast<int64_t>(i)), start[i] - 40e-4, 1e-5);
    EXPECT_NEAR(now[i], element(master, static_cast<int64_t>(i)), std::abs(now[i]) / 256 + 1e-9);
  }
}

TEST(SgdOptimizer, FollowsTheFormulas) {
  for (bool nesterov : {false, true}) {
    for (float momentum : {0.9f, 0.0f}) {
      if (nesterov && momentum == 0) continue;
      for (DType dtype : {DType::kF32, DType::kBF16}) {
        Model s(dtype);
        auto sgd = take(SGD::create(
            s.parameters,
            {.lr = 0.1f, .momentum = momentum, .weight_decay = 0.01f, .nesterov = nesterov}));
        Values p = values_of(s.parameters[0].value()), m(p.size());
        for (int step = 1; step <= 3; ++step) {
          s.set_grads(step);
          for (size_t j = 0; j < p.size(); ++j) {
            const double g =
                element(s.parameters[0].grad(), static_cast<int64_t>(j)) + 0.01f * p[j];
            m[j] = step == 1 ? g : momentum * m[j] + g;
            p[j] -= 0.1f * (nesterov ? g + momentum * m[j] : momentum == 0 ? g : m[j]);
          }
          ASSERT_OK(sgd->step());
          for (size_t j = 0; j < p.size(); ++j) {
            ASSERT_NEAR(element(s.parameters[0].value(), static_cast<int64_t>(j)), p[j],
                        dtype == DType::kF32 ? 1e-6 : std::abs(p[j]) / 200 + 1e-6);
          }
        }
      }
    }
  }
}

TEST(ClipGradNorm, ScalesOnlyWhatIsTooLong) {
  Model s;
  s.set_grads(1);
  double square = 0;
  std::vector<Values> before;
  for (const NamedParameter& p : s.parameters) {
    before.push_back(values_of(p.grad()));
    for (double g : before.back()) square += g * g;
  }
  const double norm = std::sqrt(square);
  EXPECT_NEAR(take(clip_grad_norm(s.parameters, static_cast<float>(norm * 2))), norm, 1e-5);
  EXPECT_EQ(values_of(s.parameters[0].grad()), before[0]);
  EXPECT_NEAR(take(clip_grad_norm(s.parameters, 0.5f)), norm, 1e-5);
  for (size_t i = 0; i < before.size(); ++i) {
    const Values now = values_of(s.parameters[i].grad());
    for (size_t j = 0; j < now.size(); ++j) EXPECT_NEAR(now[j], before[i][j] * 0.5 / norm, 1e-6);
  }
  EXPECT_FALSE(clip_grad_norm(s.parameters, 0).ok());
}

TEST(Optimizer, ANonFiniteNormLeavesTheParametersAlone) {
  Model s;
  s.set_grads(1);
  s.parameters[0].grad().data<float>()[2] = std::numeric_limits<float>::infinity();
  auto adam = take(Adam::create(s.parameters, {.max_grad_norm = 1}));
  const Values before = values_of(s.parameters[1].value());
  const Status status = adam->step();
  EXPECT_FAILS(status, kFailedPrecondition, "gradient norm is inf");
  EXPECT_EQ(values_of(s.parameters[1].value()), before);
  EXPECT_EQ(adam->steps(), 0);
}

TEST(Optimizer, BadOptionsAreNamed) {
  Model s;
  auto text = [](const auto& r) { return r.ok() ? std::string("ok") : r.status().to_string(); };
  EXPECT_HAS(text(Adam::create(s.parameters, {.lr = -1})), "lr is -1");
  EXPECT_HAS(text(Adam::create(s.parameters, {.beta2 = 1})), "beta2 is 1");
  EXPECT_HAS(text(SGD::create(s.parameters, {.nesterov = true})), "nesterov");
}

}  // namespace
}  // namespace te_fl::nn::testing::optimizer_test
