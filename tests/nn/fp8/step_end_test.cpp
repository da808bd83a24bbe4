// Tests of the end of a step: scale updates without an explicit call, and the errors for contexts
// that are in use and for gradients that were cleared.
#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <thread>

#include "nn_test_util.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::step_end_test {
namespace {

constexpr int64_t kRows = 16, kSize = 32;
const DelayedScaling kRecipe{.amax_history_len = 3};

Tensor values(uint64_t seed, double range = 1) {
  return tensor({kRows, kSize}, random_values(kRows * kSize, seed, range));
}
std::unique_ptr<LayerNormMLP> make_module() {
  return take(LayerNormMLP::create({.hidden_size = kSize,
                                    .ffn_hidden_size = 2 * kSize,
                                    .seed = 3,
                                    .init_std = 0.2f,
                                    .output_init_std = 0.2f}));
}
std::map<std::string, Values> fp8_state(const Module& module) {
  std::map<std::string, Values> result;
  for (const NamedTensor& t : module.state()) {
    if (t.name.find("fp8.") != std::string::npos) result[t.name] = values_of(t.tensor);
  }
  return result;
}
std::string message(const Status& status) { return status.ok() ? "ok" : status.to_string(); }
// ---- scale updates without an explicit call

enum class End {
  kCalled,          // backward_end() in every step, then the optimizer's step
  kOptimizer,       // only the optimizer's step, without backward_end()
  kOtherOptimizer,  // an optimizer outside te-fl, and zero_grad()
  kOtherContext,    // the backward runs in another Context
  kOtherThread,     // the backward runs in another Context, on a new thread
  kThreads,         // forward and backward each run on a new thread, with te-fl's optimizer
};

struct Outcome {
  std::vector<Values> dx;
  std::map<std::string, Values> state;
};

Outcome train(End end, int64_t microbatches) {
  Outcome run;
  auto module = make_module();
  auto sgd = take(SGD::create(module->parameters(), {.lr = 0}));
  for (uint64_t step = 0; step < 4; ++step) {
    check(module->zero_grad());
    for (int64_t k = 0; k < microbatches; ++k) {
      Ctx ctx;
      const auto forward = [&] {
        autocast fp8(true, kRecipe);
        (void)take(module->forward(values(step), &ctx));
        check(fp8.exit());
      };
      const auto backward = [&] {
        run.dx.push_back(values_of(take(module->backward(values(90 + step, 1e-4), ctx))));
      };
      if (end == End::kThreads) {
        std::thread(forward).join();
      } else {
        forward();
      }
      if (end == End::kOtherThread || end == End::kThreads) {
        std::thread(backward).join();
      } else if (end == End::kOtherContext) {
        const ContextScope scope{Context(17)};
        backward();
      } else {
        backward();
      }
    }
    const bool own = end == End::kCalled || end == End::kOtherContext || end == End::kOtherThread;
    if (own) check(backward_end());
    if (end != End::kOtherOptimizer) check(sgd->step());
  }
  if (end == End::kOtherOptimizer) check(backward_end());
  run.state = fp8_state(*module);
  return run;
}

TEST(StepEnd, GradientScalesAreUpdatedWhoeverEndsTheStepAndWhereverItsBackwardRan) {
  for (int64_t microbatches : {1, 2}) {
    const Outcome called = train(End::kCalled, microbatches);
    EXPECT_GT(called.state.at("fc2_fp8.bwd.scale")[0], 1e6);
    for (End end : {End::kOptimizer, End::kOtherOptimizer, End::kOtherContext, End::kOtherThread,
                    End::kThreads}) {
      SCOPED_TRACE(static_cast<int>(end));
      const Outcome other = train(end, microbatches);
      EXPECT_EQ(other.dx, called.dx);
      EXPECT_EQ(other.state, called.state);
    }
  }
}

TEST(StepEnd, ParametersInPartsBeginAStepAsWholeOnesDo) {
  const auto scale = [](bool parts) {
    LinearOptions options{.in_features = kSize, .out_features = kSize};
    if (parts) options.parameters_split = {{"a", 8}, {"b", 24}};
    auto linear = take(Linear::create(options));
    for (uint64_t step = 0; step < 2; ++step) {
      check(linear->zero_grad());
      Ctx ctx;
      {
        autocast fp8(true, kRecipe);
        check(linear->forward(values(step), &ctx).status());
      }
      check(linear->backward(values(9, 1e-4), ctx).status());
    }
    const double found = find_state(*linear, "fp8.bwd.scale").data<float>()[0];
    check(backward_end());
    return found;
  };
  EXPECT_GT(scale(false), 1e6);
  EXPECT_EQ(scale(true), scale(false));
}

TEST(StepEnd, AnotherContextForDropoutChangesNoBookkeeping) {
  auto module = make_module();
  Ctx ctx;
  {
    autocast fp8(true, kRecipe);
    const ContextScope dropout{Context(17)};
    (void)take(module->forward(values(1), &ctx));
  }
  {
    const ContextScope dropout{Context(18)};
    (void)take(module->backward(values(2), ctx));
  }
  EXPECT_EQ(fp8_state(*module).at("fc2_fp8.bwd.scale")[0], 1);
  ASSERT_OK(backward_end());
  EXPECT_GT(fp8_state(*module).at("fc2_fp8.bwd.scale")[0], 1e4);
}

TEST(StepEnd, AnErrorOfAScopesEndIsReturnedByBackwardEnd) {
  auto module = make_module();
  PolicySettings settings;  // no implementation of the scale update is allowed
  settings.per_op["fused_amax_and_scale_update_after_reduction"] = {
      {PolicyToken::Type::kImpl, Kind::kVendor, "vendor.nobody"}};
  std::optional<CapturedContext> captured;
  {
    const PolicyScope policy(settings);
    autocast fp8(true, kRecipe);
    captured = CapturedContext::capture();
  }
  std::thread([&] {
    Ctx ctx;
    auto scope = captured->enter();
    (void)take(module->forward(values(1), &ctx));
  }).join();
  EXPECT_HAS(message(backward_end()), "the scale update failed");
  ASSERT_OK(backward_end());
}

// ---- amax reduction over ranks

// The reduction function simulates a second rank whose amaxes are all 7.
TEST(StepEnd, OneReductionForEachDirectionOverAllSitesThatWereEverUsed) {
  // The last inference's amaxes stay pending until the next autocast scope ends, which happens in
  // another test. The reduction function therefore owns the memory that it writes.
  const auto all = std::make_shared<std::vector<std::vector<float>>>();
  struct Rank {
    std::vector<std::vector<float>>& reduced;  // amaxes of each call, after the reduction
    std::shared_ptr<AmaxReduction> reduction;
  } rank{*all, std::make_shared<AmaxReduction>([all](std::span<const Tensor> amaxes) -> Status {
           std::vector<float>& reduced = all->emplace_back();
           for (const Tensor& row : amaxes) {
             for (int64_t i = 0; i < row.numel(); ++i) {
               reduced.push_back(row.data<float>()[i]);
               const_cast<float*>(row.data<float>())[i] = std::max(row.data<float>()[i], 7.0f);
             }
           }
           return {};
         })};
  auto a = take(Linear::create({.in_features = kSize, .out_features = kSize, .seed = 1}));
  auto b = take(Linear::create({.in_features = kSize, .out_features = kSize, .seed = 2}));
  const auto scales = [](const Module& module) {
    std::vector<float> found;
    for (const NamedTensor& t : module.state()) {
      if (!t.name.ends_with(".scale")) continue;
      for (double v : values_of(t.tensor)) found.push_back(static_cast<float>(v));
    }
    return found;
  };
  const auto step = [&](bool leaves_out) {
    Ctx of_a, of_b;
    autocast fp8({.amax_reduction = rank.reduction}, DelayedScaling{.amax_history_len = 1});
    (void)take(a->forward(values(1), &of_a));
    if (!leaves_out) (void)take(b->forward(values(1), &of_b));
    check(fp8.exit());
    (void)take(a->backward(values(2), of_a));
    if (!leaves_out) (void)take(b->backward(values(2), of_b));
    check(backward_end());
  };
  step(false);
  ASSERT_EQ(rank.reduced.size(), 2u);
  EXPECT_EQ(rank.reduced[0].size(), 4u);
  EXPECT_EQ(rank.reduced[1].size(), 2u);
  const std::vector<float> of_sevens = {448 / 7.0f, 448 / 7.0f, 57344 / 7.0f};
  EXPECT_EQ(scales(*a), of_sevens);
  EXPECT_EQ(scales(*b), of_sevens);
  step(true);
  ASSERT_EQ(rank.reduced.size(), 4u);
  EXPECT_EQ(rank.reduced[2].size(), 4u);
  EXPECT_EQ(rank.reduced[3], (std::vector<float>{rank.reduced[1][0], 0}));
  EXPECT_EQ(scales(*b), of_sevens) << "what the other rank had";
  {  // amaxes of inference wait for an update and its reduction
    autocast fp8({.amax_reduction = rank.reduction}, DelayedScaling{.amax_history_len = 1});
    (void)take(a->forward(values(1), nullptr));
  }
  EXPECT_EQ(rank.reduced.size(), 4u);
}

TEST(StepEnd, AFailedReductionIsTheScopesError) {
  auto module = make_module();
  const auto reduction = std::make_shared<AmaxReduction>(
      [](std::span<const Tensor>) { return Status(StatusCode::kInternal, "a rank is gone"); });
  Ctx ctx;
  autocast fp8({.amax_reduction = reduction}, kRecipe);
  (void)take(module->forward(values(1), &ctx));
  const Status status = fp8.exit();
  EXPECT_HAS(message(status), "the ranks' amaxes were not reduced");
  EXPECT_HAS(message(status), "a rank is gone");
}

// Two backward passes leave amaxes for two reductions, which may be over different ranks. If the
// first reduction fails, backward_end() still calls the second, so that no other rank waits for it.
TEST(StepEnd, AFailedReductionKeepsNoOtherRanksWaiting) {
  int calls = 0;
  const auto gone = std::make_shared<AmaxReduction>(
      [](std::span<const Tensor>) { return Status(StatusCode::kCommFailed, "a rank is gone"); });
  const auto here = std::make_shared<AmaxReduction>([&](std::span<const Tensor>) -> Status {
    ++calls;
    return {};
  });
  auto left = make_module(), own = make_module();
  const auto backward = [](auto& module, const std::shared_ptr<AmaxReduction>& reduction) {
    Ctx ctx;
    autocast fp8({.amax_reduction = reduction}, kRecipe);
    (void)take(module.forward(values(1), &ctx));
    (void)fp8.exit();
    (void)take(module.backward(values(2), ctx));
  };
  backward(*left, gone);
  backward(*own, here);
  const int before = calls;
  EXPECT_FAILS(backward_end(), kCommFailed, "a rank is gone");
  EXPECT_EQ(calls, before + 1);
  EXPECT_GT(fp8_state(*own).at("fc2_fp8.bwd.scale")[0], 1e4);
  EXPECT_EQ(fp8_state(*left).at("fc2_fp8.bwd.scale")[0], 1) << "its amaxes were not reduced";
}

// ---- modules that share FP8 state

TEST(SharedFp8States, AreOneStateOfSeveralModules) {
  const DelayedScaling recipe{.amax_history_len = 1};
  Fp8States states;
  std::vector<std::unique_ptr<Linear>> modules;
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    modules.push_back(take(Linear::create(
        {.in_features = kSize, .out_features = kSize, .activation_dtype = dtype, .seed = 1})));
    ASSERT_OK(modules.back()->share_fp8_states(states));
  }
  std::vector<Ctx> ctxs(2);
  autocast fp8(true, recipe);
  for (size_t i = 0; i < 2; ++i) (void)take(modules[i]->forward(values(1, i + 1.0), &ctxs[i]));
  check(fp8.exit());
  const auto largest = [](const Tensor& t) {
    const Values all = values_of(t);
    return static_cast<float>(
        std::abs(*std::ranges::max_element(all, {}, [](double v) { return std::abs(v); })));
  };
  for (size_t i = 0; i < 2; ++i) {
    (void)take(modules[i]->backward(values(2, i + 1.0), ctxs[i]));
  }
  check(backward_end());
  std::map<std::string, Values> found;
  for (const NamedTensor& t : states.state()) found[t.name] = values_of(t.tensor);
  EXPECT_EQ(found.at("fp8.fwd.scale")[0], 448 / largest(values(1, 2)));
  EXPECT_EQ(found.at("fp8.bwd.scale")[0], 57344 / largest(values(2, 2)));
  EXPECT_EQ(found, fp8_state(*modules[0]));
  // All modules that share a state see a load. A loaded tensor of another size is refused.
  ASSERT_OK(states.load({}, "nothing"));
  EXPECT_EQ(fp8_state(*modules[1]).at("fp8.fwd.scale")[0], 1);
  const Tensor other = tensor({1}, {1});
  EXPECT_HAS(message(states.load({{"fp8.fwd.scale", other}}, "a file")),
             "a file: tensor fp8.fwd.amax_history is missing");
  auto core = take(DotProductAttention::create({.num_attention_heads = 2, .head_dim = 16}));
  EXPECT_HAS(message(core->share_fp8_states(states)), "share_fp8_states: the site fp8.fwd has 3");
}

