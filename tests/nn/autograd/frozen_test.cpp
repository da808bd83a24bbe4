// Tests frozen parameters, and that a gradient tensor is allocated at its first write.
#include <functional>
#include <optional>

#include "nn/autograd/parameter.hpp"
#include "nn_test_util.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::frozen_test {
namespace {

constexpr int64_t kRows = 6, kHidden = 16;

uint64_t calls(std::string_view op) {
  uint64_t total = 0;
  for (const OpUsage& u : OpManager::instance().usage()) {
    if (u.op == op) total += u.calls;
  }
  return total;
}

std::unique_ptr<TransformerLayer> layer() {
  auto made = take(TransformerLayer::create({.hidden_size = kHidden,
                                             .ffn_hidden_size = 32,
                                             .num_attention_heads = 2,
                                             .attention = {.softmax_type = SoftmaxType::kLearnable},
                                             .seed = 3}));
  randomize(*made, 9, 0.3);
  return made;
}

struct Grads {
  Tensor dx;
  std::map<std::string, Values> of;
};

// Runs two microbatches of the layer, with an FP8 recipe or without one; returns the gradients.
Grads backward(TransformerLayer& module, const std::optional<Recipe>& recipe) {
  const Tensor x = tensor({kRows, 1, kHidden}, random_values(kRows * kHidden, 1));
  const Tensor dy = tensor({kRows, 1, kHidden}, random_values(kRows * kHidden, 2));
  check(module.zero_grad());
  Grads result;
  for (int i = 0; i < 2; ++i) {
    Ctx ctx;
    {
      autocast fp8(recipe.has_value(), recipe.value_or(DelayedScaling{}));
      (void)take(module.forward(x, &ctx));
    }
    result.dx = take(module.backward(dy, ctx));
  }
  check(backward_end());
  for (const NamedParameter& p : module.parameters()) {
    if (p.grad().defined()) result.of[p.name] = values_of(p.grad());
  }
  return result;
}

TEST(LazyGradients, ThereIsNoneUntilABackward) {
  auto module = layer();
  for (const NamedParameter& p : module->parameters()) EXPECT_FALSE(p.grad().defined()) << p.name;
  (void)take(
      module->forward(tensor({kRows, 1, kHidden}, random_values(kRows * kHidden, 1)), nullptr));
  check(module->zero_grad());
  auto adam = take(Adam::create(module->parameters(), {.weight_decay = 0.1f, .max_grad_norm = 1}));
  const Params before = params_of(*module);
  ASSERT_OK(adam->step());  // no parameter has a gradient, so the step changes nothing; weight
                            // decay included
  EXPECT_EQ(params_of(*module), before);
  EXPECT_EQ(take(clip_grad_norm(module->parameters(), 1)), 0);
  for (const NamedParameter& p : module->parameters()) EXPECT_FALSE(p.grad().defined()) << p.name;
  (void)backward(*module, std::nullopt);
  for (const NamedParameter& p : module->parameters()) EXPECT_TRUE(p.grad().defined()) << p.name;
}

TEST(LazyGradients, EnsureGradMakesAZeroOneOfTheDtype) {
  auto module = layer();
  ASSERT_OK(module->set_grad_dtype(DType::kBF16));
  for (const NamedParameter& p : module->parameters()) {
    EXPECT_FALSE(p.grad().defined());
    ASSERT_OK(p.parameter->ensure_grad());
    EXPECT_EQ(p.grad().dtype(), DType::kBF16);
    for (double g : values_of(p.grad())) ASSERT_EQ(g, 0);
    const void* memory = p.grad().raw_data();
    ASSERT_OK(p.parameter->ensure_grad());
    EXPECT_EQ(p.grad().raw_data(), memory);
  }
}

bool wanted_in(int choice, const std::string& name) {
  const bool bias = name.find("bias") != std::string::npos;
  switch (choice) {
    case 0:
      return false;
    case 1:
      return bias;  // trains the biases only, as BitFit does
    case 2:
      return !bias;
    default:
      return name.find("layernorm_mlp") != std::string::npos;  // trains layernorm_mlp only
  }
}

// Freezing some parameters changes no bit of the other gradients; a frozen parameter gets no
// gradient.
TEST(Frozen, GradientsOfTheOthersAndOfTheInputStayTheSame) {
  for (const std::optional<Recipe>& recipe :
       {std::optional<Recipe>(), std::optional<Recipe>(DelayedScaling{}),
        std::optional<Recipe>(DelayedScaling{.fp8_dpa = true}),
        std::optional<Recipe>(Float8CurrentScaling{}),
        std::optional<Recipe>(Float8BlockScaling{})}) {
    const auto reference = layer();
    const Grads all = backward(*reference, recipe);
    for (int choice = 0; choice < 4; ++choice) {
      SCOPED_TRACE(::testing::Message()
                   << (recipe ? describe(*recipe) : "no FP8") << " " << choice);
      const auto module = layer();
      for (const NamedParameter& p : module->parameters()) {
        p.parameter->set_requires_grad(wanted_in(choice, p.name));
      }
      const Grads some = backward(*module, recipe);
      EXPECT_TRUE(same_bits(some.dx, all.dx));
      for (const auto& [name, values] : all.of) {
        ASSERT_EQ(some.of.count(name), wanted_in(choice, name)) << name;
        if (!wanted_in(choice, name)) continue;
        // A bias gradient without its weight's gradient comes from another kernel, which rounds
        // otherwise.
        if (choice == 1) {
          EXPECT_LT(relative_l2(some.of.at(name), values), 1e-5) << name;
        } else {
          EXPECT_EQ(some.of.at(name), values) << name;
        }
      }
    }
  }
}

const std::vector<std::optional<Recipe>> kRecipes = {std::nullopt, DelayedScaling{},
                                                     Float8CurrentScaling{}, Float8BlockScaling{}};

// A kind of module: how it is made and how its passes run. The tests freeze each of its parameters.
struct Kind {
  std::string name;
  std::function<std::unique_ptr<Module>(DType)> make;
  std::function<Result<Tensor>(Module&, const Tensor& x, Ctx&)> forward;
  std::function<Result<Tensor>(Module&, const Tensor& dy, Ctx&)> backward;
};

template <class M>
Kind kind(std::string name, std::function<std::unique_ptr<M>(DType)> make) {
  return {
      std::move(name), make,
      [](Module& m, const Tensor& x, Ctx& ctx) { return static_cast<M&>(m).forward(x, &ctx); },
      [](Module& m, const Tensor& dy, Ctx& ctx) { return static_cast<M&>(m).backward(dy, ctx); }};
}

std::vector<Kind> kinds() {
  std::vector<Kind> all;
  all.push_back(kind<Linear>("Linear", [](DType dtype) {
    return take(Linear::create(
        {.in_features = kHidden, .out_features = kHidden, .activation_dtype = dtype, .seed = 3}));
  }));
  all.push_back(kind<LayerNormLinear>("LayerNormLinear", [](DType dtype) {
    return take(LayerNormLinear::create(
        {.in_features = kHidden, .out_features = kHidden, .activation_dtype = dtype, .seed = 3}));
  }));
  for (Activation activation :
       {Activation::kGelu, Activation::kQGelu, Activation::kRelu, Activation::kSRelu,
        Activation::kSilu, Activation::kGeglu, Activation::kQGeglu, Activation::kReglu,
        Activation::kSReglu, Activation::kSwiglu, Activation::kGlu, Activation::kClampedSwiglu}) {
    const std::string name = "LayerNormMLP " + std::to_string(static_cast<int>(activation));
    all.push_back(kind<LayerNormMLP>(name, [activation](DType dtype) {
      return take(LayerNormMLP::create({.hidden_size = kHidden,
                                        .ffn_hidden_size = 32,
                                        .activation = activation,
                                        .activation_dtype = dtype,
                                        .seed = 3}));
    }));
  }
  Kind grouped{"GroupedLinear",
               [](DType dtype) -> std::unique_ptr<Module> {
                 return take(GroupedLinear::create({.num_gemms = 2,
                                                    .in_features = kHidden,
                                                    .out_features = kHidden,
                                                    .activation_dtype = dtype,
                                                    .seed = 3}));
               },
               [](Module& m, const Tensor& x, Ctx& ctx) {
                 const std::vector<int64_t> splits = {2, kRows - 2};
                 return static_cast<GroupedLinear&>(m).forward(x, splits, &ctx);
               },
               [](Module& m, const Tensor& dy, Ctx& ctx) {
                 return static_cast<GroupedLinear&>(m).backward(dy, ctx);
               }};
  all.push_back(std::move(grouped));
  return all;
}

// Returns the gradients of two steps of a new module. Calls `before` before each backward, and
// `between` between the backward and backward_dw(). With `delays` the weight gradients are computed
// by backward_dw().
Grads two_steps(const Kind& kind, DType dtype, const std::optional<Recipe>& recipe, bool delays,
                const std::function<void(Module&)>& before,
                const std::function<void(Module&)>& between) {
  const auto module = kind.make(dtype);
  for (const NamedParameter& p : module->parameters()) {
    check(p.parameter->write(tensor({p.value().numel()}, random_values(p.value().numel(), 9, 0.3))
                                 .view(p.value().shape())
                                 .value()));
  }
  module->set_delay_wgrad(delays);
  const int64_t n = kRows * kHidden;
  const Tensor x = tensor({kRows, kHidden}, random_values(n, 1, 1, true), dtype);
  const Tensor dy = tensor({kRows, kHidden}, random_values(n, 2, 1, true), dtype);
  Grads result;
  for (int i = 0; i < 2; ++i) {
    check(module->zero_grad());
    Ctx ctx;
    {
      autocast fp8(recipe.has_value(), recipe.value_or(DelayedScaling{}));
      check(kind.forward(*module, x, ctx).status());
    }
    before(*module);
    result.dx = take(kind.backward(*module, dy, ctx));
    between(*module);
    check(module->backward_dw());
    check(backward_end());
  }
  for (const NamedParameter& p : module->parameters()) {
    if (p.grad().defined() && p.parameter->internals().grad_written) {
      result.of[p.name] = values_of(p.grad());
    }
  }
  return result;
}

std::vector<std::string> names_of(const Kind& kind) {
  std::vector<std::string> names;
  for (const NamedParameter& p : kind.make(DType::kF32)->parameters()) names.push_back(p.name);
  return names;
}
auto setting(const std::string& name, bool trains) {
  return [name, trains](Module& module) {
    for (const NamedParameter& p : module.parameters()) {
      if (p.name == name) p.parameter->set_requires_grad(trains);
    }
  };
}
const auto kNothing = [](Module&) {};

TEST(Frozen, TheGradientOfTheInputIsTheSameWhicheverParameterIsFrozen) {
  for (const Kind& kind : kinds()) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      for (const auto& recipe : kRecipes) {
        const Grads all = two_steps(kind, dtype, recipe, false, kNothing, kNothing);
        for (const std::string& name : names_of(kind)) {
          SCOPED_TRACE(::testing::Message()
                       << kind.name << " " << static_cast<int>(dtype) << " "
                       << (recipe ? describe(*recipe) : "no FP8") << " " << name);
          const Grads some = two_steps(kind, dtype, recipe, false, setting(name, false), kNothing);
          EXPECT_TRUE(same_bits(some.dx, all.dx));
          EXPECT_EQ(some.of.count(name), 0u);
        }
      }
    }
  }
}

