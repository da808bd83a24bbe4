// FP8 state and gradients that a captured graph uses. A change between two launches either changes
// what the next launch reads, or is refused.
#include <functional>

#include "nn_test_util.hpp"
#include "support/expect.hpp"
#include "support/recording_device.hpp"

namespace te_fl::nn::testing::graphed_state_test {
namespace {

using te_fl::testing::RecordingDevice;
constexpr int64_t kRows = 8, kSize = 16;
const DelayedScaling kRecipe{.amax_history_len = 4};

std::string message(const Status& status) { return status.ok() ? "ok" : status.to_string(); }
// One FP8 layer, trained to reproduce its input.
struct Trainer {
  Device device;
  std::unique_ptr<LayerNormMLP> module;
  std::unique_ptr<Adam> adam;
  Tensor x;
  std::unique_ptr<GraphedStep> graphed;

  explicit Trainer(const Device& d) : device(d) {
    module = take(LayerNormMLP::create({.hidden_size = kSize,
                                        .ffn_hidden_size = 2 * kSize,
                                        .device = device,
                                        .seed = 3,
                                        .init_std = 0.2f,
                                        .output_init_std = 0.2f}));
    adam = take(Adam::create(module->parameters(), {.lr = 0.01f, .capturable = true}));
    x = take(Tensor::zeros({kRows, kSize}, DType::kF32, device));
  }
  Result<std::vector<Tensor>> step() {
    TE_FL_RETURN_IF_ERROR(module->zero_grad());
    Ctx ctx;
    autocast fp8(true, kRecipe);
    TE_FL_ASSIGN_OR_RETURN(Tensor y, module->forward(x, &ctx));
    TE_FL_RETURN_IF_ERROR(fp8.exit());
    TE_FL_ASSIGN_OR_RETURN(Tensor dx, module->backward(y, ctx));
    TE_FL_RETURN_IF_ERROR(backward_end());
    TE_FL_RETURN_IF_ERROR(adam->step());
    return std::vector<Tensor>{y, dx};
  }
  void use_graph() {
    graphed = take(GraphedStep::create(device, [this] { return step(); },
                                       {.inputs = {x}, .optimizer = adam.get()}));
  }
  // Runs one step, eagerly or as a graph launch; returns y and dx.
  std::vector<Values> run(uint64_t seed) {
    const Tensor next = tensor({kRows, kSize}, random_values(kRows * kSize, seed));
    std::vector<Tensor> results;
    if (graphed != nullptr) {
      results = take(graphed->run({{next}}));
    } else {
      check(devices::copy(device, x.raw_data(), Device(), next.raw_data(), kRows * kSize * 4));
      results = take(step());
    }
    std::vector<Values> values;
    for (const Tensor& t : results) values.push_back(values_of(take(t.to(Device()))));
    return values;
  }
  std::vector<NamedTensor> saved() const {
    std::vector<NamedTensor> result;
    for (const NamedTensor& t : module->state()) {
      result.push_back({t.name, take(t.tensor.to(Device()))});
    }
    return result;
  }
  Status forward(const DelayedScaling& recipe, Ctx* ctx) {
    autocast fp8(true, recipe);
    TE_FL_RETURN_IF_ERROR(module->forward(x, ctx).status());
    return fp8.exit();
  }
};

class GraphedState : public ::testing::Test {
 protected:
  void TearDown() override {
    check(backward_end());
    ASSERT_OK(devices::remove(recorder.device()));
  }
  // Returns the results of twelve steps, with or without a graph; calls `change` after the seventh.
  std::vector<std::vector<Values>> train(bool graphed,
                                         const std::function<void(Trainer&)>& change) {
    Trainer trainer(recorder.device());
    if (graphed) trainer.use_graph();
    std::vector<std::vector<Values>> results;
    for (uint64_t i = 0; i < 12; ++i) {
      results.push_back(trainer.run(i));
      if (i == 6) change(trainer);
    }
    EXPECT_EQ(graphed, trainer.graphed != nullptr && trainer.graphed->captured());
    return results;
  }
  void expect_same(const std::function<void(Trainer&)>& change) {
    EXPECT_EQ(train(true, change), train(false, change));
  }
  RecordingDevice recorder;
};

// Allocates and overwrites memory that the state may have freed.
void scribble(const Device& device) {
  std::vector<Tensor> others;
  for (int64_t n = 1; n < 2048; n += 3) {
    others.push_back(take(Tensor::empty({n}, DType::kF32, device)));
    check(devices::fill(device, others.back().raw_data(), 0xFF, static_cast<size_t>(4 * n)));
  }
}

TEST_F(GraphedState, LoadingIsSeenByTheNextLaunch) {
  std::vector<NamedTensor> early;
  {
    Trainer other(recorder.device());
    for (uint64_t i = 0; i < 3; ++i) other.run(50 + i);
    early = other.saved();
  }
  expect_same([&](Trainer& t) {
    ASSERT_OK(t.module->load_state(early, "memory"));
    scribble(t.device);
  });
  expect_same([&](Trainer& t) {  // loads the module's own state
    ASSERT_OK(t.module->load_state(t.module->state(), "memory"));
    scribble(t.device);
  });
}

TEST_F(GraphedState, LoadingWithoutFp8StateResetsIt) {
  expect_same([&](Trainer& t) {
    std::vector<NamedTensor> parameters;
    for (const NamedParameter& p : t.module->parameters()) {
      parameters.push_back({p.name, take(p.value().to(Device()))});
    }
    ASSERT_OK(t.module->load_state(parameters, "memory"));
    scribble(t.device);
    for (const NamedTensor& s : t.saved()) {
      if (s.name.ends_with(".scale")) {
        EXPECT_EQ(s.tensor.data<float>()[0], 1) << s.name;
      }
      if (s.name.ends_with(".amax_history")) {
        EXPECT_EQ(s.tensor.data<float>()[1], 0) << s.name;
      }
    }
  });
}

TEST_F(GraphedState, AnEvaluationWithAnotherHistoryLengthChangesTheRunningAmaxAlone) {
  expect_same([&](Trainer& t) {
    const auto before = t.saved();
    ASSERT_OK(t.forward({.amax_history_len = 9}, nullptr));
    const auto after = t.saved();
    ASSERT_EQ(before.size(), after.size());
    for (size_t i = 0; i < after.size(); ++i) {
      const bool history = after[i].name.ends_with(".fwd.amax_history");
      const auto kept = [&](const Tensor& all) {
        return history ? take(all.slice(0, 1, all.size(0))) : all;
      };
      EXPECT_TRUE(same_bits(kept(before[i].tensor), kept(after[i].tensor))) << after[i].name;
    }
    scribble(t.device);
  });
}

TEST_F(GraphedState, AResizeIsRefusedWhileAGraphUsesTheHistory) {
  std::vector<NamedTensor> longer;
  {
    Trainer other(recorder.device());
    Ctx ctx;
    ASSERT_OK(other.forward({.amax_history_len = 9}, &ctx));
    longer = other.saved();
  }
  const auto refusals = [&](Trainer& t) {
    const auto before = t.saved();
    Ctx ctx;
    const Status training = t.forward({.amax_history_len = 9}, &ctx);
    const Status loading = t.module->load_state(longer, "a file");
    const auto after = t.saved();
    for (size_t i = 0; i < after.size(); ++i) {
      EXPECT_TRUE(same_bits(before[i].tensor, after[i].tensor)) << after[i].name;
    }
    return std::pair(training, loading);
  };
  expect_same([&](Trainer& t) {
    if (t.graphed == nullptr) return;
    const auto [training, loading] = refusals(t);
    EXPECT_FAILS(training, kFailedPrecondition,
                 "an amax history of length 9 is requested, but a captured graph");
    EXPECT_HAS(message(loading), "a file: tensor fc1_fp8.fwd.amax_history");
    EXPECT_HAS(message(loading), "a captured graph uses the present one of length 4");
    scribble(t.device);
  });
  // After the graph is destroyed, the change is allowed.
  Trainer trainer(recorder.device());
  trainer.use_graph();
  for (uint64_t i = 0; i < 5; ++i) trainer.run(i);
  trainer.graphed.reset();
  Ctx ctx;
  ASSERT_OK(trainer.forward({.amax_history_len = 9}, &ctx));
  ASSERT_OK(trainer.module->load_state(longer, "a file"));
}

TEST_F(GraphedState, StateThatACaptureWouldMakeIsRefused) {
  Trainer trainer(recorder.device());
  bool capturing = false;
  const auto step = [&]() -> Result<std::vector<Tensor>> {
    capturing = take(devices::is_capturing(trainer.device, devices::current_stream()));
    Ctx ctx;
    if (capturing) TE_FL_RETURN_IF_ERROR(trainer.forward(kRecipe, &ctx));
    return std::vector<Tensor>();
  };
  auto graphed = take(GraphedStep::create(trainer.device, step, {}));
  for (int i = 0; i < 3; ++i) ASSERT_OK(graphed->run().status());
  EXPECT_HAS(message(graphed->run().status()), "Run the step once before the capture");
  EXPECT_TRUE(capturing);
}

TEST_F(GraphedState, AGraphOfSomeoneElseHoldsItToo) {
  Trainer trainer(recorder.device());
  trainer.run(1);
  const Stream stream = take(Stream::create(trainer.device));
  const StreamScope scope(stream.get());
  {
    Ctx ctx;
    ASSERT_OK(trainer.forward(kRecipe, &ctx));  // allocates its scratch on this stream
  }
  Ctx ctx;
  Capture capture = take(Capture::begin(trainer.device, stream.get()));
  ASSERT_OK(trainer.forward(kRecipe, &ctx));
  const Graph graph = take(capture.end());
  ctx.reset();
  EXPECT_HAS(message(trainer.forward({.amax_history_len = 9}, &ctx)), "a captured graph uses");
  ASSERT_OK(stream.synchronize());  // the module's memory is freed on another stream
}

TEST_F(GraphedState, ModulesOfTwoDevicesShareAStep) {
  Trainer trainer(recorder.device());
  auto host = take(Linear::create({.in_features = kSize, .out_features = kSize}));
  Ctx on_host, on_device;
  autocast fp8(true, kRecipe);
  const Tensor y =
      take(host->forward(tensor({kRows, kSize}, random_values(kRows * kSize, 1)), &on_host));
  const Tensor z = take(trainer.module->forward(trainer.x, &on_device));
  ASSERT_OK(fp8.exit());
  (void)take(host->backward(y, on_host));
  (void)take(trainer.module->backward(z, on_device));
  ASSERT_OK(backward_end());
  EXPECT_NE(find_state(*host, "fp8.bwd.scale").data<float>()[0], 1);
}

TEST_F(GraphedState, AGradientClearedOutsideIsOverwrittenByTheNextLaunch) {
  const auto gradients = [&](bool graphed, bool clears) {
    Trainer t(recorder.device());
    const auto microbatch = [&]() -> Result<std::vector<Tensor>> {
      Ctx ctx;
      TE_FL_ASSIGN_OR_RETURN(Tensor y, t.module->forward(t.x, &ctx));
      TE_FL_ASSIGN_OR_RETURN(Tensor dx, t.module->backward(y, ctx));
      return std::vector<Tensor>{dx};
    };
    std::unique_ptr<GraphedStep> graph;
    if (graphed) graph = take(GraphedStep::create(t.device, microbatch, {.inputs = {t.x}}));
    for (uint64_t i = 0; i < 14; ++i) {
      if (i % 2 == 0) {
        for (const NamedParameter& p : t.module->parameters()) {
          if (clears) check(p.parameter->clear_grad());
        }
        if (!clears) check(t.module->zero_grad());
      }
      const Tensor next = tensor({kRows, kSize}, random_values(kRows * kSize, i));
      if (graphed) {
        (void)take(graph->run({{next}}));
      } else {
        check(
            devices::copy(t.device, t.x.raw_data(), Device(), next.raw_data(), kRows * kSize * 4));
        (void)take(microbatch());
      }
    }
    std::vector<Values> result;
    for (const NamedParameter& p : t.module->parameters()) {
      result.push_back(values_of(take(p.grad().to(Device()))));
    }
    return result;
  };
  const auto expected = gradients(false, false);
  EXPECT_EQ(gradients(false, true), expected);
  EXPECT_EQ(gradients(true, false), expected);
  EXPECT_EQ(gradients(true, true), expected);
}

}  // namespace
}  // namespace te_fl::nn::testing::graphed_state_test
