// A residual must have the shape that the module's header documents; another shape with as many
// elements is refused.
#include "nn/autograd/parameter.hpp"
#include "nn_test_util.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::residual_shape_test {
namespace {

constexpr int64_t kWidth = 4;

void expect_refused(const Status& status, const char* what) {
  EXPECT_FAILS(status, kInvalidArgument, "f32[3,2,4]") << what;
  EXPECT_HAS(status.to_string(), "[2,3,4]") << what;
}

class ResidualShape : public ::testing::Test {
 protected:
  // Passes an output gradient of the forward's shape [2,3,4], and a residual gradient of shape
  // [3,2,4], which must be refused.
  template <class M>
  void expect_backward_refuses(M& module, const char* what) {
    Ctx ctx;
    const Tensor y = take(module.forward(x, &ctx));
    expect_refused(module.backward(y, ctx, &turned).status(), what);
  }
  const Tensor x = tensor({2, 3, kWidth}, random_values(2 * 3 * kWidth, 1));
  const Tensor turned = tensor({3, 2, kWidth}, random_values(2 * 3 * kWidth, 2));
};

TEST_F(ResidualShape, OfAForwardIsTheResults) {
  const auto linear = take(Linear::create({.in_features = kWidth, .out_features = kWidth}));
  const auto mlp = take(LayerNormMLP::create({.hidden_size = kWidth, .ffn_hidden_size = 8}));
  const auto attention = take(MultiheadAttention::create(
      {.hidden_size = kWidth, .num_attention_heads = 2, .attention = {.layout = Layout::kBSHD}}));
  expect_refused(linear->forward(x, nullptr, {}, &turned).status(), "Linear");
  expect_refused(mlp->forward(x, nullptr, {}, &turned).status(), "LayerNormMLP");
  expect_refused(attention->forward(x, nullptr, {}, {}, &turned).status(), "MultiheadAttention");
}

TEST_F(ResidualShape, OfABackwardIsTheInputs) {
  const auto norm = take(LayerNorm::create({.hidden_size = kWidth}));
  const auto linear =
      take(LayerNormLinear::create({.in_features = kWidth, .out_features = kWidth}));
  const auto mlp = take(LayerNormMLP::create({.hidden_size = kWidth, .ffn_hidden_size = 8}));
  expect_backward_refuses(*norm, "LayerNorm");
  expect_backward_refuses(*linear, "LayerNormLinear");
  expect_backward_refuses(*mlp, "LayerNormMLP");
  for (const bool input_layernorm : {true, false}) {
    const auto attention =
        take(MultiheadAttention::create({.hidden_size = kWidth,
                                         .num_attention_heads = 2,
                                         .input_layernorm = input_layernorm,
                                         .attention = {.layout = Layout::kBSHD}}));
    expect_backward_refuses(*attention, "MultiheadAttention");
    for (const NamedParameter& p : attention->parameters()) {
      EXPECT_FALSE(p.parameter->internals().grad_written)
          << p.name << " was written before the refusal";
    }
  }
}

TEST_F(ResidualShape, PositionsWithoutAnglesAreNotPassedOver) {
  const auto attention = take(MultiheadAttention::create(
      {.hidden_size = kWidth, .num_attention_heads = 2, .attention = {.layout = Layout::kBSHD}}));
  const Status status =
      attention->forward(x, nullptr, {.rotary_start_positions = int_tensor({1, 2})}).status();
  EXPECT_FAILS(status, kInvalidArgument, "rotary_angles");
}

}  // namespace
}  // namespace te_fl::nn::testing::residual_shape_test