// A parameter that is frozen during the backward gets no gradient from it, even if it is thawed
// before backward_dw().
TEST(Frozen, InTheBackwardAndThawedBeforeBackwardDwHasNoGradient) {
  for (const Kind& kind : kinds()) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      for (const auto& recipe : kRecipes) {
        for (const std::string& name : names_of(kind)) {
          SCOPED_TRACE(::testing::Message()
                       << kind.name << " " << static_cast<int>(dtype) << " "
                       << (recipe ? describe(*recipe) : "no FP8") << " " << name);
          const auto thaw = setting(name, true);
          const Grads frozen = two_steps(kind, dtype, recipe, true, setting(name, false), kNothing);
          const Grads thawed = two_steps(kind, dtype, recipe, true, setting(name, false), thaw);
          EXPECT_TRUE(same_bits(thawed.dx, frozen.dx));
          EXPECT_EQ(thawed.of, frozen.of);
        }
      }
    }
  }
}

TEST(Frozen, AWeightsGradientIsNotComputedNorItsOperandsMade) {
  for (bool fp8 : {false, true}) {
    for (bool trained : {true, false}) {
      auto linear = take(Linear::create({.in_features = kHidden, .out_features = kHidden}));
      linear->set_requires_grad(trained);
      const Tensor x = tensor({kRows, kHidden}, random_values(kRows * kHidden, 1));
      Ctx ctx;
      {
        autocast scope(fp8, Float8CurrentScaling{});
        (void)take(linear->forward(x, &ctx));
      }
      const uint64_t products = calls("generic_gemm"), sums = calls("bgrad_quantize");
      (void)take(linear->backward(x, ctx));
      EXPECT_EQ(calls("generic_gemm") - products, trained ? 2u : 1u);
      EXPECT_EQ(calls("bgrad_quantize") - sums, fp8 && trained ? 1u : 0u);
    }
  }
}