// ---- contexts in use

TEST(FullCtx, IsRefusedByEveryForwardBeforeItComputes) {
  const Tensor x = values(1), q = tensor({2, 4, 2, 8}, random_values(128, 3));
  auto linear = take(Linear::create({.in_features = kSize, .out_features = 8}));
  auto norm_linear = take(LayerNormLinear::create({.in_features = kSize, .out_features = 8}));
  auto norm = take(RMSNorm::create({.hidden_size = kSize}));
  auto mlp = make_module();
  auto core = take(DotProductAttention::create({.num_attention_heads = 2, .head_dim = 8}));
  auto mha = take(MultiheadAttention::create({.hidden_size = kSize, .num_attention_heads = 2}));
  auto layer = take(TransformerLayer::create({.hidden_size = kSize,
                                              .ffn_hidden_size = kSize,
                                              .num_attention_heads = 2,
                                              .hidden_dropout = 0.5f}));
  auto embedding = take(Embedding::create({.num_embeddings = 4, .hidden_size = 8}));
  Residual residual(0.5f);
  Dropout dropout(0.5f);
  CrossEntropyLoss loss;
  const Tensor x3 = take(x.view({4, 4, kSize})), tokens = int_tensor({0, 1, 2, 3});
  const Tensor logits = tensor({4, 3}, random_values(12, 5)), targets = int_tensor({0, 1, 2, 0});
  const std::map<std::string, std::function<Status(Ctx*)>> forwards = {
      {"Linear", [&](Ctx* c) { return linear->forward(x, c).status(); }},
      {"LayerNormLinear", [&](Ctx* c) { return norm_linear->forward(x, c).status(); }},
      {"Norm", [&](Ctx* c) { return norm->forward(x, c).status(); }},
      {"LayerNormMLP", [&](Ctx* c) { return mlp->forward(x, c).status(); }},
      {"DotProductAttention", [&](Ctx* c) { return core->forward(q, q, q, c).status(); }},
      {"MultiheadAttention", [&](Ctx* c) { return mha->forward(x3, c).status(); }},
      {"TransformerLayer", [&](Ctx* c) { return layer->forward(x3, c).status(); }},
      {"Embedding", [&](Ctx* c) { return embedding->forward(tokens, c).status(); }},
      {"Residual", [&](Ctx* c) { return residual.forward(x, x, c).status(); }},
      {"Dropout", [&](Ctx* c) { return dropout.forward(x, c).status(); }},
      {"CrossEntropyLoss", [&](Ctx* c) { return loss.forward(logits, targets, c).status(); }},
  };
  for (const auto& [name, forward] : forwards) {
    SCOPED_TRACE(name);
    Ctx ctx;
    ASSERT_OK(forward(&ctx));
    const RandomPosition random = Context::current().random();
    const Status refused = forward(&ctx);
    EXPECT_FAILS(refused, kFailedPrecondition,
                 name + ": forward got a ctx that still holds another forward");
    EXPECT_EQ(Context::current().random(), random);
    EXPECT_FALSE(ctx.empty());
    ctx.reset();
    ASSERT_OK(forward(&ctx));
  }
}

