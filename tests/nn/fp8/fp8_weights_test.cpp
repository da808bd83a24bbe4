// Adam may write the FP8 copies of weights itself; training then gives the same bits as without.
#include <optional>

#include "nn_test_util.hpp"
#include "support/expect.hpp"
#include "support/recording_device.hpp"

namespace te_fl::nn::testing::fp8_weights_test {
namespace {

constexpr int64_t kHidden = 32, kRows = 12;
constexpr int64_t kWeights = 4;  // FP8 weights of a TransformerLayer

uint64_t calls(const std::string& op) {
  uint64_t total = 0;
  for (const OpUsage& u : OpManager::instance().usage()) total += u.op == op ? u.calls : 0;
  return total;
}

struct Plan {
  bool write = false;
  DType dtype = DType::kF32;
  DelayedScaling recipe = {.amax_history_len = 3};
  int64_t microbatches = 1;
  bool tells_first = true;   // sets is_first_microbatch
  bool evaluates = false;    // runs an inference before the forward of each later step
  bool step_inside = false;  // steps before the autocast scope ends
  bool capturable = false;
  int64_t spoilt = -1;      // number of the step whose gradient is not finite; -1: none
  int64_t reloaded = -1;    // number of the step after which the state is saved and loaded; -1:
                            // none
  int64_t failing = -1;     // number of the step whose first forward fails and is repeated; -1:
                            // none
  int64_t unquantised = 0;  // number of steps at the end that run without FP8
};

struct Outcome {
  std::vector<Values> outputs, parameters;
  std::map<std::string, Values> scales;  // FP8 scales and amax histories
  uint64_t quantised = 0;
  bool operator==(const Outcome& o) const {
    return outputs == o.outputs && parameters == o.parameters && scales == o.scales;
  }
};

// Trains; returns the outputs of the last steps, the parameters and the FP8 state.
Outcome train(const Plan& plan, int64_t steps = 7) {
  const Context context(3);
  const ContextScope scope(context);
  auto layer = take(TransformerLayer::create({.hidden_size = kHidden,
                                              .ffn_hidden_size = 2 * kHidden,
                                              .num_attention_heads = 2,
                                              .attention = {.layout = Layout::kBSHD},
                                              .param_dtype = plan.dtype,
                                              .activation_dtype = plan.dtype,
                                              .seed = 5,
                                              .init_std = 0.2f}));
  auto adam = take(Adam::create(
      layer->parameters(), {.lr = 0.02f,
                            .weight_decay = 0.1f,
                            .max_grad_norm = 1,
                            .decay = [](std::string_view, const Tensor& v) { return v.rank() > 1; },
                            .capturable = plan.capturable,
                            .write_fp8_weights = plan.write}));
  Outcome run;
  const uint64_t start = calls("quantize");
  for (int64_t i = 0; i < steps; ++i) {
    const bool fp8_on = i < steps - plan.unquantised;
    const auto input = [&](int64_t k) {
      return tensor({2, kRows / 2, kHidden},
                    random_values(kRows * kHidden, static_cast<uint64_t>(100 * i + k)), plan.dtype);
    };
    if (plan.evaluates && i > 0) {  // the first step has no scales yet
      autocast fp8(fp8_on, plan.recipe);
      run.outputs.push_back(values_of(take(layer->forward(input(50), nullptr))));
    }
    check(layer->zero_grad());
    if (plan.failing == i) {
      Ctx good, bad;
      autocast fp8(fp8_on, plan.recipe);
      check(layer->forward(input(60), &good).status());
      EXPECT_FALSE(layer->forward(tensor({1, 1, 1}, {1}), &bad).ok());
    }
    for (int64_t k = 0; k < plan.microbatches; ++k) {
      const bool last = k + 1 == plan.microbatches;
      ForwardOptions options;
      if (plan.tells_first) options.is_first_microbatch = k == 0;
      Ctx ctx;
      autocast fp8(fp8_on, plan.recipe);
      const Tensor y = take(layer->forward(input(k), &ctx, {}, options));
      run.outputs.push_back(values_of(y));
      if (!plan.step_inside || !last) check(fp8.exit());
      (void)take(layer->backward(y, ctx));
      if (!last) continue;
      check(backward_end());
      if (plan.spoilt == i) layer->parameters()[0].grad().data<float>()[0] = INFINITY;
      const Status status = adam->step();
      if (plan.spoilt != i || plan.capturable) check(status);
    }
    if (plan.reloaded == i) {
      std::vector<NamedTensor> saved;
      for (const NamedTensor& t : layer->state()) saved.push_back({t.name, take(t.tensor.clone())});
      check(layer->load_state(saved, "memory"));
    }
  }
  run.quantised = calls("quantize") - start;
  for (const NamedParameter& p : layer->parameters())
    run.parameters.push_back(values_of(p.value()));
  for (const NamedTensor& t : layer->state()) {
    const std::string tail = t.name.substr(t.name.rfind('.') + 1);
    if (tail != "scale" && tail != "amax_history") continue;
    run.scales[t.name] = values_of(t.tensor);
    if (tail == "scale") continue;
    // Ignores row 0, which collects amaxes: an optimizer that writes FP8 copies has put the new
    // weights' amaxes there already.
    const auto slots = static_cast<size_t>(t.tensor.size(1));
    std::fill_n(run.scales[t.name].begin(), slots, 0.0);
  }
  return run;
}

// Trains with and without an Adam that writes the weights' FP8 copies, and compares the results;
// returns the number of quantisations that this saved.
uint64_t compare(Plan plan) {
  plan.write = false;
  const Outcome plain = train(plan);
  plan.write = true;
  const Outcome written = train(plan);
  EXPECT_EQ(plain.outputs, written.outputs);
  EXPECT_EQ(plain.parameters, written.parameters);
  EXPECT_EQ(plain.scales, written.scales);
  EXPECT_NE(plain.outputs.front(), plain.outputs.back());
  return plain.quantised - written.quantised;
}

TEST(Fp8Weights, TrainingIsTheSameBitByBitAndQuantisesNoWeightAfterTheFirstStep) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (AmaxAlgo algo : {AmaxAlgo::kMax, AmaxAlgo::kMostRecent}) {
      for (bool tells_first : {true, false}) {
        const uint64_t saved =
            compare({.dtype = dtype,
                     .recipe = {.amax_history_len = 3, .amax_compute_algo = algo},
                     .tells_first = tells_first});
        EXPECT_EQ(saved, 6u * kWeights);
      }
    }
  }
}

