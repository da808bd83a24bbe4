// MoELayer against a loop over its experts in double precision, and its gradients against numerical
// differentiation; unusual loads of the experts; what a forward keeps.
#include <cstdio>
#include <numeric>

#include "oracle.hpp"
#include "support/expect.hpp"
#include "support/recording_device.hpp"

namespace te_fl::nn::testing::moe_layer_test {
namespace {

using oracle::maybe;

constexpr int64_t kTokens = 9, kHidden = 8;

// The experts of one token, by decreasing score; of equal scores the lower index is first.
std::vector<int64_t> choose(const MoELayerOptions& o, const Values& scores, const Values* bias) {
  std::vector<double> key(scores);
  for (size_t e = 0; bias != nullptr && e < key.size(); ++e) key[e] += (*bias)[e];
  std::vector<int64_t> order(key.size());
  std::iota(order.begin(), order.end(), 0);
  if (o.num_groups > 0) {
    const int64_t size = o.num_experts / o.num_groups, best = o.top_k / o.group_topk;
    std::vector<std::pair<double, int64_t>> groups;
    for (int64_t g = 0; g < o.num_groups; ++g) {
      std::vector<double> own(key.begin() + g * size, key.begin() + (g + 1) * size);
      std::sort(own.rbegin(), own.rend());
      groups.emplace_back(-std::accumulate(own.begin(), own.begin() + best, 0.0), g);
    }
    std::sort(groups.begin(), groups.end());
    order.clear();
    for (int64_t g = 0; g < o.group_topk; ++g) {
      for (int64_t i = 0; i < size; ++i) order.push_back(groups[g].second * size + i);
    }
    std::sort(order.begin(), order.end());
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return key[a] > key[b]; });
  order.resize(static_cast<size_t>(o.top_k));
  return order;
}

Values softmax(const Values& x) {
  const double top = *std::max_element(x.begin(), x.end());
  Values y;
  double sum = 0;
  for (double v : x) sum += std::exp(v - top);
  for (double v : x) y.push_back(std::exp(v - top) / sum);
  return y;
}

double score(ScoreFunction f, double x) {
  return f == ScoreFunction::kSigmoid ? oracle::sigmoid(x) : std::sqrt(std::log1p(std::exp(x)));
}

Values slice(const Params& p, const std::string& name, int64_t expert, int64_t size) {
  if (const Values* own = maybe(p, name + std::to_string(expert))) return *own;
  const Values& all = p.at(name);
  return {all.begin() + expert * size, all.begin() + (expert + 1) * size};
}

// The probabilities [T, E] and the auxiliary loss.
struct Routed {
  std::vector<Values> probs;
  double loss = 0;
};

Routed route(const MoELayerOptions& o, const Params& p, const Values& x) {
  const int64_t tokens = static_cast<int64_t>(x.size()) / o.hidden_size, experts = o.num_experts;
  const Values logits = oracle::linear(x, p.at("router_weight"), nullptr, o.hidden_size, experts);
  Routed routed;
  Values load(experts, 0.0), score_sums(experts, 0.0);
  double z = 0;
  const bool is_softmax = o.score_function == ScoreFunction::kSoftmax;
  for (int64_t t = 0; t < tokens; ++t) {
    const Values row(logits.begin() + t * experts, logits.begin() + (t + 1) * experts);
    Values scores = row;
    if (!is_softmax) {
      for (double& s : scores) s = score(o.score_function, s);
    } else if (o.use_pre_softmax) {
      scores = softmax(row);
    }
    const auto chosen = choose(o, scores, maybe(p, "expert_bias"));
    Values own;
    for (int64_t e : chosen) own.push_back(scores[e]);
    double sum = 1;
    if (is_softmax && !o.use_pre_softmax) own = softmax(own);
    if (!is_softmax && o.top_k > 1) sum = std::accumulate(own.begin(), own.end(), 1e-20);
    Values probs(experts, 0.0);
    for (size_t i = 0; i < own.size(); ++i) {
      probs[chosen[i]] = o.scaling_factor * own[i] / sum;
      load[chosen[i]] += 1;
    }
    routed.probs.push_back(probs);
    Values all = is_softmax ? softmax(row) : scores;
    const double total = is_softmax ? 1 : std::accumulate(all.begin(), all.end(), 1e-20);
    double exps = 0;
    for (int64_t e = 0; e < experts; ++e) {
      score_sums[e] += all[e] / total;
      exps += std::exp(row[e]);
    }
    z += std::log(exps) * std::log(exps);
  }
  const double n = static_cast<double>(tokens);
  double balance = 0;
  for (int64_t e = 0; e < experts; ++e) balance += load[e] * score_sums[e];
  routed.loss = o.aux_loss_coeff * static_cast<double>(experts) /
                    (static_cast<double>(o.top_k) * n * n) * balance +
                o.z_loss_coeff * z / n;
  return routed;
}

Values mlp(const MoELayerOptions& o, const Values& x, const Values& w1, const Values* b1,
           const Values& w2, const Values* b2, int64_t ffn) {
  const int64_t wide = is_gated(o.activation) ? 2 * ffn : ffn;
  const Values pre = oracle::linear(x, w1, b1, o.hidden_size, wide);
  const Values act =
      oracle::activation(o.activation, pre, ffn, o.clamp_limit, o.clamp_alpha, o.glu_linear_offset);
  return oracle::linear(act, w2, b2, ffn, o.hidden_size);
}

// The output, with the auxiliary loss as one more element.
Values layer(const MoELayerOptions& o, const Params& p) {
  const Values& x = p.at("x");
  const int64_t h = o.hidden_size, f = o.ffn_hidden_size;
  const int64_t wide = is_gated(o.activation) ? 2 * f : f;
  const Routed routed = route(o, p, x);
  Values y(x.size(), 0.0);
  for (size_t t = 0; t < routed.probs.size(); ++t) {
    const Values row(x.begin() + static_cast<int64_t>(t) * h,
                     x.begin() + static_cast<int64_t>(t + 1) * h);
    const auto accumulate = [&](const Values& out, double factor) {
      for (int64_t i = 0; i < h; ++i) y[t * h + i] += factor * out[i];
    };
    for (int64_t e = 0; e < o.num_experts; ++e) {
      if (routed.probs[t][e] == 0) continue;
      Values b1, b2;
      if (o.bias) {
        b1 = slice(p, "fc1_bias", e, wide);
        b2 = slice(p, "fc2_bias", e, h);
      }
      accumulate(mlp(o, row, slice(p, "fc1_weight", e, wide * h), o.bias ? &b1 : nullptr,
                     slice(p, "fc2_weight", e, h * f), o.bias ? &b2 : nullptr, f),
                 routed.probs[t][e]);
    }
    if (o.shared_ffn_hidden_size == 0) continue;
    double gate = 1;
    if (o.shared_expert_gate) {
      gate = oracle::sigmoid(oracle::linear(row, p.at("shared_gate_weight"), nullptr, h, 1)[0]);
    }
    accumulate(mlp(o, row, p.at("shared_experts.fc1_weight"), maybe(p, "shared_experts.fc1_bias"),
                   p.at("shared_experts.fc2_weight"), maybe(p, "shared_experts.fc2_bias"),
                   o.shared_ffn_hidden_size),
               gate);
  }
  y.push_back(routed.loss);
  return y;
}

MoELayerOptions small(int64_t experts = 4, int64_t top_k = 2) {
  return {.hidden_size = kHidden, .ffn_hidden_size = 6, .num_experts = experts, .top_k = top_k};
}

// One step whose loss is the sum of w y + w.back() aux_loss.
std::map<std::string, Values> step(MoELayer& module, const Tensor& x, const Values& w) {
  Ctx ctx;
  check(module.zero_grad());
  MoEAuxiliary auxiliary;
  auxiliary.aux_loss_grad = tensor({1}, {w.back()});
  const Tensor y = take(module.forward(x, &ctx, {}, &auxiliary));
  const Tensor dy = tensor({x.size(0), x.size(1)}, Values(w.begin(), w.end() - 1));
  const Tensor dx = take(module.backward(dy, ctx));
  std::map<std::string, Values> got{{"y", values_of(y)}, {"x", values_of(dx)}};
  got["y"].push_back(auxiliary.aux_loss.defined() ? values_of(auxiliary.aux_loss)[0] : 0);
  for (const NamedParameter& p : module.parameters()) {
    if (p.parameter->requires_grad) got[p.name] = values_of(p.grad());
  }
  return got;
}

void expect_oracle(const MoELayerOptions& options, uint64_t seed = 1) {
  auto module = take(MoELayer::create(options));
  randomize(*module, seed + 10, 0.7);
  const Values x = random_values(kTokens * kHidden, seed);
  const Values w = random_values(kTokens * kHidden + 1, seed + 1);
  const auto got = step(*module, tensor({kTokens, kHidden}, x), w);
  Params inputs = params_of(*module);
  inputs["x"] = x;
  const oracle::Function f = [&](const Params& p) { return layer(options, p); };
  oracle::expect_matches(f, inputs, w, got, 1e-4);
}

TEST(MoELayer, IsALoopOverExperts) {
  for (const Activation activation :
       {Activation::kSwiglu, Activation::kSRelu, Activation::kClampedSwiglu, Activation::kGelu,
        Activation::kGeglu}) {
    for (const bool bias : {false, true}) {
      for (const bool single : {true, false}) {
        SCOPED_TRACE(std::string(name(activation)) + (bias ? " bias" : "") +
                     (single ? " single" : ""));
        MoELayerOptions options = small();
        options.activation = activation;
        options.bias = bias;
        options.single_grouped_weight = single;
        options.clamp_limit = 1;
        expect_oracle(options);
      }
    }
  }
}

TEST(MoELayer, RoutesByEachScoreFunction) {
  MoELayerOptions softmax = small(8, 3);
  expect_oracle(softmax);
  softmax.use_pre_softmax = true;
  softmax.scaling_factor = 2.5f;
  expect_oracle(softmax, 2);
  softmax.num_groups = 4;
  softmax.group_topk = 2;
  expect_oracle(softmax, 3);
  for (const ScoreFunction function : {ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus}) {
    SCOPED_TRACE(name(function));
    MoELayerOptions options = small(8, 4);
    options.score_function = function;
    expect_oracle(options, 4);
    options.expert_bias = true;
    expect_oracle(options, 5);
    options.num_groups = 4;
    options.group_topk = 2;
    expect_oracle(options, 6);
    options.top_k = 1;
    options.num_groups = options.group_topk = 0;
    expect_oracle(options, 7);
  }
}

TEST(MoELayer, AddsAuxiliaryLosses) {
  MoELayerOptions options = small();
  options.aux_loss_coeff = 0.5f;
  expect_oracle(options);
  options.z_loss_coeff = 0.25f;
  expect_oracle(options);
  options.aux_loss_coeff = 0;
  expect_oracle(options);
  options.score_function = ScoreFunction::kSigmoid;
  options.aux_loss_coeff = 1;
  expect_oracle(options);
}

TEST(MoELayer, AddsSharedExperts) {
  MoELayerOptions options = small();
  options.shared_ffn_hidden_size = 10;
  expect_oracle(options);
  options.bias = true;
  options.shared_expert_gate = true;
  expect_oracle(options);
}

TEST(MoELayer, ServesUnusualLoads) {
  expect_oracle(small(4, 4));  // every expert
  // One expert a token: a softmax over the chosen expert alone has no gradient, one before the
  // choice has.
  MoELayerOptions many = small(40, 1);  // more experts than tokens
  many.use_pre_softmax = true;
  expect_oracle(many);
  MoELayerOptions one = small(1, 1);
  one.score_function = ScoreFunction::kSigmoid;
  expect_oracle(one);
  // All tokens go to experts 0 and 1: the others get no gradient, but a defined one of zero.
  MoELayerOptions options = small();
  options.score_function = ScoreFunction::kSigmoid;
  options.expert_bias = true;
  auto module = take(MoELayer::create(options));
  set_values(find_state(*module, "expert_bias"), {2, 2, 0, 0});
  Ctx ctx;
  MoEAuxiliary auxiliary;
  const Tensor x = tensor({kTokens, kHidden}, random_values(kTokens * kHidden, 1));
  (void)take(module->forward(x, &ctx, {}, &auxiliary));
  EXPECT_EQ(auxiliary.tokens_per_expert.data<int64_t>()[1], kTokens);
  EXPECT_EQ(auxiliary.tokens_per_expert.data<int64_t>()[2], 0);
  (void)take(module->backward(x, ctx));
  for (const NamedParameter& p : module->parameters()) {
    if (p.name != "fc1_weight") continue;
    const Values grad = values_of(p.grad());
    EXPECT_NE(oracle::dot(grad, grad), 0);
    for (size_t i = grad.size() / 2; i < grad.size(); ++i) ASSERT_EQ(grad[i], 0);
  }
  // No token at all.
  Ctx none;
  const Tensor empty = take(Tensor::empty({0, kHidden}, DType::kF32));
  EXPECT_EQ(take(module->forward(empty, &none)).size(0), 0);
  EXPECT_EQ(take(module->backward(empty, none)).size(0), 0);
}

TEST(MoELayer, ATokenOfNaNsLeavesTheOthersAlone) {
  MoELayerOptions options = small();
  auto module = take(MoELayer::create(options));
  Values x = random_values(kTokens * kHidden, 1);
  const Values want = values_of(take(module->forward(tensor({kTokens, kHidden}, x), nullptr)));
  for (int64_t i = 0; i < kHidden; ++i) x[3 * kHidden + i] = std::nan("");
  const Values got = values_of(take(module->forward(tensor({kTokens, kHidden}, x), nullptr)));
  for (int64_t i = 0; i < kTokens * kHidden; ++i) {
    if (i / kHidden == 3) {
      EXPECT_TRUE(std::isnan(got[i]));
    } else {
      EXPECT_EQ(got[i], want[i]);
    }
  }
}

TEST(MoELayer, IsCloseToItselfInFp8) {
  MoELayerOptions options{.hidden_size = 32, .ffn_hidden_size = 48, .num_experts = 4, .top_k = 2};
  options.init_std = options.output_init_std = 0.2f;
  options.shared_ffn_hidden_size = 16;
  const Tensor x = tensor({37, 32}, random_values(37 * 32, 1));
  const auto run = [&](const std::optional<Recipe>& recipe, bool single) {
    options.single_grouped_weight = single;
    options.seed = 5;
    auto module = take(MoELayer::create(options));
    std::map<std::string, Values> got;
    for (int i = 0; i < 2; ++i) {  // the second step has scales
      check(module->zero_grad());
      std::optional<autocast> fp8;
      if (recipe.has_value()) fp8.emplace(true, *recipe);
      Ctx ctx;
      got["y"] = values_of(take(module->forward(x, &ctx)));
      got["x"] = values_of(take(module->backward(x, ctx)));
      fp8.reset();
      check(backward_end());
    }
    for (const NamedParameter& p : module->parameters()) got["router"] = values_of(p.grad());
    return got;
  };
  const auto plain = run({}, true);
  for (const Recipe& recipe : {Recipe(DelayedScaling{.amax_history_len = 2}),
                               Recipe(Float8CurrentScaling{}), Recipe(Float8BlockScaling{})}) {
    const auto got = run(recipe, true);
    EXPECT_EQ(got, run(recipe, false));  // one parameter or many: the same numbers
    for (const char* key : {"y", "x"}) {
      const double distance = relative_l2(got.at(key), plain.at(key));
      EXPECT_LT(distance, 0.1) << key;
      EXPECT_GT(distance, 1e-4) << key << ": not computed in FP8";
    }
  }
}

TEST(MoELayer, LeavesFrozenExpertsAlone) {
  MoELayerOptions options = small();
  options.single_grouped_weight = false;
  auto module = take(MoELayer::create(options));
  for (const NamedParameter& p : module->parameters()) {
    if (p.name == "fc1_weight1" || p.name == "router_weight") p.parameter->set_requires_grad(false);
  }
  Ctx ctx;
  const Tensor x = tensor({kTokens, kHidden}, random_values(kTokens * kHidden, 1));
  (void)take(module->forward(x, &ctx));
  (void)take(module->backward(x, ctx));
  for (const NamedParameter& p : module->parameters()) {
    EXPECT_EQ(p.grad().defined(), p.name != "fc1_weight1" && p.name != "router_weight") << p.name;
  }
}

TEST(MoELayer, MovesTheExpertBiasTowardsEvenLoads) {
  MoELayerOptions options = small(3, 1);
  options.score_function = ScoreFunction::kSigmoid;
  options.expert_bias = true;
  auto module = take(MoELayer::create(options));
  const Tensor tokens = take(Tensor::empty({3}, DType::kI64));
  for (int64_t e = 0; e < 3; ++e) tokens.data<int64_t>()[e] = 2 + 2 * e;  // 2, 4 (the mean), 6
  check(module->update_expert_bias(tokens, 0.25f));
  EXPECT_EQ(values_of(find_state(*module, "expert_bias")), (Values{0.25, 0, -0.25}));
  auto plain = take(MoELayer::create(small()));
  EXPECT_FAILS(plain->update_expert_bias(tokens), kFailedPrecondition, "without expert_bias");
}

TEST(MoELayer, RefusesBadOptions) {
  const auto refused = [](auto change, const char* why) {
    MoELayerOptions options = small();
    change(options);
    EXPECT_FAILS(MoELayer::create(options).status(), kInvalidArgument, why);
  };
  refused([](auto& o) { o.num_experts = 0; }, "num_experts is 0; it must be at least 1");
  refused([](auto& o) { o.top_k = 5; }, "top_k is 5; it is 1 to num_experts, which is 4");
  refused([](auto& o) { o.top_k = 0; }, "top_k is 0");
  refused([](auto& o) { o.num_groups = 2; }, "num_groups is 2 and group_topk 0");
  refused([](auto& o) { o.num_groups = 3, o.group_topk = 1; }, "must divide num_experts");
  refused([](auto& o) { o.num_groups = 4, o.group_topk = 1; }, "fewer than top_k = 2");
  refused([](auto& o) { o.expert_bias = true; }, "expert_bias is set with the score function");
  refused([](auto& o) { o.score_function = ScoreFunction::kSigmoid, o.use_pre_softmax = true; },
          "use_pre_softmax is set with the score function sigmoid");
  refused([](auto& o) { o.aux_loss_coeff = -1; }, "aux_loss_coeff is -1");
  refused([](auto& o) { o.z_loss_coeff = std::nanf(""); }, "z_loss_coeff is ");
  refused([](auto& o) { o.shared_expert_gate = true; }, "the gate needs shared experts");
  EXPECT_FAILS(parse_score_function("tanh").status(), kInvalidArgument, "it is sigmoid, softmax");
  auto module = take(MoELayer::create(small()));
  EXPECT_FAILS(module->forward(tensor({2, 3}, Values(6, 1)), nullptr).status(), kInvalidArgument,
               "MoELayer: x is f32[2,3]");
}

// Bytes that a forward keeps for its backward, per token. In BF16: the rows of fc1's output
// (top_k x 2 ffn x 2), their probabilities (top_k x 4), the map from tokens to rows (experts x 4),
// the softmax (experts x 4) and the chosen experts (top_k x 4). x is the caller's. FP8 adds the
// column-wise codes of the inputs of both products: top_k x (hidden + ffn).
TEST(MoELayer, KeepsWhatBackwardReads) {
  te_fl::testing::RecordingDevice recorder;
  constexpr int64_t kRows = 512, kWide = 128, kFfn = 64, kExperts = 8, kTop = 2;
  const auto kept = [&](const std::optional<Recipe>& recipe, Activation activation) {
    auto module = take(MoELayer::create({.hidden_size = kWide,
                                         .ffn_hidden_size = kFfn,
                                         .num_experts = kExperts,
                                         .top_k = kTop,
                                         .activation = activation,
                                         .param_dtype = DType::kBF16,
                                         .activation_dtype = DType::kBF16,
                                         .device = recorder.device()}));
    const Tensor host =
        tensor({kRows, kWide}, random_values(kRows * kWide, 1, 1, true), DType::kBF16);
    const Tensor x = take(host.to(recorder.device()));
    double bytes = 0;
    for (const bool first : {true, false}) {
      const auto held = [&] {
        check(devices::synchronize(recorder.device()));
        return static_cast<double>(take(devices::memory_account(recorder.device())).bytes);
      };
      const double before = held();
      Ctx ctx;
      {
        autocast fp8(recipe.has_value(), recipe.value_or(DelayedScaling{}));
        (void)take(module->forward(x, &ctx, {.is_first_microbatch = first}));
      }
      bytes = held() - before;
      (void)take(module->backward(x, ctx));
      check(backward_end());
    }
    return bytes / kRows;
  };
  const double routing = kTop * 8 + kExperts * 8, pre = kTop * 2 * kFfn * 2;
  const double codes = kTop * (kWide + kFfn);
  struct Case {
    const char* name;
    std::optional<Recipe> recipe;
    Activation activation;
    double bytes;
  };
  const Case cases[] = {
      {"bf16", {}, Activation::kSwiglu, routing + pre},
      // The sum over experts applies the probabilities, and reads fc2's output and [T, E] of them.
      {"bf16, geglu",
       {},
       Activation::kGeglu,
       routing + pre + kTop * (kWide * 2 - 4) + kExperts * 4},
      {"current", Float8CurrentScaling{}, Activation::kSwiglu, routing + pre + codes},
      {"block", Float8BlockScaling{}, Activation::kSwiglu, routing + pre + codes},
  };
  for (const Case& c : cases) {
    const double bytes = kept(c.recipe, c.activation);
    std::printf("%-12s %7.1f bytes per token, %7.1f computed\n", c.name, bytes, c.bytes);
    EXPECT_GE(bytes, c.bytes) << c.name;
    EXPECT_LE(bytes, c.bytes * 1.15) << c.name;  // padding of rows, scales and alignment
  }
  ASSERT_OK(devices::remove(recorder.device()));
}

}  // namespace
}  // namespace te_fl::nn::testing::moe_layer_test