TEST(FullCtx, LosesNoMicrobatch) {
  auto linear = take(Linear::create({.in_features = kSize, .out_features = kSize}));
  Ctx ctx;
  ASSERT_OK(linear->forward(values(1), &ctx).status());
  EXPECT_FALSE(linear->forward(values(2), &ctx).ok());
  ASSERT_OK(linear->backward(values(3), ctx).status());
  const Values first = values_of(linear->parameters()[0].grad());
  ASSERT_OK(linear->forward(values(1), &ctx).status());  // the backward has freed ctx
  check(linear->zero_grad());
  ASSERT_OK(linear->backward(values(3), ctx).status());
  EXPECT_EQ(values_of(linear->parameters()[0].grad()), first);
}

// ---- cleared gradients

std::vector<std::unique_ptr<Optimizer>> optimizers(const std::vector<NamedParameter>& parameters) {
  std::vector<std::unique_ptr<Optimizer>> result;
  for (float clip : {0.0f, 1.0f}) {
    for (bool capturable : {false, true}) {
      result.push_back(
          take(Adam::create(parameters, {.max_grad_norm = clip, .capturable = capturable})));
      result.push_back(
          take(SGD::create(parameters, {.max_grad_norm = clip, .capturable = capturable})));
    }
  }
  return result;
}

