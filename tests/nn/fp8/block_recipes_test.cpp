// MXFP8, custom recipes and backward overrides in Linear and LayerNormMLP.
#include <cmath>
#include <memory>

#include "nn_test_util.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::block_recipes_test {
namespace {

constexpr int64_t kIn = 32, kOut = 64, kRows = 40;

struct Step {
  Values y, dx, dw;
};

std::unique_ptr<Linear> make_linear() {
  return take(Linear::create(
      {.in_features = kIn, .out_features = kOut, .bias = false, .seed = 3, .init_std = 0.5f}));
}

// One step of a Linear whose output's gradient is its output.
Step step(Linear& layer, const Tensor& x, const Recipe& recipe, bool enabled = true) {
  const Context context(1);
  const ContextScope scope(context);
  Ctx ctx;
  Tensor y;
  {
    autocast fp8(enabled, recipe);
    y = take(layer.forward(x, &ctx));
  }
  EXPECT_OK(layer.zero_grad());
  const Tensor dx = take(layer.backward(y, ctx));
  return {values_of(y), values_of(dx), values_of(layer.parameters().front().grad())};
}

Tensor input() {
  Values values(kRows * kIn);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = std::sin(static_cast<float>(i)) * std::exp2(static_cast<float>(i / 97 % 9) - 4);
  }
  return tensor({kRows, kIn}, values);
}

// Multiplies by 2 row-wise and by 3 column-wise.
std::shared_ptr<const TensorQuantiser> scaling_quantiser(float by_rows, float by_columns) {
  const auto scaled = [](const Tensor& x, float factor) {
    Values values = values_of(x);
    for (double& v : values) v *= factor;
    return tensor({x.size(0), x.size(1)}, values);
  };
  return std::make_shared<const TensorQuantiser>(TensorQuantiser{
      .name = "scaled",
      .quantise = [=](const Tensor& x, bool rowwise, bool columnwise) -> Result<QuantisedOperand> {
        return QuantisedOperand{rowwise ? scaled(x, by_rows) : Tensor(),
                                columnwise ? scaled(x, by_columns) : Tensor()};
      }});
}

void expect_scaled(const Values& found, const Values& plain, float factor) {
  ASSERT_EQ(found.size(), plain.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_NEAR(found[i], factor * plain[i], 1e-4f * std::fabs(factor * plain[i]) + 1e-4f);
  }
}

TEST(BlockRecipes, CustomQuantisersMakeTheOperandsOfEachProduct) {
  const auto layer = make_linear();
  const Tensor x = input();
  const Step plain = step(*layer, x, DelayedScaling{}, false);
  const CustomScaling recipe{.quantisers = {.input = scaling_quantiser(2, 3),
                                            .weight = scaling_quantiser(5, 7),
                                            .gradient = nullptr}};
  const Step found = step(*layer, x, recipe);
  expect_scaled(found.y, plain.y, 2 * 5);
  expect_scaled(found.dx, plain.dx, 2 * 5 * 7);  // its gradient is y
  expect_scaled(found.dw, plain.dw, 2 * 5 * 3);
}

TEST(BlockRecipes, OverridesOfTheBackward) {
  const auto layer = make_linear();
  const Tensor x = input();
  CustomScaling recipe{.quantisers = {.input = scaling_quantiser(2, 3),
                                      .weight = scaling_quantiser(5, 7),
                                      .gradient = scaling_quantiser(11, 13)}};
  const Step plain = step(*layer, x, DelayedScaling{}, false);
  recipe.backward_override = BackwardOverride::kHighPrecision;
  Step found = step(*layer, x, recipe);
  expect_scaled(found.dx, plain.dx, 2 * 5);
  expect_scaled(found.dw, plain.dw, 2 * 5);
  recipe.backward_override = BackwardOverride::kDequantized;
  found = step(*layer, x, recipe);
  expect_scaled(found.dx, plain.dx, 2 * 5 * 5);
  expect_scaled(found.dw, plain.dw, 2 * 5 * 2);
}

TEST(BlockRecipes, Mxfp8IsNearHighPrecision) {
  const auto layer = make_linear();
  const Tensor x = input();
  const Step plain = step(*layer, x, DelayedScaling{}, false);
  const Step found = step(*layer, x, take(parse_recipe("mxfp8")));
  double error = 0, size = 0;
  for (size_t i = 0; i < plain.y.size(); ++i) {
    error += std::pow(found.y[i] - plain.y[i], 2);
    size += std::pow(plain.y[i], 2);
  }
  EXPECT_GT(error, 1e-8 * size);
  EXPECT_LT(error, 0.06 * 0.06 * size);
  const Step high =
      step(*layer, x, MXFP8BlockScaling{.backward_override = BackwardOverride::kHighPrecision});
  EXPECT_EQ(high.y, found.y);
  EXPECT_NE(high.dw, found.dw);
}

TEST(BlockRecipes, AWrongOperandIsRefusedByName) {
  const auto layer = make_linear();
  const auto quantiser = std::make_shared<const TensorQuantiser>(TensorQuantiser{
      .name = "short", .quantise = [](const Tensor& x, bool, bool) -> Result<QuantisedOperand> {
        return QuantisedOperand{take(x.slice(0, 0, 1)), Tensor()};
      }});
  autocast fp8(
      true,
      CustomScaling{.quantisers = {.input = quantiser, .weight = nullptr, .gradient = nullptr}});
  EXPECT_FAILS(layer->forward(input(), nullptr), kInvalidArgument,
               "the quantiser \"short\" returned");
  const Recipe empty =
      CustomScaling{.quantisers = {.input = std::make_shared<const TensorQuantiser>(),
                                   .weight = nullptr,
                                   .gradient = nullptr}};
  EXPECT_FAILS(validate(empty), kInvalidArgument, "has no function");
}

}  // namespace
}  // namespace te_fl::nn::testing::block_recipes_test
