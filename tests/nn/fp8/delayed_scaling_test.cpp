// Delayed scaling: the order of scale updates against hand-computed scales, weight caching, and
// calibration.
#include <algorithm>
#include <stdexcept>
#include <thread>

#include "autocast_fixture.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::delayed_scaling_test {
namespace {

uint64_t calls(const std::string& op) {
  uint64_t total = 0;
  for (const OpUsage& u : OpManager::instance().usage()) total += u.op == op ? u.calls : 0;
  return total;
}

// ---- delayed scaling against hand-computed scales

TEST(DelayedScalingOrder, ForwardAtAutocastExitBackwardAtBackwardEnd) {
  auto module = make_linear();
  const float amax_w = amax_of(module->parameters()[0].value());
  const DelayedScaling recipe{.margin = 1, .amax_history_len = 3};
  // Input ranges by step. The history has 3 rows, of which row 0 collects the current amax; a scale
  // comes from the two latest amaxes in the history and the new one.
  const std::vector<double> ranges = {8, 2, 1, 0.5, 4};
  std::vector<float> amax_x, amax_dy;
  for (size_t step = 0; step < ranges.size(); ++step) {
    const Tensor x = input(ranges[step], 10 + step);
    const Tensor dy = gradient(ranges[step] * 1e-3, 20 + step);
    const bool first = step == 0;
    const float scale_before = first ? 1 : at(*module, "fp8.fwd.scale", 0);
    Ctx ctx;
    {
      autocast fp8(true, recipe);
      (void)take(module->forward(x, &ctx));
      EXPECT_EQ(at(*module, "fp8.fwd.scale", 0), scale_before) << "updated before the scope ended";
      EXPECT_EQ(at(*module, "fp8.fwd.amax_history", 0), amax_of(x));
      EXPECT_EQ(at(*module, "fp8.fwd.amax_history", 1), amax_w);
    }
    amax_x.push_back(amax_of(x));
    // Rolling moves the rows up, appends the newest amax and clears row 0 for the next step. The
    // scale uses the maximum over the rows as they were before the roll, with the new amax.
    float largest = 0;
    for (size_t back = 0; back < 3 && back < amax_x.size(); ++back) {
      largest = std::max(largest, amax_x[amax_x.size() - 1 - back]);
    }
    SCOPED_TRACE(::testing::Message() << "step " << step);
    EXPECT_EQ(at(*module, "fp8.fwd.amax_history", 0), 0);
    EXPECT_EQ(at(*module, "fp8.fwd.amax_history", 2 * 2), amax_x.back());
    EXPECT_EQ(at(*module, "fp8.fwd.scale", 1), 448 / amax_w / 2);
    EXPECT_EQ(at(*module, "fp8.fwd.scale", 0), 448 / largest / 2);
    const float bwd_before = first ? 1 : at(*module, "fp8.bwd.scale", 0);
    (void)take(module->backward(dy, ctx));
    EXPECT_EQ(at(*module, "fp8.bwd.scale", 0), bwd_before) << "updated before backward_end";
    EXPECT_EQ(at(*module, "fp8.bwd.amax_history", 0), amax_of(dy));
    ASSERT_OK(backward_end());
    amax_dy.push_back(amax_of(dy));
    float largest_dy = 0;
    for (size_t back = 0; back < 3 && back < amax_dy.size(); ++back) {
      largest_dy = std::max(largest_dy, amax_dy[amax_dy.size() - 1 - back]);
    }
    EXPECT_EQ(at(*module, "fp8.bwd.scale", 0), 57344 / largest_dy / 2);
    ASSERT_OK(backward_end());  // nothing is pending, so no second roll
    EXPECT_EQ(at(*module, "fp8.bwd.amax_history", 2), amax_dy.back());
  }
}

TEST(DelayedScalingOrder, TheFirstForwardUsesScaleOneAndLaterUpdatesDoNotReachBack) {
  // With scale 1, E4M3 represents these values exactly, so the matrix product is exact too.
  auto module = take(Linear::create({.in_features = 16, .out_features = 16, .bias = false}));
  Values w(256, 0.0), x(16 * 16);
  for (int i = 0; i < 16; ++i) w[i * 17] = 1;
  for (int i = 0; i < 256; ++i) x[i] = (i % 15 - 7) * 0.25;
  set_values(module->parameters()[0].value(), w);
  Ctx ctx;
  {
    autocast fp8(true, DelayedScaling{});
    EXPECT_EQ(values_of(take(module->forward(tensor({16, 16}, x), &ctx))), x);
  }
  EXPECT_EQ(at(*module, "fp8.fwd.scale", 0), 256);
  // The backward reads the FP8 data of the forward with the forward's scale_inv: dW = dy^T x with
  // dy = identity.
  (void)take(module->backward(tensor({16, 16}, w), ctx));
  EXPECT_EQ(values_of(module->parameters()[0].grad()), x);
}

TEST(DelayedScalingOrder, OneOpCallUpdatesAllModules) {
  auto layer = take(TransformerLayer::create(
      {.hidden_size = 32, .ffn_hidden_size = 64, .num_attention_heads = 2}));
  const Tensor x = tensor({4, 2, 32}, random_values(256, 1));
  const std::string op = "fused_amax_and_scale_update_after_reduction";
  Ctx ctx;
  const uint64_t before = calls(op);
  Tensor y;
  {
    autocast fp8(true);
    y = take(layer->forward(x, &ctx));
    EXPECT_EQ(calls(op), before);
  }
  EXPECT_EQ(calls(op), before + 1);
  (void)take(layer->backward(y, ctx));
  ASSERT_OK(backward_end());
  EXPECT_EQ(calls(op), before + 2);
}

TEST(DelayedScalingOrder, AMicrobatchLoopInOneScopeTakesTheLargestAmax) {
  auto module = make_linear();
  const Tensor a = input(3, 1), b = input(1, 2);
  Ctx c1, c2;
  {
    autocast fp8(true, DelayedScaling{.amax_history_len = 2});
    (void)take(module->forward(a, &c1));
    (void)take(module->forward(b, &c2));
  }
  EXPECT_EQ(at(*module, "fp8.fwd.scale", 0), 448 / amax_of(a));
}

TEST(DelayedScalingOrder, AnInferenceReadsScalesAndItsAmaxWaitsForTheNextUpdate) {
  auto module = make_linear();
  const DelayedScaling recipe{.amax_history_len = 2};
  const auto forward = [&](double range, Ctx* ctx) {
    autocast fp8(true, recipe);
    (void)take(module->forward(input(range), ctx));
  };
  const auto scale = [&] { return values_of(find_state(*module, "fp8.fwd.scale")); };
  Ctx first, second;
  forward(10, &first);
  const Values before = scale();
  for (int i = 0; i < 3; ++i) forward(50, nullptr);
  EXPECT_EQ(scale(), before);
  const Tensor history = find_state(*module, "fp8.fwd.amax_history");
  EXPECT_EQ(values_of(history)[0], amax_of(input(50)));
  EXPECT_EQ(values_of(history)[2], amax_of(input(10))) << "no row was rolled";
  forward(1, &second);
  EXPECT_EQ(scale()[0], 448 / amax_of(input(50)));
  // exit(true) updates the scales even if the scope ran inference only.
  autocast fp8(true, recipe);
  (void)take(module->forward(input(100), nullptr));
  ASSERT_OK(fp8.exit(true));
  EXPECT_EQ(scale()[0], 448 / amax_of(input(100)));
}

TEST(DelayedScalingOrder, AnInferenceKeepsTheHistoryWhateverLengthItsRecipeHas) {
  auto module = make_linear();
  const DelayedScaling recipe{.amax_history_len = 4};
  const auto step = [&](double range) {
    Ctx ctx;
    autocast fp8(true, recipe);
    (void)take(module->forward(input(range), &ctx));
  };
  step(100);
  step(1);
  {
    autocast fp8(true, DelayedScaling{.amax_history_len = 1});
    (void)take(module->forward(input(), nullptr));
  }
  EXPECT_EQ(find_state(*module, "fp8.fwd.amax_history").size(0), 4);
  step(1);
  EXPECT_EQ(at(*module, "fp8.fwd.scale", 0), 448 / amax_of(input(100)));
}

TEST(DelayedScalingOrder, AnInferenceBeforeTheFirstUpdateComputesWithScaleOne) {
  auto module = make_linear();
  const auto infer = [&](double range) {
    autocast fp8(true);
    return values_of(take(module->forward(input(range), nullptr)));
  };
  const Values one = infer(1);
  EXPECT_EQ(values_of(find_state(*module, "fp8.fwd.scale")), Values(2, 1));
  const auto log_text = [&](double range) {
    ::testing::internal::CaptureStderr();
    (void)infer(range);
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(log_text(1), "");
  EXPECT_HAS(log_text(1e4), "of its inputs saturate at 448");
  EXPECT_EQ(log_text(1e5), "") << "once for a module";
  // Another thread, whose Context has run no scale update, gets the same result. Saving and loading
  // keeps the FP8 state.
  std::thread([&] { EXPECT_EQ(infer(1), one); }).join();
  auto loaded = make_linear();
  ASSERT_OK(loaded->load_state(module->state(), "memory"));
  autocast fp8(true);
  ASSERT_OK(loaded->forward(input(), nullptr).status());
}

TEST(DelayedScalingOrder, ABackwardAfterLoadingReadsTheLoadedScales) {
  auto module = make_linear();
  const auto begun = [&](Ctx& ctx) {
    autocast fp8(true);
    (void)take(module->forward(input(), &ctx));
  };
  Ctx first, second;
  begun(first);
  begun(second);
  std::vector<NamedTensor> parameters;
  for (const NamedParameter& p : module->parameters()) parameters.push_back({p.name, p.value()});
  ASSERT_OK(module->load_state(parameters, "memory"));  // the loaded tensors contain no FP8 state,
                                                        // so the module's is reset
  EXPECT_EQ(at(*module, "fp8.bwd.scale", 0), 1);
  (void)take(module->backward(gradient(1e-3), first));
  ASSERT_OK(backward_end());
  EXPECT_EQ(at(*module, "fp8.bwd.scale", 0), 57344 / amax_of(gradient(1e-3)));
  (void)take(module->backward(gradient(), second));
}

TEST(DelayedScalingOrder, AnotherFp8TypeOfGradientsTakesItsScalesAlong) {
  auto module = make_linear();
  const Tensor x = input(), dy = gradient(1e-3);
  const auto step = [&](Fp8Format format) {
    Ctx ctx;
    {
      autocast fp8(true, DelayedScaling{.format = format, .amax_history_len = 4});
      (void)take(module->forward(x, &ctx));
    }
    const Values result = values_of(take(module->backward(dy, ctx)));
    check(backward_end());
    return result;
  };
  Ctx ctx;
  (void)take(module->forward(x, &ctx));
  const Values exact = values_of(take(module->backward(dy, ctx)));
  step(Fp8Format::kHybrid);
  for (Fp8Format format : {Fp8Format::kHybrid, Fp8Format::kE4M3, Fp8Format::kE4M3,
                           Fp8Format::kHybrid, Fp8Format::kHybrid}) {
    EXPECT_LT(relative_l2(step(format), exact), 0.08) << static_cast<int>(format);
  }
  EXPECT_EQ(at(*module, "fp8.bwd.scale", 0), 57344 / amax_of(dy));
}

TEST(DelayedScalingOrder, AnotherFp8TypeOfGradientsTakesLoadedScalesAlong) {
  const Tensor x = input(), dy = gradient(1e-3);
  const auto step = [&](Linear& module, Fp8Format format) {
    Ctx ctx;
    {
      autocast fp8(true, DelayedScaling{.format = format, .amax_history_len = 4});
      (void)take(module.forward(x, &ctx));
    }
    const Values result = values_of(take(module.backward(dy, ctx)));
    check(backward_end());
    return result;
  };
  for (const Fp8Format before : {Fp8Format::kHybrid, Fp8Format::kE4M3}) {
    for (const Fp8Format after : {Fp8Format::kHybrid, Fp8Format::kE4M3}) {
      auto lived = make_linear(), loaded = make_linear();
      for (int i = 0; i < 3; ++i) step(*lived, before);
      // Saving the loaded state and loading it again gives the same state.
      ASSERT_OK(loaded->load_state(lived->state(), "a module"));
      auto again = make_linear();
      ASSERT_OK(again->load_state(loaded->state(), "a module"));
      for (int i = 0; i < 2; ++i) EXPECT_TRUE(step(*lived, after) == step(*again, after)) << i;
    }
  }
  auto module = make_linear();
  step(*module, Fp8Format::kHybrid);
  std::vector<NamedTensor> state = module->state();
  const auto largest = std::ranges::find(state, "fp8.bwd.fp8_max", &NamedTensor::name);
  ASSERT_NE(largest, state.end());
  EXPECT_EQ(values_of(largest->tensor), Values{57344});
  largest->tensor = tensor({1}, {240});
  EXPECT_REFUSED(module->load_state(state, "a file"), "fp8.bwd.fp8_max", "448");
  largest->tensor = tensor({2}, {448, 448});
  EXPECT_REFUSED(module->load_state(state, "a file"), "fp8.bwd.fp8_max", "f32[1]");
}

TEST(DelayedScalingOrder, AnotherHistoryLengthKeepsTheNewestAmaxes) {
  auto module = make_linear();
  std::vector<float> amaxes;
  auto step = [&](double range, int64_t length) {
    const Tensor x = input(range, 40 + amaxes.size());
    amaxes.push_back(amax_of(x));
    Ctx ctx;
    autocast fp8(true, DelayedScaling{.amax_history_len = length});
    (void)take(module->forward(x, &ctx));
  };
  for (double range : {9.0, 5.0, 3.0}) step(range, 4);  // history [0, 9, 5, 3]
  step(1, 2);                                           // the history is shortened to [0, 3], then
                                                        // rolls to [0, 1]
  EXPECT_EQ(at(*module, "fp8.fwd.scale", 0), 448 / amaxes[2]);
  step(0.5, 5);  // the history is extended to [0, 0, 0, 0, 1], then rolls to [0, 0, 0, 1, 0.5]
  EXPECT_EQ(at(*module, "fp8.fwd.scale", 0), 448 / amaxes[3]);
  EXPECT_EQ(at(*module, "fp8.fwd.amax_history", 4 * 2), amaxes[4]);
}

// ---- weight caching

TEST(WeightCache, IsFilledByTheFirstMicrobatchAndUsedByTheOthers) {
  for (const Recipe& recipe :
       {Recipe(DelayedScaling{}), Recipe(Float8CurrentScaling{}), Recipe(Float8BlockScaling{})}) {
    SCOPED_TRACE(describe(recipe));
    auto module = make_linear();
    auto plain = make_linear();
    const uint64_t start = calls("quantize");
    auto forward = [&](Linear& m, const Tensor& x, std::optional<bool> first) {
      autocast fp8(true, recipe);
      Ctx ctx;
      return take(m.forward(x, &ctx, {.is_first_microbatch = first}));
    };
    const Tensor y0 = forward(*module, input(1, 1), true);
    EXPECT_EQ(calls("quantize") - start, 2u);
    const Tensor y1 = forward(*module, input(1, 2), false);
    EXPECT_EQ(calls("quantize") - start, 3u) << "the weight was quantised again";
    (void)forward(*module, input(1, 2), std::nullopt);
    EXPECT_EQ(calls("quantize") - start, 5u);
    const Tensor p0 = forward(*plain, input(1, 1), std::nullopt);
    EXPECT_TRUE(same_bits(y0, p0));
    // Under delayed scaling the weight's scale has changed since the first microbatch.
    if (!std::holds_alternative<DelayedScaling>(recipe)) {
      EXPECT_TRUE(same_bits(y1, forward(*plain, input(1, 2), std::nullopt)));
    }
  }
}

// Inference without is_first_microbatch quantises or casts a weight once after each change of the
// weight. The test counts these ops in each call.
TEST(WeightCache, InferenceMakesEachVersionOnce) {
  for (const Recipe& recipe :
       {Recipe(DelayedScaling{}), Recipe(Float8CurrentScaling{}), Recipe(Float8BlockScaling{})}) {
    SCOPED_TRACE(describe(recipe));
    auto module = make_linear();
    const Tensor x = input();
    const auto forward = [&](bool training) {
      autocast fp8(true, recipe);
      Ctx ctx;
      return take(module->forward(x, training ? &ctx : nullptr));
    };
    const auto quantised = [&](bool training) {
      const uint64_t before = calls("quantize");
      (void)forward(training);
      return calls("quantize") - before - 1;  // one quantisation is the input's
    };
    EXPECT_EQ(quantised(true), 1u);
    EXPECT_EQ(quantised(true), 1u) << "training quantises for each call";
    EXPECT_EQ(quantised(false), 1u);
    const Tensor y = forward(false);
    EXPECT_EQ(quantised(false), 0u);
    EXPECT_TRUE(same_bits(forward(false), y));
    EXPECT_EQ(quantised(true), 1u);
    EXPECT_EQ(quantised(false), 1u) << "training let the copy go";
    const NamedParameter weight = module->parameters()[0];
    set_values(weight.value(), random_values(weight.value().numel(), 77));
    ++weight.parameter->version;
    EXPECT_EQ(quantised(false), 1u);
    EXPECT_EQ(quantised(false), 0u);
    EXPECT_FALSE(same_bits(forward(false), y));
    ASSERT_OK(module->load_state(module->state(), "itself"));
    EXPECT_EQ(quantised(false), 1u);
  }
}

TEST(WeightCache, InferenceCastsEachVersionOnce) {
  auto module = take(
      Linear::create({.in_features = kIn, .out_features = kOut, .activation_dtype = DType::kBF16}));
  const Tensor x = take(Tensor::zeros({2, kIn}, DType::kBF16));
  const auto copies = [&](Ctx* ctx) {
    const uint64_t before = calls("strided_copy");
    (void)take(module->forward(x, ctx));
    if (ctx != nullptr) ctx->reset();
    return calls("strided_copy") - before;
  };
  Ctx ctx;
  EXPECT_EQ(copies(nullptr), 1u);
  EXPECT_EQ(copies(nullptr), 0u);
  EXPECT_EQ(copies(&ctx), 1u);
  EXPECT_EQ(copies(nullptr), 1u);
  ++module->parameters()[0].parameter->version;
  EXPECT_EQ(copies(nullptr), 1u);
}

TEST(WeightCache, IsNotUsedForOtherWeightsOrAnotherRecipe) {
  auto module = make_linear();
  const Tensor x = input();
  auto forward = [&](const Recipe& recipe, bool training) {
    autocast fp8(true, recipe);
    Ctx ctx;
    return take(module->forward(x, training ? &ctx : nullptr, {.is_first_microbatch = false}));
  };
  const uint64_t start = calls("quantize");
  (void)forward(Float8CurrentScaling{}, false);  // quantises input and weight, row-wise only
  (void)forward(Float8CurrentScaling{}, false);
  EXPECT_EQ(calls("quantize") - start, 3u);
  (void)forward(Float8CurrentScaling{}, true);  // the backward needs the column-wise data too
  EXPECT_EQ(calls("quantize") - start, 5u);
  (void)forward(Float8BlockScaling{}, true);
  EXPECT_EQ(calls("quantize") - start, 7u);
  auto sgd = take(SGD::create(module->parameters(), {.lr = 1}));
  set_values(made_grad(module->parameters()[0]), Values(kIn * kOut, 0.25));
  const Tensor before = forward(Float8BlockScaling{}, true);
  ASSERT_OK(sgd->step());
  EXPECT_FALSE(same_bits(forward(Float8BlockScaling{}, true), before));
}

// ---- calibration

TEST(Calibrating, ComputesInHighPrecisionAndCollectsAmaxes) {
  auto module = make_linear();
  const Tensor a = input(3, 1), b = input(1, 2);
  const Tensor exact = take(module->forward(a, nullptr));
  EXPECT_THROW((void)find_state(*module, "fp8.fwd.scale"), std::runtime_error);
  {
    autocast scope({.enabled = false, .calibrating = true}, DelayedScaling{.amax_history_len = 4});
    EXPECT_TRUE(fp8_calibrating());
    EXPECT_FALSE(fp8_enabled());
    EXPECT_TRUE(same_bits(take(module->forward(a, nullptr)), exact));
    (void)take(module->forward(b, nullptr));
    EXPECT_EQ(at(*module, "fp8.fwd.amax_history", 0), amax_of(a)) << "a running maximum";
  }
  EXPECT_EQ(at(*module, "fp8.fwd.scale", 0), 448 / amax_of(a));
  EXPECT_EQ(at(*module, "fp8.fwd.scale", 1), 448 / amax_of(module->parameters()[0].value()));
  // Calibration gives FP8 a scale that fits: x beyond 448 would saturate under scale 1.
  const Tensor big = input(2000, 3);
  {
    autocast scope({.enabled = false, .calibrating = true}, DelayedScaling{.amax_history_len = 4});
    (void)take(module->forward(big, nullptr));
  }
  autocast fp8(true, DelayedScaling{.amax_history_len = 4});
  const Values y = values_of(take(module->forward(big, nullptr)));
  EXPECT_LT(relative_l2(y, values_of([&] {
                          autocast off(false);
                          return take(module->forward(big, nullptr));
                        }())),
            0.05);
}

TEST(Calibrating, CoversTheFusedModules) {
  auto layer = take(TransformerLayer::create(
      {.hidden_size = 32, .ffn_hidden_size = 64, .num_attention_heads = 2}));
  const Tensor x = tensor({4, 2, 32}, random_values(256, 1));
  {
    autocast scope({.enabled = false, .calibrating = true});
    (void)take(layer->forward(x, nullptr));
  }
  int sites = 0;
  for (const NamedTensor& t : layer->state()) {
    if (!t.name.ends_with("fwd.scale")) continue;
    ++sites;
    for (double s : values_of(t.tensor)) EXPECT_GT(s, 1) << t.name;
  }
  EXPECT_EQ(sites, 4);
}

}  // namespace
}  // namespace te_fl::nn::testing::delayed_scaling_test
