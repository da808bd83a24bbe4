// Training steps in captured graphs on a RecordingDevice give the same bits as eager steps.
#include <optional>

#include "graphed_step_fixture.hpp"
#include "support/sanitizers.hpp"

namespace te_fl::nn::testing::graphed_step_test {
namespace {

constexpr int64_t kHidden = 32, kSequence = 6, kBatch = 2, kVocabulary = 11;
// The fourth step captures the graph, and a history of four amaxes wraps around after it. The
// address sanitizer makes a step twenty times as slow, so few launches follow there.
constexpr int64_t kSteps = TE_FL_ASAN ? 7 : 20, kMicrobatchedSteps = TE_FL_ASAN ? 3 : 12;

// kParts: split QKV, norms of q and k, drop path, residuals after norms. kMovedParts: some parts
// have been moved to other memory after their allocation.
enum class Kind { kPlain, kParts, kMovedParts };

// A model from tokens to a loss: embedding, one TransformerLayer with dropout, output projection.
struct Model : Module {
  std::unique_ptr<Embedding> tokens;
  std::unique_ptr<TransformerLayer> layer;
  std::unique_ptr<Linear> head;
  CrossEntropyLoss loss;
  std::vector<Tensor> moved;
  bool recomputes = false;  // recomputes the layer in the backward

  Model(Device device, Kind kind) {
    tokens = take(Embedding::create(
        {.num_embeddings = kVocabulary, .hidden_size = kHidden, .device = device, .seed = 3}));
    TransformerLayerOptions options{
        .hidden_size = kHidden,
        .ffn_hidden_size = 2 * kHidden,
        .num_attention_heads = 2,
        .hidden_dropout = 0.2f,
        .attention = {.layout = Layout::kBSHD, .attention_dropout = 0.3f},
        .device = device,
        .seed = 5,
        .init_std = 0.2f};
    if (kind != Kind::kPlain) {
      options.fuse_qkv_params = false;
      options.qk_norm = QkNorm::kRMSNorm;
      options.drop_path_rate = 0.2f;
      options.apply_residual_connection_post_layernorm = true;
    }
    layer = take(TransformerLayer::create(options));
    for (const NamedParameter& p : layer->parameters()) {
      if (kind != Kind::kMovedParts || p.name.find(".key_") == std::string::npos) continue;
      moved.push_back(take(p.value().clone()));
      testing::check(p.parameter->borrow(moved.back(), 0));
    }
    head = take(Linear::create({.in_features = kHidden,
                                .out_features = kVocabulary,
                                .device = device,
                                .seed = 7,
                                .init_std = 0.2f,
                                .high_precision = true}));
    register_module("tokens", *tokens);
    register_module("layer", *layer);
    register_module("head", *head);
  }

