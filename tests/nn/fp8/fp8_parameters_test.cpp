// Weights that exist only as FP8 codes, without a high-precision copy (quantized_model_init).
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "autocast_fixture.hpp"
#include "support/expect.hpp"
#include "te_fl/numeric/formats.hpp"

namespace te_fl::nn::testing::fp8_parameters_test {
namespace {

const DelayedScaling kDelayed{.amax_history_len = 2};
const Recipe kRecipes[] = {kDelayed, Float8CurrentScaling{},
                           Float8CurrentScaling{.pow2_scale = true}};

std::unique_ptr<Linear> make_fp8_linear(const Recipe& recipe, bool preserve = false) {
  const quantized_model_init fp8({.recipe = recipe, .preserve_high_precision_init_val = preserve});
  return make_linear();
}

Parameter& weight_of(const Module& module) { return *module.parameters()[0].parameter; }

// Returns the dequantised values of an FP8 tensor, decoded here independently of te-fl's own path.
Values decoded(const Tensor& value, bool columns = false) {
  const Tensor codes = columns ? value.columnwise_codes() : value.rowwise_codes();
  const double scale_inv = value.scale_inv().data<float>()[0];
  Values values(static_cast<size_t>(value.numel()));
  const int64_t rows = value.size(0), width = value.size(1);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < width; ++c) {
      const uint8_t code = codes.data<uint8_t>()[columns ? c * rows + r : r * width + c];
      values[static_cast<size_t>(r * width + c)] =
          static_cast<double>(numeric::e4m3_to_float(code)) * scale_inv;
    }
  }
  return values;
}

// Returns the E4M3 codes of `values` times `scale`, encoded here.
std::vector<uint8_t> encoded(const Values& values, float scale) {
  std::vector<uint8_t> codes;
  for (double v : values) codes.push_back(numeric::float_to_e4m3(static_cast<float>(v) * scale));
  return codes;
}
std::vector<uint8_t> bytes_of(const Tensor& codes) {
  const auto* begin = static_cast<const uint8_t*>(codes.raw_data());
  return {begin, begin + codes.numel()};
}

// Returns values that E4M3 represents exactly with a power-of-two scale; the largest is 448 times
// that power.
Values exact_values(int64_t count, uint64_t seed) {
  Values values = random_values(count, seed, 400);
  for (double& v : values) {
    v = numeric::e4m3_to_float(numeric::float_to_e4m3(static_cast<float>(v))) * 0x1p-10;
  }
  values[0] = 448 * 0x1p-10;
  return values;
}

TEST(Fp8Parameters, AreCodesOfTheInitialValues) {
  for (const Recipe& recipe : kRecipes) {
    SCOPED_TRACE(describe(recipe));
    auto linear = make_fp8_linear(recipe, true);
    const Parameter& weight = weight_of(*linear);
    EXPECT_TRUE(weight.value.quantized());
    EXPECT_FALSE(weight.value.has_columnwise());
    EXPECT_FALSE(linear->parameters()[1].value().quantized());  // the bias is not quantised
    const Values initial = values_of(weight.initial_value);
    EXPECT_EQ(initial, values_of(make_linear()->parameters()[0].value()));
    float scale = 448 / amax_of(weight.initial_value);
    const auto* current = std::get_if<Float8CurrentScaling>(&recipe);
    if (current != nullptr && current->pow2_scale) scale = std::exp2(std::floor(std::log2(scale)));
    EXPECT_EQ(bytes_of(weight.value.rowwise_codes()), encoded(initial, scale));
    EXPECT_FALSE(weight_of(*make_fp8_linear(recipe)).initial_value.defined());
  }
}

TEST(Fp8Parameters, OnlyScopesThatAreEnabledCount) {
  const auto quantised = [] { return weight_of(*make_linear()).value.quantized(); };
  const quantized_model_init on;
  EXPECT_TRUE(quantised());
  {
    const quantized_model_init off({.enabled = false});
    EXPECT_FALSE(quantised());
  }
  EXPECT_TRUE(quantised());
  auto high = take(Linear::create({.in_features = 8, .out_features = 8, .high_precision = true}));
  EXPECT_FALSE(weight_of(*high).value.quantized());
}

