// Recomputing a section of the model (a "segment": activation checkpointing) gives the same bits as
// running it once, under every recipe and with dropout.
#include <optional>

#include "nn_test_util.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::recompute_test {
namespace {

constexpr int64_t kHidden = 32, kRows = 12, kLayers = 2;

struct Plan {
  std::optional<Recipe> recipe;
  bool recompute = false;
  bool tells_first = false;  // sets is_first_microbatch
  bool ends_before = false;  // the autocast scope ends, and changes its scales, before the backward
  bool crossed = false;      // both microbatches' forwards run before their backward passes
  bool calibrating = false;
  bool whole = false;  // both layers form one segment, which contains smaller pieces
  float dropout = 0.1f;
};

struct Outcome {
  std::vector<Values> outputs, gradients, state;
  RandomPosition random;
};

std::unique_ptr<TransformerLayer> make_layer(uint64_t seed, float dropout) {
  return take(TransformerLayer::create(
      {.hidden_size = kHidden,
       .ffn_hidden_size = 2 * kHidden,
       .num_attention_heads = 2,
       .hidden_dropout = dropout,
       .attention = {.layout = Layout::kBSHD, .attention_dropout = dropout},
       .seed = seed,
       .init_std = 0.2f}));
}

Tensor input(int64_t step, int64_t microbatch) {
  return tensor(
      {2, kRows / 2, kHidden},
      random_values(kRows * kHidden, static_cast<uint64_t>(100 * step + microbatch), 1 + step));
}

// One microbatch through the layers; each layer is a segment of its own.
struct Pass {
  std::vector<SegmentRun> runs;