  // Runs forward and backward of one microbatch; returns its loss, F32 [1].
  Result<Tensor> microbatch(const Tensor& inputs, const Tensor& targets,
                            const std::optional<Recipe>& recipe, const ForwardOptions& options) {
    Ctx a, c, d;
    SegmentRun run;  // run of the layer
    const Segment piece = [&](const Tensor& in) {
      return run_segment(*layer, in, AttentionInputs{}, options);
    };
    Tensor value, grad;
    {
      autocast fp8(recipe.has_value(), recipe.value_or(DelayedScaling{}));
      TE_FL_ASSIGN_OR_RETURN(Tensor x, tokens->forward(inputs, &a));
      TE_FL_ASSIGN_OR_RETURN(run, recomputes ? checkpoint(piece, x) : piece(x));
      TE_FL_ASSIGN_OR_RETURN(x, head->forward(run.y, &c, options));
      TE_FL_ASSIGN_OR_RETURN(value, loss.forward(x, targets, &d));
      TE_FL_RETURN_IF_ERROR(fp8.exit());
    }
    TE_FL_ASSIGN_OR_RETURN(grad, loss.backward(d));
    TE_FL_ASSIGN_OR_RETURN(grad, head->backward(grad, c));
    TE_FL_ASSIGN_OR_RETURN(grad, run.backward(grad));
    TE_FL_RETURN_IF_ERROR(tokens->backward(grad, a));
    return value;
  }
};

Tensor token_batch(uint64_t seed) {
  Random random(seed);
  std::vector<int32_t> values(kBatch * kSequence);
  for (int32_t& v : values) v = static_cast<int32_t>(random.below(kVocabulary));
  return take(int_tensor(values).view({kBatch, kSequence}));
}

struct Outcome {
  std::vector<float> losses;
  std::vector<Values> parameters;
  RandomPosition random;
  int64_t steps = 0;
};

struct Plan {
  bool graphed = false;
  std::optional<Recipe> recipe = std::nullopt;
  int64_t microbatches = 2;
  int64_t steps = kSteps;
  bool sgd = false;
  float max_grad_norm = 0.5f;
  Kind kind = Kind::kPlain;
  bool recomputes = false;
  bool codes = false;  // the layer's weights exist only as FP8 codes
};

std::unique_ptr<Optimizer> make_optimizer(const Plan& s, Model& model) {
  if (s.sgd) {
    return take(SGD::create(
        model.parameters(),
        {.lr = 0.05f, .momentum = 0.9f, .max_grad_norm = s.max_grad_norm, .capturable = true}));
  }
  return take(
      Adam::create(model.parameters(),
                   {.weight_decay = 0.1f, .max_grad_norm = s.max_grad_norm, .capturable = true}));
}

// Trains the same way eagerly or in a graph.
Outcome train(const Device& device, const Plan& s) {
  Outcome run;
  std::optional<quantized_model_init> fp8_weights;
  if (s.codes) fp8_weights.emplace(QuantizedModelInitOptions{.recipe = *s.recipe});
  Model model(device, s.kind);
  fp8_weights.reset();
  model.recomputes = s.recomputes;
  std::unique_ptr<Optimizer> optimizer = make_optimizer(s, model);
  const Context context(41);
  const ContextScope scope(context);
  std::vector<Tensor> inputs;
  for (int64_t i = 0; i < 2 * s.microbatches; ++i) {
    inputs.push_back(take(Tensor::zeros({kBatch, kSequence}, DType::kI32, device)));
  }
  const auto step = [&]() -> Result<std::vector<Tensor>> {
    std::vector<Tensor> losses;
    TE_FL_RETURN_IF_ERROR(model.zero_grad());
    for (int64_t i = 0; i < s.microbatches; ++i) {
      const auto at = static_cast<size_t>(2 * i);
      TE_FL_ASSIGN_OR_RETURN(Tensor loss, model.microbatch(inputs[at], inputs[at + 1], s.recipe,
                                                           {.is_first_microbatch = i == 0}));
      losses.push_back(std::move(loss));
    }
    TE_FL_RETURN_IF_ERROR(backward_end());
    TE_FL_RETURN_IF_ERROR(optimizer->step());
    return losses;
  };
  auto graphed = s.graphed ? take(GraphedStep::create(
                                 device, step, {.inputs = inputs, .optimizer = optimizer.get()}))
                           : nullptr;
  for (int64_t i = 0; i < s.steps; ++i) {
    optimizer->set_lr(1e-2f / static_cast<float>(i + 1));
    std::vector<Tensor> next;
    for (size_t k = 0; k < inputs.size(); ++k) {
      next.push_back(token_batch(static_cast<uint64_t>(i) * 100 + k));
    }
    std::vector<Tensor> losses;
    if (graphed != nullptr) {
      losses = take(graphed->run(next));
      EXPECT_EQ(graphed->captured(), i >= 3) << i;
    } else {
      for (size_t k = 0; k < inputs.size(); ++k) {
        check(devices::copy(device, inputs[k].raw_data(), Device(), next[k].raw_data(),
                            kBatch * kSequence * 4));
      }
      losses = take(step());
    }
    for (const Tensor& loss : losses) run.losses.push_back(take(item(loss)));
  }
  for (const NamedParameter& p : model.parameters()) {
    run.parameters.push_back(values_of(take(take(p.parameter->read(DType::kF32)).to(Device()))));
  }
  run.random = Context::current().random();
  run.steps = optimizer->steps();
  return run;
}

TEST_F(GraphedSteps, GiveTheBitsOfEagerSteps) {
  for (const std::optional<Recipe>& recipe :
       {std::optional<Recipe>(), std::optional<Recipe>(DelayedScaling{.amax_history_len = 4}),
        std::optional<Recipe>(Float8CurrentScaling{})}) {
    const std::pair<Kind, bool> plans[] = {{Kind::kPlain, false},
                                           {Kind::kPlain, true},
                                           {Kind::kParts, false},
                                           {Kind::kMovedParts, true}};
    for (const auto& plan : plans) {
      Plan setup{.recipe = recipe, .sgd = plan.second, .kind = plan.first};
      const Outcome eager = train(recorder.device(), setup);
      const int64_t launched = recorder.launches();
      setup.graphed = true;
      const Outcome graphed = train(recorder.device(), setup);
      EXPECT_EQ(recorder.launches() - launched, setup.steps - 3);
      EXPECT_EQ(eager.losses, graphed.losses);
      EXPECT_EQ(eager.parameters, graphed.parameters);
      EXPECT_EQ(eager.random, graphed.random);
      EXPECT_EQ(graphed.steps, setup.steps);
      EXPECT_NE(graphed.losses[kSteps], graphed.losses[kSteps + 2]) << "nothing is learned";
    }
  }
}

// A captured step that recomputes the layer in its backward gives the same bits as eager steps
// without recomputation.
TEST_F(GraphedSteps, RecomputeSegments) {
  for (const std::optional<Recipe>& recipe :
       {std::optional<Recipe>(), std::optional<Recipe>(DelayedScaling{.amax_history_len = 4}),
        std::optional<Recipe>(Float8CurrentScaling{})}) {
    const Outcome eager = train(recorder.device(), {.recipe = recipe, .steps = 10});
    const Outcome graphed = train(
        recorder.device(), {.graphed = true, .recipe = recipe, .steps = 10, .recomputes = true});
    EXPECT_EQ(eager.losses, graphed.losses);
    EXPECT_EQ(eager.parameters, graphed.parameters);
    EXPECT_EQ(eager.random, graphed.random);
  }
}

TEST_F(GraphedSteps, WriteWeightsThatAreCodesAlone) {
  for (const Recipe& recipe :
       {Recipe(DelayedScaling{.amax_history_len = 4}), Recipe(Float8CurrentScaling{})}) {
    for (bool sgd : {false, true}) {
      Plan plan{.recipe = recipe, .steps = 10, .sgd = sgd, .codes = true};
      const Outcome eager = train(recorder.device(), plan);
      plan.graphed = true;
      const Outcome graphed = train(recorder.device(), plan);
      EXPECT_EQ(eager.losses, graphed.losses);
      EXPECT_EQ(eager.parameters, graphed.parameters);
      EXPECT_NE(graphed.losses[0], graphed.losses[10]) << "nothing is learned";
    }
  }
}

enum class Microbatches { kEager, kGraphed, kMixed };

// Trains in steps of three microbatches, each of which is one launch of the same graph. With kMixed
// the second microbatch runs eagerly.
Outcome train_by_microbatches(const Device& device, const Recipe& recipe, Microbatches how,
                              Kind kind = Kind::kPlain) {
  Outcome run;
  Model model(device, kind);
  std::unique_ptr<Optimizer> optimizer = make_optimizer({}, model);
  const Context context(41);
  const ContextScope scope(context);
  const auto batch = [&] { return take(Tensor::zeros({kBatch, kSequence}, DType::kI32, device)); };
  const Tensor inputs = batch(), targets = batch();
  const Tensor reuse = take(Tensor::zeros({1}, DType::kF32, device));
  const auto microbatch = [&](const ForwardOptions& options) -> Result<std::vector<Tensor>> {
    TE_FL_ASSIGN_OR_RETURN(Tensor loss, model.microbatch(inputs, targets, recipe, options));
    TE_FL_RETURN_IF_ERROR(backward_end());
    return std::vector<Tensor>{loss};
  };
  const auto graph =
      take(GraphedStep::create(device, [&] { return microbatch({.reuse_weights = reuse}); },
                               {.inputs = {inputs, targets, reuse}}));
  for (uint64_t i = 0; i < kMicrobatchedSteps; ++i) {
    check(model.zero_grad());
    for (uint64_t k = 0; k < 3; ++k) {
      const Tensor next[] = {token_batch(100 * i + 2 * k), token_batch(100 * i + 2 * k + 1),
                             tensor({1}, {k == 0 ? 0.0 : 1.0})};
      std::vector<Tensor> losses;
      if (how == Microbatches::kGraphed || (how == Microbatches::kMixed && k != 1)) {
        losses = take(graph->run(next));
      } else {
        const Tensor to[] = {inputs, targets, reuse};
        for (size_t n = 0; n < 3; ++n) {
          check(devices::copy(device, to[n].raw_data(), Device(), next[n].raw_data(),
                              static_cast<size_t>(4 * next[n].numel())));
        }
        losses = take(microbatch(how == Microbatches::kEager
                                     ? ForwardOptions{.is_first_microbatch = k == 0}
                                     : ForwardOptions{.reuse_weights = reuse}));
      }
      run.losses.push_back(take(item(losses[0])));
    }
    check(optimizer->step());
  }
  EXPECT_EQ(graph->captured(), how != Microbatches::kEager);
  for (const NamedParameter& p : model.parameters()) {
    run.parameters.push_back(values_of(take(p.value().to(Device()))));
  }
  return run;
}

TEST_F(GraphedSteps, OneGraphRunsEveryMicrobatch) {
  const std::vector<Recipe> recipes = {DelayedScaling{.amax_history_len = 4},
                                       Float8CurrentScaling{}};
  for (const Recipe& recipe : recipes) {
    for (const Kind kind : {Kind::kPlain, Kind::kParts, Kind::kMovedParts}) {
      const Outcome eager =
          train_by_microbatches(recorder.device(), recipe, Microbatches::kEager, kind);
      for (Microbatches how : {Microbatches::kGraphed, Microbatches::kMixed}) {
        // Under delayed scaling, the eager microbatch of kMixed would quantise under another scale,
        // as the host does not know what a launch has quantised.
        if (how == Microbatches::kMixed && std::holds_alternative<DelayedScaling>(recipe)) continue;
        const Outcome graphed = train_by_microbatches(recorder.device(), recipe, how, kind);
        EXPECT_EQ(eager.losses, graphed.losses);
        EXPECT_EQ(eager.parameters, graphed.parameters);
      }
      EXPECT_NE(eager.losses.front(), eager.losses.back());
    }
  }
}

TEST_F(GraphedSteps, LaunchesRunTheOpsOfTheStepAndNothingElse) {
  const auto eager_ops = [&](int64_t steps) {
    const int64_t before = recorder.ops_run();
    (void)train(recorder.device(), {.steps = steps});
    return recorder.ops_run() - before;
  };
  const int64_t of_a_step = (eager_ops(5) - eager_ops(3)) / 2;
  EXPECT_EQ(recorder.ops_recorded(), 0);
  const int64_t eager = eager_ops(8), before = recorder.ops_run();
  (void)train(recorder.device(), {.graphed = true, .steps = 8});
  EXPECT_EQ(recorder.ops_recorded(), of_a_step) << "captured once, with all its ops";
  EXPECT_EQ(recorder.ops_run() - before, eager);
}

// Runs these tests on a real device. GRAPHED_STEP_DEVICE names it, and TE_FL_PLUGIN_MODULES its
// plugin. tools/gpu_check.sh runs these tests.
class GraphedStepsOnADevice : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* name = std::getenv("GRAPHED_STEP_DEVICE");
    if (name == nullptr) GTEST_SKIP() << "GRAPHED_STEP_DEVICE is not set";
    OpManager::instance();
    device = take(parse_device(name));
  }
  Device device;
};