// If FP8 represents the weights exactly, the module gives the same results as a module with
// high-precision weights.
TEST(Fp8Parameters, ComputeLikeWeightsThatAreQuantisedInTheForward) {
  auto plain = make_linear();
  auto codes = make_fp8_linear(Float8CurrentScaling{});
  const Values values = exact_values(kIn * kOut, 3);
  check(weight_of(*plain).write(tensor({kOut, kIn}, values)));
  check(weight_of(*codes).write(tensor({kOut, kIn}, values)));
  ASSERT_EQ(decoded(weight_of(*codes).value), values);
  for (bool fp8_on : {true, false}) {
    SCOPED_TRACE(fp8_on);
    std::vector<Values> seen[2];
    int at = 0;
    for (Linear* linear : {plain.get(), codes.get()}) {
      const autocast fp8(fp8_on, Float8CurrentScaling{});
      seen[at].push_back(values_of(take(linear->forward(input(), nullptr))));
      Ctx ctx;
      check(linear->zero_grad());
      seen[at].push_back(values_of(take(linear->forward(input(), &ctx))));
      seen[at].push_back(values_of(take(linear->backward(gradient(), ctx))));
      for (const NamedParameter& p : linear->parameters()) {
        seen[at].push_back(values_of(p.grad()));
      }
      ++at;
    }
    EXPECT_TRUE(seen[0] == seen[1]);
  }
  EXPECT_TRUE(weight_of(*codes).value.has_columnwise());
  EXPECT_EQ(decoded(weight_of(*codes).value, true), values);
}

// Runs one training step; returns the sum of the squared outputs.
double step(Module& module, const std::function<Result<Tensor>(Ctx&)>& forward,
            const std::function<Status(const Tensor&, Ctx&)>& backward, Optimizer& optimizer,
            const Recipe& recipe) {
  check(module.zero_grad());
  Ctx ctx;
  Tensor y;
  {
    const autocast fp8(true, recipe);
    y = take(forward(ctx));
  }
  check(backward(y, ctx));
  check(backward_end());
  check(optimizer.step());
  double sum = 0;
  for (double v : values_of(y)) sum += v * v;
  return sum;
}

TEST(Fp8Parameters, AreWrittenFromTheMasterWeights) {
  for (const Recipe& recipe : kRecipes) {
    for (bool adam_w : {true, false}) {
      SCOPED_TRACE(describe(recipe));
      auto linear = make_fp8_linear(recipe, true);
      const Values initial = values_of(weight_of(*linear).initial_value);
      std::unique_ptr<Optimizer> optimizer;
      if (adam_w) {
        optimizer = take(Adam::create(linear->parameters(), {.lr = 1e-2f}));
      } else {
        optimizer = take(SGD::create(linear->parameters(), {.lr = 1e-3f, .momentum = 0.5f}));
      }
      const auto master = [&] {
        for (const NamedTensor& t : optimizer->state()) {
          if (t.name == "optimizer.master.weight") return values_of(t.tensor);
        }
        return Values();
      };
      EXPECT_EQ(master(), initial);
      for (int i = 0; i < 4; ++i) {
        (void)step(
            *linear, [&](Ctx& ctx) { return linear->forward(input(), &ctx); },
            [&](const Tensor& dy, Ctx& ctx) { return linear->backward(dy, ctx).status(); },
            *optimizer, recipe);
        const Tensor& value = weight_of(*linear).value;
        EXPECT_NE(master(), initial);
        float scale;
        if (std::holds_alternative<DelayedScaling>(recipe)) {
          scale = at(*linear, "fp8.fwd.scale", 1);
          if (i == 0) {  // the scale comes from the initial amax; no forward has measured one
            double amax = 0;
            for (double v : initial) amax = std::max(amax, std::abs(v));
            EXPECT_FLOAT_EQ(scale, static_cast<float>(448 / amax));
          }
        } else {
          double amax = 0;
          for (double v : master()) amax = std::max(amax, std::abs(v));
          scale = 448 / static_cast<float>(amax);
          if (std::get<Float8CurrentScaling>(recipe).pow2_scale) {
            scale = std::exp2(std::floor(std::log2(scale)));
          }
        }
        EXPECT_EQ(bytes_of(value.rowwise_codes()), encoded(master(), scale));
        EXPECT_EQ(decoded(value), decoded(value, true));
      }
    }
  }
}

