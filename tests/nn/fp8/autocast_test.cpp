// FP8 autocast: each recipe against high precision, FP8 data passed between fused modules, nested
// autocast scopes, and a scope captured for use on other threads.
#include <algorithm>
#include <atomic>
#include <map>
#include <thread>

#include "autocast_fixture.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::autocast_test {
namespace {

std::map<std::string, uint64_t> all_calls() {
  std::map<std::string, uint64_t> result;
  for (const OpUsage& u : OpManager::instance().usage()) result[u.op] += u.calls;
  return result;
}

// ---- recipes against high precision

struct RecipeCase {
  std::string name;
  Recipe recipe;
};

class Recipes : public ::testing::TestWithParam<RecipeCase> {};

template <class M>
std::map<std::string, Values> run(M& module, const Tensor& x, const Tensor& dy,
                                  const Recipe* recipe, int warmup) {
  std::map<std::string, Values> got;
  for (int i = 0; i <= warmup; ++i) {  // delayed scaling finds its scales in the first steps
    check(module.zero_grad());
    Ctx ctx;
    Tensor y;
    {
      autocast fp8(recipe != nullptr, recipe != nullptr ? *recipe : Recipe(DelayedScaling{}));
      y = take(module.forward(x, &ctx));
      check(fp8.exit());
    }
    got["y"] = values_of(y);
    got["x"] = values_of(take(module.backward(dy, ctx)));
    check(backward_end());
    for (const NamedParameter& p : module.parameters()) got[p.name] = values_of(p.grad());
  }
  return got;
}

// Rounding to FP8 has an rms error of about 2.6 % (E4M3) or 5 % (E5M2) per factor; the upper bounds
// follow from the number of roundings in a row. The lower bound proves that FP8 was used.
void expect_close(const std::map<std::string, Values>& fp8,
                  const std::map<std::string, Values>& exact, double bound) {
  for (const auto& [name, values] : exact) {
    const double error = relative_l2(fp8.at(name), values);
    EXPECT_LT(error, bound) << name;
    if (name == "fc2_bias") {
      EXPECT_LT(error, 1e-6) << "summed before quantisation";
    } else if (!name.ends_with("bias")) {
      EXPECT_GT(error, 1e-3) << name;
    }
  }
}

TEST_P(Recipes, LinearIsCloseToHighPrecision) {
  auto module = make_linear();
  const auto exact = run(*module, input(), gradient(1e-3), nullptr, 0);
  const auto fp8 = run(*module, input(), gradient(1e-3), &GetParam().recipe, 2);
  for (const auto& [name, values] : exact) {
    const double error = relative_l2(fp8.at(name), values);
    if (name == "bias") {
      EXPECT_LT(error, 1e-6) << "the bias gradient is summed before quantisation";
      continue;
    }
    EXPECT_LT(error, name == "y" ? 0.05 : 0.08) << name;
    EXPECT_GT(error, 1e-3) << name;
  }
}

TEST_P(Recipes, MlpIsCloseToHighPrecisionWithEveryActivation) {
  for (int i = 0; i < 12; ++i) {
    for (bool bias : {true, false}) {
      const auto activation = static_cast<Activation>(i);
      SCOPED_TRACE(::testing::Message() << name(activation) << " bias " << bias);
      auto module = take(LayerNormMLP::create({.hidden_size = kIn,
                                               .ffn_hidden_size = 96,
                                               .activation = activation,
                                               .bias = bias,
                                               .seed = 5,
                                               .init_std = 0.1f,
                                               .output_init_std = 0.1f}));
      const Tensor dy = tensor({kRows, kIn}, random_values(kRows * kIn, 7, 1e-3));
      const auto exact = run(*module, input(), dy, nullptr, 0);
      const auto fp8 = run(*module, input(), dy, &GetParam().recipe, 2);
      // Rounding may change the sign of a pre-activation near zero. Where the activation's
      // derivative jumps at zero, the error is then much larger than the rounding error.
      const bool jumps = activation == Activation::kRelu || activation == Activation::kReglu;
      expect_close(fp8, exact, jumps ? 0.3 : 0.15);
    }
  }
}

TEST_P(Recipes, TransformerLayerIsCloseToHighPrecision) {
  for (bool llama : {false, true}) {
    TransformerLayerOptions options{.hidden_size = 64,
                                    .ffn_hidden_size = 128,
                                    .num_attention_heads = 4,
                                    .seed = 5,
                                    .init_std = 0.1f,
                                    .output_init_std = 0.1f};
    if (llama) {
      options.num_gqa_groups = 2;
      options.normalization = Normalization::kRMSNorm;
      options.activation = Activation::kSwiglu;
      options.bias = false;
    }
    auto module = take(TransformerLayer::create(options));
    const Tensor x = tensor({16, 2, 64}, random_values(2048, 1));
    const Tensor dy = tensor({16, 2, 64}, random_values(2048, 2, 1e-3));
    const auto exact = run(*module, x, dy, nullptr, 0);
    const auto fp8 = run(*module, x, dy, &GetParam().recipe, 2);
    for (const auto& [name, values] : exact) {
      // The gradient of the key bias is zero in exact arithmetic, so a relative error is
      // meaningless for this tensor.
      if (name == "self_attention.layernorm_qkv.bias") continue;
      EXPECT_LT(relative_l2(fp8.at(name), values), 0.25) << name;
    }
    EXPECT_LT(relative_l2(fp8.at("y"), exact.at("y")), 0.08);
    EXPECT_GT(relative_l2(fp8.at("y"), exact.at("y")), 1e-3);
  }
}

TEST_P(Recipes, OddSizesWork) {
  auto module = take(Linear::create({.in_features = 19, .out_features = 7, .init_std = 0.3f}));
  const Tensor x = tensor({5, 19}, random_values(95, 1)), dy = tensor({5, 7}, random_values(35, 2));
  const auto exact = run(*module, x, dy, nullptr, 0);
  const auto fp8 = run(*module, x, dy, &GetParam().recipe, 2);
  for (const auto& [name, values] : exact) {
    EXPECT_LT(relative_l2(fp8.at(name), values), 0.12) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, Recipes,
    ::testing::Values(RecipeCase{"delayed", DelayedScaling{}},
                      RecipeCase{"delayed_e4m3_recent",
                                 DelayedScaling{.margin = 1,
                                                .format = Fp8Format::kE4M3,
                                                .amax_history_len = 4,
                                                .amax_compute_algo = AmaxAlgo::kMostRecent}},
                      RecipeCase{"current", Float8CurrentScaling{}},
                      RecipeCase{"current_pow2", Float8CurrentScaling{.pow2_scale = true}},
                      RecipeCase{"block", Float8BlockScaling{}},
                      RecipeCase{"block_hybrid", Float8BlockScaling{.format = Fp8Format::kHybrid}},
                      RecipeCase{"block_exact", Float8BlockScaling{.pow2_scale = false}}),
    [](const auto& info) { return info.param.name; });

TEST(Fp8Attention, IsCloseToHighPrecision) {
  auto module = take(DotProductAttention::create(
      {.num_attention_heads = 2, .head_dim = 16, .attention = {.layout = Layout::kBSHD}}));
  const DelayedScaling recipe{.amax_history_len = 2, .fp8_dpa = true};
  auto part = [](uint64_t seed, double range = 1) {
    return tensor({2, 12, 2, 16}, random_values(768, seed, range));
  };
  const Tensor q = part(1), k = part(2), v = part(3), d_o = part(4, 1e-3);
  auto once = [&](bool fp8) {
    Ctx ctx;
    Tensor o;
    {
      autocast scope(fp8, recipe);
      o = take(module->forward(q, k, v, &ctx));
    }
    auto g = take(module->backward(d_o, ctx));
    check(backward_end());
    return std::vector<Values>{values_of(o), values_of(g.dq), values_of(g.dk), values_of(g.dv)};
  };
  const auto exact = once(false);
  std::vector<Values> fp8;
  for (int i = 0; i < 3; ++i) fp8 = once(true);
  EXPECT_GT(relative_l2(fp8[0], exact[0]), 1e-3);
  EXPECT_LT(relative_l2(fp8[0], exact[0]), 0.08);
  for (int i = 1; i < 4; ++i) EXPECT_LT(relative_l2(fp8[i], exact[i]), 0.2) << i;
  // Q, K and V share one amax and the scale that follows from it.
  const float amax = std::max({amax_of(q), amax_of(k), amax_of(v)});
  EXPECT_EQ(at(*module, "fp8.fwd.scale", 0), 448 / amax);
  EXPECT_EQ(at(*module, "fp8.bwd.scale", 0), 57344 / amax_of(d_o));
}

// The modules before and after attention exchange FP8 data with it where possible (as many key
// heads as query heads, no RoPE), and high-precision values otherwise.
TEST(Fp8Attention, InMultiheadAttentionIsCloseToHighPrecision) {
  struct Kind {
    const char* name;
    int64_t groups;
    bool rope;
  };
  for (const Kind& kind : {Kind{"codes", 4, false}, {"grouped", 2, false}, {"rope", 4, true}}) {
    auto module = take(MultiheadAttention::create({.hidden_size = 64,
                                                   .num_attention_heads = 4,
                                                   .num_gqa_groups = kind.groups,
                                                   .init_std = 0.2f,
                                                   .output_init_std = 0.2f}));
    const DelayedScaling recipe{.amax_history_len = 2, .fp8_dpa = true};
    const Tensor x = tensor({12, 2, 64}, random_values(1536, 1));
    const Tensor dy = tensor({12, 2, 64}, random_values(1536, 2, 1e-3));
    AttentionInputs inputs;
    if (kind.rope) {
      inputs.rotary_angles = take(init::rotary_angles({.dim = 16, .max_seqlen = 12}));
    }
    auto once = [&](bool fp8) {
      for (const NamedParameter& p : module->parameters()) check(p.parameter->clear_grad());
      Ctx ctx;
      std::map<std::string, Values> result;
      {
        autocast scope(fp8, recipe);
        result["y"] = values_of(take(module->forward(x, &ctx, inputs)));
      }
      result["dx"] = values_of(take(module->backward(dy, ctx)));
      check(backward_end());
      for (const NamedParameter& p : module->parameters()) result[p.name] = values_of(p.grad());
      return result;
    };
    const auto exact = once(false);
    std::map<std::string, Values> fp8;
    for (int i = 0; i < 3; ++i) fp8 = once(true);
    ASSERT_EQ(fp8.size(), exact.size());
    for (const auto& [name, values] : exact) {
      const double off = relative_l2(fp8[name], values);
      EXPECT_LT(off, name == "y" ? 0.15 : 0.25) << kind.name << " " << name;
      // The projection's bias gradient is the sum of the high-precision dy, so it is the only
      // gradient without FP8 error.
      EXPECT_EQ(off > 1e-3, name != "proj.bias") << kind.name << " " << name;
    }
    // The projection reads attention's FP8 output, which has attention's scale, so the projection's
    // own input scale stays unused.
    EXPECT_EQ(at(*module, "proj.fp8.fwd.scale", 0), 1) << kind.name;
    EXPECT_NE(at(*module, "core_attention.fp8.fwd.scale", 2), 1) << kind.name;
    // The gradient of Q, K and V is passed to the QKV layer as FP8 data with attention's scale, so
    // that layer's own gradient scale stays unused.
    EXPECT_EQ(at(*module, "layernorm_qkv.fp8.bwd.scale", 0) == 1,
              std::string("codes") == kind.name);
  }
}

TEST(Fp8Attention, CodesAreRefusedWithoutDelayedScaling) {
  auto linear = make_linear();
  const Tensor x = input(1, 3);
  const Tensor codes = take(Tensor::empty_quantized(x.shape(), {}));
  const auto refused = linear->forward(codes, nullptr);
  EXPECT_HAS(refused.status().message(), "dequantize it first");
  const Tensor narrow = tensor({1, 1}, {0});
  const auto wrong = linear->forward(x, nullptr, {}, nullptr, &narrow);
  EXPECT_HAS(wrong.status().message(), "of the result's shape");
}

// ---- fused data flow

TEST(FusedFlow, NormsAndActivationsWriteFp8Themselves) {
  auto layer = take(TransformerLayer::create(
      {.hidden_size = 32, .ffn_hidden_size = 64, .num_attention_heads = 2}));
  const Tensor x = tensor({4, 2, 32}, random_values(256, 1));
  const auto before = all_calls();
  Ctx ctx;
  Tensor y;
  {
    autocast fp8(true, Float8CurrentScaling{});
    y = take(layer->forward(x, &ctx));
  }
  auto delta = [&](const std::string& op) {
    auto now = all_calls();
    auto old = before.find(op);
    return now[op] - (old == before.end() ? 0 : old->second);
  };
  EXPECT_EQ(delta("layernorm_fwd"), 2u);
  EXPECT_EQ(delta("gelu"), 1u);
  EXPECT_EQ(delta("quantize"), 5u);  // four weights and proj's input
  EXPECT_EQ(delta("generic_gemm"), 4u);
  (void)take(layer->backward(y, ctx));
  EXPECT_EQ(delta("quantize"), 5u);
  // fc2, proj and qkv; fc1's bias gradient comes from dbias_dgelu.
  EXPECT_EQ(delta("bgrad_quantize"), 3u);
  EXPECT_EQ(delta("dbias_dgelu"), 1u);
  EXPECT_EQ(delta("dgelu"), 0u);
  EXPECT_EQ(delta("dequantize"), 0u);
}

TEST(FusedFlow, HighPrecisionLinearStaysOutOfFp8) {
  auto module = take(Linear::create(
      {.in_features = kIn, .out_features = kOut, .seed = 3, .high_precision = true}));
  const Tensor exact = take(module->forward(input(), nullptr));
  autocast fp8(true);
  EXPECT_TRUE(same_bits(take(module->forward(input(), nullptr)), exact));
}

// ---- scopes

TEST(Scopes, NestAndTheInnermostCounts) {
  EXPECT_FALSE(fp8_enabled());
  EXPECT_FALSE(current_recipe().has_value());
  auto module = make_linear();
  const Tensor x = input();
  const Tensor exact = take(module->forward(x, nullptr));
  {
    autocast outer(true, DelayedScaling{});
    EXPECT_TRUE(fp8_enabled());
    {
      autocast inner(false);
      EXPECT_FALSE(fp8_enabled());
      EXPECT_TRUE(same_bits(take(module->forward(x, nullptr)), exact));
      {
        autocast innermost(true, Float8BlockScaling{});
        EXPECT_TRUE(std::holds_alternative<Float8BlockScaling>(*current_recipe()));
        EXPECT_FALSE(same_bits(take(module->forward(x, nullptr)), exact));
      }
      EXPECT_FALSE(fp8_enabled());
    }
    EXPECT_TRUE(std::holds_alternative<DelayedScaling>(*current_recipe()));
  }
  EXPECT_FALSE(fp8_enabled());
}

TEST(Scopes, OnlyTheOutermostUpdates) {
  auto module = make_linear();
  Ctx ctx;
  autocast outer(true);
  {
    autocast inner(true);
    (void)take(module->forward(input(), &ctx));
    ASSERT_OK(inner.exit());
  }
  EXPECT_EQ(at(*module, "fp8.fwd.scale", 0), 1);
  ASSERT_OK(outer.exit());
  EXPECT_EQ(at(*module, "fp8.fwd.scale", 0), 448 / amax_of(input()));
  ASSERT_OK(outer.exit());  // a second exit does nothing
  EXPECT_FALSE(fp8_enabled());
}

TEST(Scopes, ABackwardNeedsNone) {
  auto module = make_linear();
  Ctx in_fp8, plain;
  {
    autocast fp8(true, Float8CurrentScaling{});
    (void)take(module->forward(input(), &in_fp8));
  }
  (void)take(module->forward(input(), &plain));
  const Tensor a = take(module->backward(gradient(), in_fp8));
  autocast fp8(true, Float8CurrentScaling{});
  const Tensor b = take(module->backward(gradient(), plain));
  const double error = relative_l2(values_of(a), values_of(b));
  EXPECT_GT(error, 1e-3);
  EXPECT_LT(error, 0.08);
}

TEST(Scopes, AnInvalidRecipeFailsTheForwardWithItsMessage) {
  auto module = make_linear();
  auto message = [&](AutocastOptions options, const Recipe& recipe) {
    autocast fp8(options, recipe);
    Ctx ctx;
    const auto result = module->forward(input(), &ctx);
    return result.ok() ? std::string("ok") : result.status().to_string();
  };
  EXPECT_HAS(message({}, DelayedScaling{.amax_history_len = 0}), "amax_history_len is 0");
  EXPECT_HAS(message({}, DelayedScaling{.margin = 900}), "margin is 900");
  EXPECT_HAS(message({}, DelayedScaling{.format = Fp8Format(9)}), "DelayedScaling: format is 9");
  EXPECT_HAS(message({}, Float8CurrentScaling{.format = Fp8Format(2)}), "format is 2; it must be");
  EXPECT_HAS(message({}, DelayedScaling{.amax_compute_algo = AmaxAlgo(2)}),
             "amax_compute_algo is 2; it must be");
  EXPECT_HAS(message({}, Float8BlockScaling{.amax_epsilon = -1}), "amax_epsilon");
  EXPECT_HAS(message({}, Float8BlockScaling{.format = Fp8Format(2)}), "format is 2; it must be");
  EXPECT_HAS(message({.enabled = false, .calibrating = true}, Float8CurrentScaling{}),
             "keeps no state to calibrate");
  EXPECT_EQ(message({}, DelayedScaling{}), "ok");
}

TEST(Capture, CarriesAutocastContextAndPolicyToAnotherThread) {
  auto module = make_linear();
  std::optional<CapturedContext> captured;
  PolicySettings settings;
  settings.prefer = Kind::kReference;
  ContextScope context{Context(31)};
  {
    PolicyScope policy(settings);
    autocast fp8(true, Float8BlockScaling{});
    captured = CapturedContext::capture();
  }  // captured outlives the scopes
  std::thread([&] {
    EXPECT_FALSE(fp8_enabled());
    EXPECT_EQ(Context::current().random().seed, 0u);
    {
      auto scope = captured->enter();
      EXPECT_TRUE(std::holds_alternative<Float8BlockScaling>(*current_recipe()));
      EXPECT_TRUE(fp8_enabled());
      EXPECT_EQ(Context::current().random().seed, 31u);
      EXPECT_EQ(take(current_policy()).settings(), settings);
    }
    EXPECT_FALSE(fp8_enabled());
    EXPECT_EQ(Context::current().random().seed, 0u);
  }).join();
}

TEST(Capture, WithoutAutocastTurnsTheOtherThreadsOff) {
  const CapturedContext captured = CapturedContext::capture();
  autocast fp8(true);
  {
    auto scope = captured.enter();
    EXPECT_FALSE(fp8_enabled());
  }
  EXPECT_TRUE(fp8_enabled());
}

TEST(Capture, WithoutAPolicyScopeLeavesTheOtherThreadsAside) {
  const CapturedContext captured = CapturedContext::capture();
  const SelectionPolicy usual = take(current_policy());
  std::thread([&] {
    PolicySettings other, strict;
    other.prefer = Kind::kReference;
    strict.strict = true;
    const PolicyScope own(other);
    const SelectionPolicy before = take(current_policy());
    EXPECT_NE(before, usual);
    {
      const auto scope = captured.enter();
      EXPECT_EQ(take(current_policy()), usual);
      const PolicyScope inner(strict);
      EXPECT_TRUE(take(current_policy()).settings().strict);
    }
    EXPECT_EQ(take(current_policy()), before);
  }).join();
}

TEST(Capture, TheLastScopeOfASessionUpdates) {
  auto module = make_linear();
  Ctx ctx;
  std::atomic<int> phase = 0;
  std::thread other;
  {
    autocast fp8(true);
    const CapturedContext captured = CapturedContext::capture();
    other = std::thread([&, captured] {
      auto scope = captured.enter();
      (void)take(module->forward(input(), &ctx));
      phase = 1;
      phase.notify_all();
      phase.wait(1);  // wait until the thread that opened the scope has left it
    });
    phase.wait(0);
  }
  EXPECT_EQ(at(*module, "fp8.fwd.scale", 0), 1);
  phase = 2;
  phase.notify_all();
  other.join();
  EXPECT_EQ(at(*module, "fp8.fwd.scale", 0), 448 / amax_of(input()));
}

TEST(Capture, ABackwardThreadsAmaxesAreUpdatedByTheOwnersBackwardEnd) {
  auto module = make_linear();
  Ctx ctx;
  {
    autocast fp8(true);
    (void)take(module->forward(input(), &ctx));
  }
  const CapturedContext captured = CapturedContext::capture();
  std::thread([&] {
    auto scope = captured.enter();
    (void)take(module->backward(gradient(), ctx));
  }).join();
  EXPECT_EQ(at(*module, "fp8.bwd.scale", 0), 1);
  ASSERT_OK(backward_end());
  EXPECT_EQ(at(*module, "fp8.bwd.scale", 0), 57344 / amax_of(gradient()));
}

TEST(Threads, TrainTheirOwnModulesIndependently) {
  std::vector<Values> results(4);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < results.size(); ++t) {
    threads.emplace_back([&, t] {
      ContextScope scope{Context(5)};
      auto layer = take(TransformerLayer::create({.hidden_size = 16,
                                                  .ffn_hidden_size = 32,
                                                  .num_attention_heads = 2,
                                                  .hidden_dropout = 0.1f,
                                                  .seed = 1}));
      auto adam = take(Adam::create(layer->parameters(), {}));
      Tensor y;
      for (uint64_t step = 0; step < 3; ++step) {
        Ctx ctx;
        {
          autocast fp8(true);
          y = take(layer->forward(tensor({4, 1, 16}, random_values(64, step)), &ctx));
        }
        (void)take(layer->backward(y, ctx));
        check(backward_end());
        check(adam->step());
        check(layer->zero_grad());
      }
      results[t] = values_of(y);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Values& r : results) EXPECT_EQ(r, results[0]);
}

TEST(RecipeNames, AreParsedAndDescribed) {
  EXPECT_TRUE(std::holds_alternative<DelayedScaling>(take(parse_recipe("Delayed"))));
  EXPECT_TRUE(std::holds_alternative<Float8CurrentScaling>(take(parse_recipe("current"))));
  EXPECT_TRUE(std::holds_alternative<Float8BlockScaling>(take(parse_recipe("block"))));
  EXPECT_EQ(describe(DelayedScaling{}), "delayed scaling (hybrid, margin 0, history 1024, max)");
}

}  // namespace
}  // namespace te_fl::nn::testing::autocast_test