TEST_F(GraphedStepsOnADevice, GiveTheBitsOfEagerSteps) {
  for (const std::optional<Recipe>& recipe :
       {std::optional<Recipe>(), std::optional<Recipe>(DelayedScaling{.amax_history_len = 4}),
        // With dropout and a head size of 16, no library has an FP8 attention kernel.
        std::optional<Recipe>(DelayedScaling{.amax_history_len = 4, .fp8_dpa = true}),
        std::optional<Recipe>(Float8CurrentScaling{}),
        std::optional<Recipe>(Float8BlockScaling{})}) {
    for (bool sgd : {false, true}) {
      Plan plan{.recipe = recipe, .sgd = sgd};
      const Outcome eager = train(device, plan);
      plan.graphed = true;
      const Outcome graphed = train(device, plan);
      EXPECT_EQ(eager.losses, graphed.losses);
      EXPECT_EQ(eager.parameters, graphed.parameters);
      EXPECT_EQ(eager.random, graphed.random);
    }
  }
}

TEST_F(GraphedStepsOnADevice, OneGraphRunsEveryMicrobatch) {
  for (const Recipe& recipe : std::vector<Recipe>{DelayedScaling{.amax_history_len = 4},
                                                  Float8CurrentScaling{}, Float8BlockScaling{}}) {
    const Outcome eager = train_by_microbatches(device, recipe, Microbatches::kEager);
    const Outcome graphed = train_by_microbatches(device, recipe, Microbatches::kGraphed);
    EXPECT_EQ(eager.losses, graphed.losses);
    EXPECT_EQ(eager.parameters, graphed.parameters);
  }
}

