// Split weights and biases, biases that the caller adds, and modules that also return the norm's
// output, against the unsplit module and the double-precision oracles.
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "nn/autograd/parameter.hpp"
#include "oracle.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::parameter_parts_test {
namespace {

constexpr int64_t kRows = 5, kIn = 12, kOut = 9;
const std::vector<ParameterPart> kParts = {{"query", 4}, {"key", 2}, {"value", 3}};

LinearOptions options_in_parts() {
  return {.in_features = kIn, .out_features = kOut, .seed = 3, .parameters_split = kParts};
}

Parameter& parameter(Module& module, const std::string& name) {
  for (const NamedParameter& p : module.parameters()) {
    if (p.name == name) return *p.parameter;
  }
  throw std::runtime_error("no parameter named " + name);
}

// Returns the values, or the gradients, of a split parameter's parts, concatenated.
Values joined(const Module& module, const std::string& kind, bool grads) {
  Values all;
  for (const NamedParameter& p : module.parameters()) {
    if (!p.name.ends_with(kind)) continue;
    const Values part = values_of(grads ? p.grad() : p.value());
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

struct Step {
  Values y, dx;
};

Step step(Linear& module, uint64_t seed, const std::optional<Recipe>& recipe = {}) {
  Ctx ctx;
  Step result;
  {
    autocast fp8(recipe.has_value(), recipe.value_or(DelayedScaling{}));
    result.y = values_of(
        take(module.forward(tensor({kRows, kIn}, random_values(kRows * kIn, seed)), &ctx)));
  }
  result.dx = values_of(
      take(module.backward(tensor({kRows, kOut}, random_values(kRows * kOut, seed + 1)), ctx)));
  return result;
}

TEST(ParameterParts, AreNamedAndInitialisedAsTheWhole) {
  auto parts = take(Linear::create(options_in_parts()));
  auto whole = take(Linear::create({.in_features = kIn, .out_features = kOut, .seed = 3}));
  std::vector<std::string> names;
  for (const NamedParameter& p : parts->parameters()) names.push_back(p.name);
  EXPECT_EQ(names, (std::vector<std::string>{"query_weight", "key_weight", "value_weight",
                                             "query_bias", "key_bias", "value_bias"}));
  EXPECT_EQ(joined(*parts, "weight", false), values_of(whole->parameters()[0].value()));
}

// Expects a Linear with split parameters to give the same bits as an unsplit one over microbatches
// and steps. Applies `change` to the split module before each step and after each microbatch.
void expect_equal(const std::optional<Recipe>& recipe, const std::function<void(Linear&)>& change) {
  auto parts = take(Linear::create(options_in_parts()));
  auto whole = take(Linear::create({.in_features = kIn, .out_features = kOut, .seed = 3}));
  for (int s = 0; s < 3; ++s) {
    check(parts->zero_grad());
    check(whole->zero_grad());
    change(*parts);
    for (uint64_t m = 0; m < 2; ++m) {
      const Step a = step(*parts, 10 * m + 1, recipe), b = step(*whole, 10 * m + 1, recipe);
      EXPECT_EQ(a.y, b.y) << s << m;
      EXPECT_EQ(a.dx, b.dx) << s << m;
      change(*parts);
    }
    check(backward_end());
    EXPECT_EQ(joined(*parts, "weight", true), values_of(whole->parameters()[0].grad())) << s;
    EXPECT_EQ(joined(*parts, "bias", true), values_of(whole->parameters()[1].grad())) << s;
    check(take(SGD::create(parts->parameters(), {.lr = 0.1f}))->step());
    check(take(SGD::create(whole->parameters(), {.lr = 0.1f}))->step());
    EXPECT_EQ(joined(*parts, "weight", false), values_of(whole->parameters()[0].value())) << s;
  }
}

const std::vector<std::optional<Recipe>> kRecipes = {
    std::nullopt, Recipe(DelayedScaling{.amax_history_len = 4}), Recipe(Float8CurrentScaling{})};

TEST(ParameterParts, EqualTheWhole) {
  for (const auto& recipe : kRecipes) expect_equal(recipe, [](Linear&) {});
}

TEST(ParameterParts, EqualTheWholeWhereverTheyLie) {
  for (const auto& recipe : kRecipes) {
    std::vector<Tensor> memory;
    expect_equal(recipe, [&](Linear& module) {
      for (const char* name : {"key_weight", "query_bias"}) {
        Parameter& part = parameter(module, name);
        memory.push_back(take(part.value.clone()));
        check(part.borrow(memory.back(), part.internals().owners_version.value_or(0)));
      }
    });
  }
}

TEST(ParameterParts, GradientsMayBeGivenAndTaken) {
  expect_equal({}, [](Linear& module) {
    Parameter& key = parameter(module, "key_weight");
    if (!key.grad.defined()) return;
    const bool written = key.internals().grad_written;
    check(key.give_grad(take(key.grad.clone()), written));
  });
  auto module = take(Linear::create(options_in_parts()));
  (void)step(*module, 1);
  const Values first = joined(*module, "weight", true);
  std::vector<Tensor> taken;
  for (const NamedParameter& p : module->parameters()) taken.push_back(p.parameter->take_grad());
  (void)step(*module, 1);  // allocates and writes new gradients
  EXPECT_EQ(joined(*module, "weight", true), first);
  EXPECT_NE(taken[0].raw_data(), module->parameters()[0].grad().raw_data());
}

TEST(ParameterParts, AFrozenPartHasNoGradient) {
  auto module = take(Linear::create(options_in_parts()));
  auto all = take(Linear::create(options_in_parts()));
  for (const char* name : {"key_weight", "value_bias"}) {
    parameter(*module, name).set_requires_grad(false);
  }
  for (int m = 0; m < 2; ++m) EXPECT_EQ(step(*module, 1).dx, step(*all, 1).dx);
  for (const NamedParameter& p : module->parameters()) {
    const bool frozen = p.name == "key_weight" || p.name == "value_bias";
    EXPECT_EQ(p.grad().defined(), !frozen) << p.name;
    if (frozen) continue;
    EXPECT_EQ(values_of(p.grad()), values_of(parameter(*all, p.name).grad)) << p.name;
  }
  module->set_requires_grad(false);
  EXPECT_EQ(step(*module, 1).dx, step(*all, 1).dx);
}

TEST(ParameterParts, WithoutValuesNeedMemoryFirst) {
  std::unique_ptr<Linear> module;
  {
    const init::WithoutValues scope;
    module = take(Linear::create(options_in_parts()));
  }
  const Tensor x = tensor({kRows, kIn}, random_values(kRows * kIn, 1));
  EXPECT_FAILS(module->forward(x, nullptr).status(), kInvalidArgument, "Parameter::borrow()");
  auto own = take(Linear::create(options_in_parts()));
  for (const NamedParameter& p : own->parameters()) {
    check(parameter(*module, p.name).borrow(p.value(), 1));
  }
  EXPECT_TRUE(same_bits(take(module->forward(x, nullptr)), take(own->forward(x, nullptr))));
}

TEST(ParameterParts, AChangeBetweenForwardAndBackwardIsDetected) {
  auto module = take(Linear::create(options_in_parts()));
  Ctx ctx;
  (void)take(module->forward(tensor({kRows, kIn}, random_values(kRows * kIn, 1)), &ctx));
  ++parameter(*module, "value_weight").version;
  EXPECT_FAILS(
      module->backward(tensor({kRows, kOut}, random_values(kRows * kOut, 2)), ctx).status(),
      kFailedPrecondition, "has changed since the forward");
}

TEST(ParameterParts, WrongRowsAreNamed) {
  LinearOptions options = options_in_parts();
  options.parameters_split = {{"a", 4}, {"b", 4}};
  EXPECT_FAILS(Linear::create(options).status(), kInvalidArgument, "have 8 rows together");
  options.parameters_split = {{"a", 9}, {"b", 1}};
  EXPECT_FAILS(Linear::create(options).status(), kInvalidArgument, "the part \"b\"");
  options = options_in_parts();
  options.tied_weight =
      take(Linear::create({.in_features = kIn, .out_features = kOut}))->parameters()[0].parameter;
  EXPECT_FAILS(Linear::create(options).status(), kInvalidArgument, "tied_weight");
}

// Weights that exist only as FP8 codes cannot be split. A "split" into a single part is allowed: it
// only renames the weight.
TEST(ParameterParts, ShareNoCodes) {
  const quantized_model_init scope;
  EXPECT_FAILS(Linear::create(options_in_parts()).status(), kInvalidArgument,
               "quantized_model_init");
  LinearOptions options = options_in_parts();
  options.parameters_split = {{"query", kOut}};
  auto module = take(Linear::create(options));
  EXPECT_EQ(module->parameters()[0].name, "query_weight");
  EXPECT_TRUE(module->parameters()[0].value().quantized());
  EXPECT_EQ(module->parameters()[1].name, "query_bias");
}

TEST(ReturnBias, IsLeftOutWithItsGradient) {
  for (const auto& recipe : kRecipes) {
    LinearOptions options{.in_features = kIn, .out_features = kOut, .bias = false, .seed = 3};
    auto without = take(Linear::create(options));
    options.bias = options.return_bias = true;
    auto returned = take(Linear::create(options));
    set_values(parameter(*returned, "bias").value, random_values(kOut, 8));
    const Step a = step(*returned, 1, recipe), b = step(*without, 1, recipe);
    EXPECT_EQ(a.y, b.y);
    EXPECT_EQ(a.dx, b.dx);
    EXPECT_FALSE(parameter(*returned, "bias").grad.defined());
    EXPECT_TRUE(same_bits(parameter(*returned, "weight").grad, parameter(*without, "weight").grad));
  }
}

// Expects both outputs of a module that also returns its norm's output to match `f`, which returns
// them concatenated, and the gradients of both outputs together to match too.
template <class M>
void expect_both(M& module, int64_t out, const oracle::Function& f) {
  randomize(module, 5);
  Params in = params_of(module);
  in["x"] = random_values(kRows * kIn, 1);
  Ctx ctx;
  Tensor normed;
  const Tensor x = tensor({kRows, 1, kIn}, in["x"]);
  const Tensor y = take(module.forward(x, &ctx, {}, nullptr, &normed));
  EXPECT_EQ(normed.rank(), 3);
  const Values w = random_values(kRows * (out + kIn), 2);
  const Tensor dy = tensor({kRows, 1, out}, Values(w.begin(), w.begin() + kRows * out));
  const Tensor d_normed = tensor({kRows, 1, kIn}, Values(w.begin() + kRows * out, w.end()));
  Values both = values_of(y);
  for (const double v : values_of(normed)) both.push_back(v);
  const Tensor dx = take(module.backward(dy, ctx, nullptr, &d_normed));
  std::map<std::string, Values> got{{"y", both}, {"x", values_of(dx)}};
  for (const NamedParameter& p : module.parameters()) {
    if (p.grad().defined()) got[p.name] = values_of(p.grad());
  }
  oracle::expect_matches(f, in, w, got, 5e-5);
}

Values gradient_norm(const Params& p) {
  return oracle::norm(p.at("x"), p.at("layer_norm_weight"), oracle::maybe(p, "layer_norm_bias"),
                      1e-5f, false);
}
Values and_norm(Values y, const Params& p) {
  for (const double v : gradient_norm(p)) y.push_back(v);
  return y;
}

TEST(LayerNormOutput, OfLayerNormLinear) {
  for (const Normalization norm : {Normalization::kLayerNorm, Normalization::kRMSNorm}) {
    auto module = take(LayerNormLinear::create({.in_features = kIn,
                                                .out_features = kOut,
                                                .normalization = norm,
                                                .parameters_split = kParts}));
    expect_both(*module, kOut, [](const Params& p) {
      return and_norm(
          oracle::split_linear(p, "", {"query_", "key_", "value_"}, gradient_norm(p), kIn), p);
    });
  }
}

TEST(LayerNormOutput, OfLayerNormMlp) {
  for (const Activation activation : {Activation::kGelu, Activation::kSwiglu}) {
    auto module = take(LayerNormMLP::create(
        {.hidden_size = kIn, .ffn_hidden_size = 10, .activation = activation}));
    expect_both(*module, kIn, [&](const Params& p) {
      return and_norm(
          oracle::mlp({.hidden = kIn, .ffn = 10, .activation = activation, .epsilon = 1e-5f}, p, "",
                      p.at("x")),
          p);
    });
  }
}

TEST(LayerNormOutput, UnderFp8IsTheNormItself) {
  auto module = take(LayerNormLinear::create({.in_features = 16, .out_features = 16}));
  auto norm = take(LayerNorm::create({.hidden_size = 16}));
  const Tensor x = tensor({16, 16}, random_values(256, 1));
  const Tensor dy = tensor({16, 16}, random_values(256, 2));
  const Tensor d_normed = tensor({16, 16}, random_values(256, 3));
  const auto run = [&](bool wanted) {
    check(module->zero_grad());
    Ctx ctx;
    Tensor normed, y;
    {
      autocast fp8(true, Float8CurrentScaling{});
      y = take(module->forward(x, &ctx, {}, nullptr, wanted ? &normed : nullptr));
    }
    if (wanted) {
      EXPECT_TRUE(same_bits(normed, take(norm->forward(x, nullptr))));
    }
    const Tensor dx = take(module->backward(dy, ctx, nullptr, wanted ? &d_normed : nullptr));
    return std::pair(values_of(y), values_of(dx));
  };
  const auto plain = run(false), both = run(true);
  EXPECT_EQ(plain.first, both.first);
  Ctx ctx;
  (void)take(norm->forward(x, &ctx));
  const Values past = values_of(take(norm->backward(d_normed, ctx)));
  for (size_t i = 0; i < past.size(); ++i) {
    ASSERT_NEAR(both.second[i], plain.second[i] + past[i], 1e-4) << i;
  }
}

TEST(MlpBiases, AreChosenOneByOne) {
  for (const bool fc1 : {true, false}) {
    auto module = take(LayerNormMLP::create(
        {.hidden_size = kIn, .ffn_hidden_size = 10, .fc1_bias = fc1, .fc2_bias = !fc1}));
    EXPECT_EQ(params_of(*module).count("fc1_bias"), fc1 ? 1u : 0u);
    EXPECT_EQ(params_of(*module).count("fc2_bias"), fc1 ? 0u : 1u);
    expect_both(*module, kIn, [&](const Params& p) {
      return and_norm(oracle::mlp({.hidden = kIn, .ffn = 10, .epsilon = 1e-5f}, p, "", p.at("x")),
                      p);
    });
  }
}

TEST(MlpBiases, TheLastMayBeReturned) {
  auto module =
      take(LayerNormMLP::create({.hidden_size = kIn, .ffn_hidden_size = 10, .return_bias = true}));
  expect_both(*module, kIn, [&](Params p) {
    p.erase("fc2_bias");
    return and_norm(oracle::mlp({.hidden = kIn, .ffn = 10, .epsilon = 1e-5f}, p, "", p.at("x")), p);
  });
  EXPECT_FALSE(parameter(*module, "fc2_bias").grad.defined());
}

}  // namespace
}  // namespace te_fl::nn::testing::parameter_parts_test