TEST(ClearedGradients, AreNotAppliedAgain) {
  auto linear = take(Linear::create({.in_features = kSize, .out_features = kSize}));
  const auto parameters = linear->parameters();
  const auto backward = [&] {
    Ctx ctx;
    check(linear->forward(values(1), &ctx).status());
    check(linear->backward(values(2), ctx).status());
  };
  for (auto& optimizer : optimizers(parameters)) {
    backward();
    ASSERT_OK(optimizer->step());
    for (const NamedParameter& p : parameters) ASSERT_OK(p.parameter->clear_grad());
    const Values before = values_of(parameters[0].value());
    const Status refused = optimizer->step();
    EXPECT_FAILS(refused, kFailedPrecondition,
                 "the gradient of weight was cleared by clear_grad()");
    EXPECT_EQ(values_of(parameters[0].value()), before);
    EXPECT_EQ(optimizer->steps(), 1);
    EXPECT_HAS(message(clip_grad_norm(parameters, 1).status()), "clip_grad_norm: the gradient");
    // Tries each solution that the error message names.
    backward();
    ASSERT_OK(optimizer->step());
    ASSERT_OK(parameters[0].parameter->clear_grad());
    ASSERT_OK(linear->zero_grad());
    ASSERT_OK(optimizer->step());
    ASSERT_OK(parameters[0].parameter->clear_grad());
    ASSERT_OK(linear->set_grad_dtype(DType::kF32));
    ASSERT_OK(optimizer->step());
  }
}