TEST_F(GraphedStepsOnADevice, MemoryOfGraphsComesBack) {
  uint64_t least = 0;
  for (int i = 0; i < 12; ++i) {
    (void)train(device, {.graphed = true, .steps = 5});
    ASSERT_OK(devices::synchronize(device));
    const uint64_t free = take(devices::properties(device)).free_memory;
    if (i == 3) least = free;
    EXPECT_GE(free + (uint64_t{8} << 20), least) << i;
  }
}

TEST_F(GraphedStepsOnADevice, MemoryOfAGraphIsNotShared) {
  Small small(device);
  auto graphed = take(GraphedStep::create(device, [&] { return small.step(); },
                                          {.inputs = {small.x}, .optimizer = small.adam.get()}));
  const Tensor x = tensor({2, 4}, random_values(8, 1));
  small.adam->set_lr(0);  // so every step gives the same output
  Tensor y;
  Values expected;
  for (int i = 0; i < 6; ++i) {
    y = take(graphed->run({{x}}))[0];
    if (i == 2) expected = values_of(take(y.to(Device())));
    // Overwrites any memory that the graph should own but has freed.
    for (int64_t n = 1; n < 4096; n *= 2) {
      const Tensor other = take(Tensor::empty({n}, DType::kU8, device));
      check(devices::fill(device, other.raw_data(), 0xFF, static_cast<size_t>(n)));
      const StreamScope scope(graphed->stream());
      const Tensor same_stream = take(Tensor::empty({n}, DType::kU8, device));
      check(devices::fill(device, same_stream.raw_data(), 0xFF, static_cast<size_t>(n),
                          graphed->stream()));
    }
    if (i < 2) continue;
    EXPECT_EQ(values_of(take(y.to(Device()))), expected) << i;
  }
  graphed.reset();
  EXPECT_EQ(values_of(take(y.to(Device()))), expected) << "after the graph";
}

