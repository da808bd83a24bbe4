// Norm, Linear, LayerNormLinear, LayerNormMLP, Embedding, Residual, Dropout and CrossEntropyLoss
// against double-precision oracles, and their gradients against numerical differentiation.
#include "oracle.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::layers_gradient_test {
namespace {

using oracle::maybe;

// Runs forward and backward of a module with x -> y and returns outputs and gradients by name.
template <class M>
std::map<std::string, Values> run(M& module, const Tensor& x, const Values& weight) {
  Ctx ctx;
  check(module.zero_grad());
  Tensor y = take(module.forward(x, &ctx));
  Tensor dy =
      take(Tensor::from_values({y.numel()}, std::vector<float>(weight.begin(), weight.end())));
  Tensor dx = take(module.backward(take(dy.view(y.shape())), ctx));
  std::map<std::string, Values> got{{"y", values_of(y)}, {"x", values_of(dx)}};
  for (const NamedParameter& p : module.parameters()) got[p.name] = values_of(p.grad());
  return got;
}

constexpr int64_t kRows = 5, kIn = 12, kOut = 7;

TEST(NormGradient, LayerNormAndRmsNorm) {
  for (bool zero_centered : {false, true}) {
    const NormOptions options{
        .hidden_size = kIn, .epsilon = 1e-3f, .zero_centered_gamma = zero_centered};
    for (bool layer : {true, false}) {
      SCOPED_TRACE(::testing::Message()
                   << "layernorm " << layer << " zero centered " << zero_centered);
      std::unique_ptr<Norm> module;
      if (layer)
        module = take(LayerNorm::create(options));
      else
        module = take(RMSNorm::create(options));
      randomize(*module, 3);
      const Values xs = random_values(kRows * kIn, 1), w = random_values(kRows * kIn, 2);
      auto got = run(*module, tensor({kRows, kIn}, xs), w);
      Params inputs = params_of(*module);
      inputs["x"] = xs;
      oracle::Function f = [&](const Params& p) {
        return oracle::norm(p.at("x"), p.at("weight"), maybe(p, "bias"), 1e-3f, zero_centered);
      };
      oracle::expect_matches(f, inputs, w, got);
    }
  }
}

TEST(NormGradient, AddsTheResidualGradient) {
  for (bool layer : {true, false}) {
    const NormOptions options{.hidden_size = kIn};
    std::unique_ptr<Norm> module;
    if (layer)
      module = take(LayerNorm::create(options));
    else
      module = take(RMSNorm::create(options));
    const Tensor x = tensor({kRows, kIn}, random_values(kRows * kIn, 1));
    const Tensor dy = tensor({kRows, kIn}, random_values(kRows * kIn, 2));
    const Tensor residual = tensor({kRows, kIn}, random_values(kRows * kIn, 3));
    Ctx ctx;
    (void)take(module->forward(x, &ctx));
    const Values alone = values_of(take(module->backward(dy, ctx)));
    (void)take(module->forward(x, &ctx));
    const Values with = values_of(take(module->backward(dy, ctx, &residual)));
    for (size_t i = 0; i < alone.size(); ++i) {
      ASSERT_NEAR(with[i], alone[i] + element(residual, static_cast<int64_t>(i)), 1e-5);
    }
  }
}

TEST(LinearGradient, WithAndWithoutBias) {
  for (bool bias : {true, false}) {
    auto module =
        take(Linear::create({.in_features = kIn, .out_features = kOut, .bias = bias, .seed = 7}));
    randomize(*module, 11);
    const Values xs = random_values(kRows * kIn, 1), w = random_values(kRows * kOut, 2);
    auto got = run(*module, tensor({kRows, kIn}, xs), w);
    EXPECT_EQ(got.size(), bias ? 4u : 3u);
    Params inputs = params_of(*module);
    inputs["x"] = xs;
    oracle::Function f = [&](const Params& p) {
      return oracle::linear(p.at("x"), p.at("weight"), maybe(p, "bias"), kIn, kOut);
    };
    oracle::expect_matches(f, inputs, w, got);
  }
}

TEST(LinearGradient, KeepsLeadingDimensionsAndTakesStridedInput) {
  auto module = take(Linear::create({.in_features = kIn, .out_features = kOut}));
  const Tensor x = tensor({2, 3, kIn}, random_values(6 * kIn, 1));
  Ctx ctx;
  const Tensor y = take(module->forward(x, &ctx));
  EXPECT_EQ(Shape(y.shape().begin(), y.shape().end()), (Shape{2, 3, kOut}));
  const Tensor dx = take(module->backward(y, ctx));
  EXPECT_EQ(Shape(dx.shape().begin(), dx.shape().end()), (Shape{2, 3, kIn}));
  const Tensor strided = take(take(x.transpose(0, 1)).transpose(0, 1));
  const Tensor swapped = take(x.transpose(0, 1));
  const Tensor y_swapped = take(module->forward(swapped, nullptr));
  for (int64_t a = 0; a < 2; ++a) {
    for (int64_t b = 0; b < 3; ++b) {
      for (int64_t o = 0; o < kOut; ++o) {
        ASSERT_EQ(element(y_swapped, (b * 2 + a) * kOut + o), element(y, (a * 3 + b) * kOut + o));
      }
    }
  }
  EXPECT_TRUE(same_bits(take(module->forward(strided, nullptr)), y));
}

TEST(LinearResidual, IsAddedToTheOutput) {
  auto module = take(Linear::create({.in_features = kIn, .out_features = kOut}));
  randomize(*module, 5);
  const Tensor x = tensor({2, 3, kIn}, random_values(6 * kIn, 1));
  const Tensor residual = tensor({2, 3, kOut}, random_values(6 * kOut, 2));
  const Values alone = values_of(take(module->forward(x, nullptr)));
  const Values with = values_of(take(module->forward(x, nullptr, {}, &residual)));
  for (size_t i = 0; i < alone.size(); ++i) {
    ASSERT_NEAR(with[i], alone[i] + element(residual, static_cast<int64_t>(i)), 1e-6);
  }
  const Status status = module->forward(x, nullptr, {}, &x).status();
  EXPECT_FAILS(status, kInvalidArgument, "Linear: residual");
}

TEST(GradDtype, Bf16GradientsAreTheF32OnesRounded) {
  auto module = take(Linear::create({.in_features = kIn, .out_features = kOut}));
  randomize(*module, 5);
  const Tensor x = tensor({kRows, kIn}, random_values(kRows * kIn, 1));
  const Values w = random_values(kRows * kOut, 2);
  const auto exact = run(*module, x, w);
  check(module->set_grad_dtype(DType::kBF16));
  const auto rounded = run(*module, x, w);
  for (const char* name : {"weight", "bias"}) {
    for (size_t i = 0; i < exact.at(name).size(); ++i) {
      const double want = exact.at(name)[i];
      ASSERT_NEAR(rounded.at(name)[i], want, std::fabs(want) * 0x1p-8 + 1e-6) << name;
    }
  }
  EXPECT_EQ(module->parameters()[0].grad().dtype(), DType::kBF16);
  EXPECT_EQ(module->set_grad_dtype(DType::kF8E4M3).code(), StatusCode::kInvalidArgument);
}

TEST(LinearGradient, EmptyBatchGivesEmptyResultsAndZeroGradients) {
  auto module = take(Linear::create({.in_features = kIn, .out_features = kOut}));
  Ctx ctx;
  const Tensor y = take(module->forward(take(Tensor::empty({0, kIn}, DType::kF32)), &ctx));
  EXPECT_EQ(y.numel(), 0);
  EXPECT_EQ(take(module->backward(y, ctx)).numel(), 0);
  for (const NamedParameter& p : module->parameters()) {
    for (double g : values_of(p.grad())) ASSERT_EQ(g, 0) << p.name;
  }
}

TEST(LayerNormLinearGradient, BothNorms) {
  for (Normalization norm : {Normalization::kLayerNorm, Normalization::kRMSNorm}) {
    for (bool zero_centered : {false, true}) {
      auto module = take(LayerNormLinear::create({.in_features = kIn,
                                                  .out_features = kOut,
                                                  .normalization = norm,
                                                  .epsilon = 1e-3f,
                                                  .zero_centered_gamma = zero_centered}));
      randomize(*module, 5);
      const Values xs = random_values(kRows * kIn, 1), w = random_values(kRows * kOut, 2);
      auto got = run(*module, tensor({kRows, kIn}, xs), w);
      Params inputs = params_of(*module);
      inputs["x"] = xs;
      oracle::Function f = [&](const Params& p) {
        const Values z = oracle::norm(p.at("x"), p.at("layer_norm_weight"),
                                      maybe(p, "layer_norm_bias"), 1e-3f, zero_centered);
        return oracle::linear(z, p.at("weight"), maybe(p, "bias"), kIn, kOut);
      };
      oracle::expect_matches(f, inputs, w, got);
    }
  }
}

class MlpGradient : public ::testing::TestWithParam<Activation> {};

TEST_P(MlpGradient, MatchesFiniteDifferences) {
  for (bool bias : {true, false}) {
    for (Normalization norm : {Normalization::kLayerNorm, Normalization::kRMSNorm}) {
      SCOPED_TRACE(::testing::Message() << name(GetParam()) << " bias " << bias);
      constexpr int64_t kFfn = 10;
      auto module = take(LayerNormMLP::create({.hidden_size = kIn,
                                               .ffn_hidden_size = kFfn,
                                               .activation = GetParam(),
                                               .clamp_limit = 1.5f,  // low, so that the clamp acts
                                               .bias = bias,
                                               .normalization = norm,
                                               .glu_linear_offset = 0.25f}));
      randomize(*module, 21);
      const Values xs = random_values(kRows * kIn, 1), w = random_values(kRows * kIn, 2);
      auto got = run(*module, tensor({kRows, kIn}, xs), w);
      Params inputs = params_of(*module);
      inputs["x"] = xs;
      oracle::MlpConfig config{.hidden = kIn,
                               .ffn = kFfn,
                               .activation = GetParam(),
                               .epsilon = 1e-5f,
                               .limit = 1.5,
                               .alpha = 1.702f,
                               .offset = 0.25};
      oracle::Function f = [&](const Params& p) { return oracle::mlp(config, p, "", p.at("x")); };
      oracle::expect_matches(f, inputs, w, got);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, MlpGradient,
                         ::testing::Values(Activation::kGelu, Activation::kQGelu, Activation::kRelu,
                                           Activation::kSRelu, Activation::kSilu,
                                           Activation::kGeglu, Activation::kQGeglu,
                                           Activation::kReglu, Activation::kSReglu,
                                           Activation::kSwiglu, Activation::kGlu,
                                           Activation::kClampedSwiglu),
                         [](const auto& info) { return std::string(name(info.param)); });

TEST(GradientAccumulation, MicrobatchesInFlightAddUp) {
  auto module = take(LayerNormMLP::create({.hidden_size = kIn, .ffn_hidden_size = 9}));
  randomize(*module, 4);
  std::vector<Values> sum;
  std::vector<Tensor> xs, dys;
  for (uint64_t m = 0; m < 3; ++m) {
    xs.push_back(tensor({kRows, kIn}, random_values(kRows * kIn, 100 + m)));
    dys.push_back(tensor({kRows, kIn}, random_values(kRows * kIn, 200 + m)));
    check(module->zero_grad());
    Ctx ctx;
    (void)take(module->forward(xs[m], &ctx));
    (void)take(module->backward(dys[m], ctx));
    const auto params = module->parameters();
    sum.resize(params.size());
    for (size_t i = 0; i < params.size(); ++i) {
      const Values g = values_of(params[i].grad());
      sum[i].resize(g.size());
      for (size_t j = 0; j < g.size(); ++j) sum[i][j] += g[j];
    }
  }
  check(module->zero_grad());
  std::vector<Ctx> ctxs(3);
  for (size_t m = 0; m < 3; ++m) (void)take(module->forward(xs[m], &ctxs[m]));
  for (size_t m : {2, 0, 1}) (void)take(module->backward(dys[m], ctxs[m]));
  const auto params = module->parameters();
  for (size_t i = 0; i < params.size(); ++i) {
    EXPECT_LT(relative_l2(values_of(params[i].grad()), sum[i]), 1e-6) << params[i].name;
  }
}

TEST(Bf16, MlpFollowsTheOracleWithinBf16) {
  auto f32 = take(LayerNormMLP::create({.hidden_size = 32,
                                        .ffn_hidden_size = 48,
                                        .seed = 5,
                                        .init_std = 0.2f,
                                        .output_init_std = 0.2f}));
  for (DType param : {DType::kF32, DType::kBF16}) {
    auto module = take(LayerNormMLP::create({.hidden_size = 32,
                                             .ffn_hidden_size = 48,
                                             .param_dtype = param,
                                             .activation_dtype = DType::kBF16,
                                             .seed = 5,
                                             .init_std = 0.2f,
                                             .output_init_std = 0.2f}));
    const Values xs = random_values(16 * 32, 1, 1, true), w = random_values(16 * 32, 2, 1, true);
    Ctx ctx;
    const Tensor y = take(module->forward(tensor({16, 32}, xs, DType::kBF16), &ctx));
    ASSERT_EQ(y.dtype(), DType::kBF16);
    const Tensor dx = take(module->backward(tensor({16, 32}, w, DType::kBF16), ctx));
    ASSERT_EQ(dx.dtype(), DType::kBF16);
    auto want = run(*f32, tensor({16, 32}, xs), w);
    EXPECT_LT(relative_l2(values_of(y), want["y"]), 0.015);
    EXPECT_LT(relative_l2(values_of(dx), want["x"]), 0.03);
    for (const NamedParameter& p : module->parameters()) {
      EXPECT_EQ(p.value().dtype(), param);
      EXPECT_EQ(p.grad().dtype(), DType::kF32);
      EXPECT_LT(relative_l2(values_of(p.grad()), want[p.name]), 0.03) << p.name;
    }
  }
}

TEST(EmbeddingGradient, RepeatedIndicesAddUp) {
  auto module =
      take(Embedding::create({.num_embeddings = 6, .hidden_size = 4, .seed = 1, .init_std = 1}));
  const Tensor indices = take(int_tensor({3, 0, 3, 5, 3, 0}).view({2, 3}));
  Ctx ctx;
  const Tensor y = take(module->forward(indices, &ctx));
  ASSERT_EQ(Shape(y.shape().begin(), y.shape().end()), (Shape{2, 3, 4}));
  const Values table = values_of(module->weight()->value);
  const std::vector<int> rows = {3, 0, 3, 5, 3, 0};
  for (int i = 0; i < 6; ++i) {
    for (int c = 0; c < 4; ++c) ASSERT_EQ(element(y, i * 4 + c), table[rows[i] * 4 + c]);
  }
  const Values w = random_values(24, 2);
  for (int round = 1; round <= 2; ++round) {  // the second round adds to the first one's gradients
    if (round == 2) (void)take(module->forward(indices, &ctx));
    check(module->backward(tensor({2, 3, 4}, w), ctx));
    Values want(24, 0.0);
    for (int i = 0; i < 6; ++i) {
      for (int c = 0; c < 4; ++c) want[rows[i] * 4 + c] += round * w[i * 4 + c];
    }
    const Values got = values_of(module->weight()->grad);
    for (int i = 0; i < 24; ++i) ASSERT_NEAR(got[i], want[i], 1e-6);
  }
}

TEST(DropoutGradient, FollowsThePhiloxStream) {
  constexpr float p = 0.3f;
  ContextScope scope{Context(99)};
  oracle::DropoutStream stream{.seed = 99};
  Dropout dropout(p);
  Residual residual(p);
  const Values xs = random_values(37, 1, 2), bs = random_values(37, 2, 2), w = random_values(37, 3);
  for (int round = 0; round < 3; ++round) {
    Ctx c1, c2;
    const Tensor y = take(dropout.forward(tensor({37}, xs), &c1));
    const Tensor r = take(residual.forward(tensor({37}, xs), tensor({37}, bs), &c2));
    const Values f1 = stream.factors(37, p), f2 = stream.factors(37, p);
    const Tensor dy = take(dropout.backward(tensor({37}, w), c1));
    const Tensor db = take(residual.backward(tensor({37}, w), c2));
    int dropped = 0;
    for (int i = 0; i < 37; ++i) {
      dropped += f1[i] == 0;
      ASSERT_NEAR(element(y, i), xs[i] * f1[i], 1e-6);
      ASSERT_NEAR(element(r, i), xs[i] + bs[i] * f2[i], 1e-6);
      ASSERT_NEAR(element(dy, i), w[i] * f1[i], 1e-6);
      ASSERT_NEAR(element(db, i), w[i] * f2[i], 1e-6);
    }
    ASSERT_GT(dropped, 0);
    ASSERT_LT(dropped, 37);
  }
  EXPECT_EQ(Context::current().random(), (RandomPosition{99, 60}));
  // Without a ctx (inference), nothing is dropped and the RNG offset does not advance.
  EXPECT_TRUE(same_bits(take(dropout.forward(tensor({37}, xs), nullptr)), tensor({37}, xs)));
  EXPECT_EQ(Context::current().random().offset, 60u);
}

TEST(CrossEntropyGradient, MeanWithSmoothingAndIgnoredRows) {
  constexpr int64_t kVocab = 9;
  for (double smoothing : {0.0, 0.1}) {
    CrossEntropyLoss loss({.label_smoothing = static_cast<float>(smoothing), .ignore_index = -1});
    const std::vector<int32_t> targets = {4, -1, 0, 8, 4};
    const Values xs = random_values(kRows * kVocab, 1, 3);
    oracle::Function f = [&](const Params& p) {
      const Values& x = p.at("x");
      double total = 0;
      const double eps = static_cast<float>(smoothing);
      for (int r = 0; r < kRows; ++r) {
        if (targets[r] < 0) continue;
        double lse = 0, mean = 0;
        for (int j = 0; j < kVocab; ++j) lse += std::exp(x[r * kVocab + j]);
        for (int j = 0; j < kVocab; ++j) mean += x[r * kVocab + j] / kVocab;
        total += std::log(lse) - (1 - eps) * x[r * kVocab + targets[r]] - eps * mean;
      }
      return Values{total / 4};
    };
    Ctx ctx;
    const Tensor y = take(loss.forward(tensor({kRows, kVocab}, xs), int_tensor(targets), &ctx, 4));
    EXPECT_NEAR(take(item(y)), f({{"x", xs}})[0], 1e-5);
    const Tensor dx = take(loss.backward(ctx, 2.5));
    oracle::expect_matches(f, {{"x", xs}}, {2.5}, {{"y", values_of(y)}, {"x", values_of(dx)}});
    // The default divisor is the number of rows.
    EXPECT_NEAR(
        take(item(take(loss.forward(tensor({kRows, kVocab}, xs), int_tensor(targets), nullptr)))),
        f({{"x", xs}})[0] * 4 / 5, 1e-5);
  }
}

TEST(Misuse, IsRefusedWithAReason) {
  auto module = take(Linear::create({.in_features = kIn, .out_features = kOut}));
  auto other = take(Linear::create({.in_features = kIn, .out_features = kOut}));
  const Tensor x = tensor({2, kIn}, random_values(2 * kIn, 1));
  const Tensor dy = tensor({2, kOut}, random_values(2 * kOut, 1));
  auto text = [](const auto& result) {
    EXPECT_FALSE(result.ok());
    return result.status().to_string();
  };
  Ctx ctx;
  EXPECT_HAS(text(module->backward(dy, ctx)), "empty ctx");
  (void)take(module->forward(x, &ctx));
  EXPECT_HAS(text(other->backward(dy, ctx)), "another module");
  (void)take(module->backward(dy, ctx));
  EXPECT_HAS(text(module->backward(dy, ctx)), "empty ctx");
  const std::string wrong = text(module->forward(tensor({3, 5}, random_values(15, 1)), nullptr));
  EXPECT_HAS(wrong, "[..., 12]");
  EXPECT_HAS(wrong, "[3,5]");
  EXPECT_HAS(text(module->forward(Tensor(), nullptr)), "undefined");
  EXPECT_HAS(text(Linear::create({.in_features = 0, .out_features = 3})), "in_features is 0");
  EXPECT_HAS(text(TransformerLayer::create(
                 {.hidden_size = 10, .ffn_hidden_size = 4, .num_attention_heads = 3})),
             "multiple of num_attention_heads");
  EXPECT_HAS(
      text(TransformerLayer::create(
          {.hidden_size = 8, .ffn_hidden_size = 4, .num_attention_heads = 4, .num_gqa_groups = 3})),
      "must divide");
  EXPECT_HAS(
      text(TransformerLayer::create(
          {.hidden_size = 8, .ffn_hidden_size = 4, .num_attention_heads = 4, .hidden_dropout = 1})),
      "hidden_dropout is 1");
  EXPECT_HAS(text(parse_activation("swigl")), "swiglu");
  EXPECT_HAS(text(parse_recipe("delay")), "delayed");
}

}  // namespace
}  // namespace te_fl::nn::testing::layers_gradient_test