// ---- input gradients

TEST(InputGradient, HasTheInputsDType) {
  const Tensor x = values(1), x3 = take(x.view({4, 4, kSize}));
  const DType bf16 = DType::kBF16;
  for (const std::optional<Recipe>& recipe :
       {std::optional<Recipe>(), std::optional<Recipe>(kRecipe),
        std::optional<Recipe>(Float8CurrentScaling{})}) {
    SCOPED_TRACE(recipe.has_value() ? describe(*recipe) : "no FP8");
    const auto gradient = [&](auto& module, const Tensor& in, DType out) {
      Ctx ctx;
      autocast fp8(recipe.has_value(), recipe.value_or(kRecipe));
      const Tensor y = take(module.forward(in, &ctx));
      EXPECT_EQ(y.dtype(), out);
      const Tensor dy =
          take(tensor({y.numel()}, Values(static_cast<size_t>(y.numel()), 0.3)).view(y.shape()));
      return take(module.backward(dy, ctx));
    };
    auto linear = take(Linear::create(
        {.in_features = kSize, .out_features = 8, .activation_dtype = bf16, .init_std = 0.3f}));
    auto norm_linear = take(LayerNormLinear::create(
        {.in_features = kSize, .out_features = 8, .activation_dtype = bf16}));
    auto norm = take(LayerNorm::create({.hidden_size = kSize, .activation_dtype = bf16}));
    auto mlp = take(LayerNormMLP::create(
        {.hidden_size = kSize, .ffn_hidden_size = kSize, .activation_dtype = bf16}));
    auto mha = take(MultiheadAttention::create({.hidden_size = kSize,
                                                .num_attention_heads = 2,
                                                .input_layernorm = false,
                                                .activation_dtype = bf16}));
    auto layer = take(TransformerLayer::create({.hidden_size = kSize,
                                                .ffn_hidden_size = kSize,
                                                .num_attention_heads = 2,
                                                .activation_dtype = bf16}));
    const Tensor dx = gradient(*linear, x, bf16);
    EXPECT_EQ(dx.dtype(), DType::kF32);
    if (dx.dtype() == DType::kF32) {
      bool finer = false;  // true if the parameter has values that BF16 cannot represent
      for (double v : values_of(dx)) {
        uint32_t bits;
        const auto f = static_cast<float>(v);
        std::memcpy(&bits, &f, 4);
        finer = finer || (bits & 0xffff) != 0;
      }
      EXPECT_TRUE(finer);
    }
    EXPECT_EQ(gradient(*norm_linear, x, bf16).dtype(), DType::kF32);
    EXPECT_EQ(gradient(*norm, x, bf16).dtype(), DType::kF32);
    EXPECT_EQ(gradient(*mlp, x, bf16).dtype(), DType::kF32);
    EXPECT_EQ(gradient(*mha, x3, bf16).dtype(), DType::kF32);
    EXPECT_EQ(gradient(*layer, x3, DType::kF32).dtype(), DType::kF32) << "the residual stream";
    check(backward_end());
  }
}

TEST(InputGradient, OfAttentionHasEachInputsDType) {
  auto core = take(DotProductAttention::create(
      {.num_attention_heads = 2, .head_dim = 8, .activation_dtype = DType::kBF16}));
  const Tensor q = tensor({4, 2, 2, 8}, random_values(128, 3));
  for (bool fp8_on : {false, true}) {
    Ctx ctx;
    autocast fp8(fp8_on, DelayedScaling{.fp8_dpa = true});
    const Tensor o = take(core->forward(q, q, q, &ctx));
    EXPECT_EQ(o.dtype(), DType::kBF16);
    const auto grads = take(core->backward(o, ctx));
    for (const Tensor& t : {grads.dq, grads.dk, grads.dv}) EXPECT_EQ(t.dtype(), DType::kF32);
  }
  check(backward_end());
}

}  // namespace
}  // namespace te_fl::nn::testing::step_end_test