  Tensor forward(const std::vector<std::unique_ptr<TransformerLayer>>& layers, Tensor x,
                 const Plan& plan, const ForwardOptions& options) {
    const auto make_segment = [options](TransformerLayer& layer) -> Segment {
      return [&layer, options](const Tensor& in) {
        return run_segment(layer, in, AttentionInputs{}, options);
      };
    };
    if (plan.whole && plan.recompute) {
      const Segment both = [&layers, make_segment](const Tensor& in) -> Result<SegmentRun> {
        TE_FL_ASSIGN_OR_RETURN(const SegmentRun one, checkpoint(make_segment(*layers[0]), in));
        TE_FL_ASSIGN_OR_RETURN(const SegmentRun two, checkpoint(make_segment(*layers[1]), one.y));
        return SegmentRun{two.y, [one, two](const Tensor& dy) -> Result<Tensor> {
                            TE_FL_ASSIGN_OR_RETURN(const Tensor between, two.backward(dy));
                            return one.backward(between);
                          }};
      };
      runs.push_back(take(checkpoint(both, x)));
      return runs.back().y;
    }
    for (const auto& layer : layers) {
      runs.push_back(
          take(plan.recompute ? checkpoint(make_segment(*layer), x) : make_segment(*layer)(x)));
      x = runs.back().y;
    }
    return x;
  }
  Tensor backward(Tensor dy) {
    for (; !runs.empty(); runs.pop_back()) dy = take(runs.back().backward(dy));
    return dy;
  }
};

Outcome train(const Plan& plan) {
  const Context context(7);
  const ContextScope scope(context);
  std::vector<std::unique_ptr<TransformerLayer>> layers;
  std::vector<NamedParameter> parameters;
  for (int64_t i = 0; i < kLayers; ++i) {
    layers.push_back(make_layer(static_cast<uint64_t>(i), plan.dropout));
    for (const NamedParameter& p : layers.back()->parameters()) {
      parameters.push_back({std::to_string(i) + p.name, p.parameter});
    }
  }
  auto adam = take(Adam::create(parameters, {.lr = 0.02f}));
  Outcome outcome;
  for (int64_t step = 0; step < 4; ++step) {
    for (const auto& layer : layers) check(layer->zero_grad());
    Pass passes[2];
    Tensor outputs[2];
    const auto forward = [&](int64_t m) {
      ForwardOptions options;
      if (plan.tells_first) options.is_first_microbatch = m == 0;
      outputs[m] = passes[m].forward(layers, input(step, m), plan, options);
      outcome.outputs.push_back(values_of(outputs[m]));
    };
    const auto backward = [&](int64_t m) {
      outcome.outputs.push_back(values_of(passes[m].backward(outputs[m])));
    };
    std::optional<autocast> fp8;
    const auto open = [&] {
      if (!plan.recipe.has_value()) return;
      fp8.emplace(AutocastOptions{.enabled = !plan.calibrating, .calibrating = plan.calibrating},
                  *plan.recipe);
    };
    for (int64_t m = 0; m < 2; ++m) {
      open();
      forward(m);
      if (plan.ends_before) fp8.reset();
      if (!plan.crossed) backward(m);
      fp8.reset();
    }
    if (plan.crossed) backward(0), backward(1);
    check(backward_end());
    for (const NamedParameter& p : parameters) outcome.gradients.push_back(values_of(p.grad()));
    check(adam->step());
  }
  for (const auto& layer : layers) {
    for (const NamedTensor& t : layer->state()) outcome.state.push_back(values_of(t.tensor));
  }
  outcome.random = context.random();
  return outcome;
}

void expect_equal(Plan plan) {
  plan.recompute = false;
  const Outcome plain = train(plan);
  plan.recompute = true;
  const Outcome recomputed = train(plan);
  EXPECT_TRUE(plain.outputs == recomputed.outputs);
  EXPECT_TRUE(plain.gradients == recomputed.gradients);
  EXPECT_TRUE(plain.state == recomputed.state);
  EXPECT_EQ(plain.random, recomputed.random);
}

const DelayedScaling kDelayed{.amax_history_len = 2};

TEST(Recompute, EqualsTheSegmentWithoutFp8) { expect_equal({}); }

TEST(Recompute, EqualsTheSegmentUnderEveryRecipe) {
  DelayedScaling recent = kDelayed, attention = kDelayed;
  recent.amax_compute_algo = AmaxAlgo::kMostRecent;
  attention.fp8_dpa = true;
  for (const Recipe& recipe : {Recipe(kDelayed), Recipe(recent), Recipe(attention),
                               Recipe(Float8CurrentScaling{}), Recipe(Float8BlockScaling{})}) {
    SCOPED_TRACE(describe(recipe));
    for (bool ends_before : {false, true}) {
      expect_equal({.recipe = recipe, .ends_before = ends_before});
    }
  }
}

TEST(Recompute, EqualsTheSegmentWithCachedWeightsAndCrossedMicrobatches) {
  for (const Recipe& recipe : {Recipe(kDelayed), Recipe(Float8CurrentScaling{})}) {
    for (bool tells_first : {false, true}) {
      expect_equal(
          {.recipe = recipe, .tells_first = tells_first, .ends_before = true, .crossed = true});
    }
  }
}

TEST(Recompute, EqualsTheSegmentWhileCalibrating) {
  expect_equal({.recipe = kDelayed, .ends_before = true, .calibrating = true});
}

TEST(Recompute, SegmentsNest) {
  expect_equal({.recipe = kDelayed, .ends_before = true, .whole = true});
  expect_equal({.recipe = Float8BlockScaling{}, .crossed = true, .whole = true});
}

// A second forward without the recomputation scopes gives other gradients.
TEST(Recompute, ASecondForwardAloneIsNotTheSame) {
  auto gradient = [](bool twice) {
    const ContextScope scope(Context(7));
    auto layer = make_layer(1, 0.1f);
    Ctx first, second;
    const Tensor y = take(layer->forward(input(0, 0), &first));
    if (!twice) return values_of(take(layer->backward(y, first)));
    (void)take(layer->forward(input(0, 0), &second));
    return values_of(take(layer->backward(y, second)));
  };
  EXPECT_NE(gradient(false), gradient(true));
}

TEST(Recompute, KeepsNothingOfTheFirstRun) {
  auto layer = make_layer(1, 0);
  std::weak_ptr<Ctx> kept;
  auto run = take(checkpoint(
      [&](const Tensor& x) -> Result<SegmentRun> {
        auto ctx = std::make_shared<Ctx>();
        kept = ctx;
        TE_FL_ASSIGN_OR_RETURN(Tensor y, layer->forward(x, ctx.get()));
        return SegmentRun{y, [&layer, ctx](const Tensor& dy) { return layer->backward(dy, *ctx); }};
      },
      input(0, 0)));
  EXPECT_TRUE(kept.expired());
  (void)take(run.backward(run.y));
}

TEST(Recompute, RefusesAParameterThatWasWritten) {
  for (const char* name : {"layernorm_mlp.layer_norm_weight", "layernorm_mlp.fc2_bias",
                           "self_attention.proj.weight"}) {
    auto layer = make_layer(1, 0);
    auto run =
        take(checkpoint([&](const Tensor& x) { return run_segment(*layer, x); }, input(0, 0)));
    for (const NamedParameter& p : layer->parameters()) {
      if (p.name == name) ++p.parameter->version;
    }
    EXPECT_FAILS(run.backward(run.y), kFailedPrecondition, "has changed since the forward");
  }
}

TEST(Recompute, RefusesAnotherSecondRun) {
  auto one = make_layer(1, 0), other = make_layer(2, 0), dropping = make_layer(1, 0.1f);
  TransformerLayer* now = one.get();
  const Segment segment = [&](const Tensor& x) { return run_segment(*now, x); };
  auto run = take(checkpoint(segment, input(0, 0)));
  now = other.get();
  EXPECT_FAILS(run.backward(run.y), kFailedPrecondition, "the first used another module's");
  now = dropping.get();
  run = take(checkpoint(segment, input(0, 0)));
  now = one.get();
  EXPECT_FAILS(run.backward(run.y), kFailedPrecondition, "the second run");
}

TEST(Recompute, RefusesASecondRunThatDoesLess) {
  auto one = make_layer(1, 0), two = make_layer(2, 0);
  bool less = false;
  const Segment segment = [&](const Tensor& x) -> Result<SegmentRun> {
    TE_FL_ASSIGN_OR_RETURN(SegmentRun run, run_segment(*one, x));
    return less ? run : run_segment(*two, run.y);
  };
  auto run = take(checkpoint(segment, input(0, 0)));
  less = true;
  EXPECT_FAILS(run.backward(run.y), kFailedPrecondition,
               "the second run ends where the first used a parameter");
  // This segment uses no recorded state. Its second run computes less than the first, which only
  // the shape of its result shows.
  const Segment cut = [&](const Tensor& x) -> Result<SegmentRun> {
    TE_FL_ASSIGN_OR_RETURN(const Tensor y, x.slice(1, 0, less ? 1 : 2));
    return SegmentRun{y, [](const Tensor& dy) -> Result<Tensor> { return dy; }};
  };
  less = false;
  run = take(checkpoint(cut, input(0, 0)));
  less = true;
  EXPECT_FAILS(run.backward(run.y), kFailedPrecondition, "f32[2,1,32]");
}

// A framework's own activation checkpointing can use the low-level scopes for recording and
// replaying directly.
TEST(Recompute, ScopesWorkForAnotherCheckpoint) {
  auto linear = take(Linear::create({.in_features = kHidden, .out_features = kHidden, .seed = 4}));
  const Tensor x = tensor({kRows, kHidden}, random_values(kRows * kHidden, 3));
  EXPECT_EQ(recompute_phase(), RecomputePhase::kNone);
  RecomputeRecord record;
  Tensor y;
  {
    const autocast fp8(true, kDelayed);
    const RecomputeScope scope(record, RecomputePhase::kFirst);
    EXPECT_EQ(recompute_phase(), RecomputePhase::kFirst);
    Ctx dropped;
    y = take(linear->forward(x, &dropped));
  }
  const Values scale = values_of(find_state(*linear, "fp8.fwd.scale"));
  const Values history = values_of(find_state(*linear, "fp8.fwd.amax_history"));
  for (int i = 0; i < 2; ++i) {  // a record may be replayed more than once
    Ctx ctx;
    {
      const RecomputeScope scope(record, RecomputePhase::kSecond);
      EXPECT_EQ(recompute_phase(), RecomputePhase::kSecond);
      EXPECT_TRUE(fp8_enabled());
      EXPECT_EQ(values_of(take(linear->forward(x, &ctx))), values_of(y));
    }
    EXPECT_FALSE(fp8_enabled());
    (void)take(linear->backward(y, ctx));
  }
  EXPECT_EQ(values_of(find_state(*linear, "fp8.fwd.scale")), scale);
  EXPECT_EQ(values_of(find_state(*linear, "fp8.fwd.amax_history")), history);
}

}  // namespace
}  // namespace te_fl::nn::testing::recompute_test
