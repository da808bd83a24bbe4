// Parameter groups and dynamic loss scaling.
#include <cmath>
#include <limits>

#include "nn_test_util.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::optimizer_groups_test {
namespace {

// Three parameters of one element each, without a module.
std::vector<NamedParameter> three(DType dtype = DType::kF32) {
  std::vector<NamedParameter> parameters;
  for (const char* name : {"body.weight", "head.weight", "head.bias"}) {
    parameters.push_back({name, take(init::constant(Shape{1}, 1, dtype, Device()))});
  }
  return parameters;
}
void give(const std::vector<NamedParameter>& parameters, float gradient) {
  for (const NamedParameter& p : parameters) {
    check(p.parameter->ensure_grad());
    p.grad().data<float>()[0] = gradient;
  }
}
Values values(const std::vector<NamedParameter>& parameters) {
  Values result;
  for (const NamedParameter& p : parameters) result.push_back(element(p.value(), 0));
  return result;
}
DecayFilter begins(std::string prefix) {
  return [prefix](std::string_view name, const Tensor&) { return name.starts_with(prefix); };
}

TEST(ParamGroups, HaveTheirLearningRatesAndDecays) {
  for (bool capturable : {false, true}) {
    const auto parameters = three();
    SGDOptions options{.lr = 0.5f, .weight_decay = 0.25f, .capturable = capturable};
    options.groups = {{.selects = begins("head.w"), .lr_scale = 0.5f},
                      {.selects = begins("head"), .lr_scale = 2, .weight_decay = 0}};
    auto sgd = take(SGD::create(parameters, options));
    give(parameters, 1);
    check(sgd->step());
    // Expected: w - lr (g + decay w), computed by hand.
    EXPECT_EQ(values(parameters), (Values{1 - 0.5 * 1.25, 1 - 0.25 * 1.25, 1 - 1.0}));
    sgd->set_lr(0.25f);
    check(sgd->set_lr_scale(1, 4));
    const Values before = values(parameters);
    check(sgd->step());
    EXPECT_EQ(values(parameters),
              (Values{before[0] - 0.25 * (1 + 0.25 * before[0]),
                      before[1] - 0.125 * (1 + 0.25 * before[1]), before[2] - 1.0}));
    EXPECT_FAILS(sgd->set_lr_scale(2, 1), kInvalidArgument, "created with 2");
    EXPECT_FAILS(sgd->set_lr_scale(0, -1), kInvalidArgument, "scale is -1");
  }
}

// Adam's first step is lr * sign(g), independent of the gradient's magnitude.
TEST(ParamGroups, OfAdam) {
  for (bool capturable : {false, true}) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      const auto parameters = three(dtype);
      AdamOptions options{
          .lr = 0.25f, .epsilon = 0, .weight_decay = 0.5f, .capturable = capturable};
      options.groups = {{.selects = begins("head"), .lr_scale = 0.5f, .weight_decay = 0}};
      auto adam = take(Adam::create(parameters, options));
      give(parameters, 3);
      check(adam->step());
      const Values want = {1 - 0.25 - 0.25 * 0.5, 0.875, 0.875};
      for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(values(parameters)[i], want[i], 1e-6) << i;
    }
  }
}

TEST(ParamGroups, WhatIsWrongIsNamed) {
  AdamOptions adam;
  adam.groups = {{.selects = begins("head")}, {.selects = nullptr}};
  EXPECT_FAILS(Adam::create(three(), adam), kInvalidArgument, "groups[1] selects nothing");
  SGDOptions sgd;
  sgd.groups = {{.selects = begins("head"), .lr_scale = -2}};
  EXPECT_FAILS(SGD::create(three(), sgd), kInvalidArgument, "groups[0]: lr_scale is -2");
  sgd.groups[0] = {.selects = begins("head"), .weight_decay = NAN};
  EXPECT_FAILS(SGD::create(three(), sgd), kInvalidArgument, "groups[0]: weight_decay is");
}

TEST(LossScaler, StepsAsWithoutScaling) {
  for (bool capturable : {false, true}) {
    for (float max_norm : {0.0f, 1.0f}) {
      Values seen[2];
      for (bool scaled : {false, true}) {
        const auto parameters = three();
        auto adam = take(Adam::create(
            parameters, {.lr = 0.1f, .max_grad_norm = max_norm, .capturable = capturable}));
        auto scaler = take(LossScaler::create({.init_scale = 1024}));
        for (float g : {2.0f, -1.0f, 0.5f}) {
          give(parameters, scaled ? g * 1024 : g);
          check(scaled ? adam->step(*scaler) : adam->step());
        }
        seen[scaled] = values(parameters);
      }
      EXPECT_EQ(seen[0], seen[1]);
    }
  }
}

