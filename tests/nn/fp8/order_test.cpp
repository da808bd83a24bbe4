// Makes calls in an unusual order, on another thread or with an unexpected shape: each is refused
// or gives right results.
#include <memory>
#include <optional>
#include <thread>

#include "nn/autograd/parameter.hpp"
#include "nn_test_util.hpp"
#include "support/expect.hpp"
#include "support/recording_device.hpp"

namespace te_fl::nn::testing::order_test {
namespace {

constexpr int64_t kRows = 4, kSize = 16;
std::string message(const Status& status) { return status.ok() ? "ok" : status.to_string(); }
Tensor values(uint64_t seed) { return tensor({kRows, kSize}, random_values(kRows * kSize, seed)); }
std::unique_ptr<Linear> make_linear(uint64_t seed = 1, DType dtype = DType::kF32) {
  return take(Linear::create({.in_features = kSize,
                              .out_features = kSize,
                              .param_dtype = dtype,
                              .seed = seed,
                              .init_std = 1}));
}
std::vector<Values> grads_of(const Module& module) {
  std::vector<Values> result;
  for (const NamedParameter& p : module.parameters()) result.push_back(values_of(p.grad()));
  return result;
}

// ---- weights that change between a forward and its backward

template <class M>
void expect_late_backward_refused(M& module, const Tensor& x) {
  Ctx first, late;
  const Tensor y = take(module.forward(x, &first));
  (void)take(module.forward(x, &late));
  (void)take(module.backward(y, first));
  auto sgd = take(SGD::create(module.parameters(), {.lr = 0.1f}));
  check(sgd->step());
  const auto before = grads_of(module);
  const auto refused = module.backward(y, late);
  EXPECT_FAILS(refused, kFailedPrecondition, "changed since the forward");
  EXPECT_EQ(grads_of(module), before);
}

TEST(LateBackward, IsRefusedWhereItWouldReadOtherWeights) {
  expect_late_backward_refused(*make_linear(), values(1));
  expect_late_backward_refused(
      *take(LayerNormLinear::create({.in_features = kSize, .out_features = kSize})), values(1));
  expect_late_backward_refused(*take(RMSNorm::create({.hidden_size = kSize})), values(1));
  expect_late_backward_refused(
      *take(LayerNormMLP::create({.hidden_size = kSize, .ffn_hidden_size = kSize})), values(1));
}

TEST(LateBackward, ReadsTheForwardsWeightsWhereTheyWereCopied) {
  auto linear = take(Linear::create({.in_features = kSize,
                                     .out_features = kSize,
                                     .activation_dtype = DType::kBF16,
                                     .init_std = 1}));
  Ctx first, late;
  const Tensor y = take(linear->forward(values(1), &first));
  (void)take(linear->forward(values(1), &late));
  const Values expected = values_of(take(linear->backward(y, first)));
  check(take(SGD::create(linear->parameters(), {.lr = 0.1f}))->step());
  EXPECT_EQ(values_of(take(linear->backward(y, late))), expected);
}

// ---- master weights and values

TEST(Masters, FollowValuesThatWereLoaded) {
  for (bool adam : {false, true}) {
    auto module = make_linear(1, DType::kBF16), other = make_linear(2, DType::kBF16);
    std::unique_ptr<Optimizer> optimizer;
    if (adam) {
      optimizer = take(Adam::create(module->parameters(), {.lr = 1e-4f}));
    } else {
      optimizer = take(SGD::create(module->parameters(), {.lr = 1e-4f}));
    }
    check(module->zero_grad());
    check(optimizer->step());
    check(module->load_state(other->state(), "memory"));
    check(optimizer->step());  // with zero gradients
    EXPECT_TRUE(same_bits(module->parameters()[0].value(), other->parameters()[0].value()));
  }
}

TEST(Masters, KeepTheirLowBitsWhenTheyAreLoadedToo) {
  const std::string path = ::testing::TempDir() + "/te_fl_masters.safetensors";
  auto module = make_linear(1, DType::kBF16), resumed = make_linear(2, DType::kBF16);
  auto adam = take(Adam::create(module->parameters(), {.lr = 1e-4f}));
  auto resumed_adam = take(Adam::create(resumed->parameters(), {.lr = 1e-4f}));
  const auto step = [](Linear& linear, Adam& optimizer) {
    Ctx ctx;
    const Tensor y = take(linear.forward(values(1), &ctx));
    check(linear.zero_grad());
    (void)take(linear.backward(y, ctx));
    check(optimizer.step());
  };
  for (int i = 0; i < 3; ++i) step(*module, *adam);
  ASSERT_OK(save_checkpoint(path, *module, adam.get()));
  ASSERT_OK(load_checkpoint(path, *resumed, resumed_adam.get()).status());
  step(*module, *adam);
  step(*resumed, *resumed_adam);
  const auto a = adam->state(), b = resumed_adam->state();
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(same_bits(a[i].tensor, b[i].tensor)) << a[i].name;
  }
}

TEST(OptimizerParameters, AreNotSteppedTwice) {
  auto linear = make_linear();
  auto twice = linear->parameters();
  twice.push_back({"again", twice[0].parameter});
  for (const Status& status : {SGD::create(twice, {}).status(), Adam::create(twice, {}).status()}) {
    EXPECT_FAILS(status, kInvalidArgument, "the parameter weight is given again as again");
  }
}

TEST(LoadStateNames, RefusesANameThatIsGivenTwice) {
  auto linear = make_linear(1), other = make_linear(2);
  std::vector<NamedTensor> tensors = other->state();
  tensors.push_back({"bias", tensors[0].tensor});
  EXPECT_HAS(message(linear->load_state(tensors, "memory")), "tensor bias is given twice");
}

// ---- shapes of output gradients

TEST(GradientShape, IsTheOutputsAndAnErrorWritesNothing) {
  const Tensor x = take(values(1).view({2, 2, kSize}));
  const Tensor swapped = take(values(2).view({1, 4, kSize}));
  const Tensor longer = tensor({2, 3, kSize}, random_values(6 * kSize, 3));
  for (bool fp8_on : {false, true}) {
    const auto expect_refused = [&](auto& module, const char* name) {
      SCOPED_TRACE(name);
      check(module.zero_grad());
      for (const Tensor& dy : {swapped, longer}) {
        const std::string reason = name + (": dy is " + dy.describe());
        Ctx ctx;
        autocast fp8(fp8_on, Float8CurrentScaling{});
        (void)take(module.forward(x, &ctx));
        const auto refused = module.backward(dy, ctx);
        EXPECT_FAILS(refused, kInvalidArgument, reason);
        for (const NamedParameter& p : module.parameters()) {
          EXPECT_FALSE(p.parameter->internals().grad_written) << p.name;
        }
      }
    };
    expect_refused(*make_linear(), "Linear");
    expect_refused(*take(LayerNormLinear::create({.in_features = kSize, .out_features = kSize})),
                   "LayerNormLinear");
    expect_refused(*take(LayerNorm::create({.hidden_size = kSize})), "Norm");
    expect_refused(*take(LayerNormMLP::create({.hidden_size = kSize, .ffn_hidden_size = kSize})),
                   "LayerNormMLP");
    expect_refused(
        *take(MultiheadAttention::create({.hidden_size = kSize, .num_attention_heads = 2})),
        "MultiheadAttention");
    expect_refused(*take(TransformerLayer::create({.hidden_size = kSize,
                                                   .ffn_hidden_size = kSize,
                                                   .num_attention_heads = 2,
                                                   .hidden_dropout = 0.1f})),
                   "TransformerLayer");
  }
  for (float p : {0.0f, 0.5f}) {
    Dropout dropout(p);
    Ctx ctx;
    (void)take(dropout.forward(x, &ctx));
    EXPECT_HAS(message(dropout.backward(swapped, ctx).status()), "Dropout: dy is");
    Residual residual(p);
    (void)take(residual.forward(x, x, &ctx));
    EXPECT_HAS(message(residual.backward(longer, ctx).status()), "Residual: dy is");
  }
}

// ---- threads

TEST(AutocastThreads, AScopeThatAnotherThreadEndsHasEnded) {
  auto linear = make_linear();
  auto outer = std::make_unique<autocast>(true, Float8BlockScaling{});
  auto inner = std::make_unique<autocast>(true, DelayedScaling{.amax_history_len = 2});
  Ctx ctx;
  (void)take(linear->forward(values(1), &ctx));
  std::thread([&] { inner.reset(); }).join();
  EXPECT_TRUE(std::holds_alternative<Float8BlockScaling>(*current_recipe()));
  std::thread([&] { outer.reset(); }).join();
  EXPECT_FALSE(fp8_enabled());
  EXPECT_FALSE(current_recipe().has_value());
  EXPECT_NE(find_state(*linear, "fp8.fwd.scale").data<float>()[0], 1) << "the session's update";
  const autocast again(true, DelayedScaling{});
  EXPECT_TRUE(std::holds_alternative<DelayedScaling>(*current_recipe()));
}

// ---- cached weights and captures

TEST(CachedWeights, OfAnEarlierMicrobatchAreNotCaptured) {
  te_fl::testing::RecordingDevice recorder;
  {
    auto linear = take(Linear::create({.in_features = kSize,
                                       .out_features = kSize,
                                       .bias = false,
                                       .activation_dtype = DType::kBF16,
                                       .device = recorder.device()}));
    const Tensor x = take(values(1).to(recorder.device()));
    const auto forward = [&](bool first) -> Result<std::vector<Tensor>> {
      TE_FL_ASSIGN_OR_RETURN(Tensor y, linear->forward(x, nullptr, {.is_first_microbatch = first}));
      return std::vector<Tensor>{y};
    };
    auto later = take(GraphedStep::create(recorder.device(), [&] { return forward(false); }, {}));
    check(forward(true).status());
    for (int i = 0; i < 3; ++i) ASSERT_OK(later->run().status());
    const Status refused = later->run().status();
    EXPECT_FAILS(refused, kFailedPrecondition, "a graph holds all the microbatches of a step");
    auto whole = take(GraphedStep::create(recorder.device(),
                                          [&]() -> Result<std::vector<Tensor>> {
                                            TE_FL_RETURN_IF_ERROR(forward(true).status());
                                            return forward(false);
                                          },
                                          {}));
    for (int i = 0; i < 5; ++i) ASSERT_OK(whole->run().status());
    ASSERT_OK(forward(false).status());
  }
  ASSERT_OK(devices::remove(recorder.device()));
}

}  // namespace
}  // namespace te_fl::nn::testing::order_test