TEST(CapturableOptimizer, GivesTheBitsOfTheOtherOnTheHost) {
  for (bool sgd : {false, true}) {
    for (float clip : {0.0f, 0.1f, 1e9f}) {
      std::vector<Values> results;
      for (bool capturable : {false, true}) {
        auto linear = take(Linear::create({.in_features = 3, .out_features = 4, .seed = 2}));
        const auto parameters = linear->parameters();
        std::unique_ptr<Optimizer> optimizer;
        if (sgd) {
          optimizer = take(SGD::create(
              parameters, {.momentum = 0.9f, .max_grad_norm = clip, .capturable = capturable}));
        } else {
          optimizer = take(Adam::create(
              parameters, {.weight_decay = 0.1f, .max_grad_norm = clip, .capturable = capturable}));
        }
        EXPECT_EQ(optimizer->capturable(), capturable);
        for (uint64_t step = 1; step <= 5; ++step) {
          for (const NamedParameter& p : parameters) {
            set_values(made_grad(p), random_values(p.value().numel(), step * 10 + p.name.size()));
          }
          optimizer->set_lr(0.1f / static_cast<float>(step));
          ASSERT_OK(optimizer->step());
        }
        EXPECT_EQ(optimizer->steps(), 5);
        EXPECT_EQ(optimizer->grad_norm().defined(), capturable && clip > 0);
        for (const NamedParameter& p : parameters) results.push_back(values_of(p.value()));
      }
      ASSERT_EQ(results.size(), 4u);
      EXPECT_EQ(results[0], results[2]);
      EXPECT_EQ(results[1], results[3]);
    }
  }
}

}  // namespace
}  // namespace te_fl::nn::testing::graphed_step_test