TEST(LossScaler, LeavesOutStepsThatOverflow) {
  for (bool capturable : {false, true}) {
    for (float max_norm : {0.0f, 1.0f}) {
      for (float bad : {INFINITY, -INFINITY, NAN}) {
        const auto parameters = three();
        auto sgd = take(SGD::create(
            parameters,
            {.lr = 0.5f, .momentum = 0.5f, .max_grad_norm = max_norm, .capturable = capturable}));
        auto scaler = take(LossScaler::create({.init_scale = 8, .growth_interval = 2}));
        give(parameters, 8);
        parameters[1].grad().data<float>()[0] = bad;
        check(sgd->step(*scaler));
        EXPECT_EQ(values(parameters), (Values{1, 1, 1}));
        EXPECT_TRUE(take(scaler->update()));
        EXPECT_EQ(take(item(scaler->scale())), 4);
        give(parameters, 4);
        check(sgd->step(*scaler));
        EXPECT_FALSE(take(scaler->update()));
        EXPECT_LT(values(parameters)[1], 1);
        EXPECT_EQ(take(item(scaler->scale())), 4);
        check(sgd->step(*scaler));
        EXPECT_FALSE(take(scaler->update()));
        EXPECT_EQ(take(item(scaler->scale())), 8);  // the scale doubles after two good steps
      }
    }
  }
}

// On a tape, the loss scale multiplies the gradients and the optimizer's step divides them by it.
TEST(LossScaler, WorksWithATape) {
  const Tensor x = tensor({4, 8}, random_values(32, 1)), targets = int_tensor({0, 1, 2, 3});
  std::vector<Values> seen[2];
  for (bool scaled : {false, true}) {
    const Layer<Linear> linear({.in_features = 8, .out_features = 4, .init_std = 0.5f});
    auto adam = take(Adam::create(linear->parameters(), {.lr = 0.1f}));
    auto scaler = take(LossScaler::create({.init_scale = 65536}));
    for (int i = 0; i < 3; ++i) {
      check(linear->zero_grad());
      Tape tape;
      const Value loss = cross_entropy(linear(tape.input(x)), targets);
      check(scaled ? tape.backward(loss, scaler->scale()) : tape.backward(loss));
      check(scaled ? adam->step(*scaler) : adam->step());
    }
    for (const NamedParameter& p : linear->parameters())
      seen[scaled].push_back(values_of(p.value()));
  }
  EXPECT_EQ(seen[0], seen[1]);  // scaling by a power of two changes no bit
}

// Each optimizer skips its own overflowed steps. The scale takes each optimizer's overflow into
// account once.
TEST(LossScaler, WorksWithSeveralOptimizers) {
  for (bool capturable : {false, true}) {
    for (size_t bad : {0u, 1u}) {
      const std::vector<NamedParameter> models[] = {three(), three()};
      std::unique_ptr<SGD> sgd[2];
      for (size_t i = 0; i < 2; ++i) {
        sgd[i] = take(SGD::create(models[i], {.lr = 0.5f, .capturable = capturable}));
      }
      auto scaler = take(LossScaler::create({.init_scale = 8, .growth_interval = 1}));
      for (const auto& model : models) give(model, 8);
      models[bad][2].grad().data<float>()[0] = INFINITY;
      for (const auto& each : sgd) check(each->step(*scaler));
      EXPECT_EQ(values(models[bad]), (Values{1, 1, 1}));
      EXPECT_EQ(values(models[1 - bad]), (Values{0.5, 0.5, 0.5}));
      EXPECT_TRUE(take(scaler->update()));
      EXPECT_EQ(take(item(scaler->scale())), 4);
      // Only the other optimizer steps. The overflow of the first optimizer's step is not counted
      // again.
      give(models[1 - bad], 4);
      check(sgd[1 - bad]->step(*scaler));
      EXPECT_FALSE(take(scaler->update()));
      EXPECT_EQ(take(item(scaler->scale())), 8);
    }
  }
}

TEST(LossScaler, StaysWithinItsBounds) {
  auto scaler =
      take(LossScaler::create({.init_scale = 2, .growth_factor = 4, .growth_interval = 1}));
  for (int i = 0; i < 3; ++i) {
    scaler->found_inf().data<int32_t>()[0] = 1;  // sets the flag as a caller's own optimizer would
    EXPECT_TRUE(take(scaler->update()));
  }
  EXPECT_EQ(scaler->state().scale, 1);
  check(scaler->load_state({.scale = 0x1p127f}));
  EXPECT_FALSE(take(scaler->update()));
  EXPECT_EQ(scaler->state().scale, 0x1p127f);
  EXPECT_FAILS(scaler->load_state({.scale = 0.5f}), kInvalidArgument, "at least 1");
  EXPECT_FAILS(scaler->load_state({.scale = 2, .good_steps = 1}), kInvalidArgument, "good_steps");
  EXPECT_FAILS(LossScaler::create({.init_scale = 0}), kInvalidArgument, "the scale is 0");
  EXPECT_FAILS(LossScaler::create({.growth_factor = 0.5f}), kInvalidArgument, "growth_factor");
  EXPECT_FAILS(LossScaler::create({.backoff_factor = 2}), kInvalidArgument, "backoff_factor");
  EXPECT_FAILS(LossScaler::create({.growth_interval = 0}), kInvalidArgument, "growth_interval");
}

}  // namespace
}  // namespace te_fl::nn::testing::optimizer_groups_test