TEST(Frozen, EmbeddingsPassOverTheirTable) {
  auto module = take(Embedding::create({.num_embeddings = 4, .hidden_size = 2}));
  module->set_requires_grad(false);
  Ctx ctx;
  (void)take(module->forward(int_tensor({1, 2}), &ctx));
  ASSERT_OK(module->backward(tensor({2, 2}, {1, 2, 3, 4}), ctx));
  EXPECT_TRUE(ctx.empty());
  EXPECT_FALSE(module->weight()->grad.defined());
}

TEST(Frozen, FreezingDropsTheGradientAndUnfreezingBeginsAnew) {
  auto module = layer();
  const Grads first = backward(*module, std::nullopt);
  module->set_requires_grad(false);
  for (const NamedParameter& p : module->parameters()) {
    EXPECT_FALSE(p.grad().defined());
    ASSERT_OK(p.parameter->clear_grad());  // no gradient to clear: no later step is refused
    EXPECT_FALSE(p.parameter->internals().grad_stale);
    ASSERT_OK(p.parameter->ensure_grad());
    EXPECT_FALSE(p.grad().defined());
  }
  module->set_requires_grad(true);
  EXPECT_EQ(backward(*module, std::nullopt).of, first.of);
}

template <class Make>
void expect_steps_pass_over_the_frozen(const Make& make) {
  auto module = layer();
  const auto all = module->parameters();
  all[0].parameter->set_requires_grad(false);
  std::unique_ptr<Optimizer> optimizer = make(all);
  for (const NamedTensor& t : optimizer->state()) EXPECT_FALSE(t.name.ends_with("." + all[0].name));
  all[1].parameter->set_requires_grad(false);  // frozen after create(): has optimizer state
  const Params before = params_of(*module);
  const uint64_t versions[] = {all[0].parameter->version, all[1].parameter->version};
  for (int i = 0; i < 2; ++i) {
    (void)backward(*module, std::nullopt);
    ASSERT_OK(optimizer->step());
  }
  const Params after = params_of(*module);
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(after.at(all[i].name) == before.at(all[i].name), i < 2) << all[i].name;
  }
  EXPECT_EQ(all[0].parameter->version, versions[0]);
  EXPECT_EQ(all[1].parameter->version, versions[1]);
  all[1].parameter->set_requires_grad(true);
  (void)backward(*module, std::nullopt);
  ASSERT_OK(optimizer->step());
  EXPECT_NE(params_of(*module).at(all[1].name), before.at(all[1].name));
  all[0].parameter->set_requires_grad(true);
  (void)backward(*module, std::nullopt);
  const Params held = params_of(*module);
  const std::string text = optimizer->step().to_string();
  EXPECT_HAS(text, all[0].name + " has a gradient but was frozen when the optimizer was created");
  EXPECT_EQ(params_of(*module), held);
  EXPECT_EQ(optimizer->steps(), 3);
}

TEST(Frozen, OptimizersPassOver) {
  expect_steps_pass_over_the_frozen([](const auto& p) {
    return take(Adam::create(p, {.weight_decay = 0.1f, .max_grad_norm = 1}));
  });
  expect_steps_pass_over_the_frozen(
      [](const auto& p) { return take(SGD::create(p, {.momentum = 0.9f, .weight_decay = 0.1f})); });
}

TEST(Frozen, CheckpointsHoldTheValuesAllTheSame) {
  auto a = layer();
  auto b = take(TransformerLayer::create({.hidden_size = kHidden,
                                          .ffn_hidden_size = 32,
                                          .num_attention_heads = 2,
                                          .attention = {.softmax_type = SoftmaxType::kLearnable}}));
  a->set_requires_grad(false);
  b->set_requires_grad(false);
  ASSERT_OK(b->load_state(a->state(), "a"));
  EXPECT_EQ(params_of(*b), params_of(*a));
}

}  // namespace
}  // namespace te_fl::nn::testing::frozen_test