std::unique_ptr<TransformerLayer> make_layer(const Recipe& recipe, bool fp8 = true) {
  const quantized_model_init init({.enabled = fp8, .recipe = recipe});
  return take(TransformerLayer::create({.hidden_size = 32,
                                        .ffn_hidden_size = 64,
                                        .num_attention_heads = 2,
                                        .attention = {.layout = Layout::kBSHD},
                                        .seed = 5,
                                        .init_std = 0.2f}));
}

double train(TransformerLayer& layer, const Recipe& recipe, int steps,
             Optimizer* optimizer = nullptr) {
  std::unique_ptr<Adam> own;
  if (optimizer == nullptr) own = take(Adam::create(layer.parameters(), {.lr = 1e-2f}));
  double loss = 0;
  for (int i = 0; i < steps; ++i) {
    const Tensor x = tensor({2, 6, 32}, random_values(2 * 6 * 32, 7));
    loss = step(
        layer, [&](Ctx& ctx) { return layer.forward(x, &ctx); },
        [&](const Tensor& dy, Ctx& ctx) { return layer.backward(dy, ctx).status(); },
        optimizer != nullptr ? *optimizer : *own, recipe);
  }
  return loss;
}

// All four weights of a layer exist only as FP8 codes. Training converges as with high-precision
// weights that the forward quantises.
TEST(Fp8Parameters, ALayerTrains) {
  for (const Recipe& recipe : {Recipe(kDelayed), Recipe(Float8CurrentScaling{})}) {
    SCOPED_TRACE(describe(recipe));
    auto layer = make_layer(recipe);
    auto plain = make_layer(recipe, false);
    int64_t codes = 0;
    for (const NamedParameter& p : layer->parameters()) codes += p.value().quantized();
    EXPECT_EQ(codes, 4);
    const double before = train(*plain, recipe, 1), high = train(*plain, recipe, 30);
    (void)train(*layer, recipe, 1);
    const double fp8 = train(*layer, recipe, 30);
    EXPECT_LT(high, 0.5 * before);
    EXPECT_NEAR(fp8, high, 0.1 * before);
  }
}

TEST(Fp8Parameters, RecomputedSegmentsReadTheSameCodes) {
  for (const Recipe& recipe : {Recipe(kDelayed), Recipe(Float8CurrentScaling{})}) {
    std::vector<Values> seen[2];
    for (int again = 0; again < 2; ++again) {
      auto layer = make_layer(recipe);
      const Tensor x = tensor({2, 6, 32}, random_values(2 * 6 * 32, 7));
      const Segment piece = [&](const Tensor& in) { return run_segment(*layer, in); };
      SegmentRun run;
      {
        const autocast fp8(true, recipe);
        run = take(again == 1 ? checkpoint(piece, x) : piece(x));
      }
      seen[again].push_back(values_of(take(run.backward(run.y))));
      for (const NamedParameter& p : layer->parameters()) {
        seen[again].push_back(values_of(p.grad()));
      }
    }
    EXPECT_TRUE(seen[0] == seen[1]);
  }
}

TEST(Fp8Parameters, CheckpointsContinueBitForBit) {
  const std::string path = ::testing::TempDir() + "fp8_parameters.safetensors";
  auto layer = make_layer(kDelayed);
  auto adam = take(Adam::create(layer->parameters(), {.lr = 1e-2f}));
  (void)train(*layer, kDelayed, 3, adam.get());
  check(save_checkpoint(path, *layer, adam.get()));
  const double expected = train(*layer, kDelayed, 3, adam.get());
  auto other = make_layer(kDelayed);
  auto other_adam = take(Adam::create(other->parameters(), {.lr = 1e-2f}));
  (void)train(*other, kDelayed, 1, other_adam.get());
  check(load_checkpoint(path, *other, other_adam.get()).status());
  EXPECT_EQ(train(*other, kDelayed, 3, other_adam.get()), expected);
  for (size_t i = 0; i < layer->state().size(); ++i) {
    const NamedTensor a = layer->state()[i], b = other->state()[i];
    EXPECT_EQ(a.name, b.name);
    EXPECT_TRUE(same_bits(a.tensor, b.tensor)) << a.name;
  }
  std::remove(path.c_str());
}