TEST(Fp8Weights, MicrobatchesAfterAScaleUpdateQuantiseUnlessTheyReuseTheFirstOnes) {
  EXPECT_EQ(compare({.microbatches = 3, .tells_first = true}), 6u * kWeights);
  EXPECT_EQ(compare({.microbatches = 3, .tells_first = false}), 6u * kWeights);
}

TEST(Fp8Weights, InferencesReadThemToo) {
  EXPECT_EQ(compare({.evaluates = true}), 2 * 6u * kWeights);
}

TEST(Fp8Weights, AreNotWrittenInsideAnAutocast) { EXPECT_EQ(compare({.step_inside = true}), 0u); }

TEST(Fp8Weights, ASkippedStepLeavesWhatTheForwardWouldMake) {
  EXPECT_EQ(compare({.spoilt = 2}), 5u * kWeights);  // a skipped step writes no FP8 copy
  EXPECT_EQ(compare({.capturable = true, .spoilt = 2}), 6u * kWeights);
}

TEST(Fp8Weights, AForwardThatFailsLeavesTheAmaxesOfTheNextOne) {
  EXPECT_EQ(compare({.failing = 3}), 6u * kWeights);
}

TEST(Fp8Weights, AreNotUsedAfterLoadingOrWithoutFp8) {
  EXPECT_EQ(compare({.reloaded = 3}), 5u * kWeights);
  EXPECT_EQ(compare({.unquantised = 2}), 4u * kWeights);
}

TEST(Fp8Weights, OtherRecipesQuantiseAsEver) {
  for (const Recipe& recipe : {Recipe(Float8CurrentScaling{}), Recipe(Float8BlockScaling{})}) {
    std::vector<Values> weights[2];
    for (bool write : {false, true}) {
      auto linear = take(Linear::create({.in_features = 128, .out_features = 128, .seed = 2}));
      auto adam = take(Adam::create(linear->parameters(), {.write_fp8_weights = write}));
      for (uint64_t i = 0; i < 3; ++i) {
        const Tensor x = tensor({128, 128}, random_values(128 * 128, i));
        Ctx ctx;
        autocast fp8(true, recipe);
        const Tensor y = take(linear->forward(x, &ctx));
        check(fp8.exit());
        check(linear->zero_grad());
        (void)take(linear->backward(y, ctx));
        check(adam->step());
      }
      weights[write].push_back(values_of(linear->parameters()[0].value()));
    }
    EXPECT_EQ(weights[0], weights[1]);
  }
}

TEST(Fp8Weights, ABackwardAfterTheStepReadsTheCopyOfItsForward) {
  const auto gradient = [](bool write) {
    auto linear = take(Linear::create({.in_features = 16, .out_features = 16, .seed = 2}));
    auto adam = take(Adam::create(linear->parameters(), {.write_fp8_weights = write}));
    Tensor dx;
    for (uint64_t i = 0; i < 2; ++i) {
      const Tensor x = tensor({16, 16}, random_values(256, i));
      Ctx first, late;
      autocast fp8(true, DelayedScaling{.amax_history_len = 2});
      const Tensor y = take(linear->forward(x, &first));
      (void)take(linear->forward(x, &late));
      check(fp8.exit());
      (void)take(linear->backward(y, first));
      check(adam->step());
      dx = take(linear->backward(y, late));
    }
    return values_of(dx);
  };
  EXPECT_EQ(gradient(false), gradient(true));
}

TEST(Fp8Weights, NoGraphHoldsSuchAStep) {
  te_fl::testing::RecordingDevice recorder;
  {
    auto linear =
        take(Linear::create({.in_features = 4, .out_features = 4, .device = recorder.device()}));
    auto adam =
        take(Adam::create(linear->parameters(), {.capturable = true, .write_fp8_weights = true}));
    const auto step = [&]() -> Result<std::vector<Tensor>> {
      TE_FL_RETURN_IF_ERROR(adam->step());
      return std::vector<Tensor>{};
    };
    auto graphed = take(GraphedStep::create(recorder.device(), step, {.optimizer = adam.get()}));
    Status status;
    for (int i = 0; i < 4 && status; ++i) status = graphed->run().status();
    EXPECT_FAILS(status, kFailedPrecondition, "write_fp8_weights = false");
  }
  ASSERT_OK(devices::remove(recorder.device()));
}

}  // namespace
}  // namespace te_fl::nn::testing::fp8_weights_test
