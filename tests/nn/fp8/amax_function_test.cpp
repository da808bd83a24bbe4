// Delayed scaling with a user function that chooses the amax from the history.
#include <algorithm>

#include "autocast_fixture.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::amax_function_test {
namespace {

using Compute = std::function<Status(const Tensor&, const Tensor&)>;

DelayedScaling recipe(Compute compute) {
  return {
      .amax_history_len = 3,
      .amax_function = std::make_shared<AmaxFunction>(AmaxFunction{"mine", std::move(compute)})};
}

Status largest(const Tensor& history, const Tensor& amax) {
  const int64_t slots = history.size(1);
  for (int64_t s = 0; s < slots; ++s) {
    float most = 0;
    for (int64_t r = 0; r < history.size(0); ++r) {
      most = std::max(most, history.data<float>()[r * slots + s]);
    }
    amax.data<float>()[s] = most;
  }
  return {};
}

std::vector<Values> train(const DelayedScaling& recipe) {
  auto linear = make_linear();
  std::vector<Values> seen;
  for (int step = 0; step < 5; ++step) {
    Ctx ctx;
    Tensor y;
    {
      const autocast fp8(true, recipe);
      y = take(linear->forward(input(step == 2 ? 8 : 1), &ctx));
    }
    seen.push_back(values_of(y));
    seen.push_back(values_of(take(linear->backward(gradient(step == 3 ? 0.1 : 2), ctx))));
    check(backward_end());
    for (const NamedTensor& t : linear->state()) seen.push_back(values_of(t.tensor));
  }
  return seen;
}

TEST(AmaxFunction, OfTheLargestIsKMax) {
  EXPECT_TRUE(train(recipe(largest)) == train({.amax_history_len = 3}));
}

TEST(AmaxFunction, OfTheRunningRowIsKMostRecent) {
  const Compute newest = [](const Tensor& history, const Tensor& amax) -> Status {
    std::copy_n(history.data<float>(), amax.numel(), amax.data<float>());
    return {};
  };
  EXPECT_TRUE(train(recipe(newest)) ==
              train({.amax_history_len = 3, .amax_compute_algo = AmaxAlgo::kMostRecent}));
}

TEST(AmaxFunction, DecidesTheScale) {
  auto linear = make_linear();
  const DelayedScaling seven = recipe([](const Tensor&, const Tensor& amax) -> Status {
    std::fill_n(amax.data<float>(), amax.numel(), 7.0f);
    return {};
  });
  Ctx ctx;
  {
    const autocast fp8(true, seven);
    (void)take(linear->forward(input(), &ctx));
  }
  EXPECT_EQ(values_of(find_state(*linear, "fp8.fwd.scale")), (Values{64, 64}));
  // The history holds the measured amax, not the function's result.
  const Values history = values_of(find_state(*linear, "fp8.fwd.amax_history"));
  EXPECT_EQ(history[4], static_cast<double>(amax_of(input())));
  EXPECT_EQ(history[0], 0);
}

TEST(AmaxFunction, MayComputeTheScales) {
  auto linear = make_linear();
  std::vector<float> maxima;
  AmaxFunction function{"mine", largest};
  function.compute_scale = [&](const Tensor& amax, const Tensor& scale, float fp8_max) -> Status {
    maxima.push_back(fp8_max);
    for (int64_t i = 0; i < scale.numel(); ++i) {
      scale.data<float>()[i] = scale.data<float>()[i] * 3 + fp8_max / 2 / amax.data<float>()[i];
    }
    return {};
  };
  const DelayedScaling mine{.amax_history_len = 3,
                            .amax_function = std::make_shared<AmaxFunction>(function)};
  Ctx ctx;
  {
    const autocast fp8(true, mine);
    (void)take(linear->forward(input(), &ctx));
  }
  const float amax = amax_of(input());
  EXPECT_EQ(values_of(find_state(*linear, "fp8.fwd.scale"))[0],
            static_cast<double>(3 + 224 / amax));
  EXPECT_EQ(values_of(find_state(*linear, "fp8.fwd.amax_history"))[0], 0);
  (void)take(linear->backward(gradient(), ctx));
  check(backward_end());
  EXPECT_EQ(maxima, (std::vector<float>{448, 57344}));
}

TEST(AmaxFunction, ItsErrorIsTheUpdates) {
  auto linear = make_linear();
  const DelayedScaling broken =
      recipe([](const Tensor&, const Tensor&) { return internal_error("no amax today"); });
  autocast fp8(true, broken);
  Ctx ctx;
  (void)take(linear->forward(input(), &ctx));
  const Status status = fp8.exit();
  EXPECT_FAILS(status, kInternal, "no amax today");
  EXPECT_HAS(status.to_string(), "amax_function \"mine\"");
}

TEST(AmaxFunction, IsPartOfTheRecipe) {
  const DelayedScaling a = recipe(largest), b = recipe(largest);
  EXPECT_EQ(a, DelayedScaling(a));
  EXPECT_NE(a, b);
  EXPECT_HAS(describe(a), "function mine");
  EXPECT_OK(validate(a));
  EXPECT_FAILS(validate(recipe(nullptr)), kInvalidArgument, "\"mine\" has no function");
  DelayedScaling both = a;
  both.amax_compute_algo = AmaxAlgo::kMostRecent;
  EXPECT_FAILS(validate(both), kInvalidArgument, "both set");
}

}  // namespace
}  // namespace te_fl::nn::testing::amax_function_test