TEST(Fp8Parameters, LoadHighPrecisionValues) {
  auto plain = make_linear();
  auto codes = make_fp8_linear(kDelayed);
  (void)take(codes->forward(input(), nullptr));
  const uint64_t version = weight_of(*codes).version;
  check(codes->load_state(plain->state(), "memory"));
  EXPECT_GT(weight_of(*codes).version, version);
  const Tensor& value = plain->parameters()[0].value();
  EXPECT_EQ(bytes_of(weight_of(*codes).value.rowwise_codes()),
            encoded(values_of(value), 448 / amax_of(value)));
}

// Other programs save FP8 codes without the amax.
TEST(Fp8Parameters, LoadCodesWithTheirScaleAlone) {
  auto from = make_fp8_linear(kDelayed), to = make_fp8_linear(kDelayed);
  check(weight_of(*from).write(tensor({kOut, kIn}, exact_values(kIn * kOut, 5))));
  std::vector<NamedTensor> state = from->state();
  std::erase_if(state, [](const NamedTensor& t) { return t.name == "weight.amax"; });
  check(to->load_state(state, "memory"));
  EXPECT_EQ(decoded(weight_of(*to).value), exact_values(kIn * kOut, 5));
  EXPECT_EQ(weight_of(*to).value.amax().data<float>()[0], 448 * 0x1p-10f);
}

TEST(Fp8Parameters, StateThatDoesNotFitChangesNothing) {
  auto codes = make_fp8_linear(kDelayed);
  const auto before = bytes_of(weight_of(*codes).value.rowwise_codes());
  const auto changed = [&](const std::string& name, std::optional<Tensor> to) {
    std::vector<NamedTensor> state = make_fp8_linear(Float8CurrentScaling{})->state();
    std::erase_if(state, [&](const NamedTensor& t) { return !to.has_value() && t.name == name; });
    for (NamedTensor& t : state) {
      if (t.name == name && to.has_value()) t.tensor = *to;
    }
    return codes->load_state(state, "memory");
  };
  EXPECT_FAILS(changed("weight.scale_inv", std::nullopt), kNotFound, "weight.scale_inv is missing");
  EXPECT_FAILS(changed("weight.scale_inv", tensor({2}, {1, 1})), kInvalidArgument, "f32[1]");
  EXPECT_FAILS(changed("weight.amax", tensor({2}, {1, 1})), kInvalidArgument, "f32[1]");
  EXPECT_FAILS(changed("weight", std::nullopt), kNotFound, "weight is missing");
  EXPECT_FAILS(changed("weight", tensor({kIn, kOut}, random_values(kIn * kOut, 1))),
               kInvalidArgument, "f8e4m3[48,64]");
  EXPECT_FAILS(changed("weight", tensor({kOut, kIn}, random_values(kIn * kOut, 1))),
               kInvalidArgument, "are no codes");
  EXPECT_FAILS(make_linear()->load_state(codes->state(), "memory"), kInvalidArgument, "weight");
  EXPECT_EQ(bytes_of(weight_of(*codes).value.rowwise_codes()), before);
}

TEST(Fp8Parameters, WhatCannotBeIsRefused) {
  {
    const quantized_model_init block({.recipe = Float8BlockScaling{}});
    EXPECT_FAILS(Linear::create({.in_features = 8, .out_features = 8}), kInvalidArgument,
                 "quantized_model_init: the recipe is block scaling");
  }
  {
    const quantized_model_init fp8;
    const init::WithoutValues borrowed;
    EXPECT_FAILS(Linear::create({.in_features = 8, .out_features = 8}), kInvalidArgument,
                 "init::WithoutValues");
  }
  auto linear = make_fp8_linear(kDelayed);
  EXPECT_FAILS(weight_of(*linear).borrow(tensor({kOut, kIn}, Values(kIn * kOut)), 1),
               kFailedPrecondition, "codes alone");
  EXPECT_FAILS(weight_of(*linear).write(tensor({kIn, kOut}, Values(kIn * kOut))), kInvalidArgument,
               "of its shape");
  EXPECT_FAILS(weight_of(*linear).read(DType::kI32), kInvalidArgument, "f32, bf16 or f16");
  const autocast fp8(true, Float8BlockScaling{});
  EXPECT_FAILS(linear->forward(input(), nullptr), kFailedPrecondition, "quantized_model_init");
}

}  // namespace
}  // namespace te_fl::nn::testing::fp8_parameters_test
