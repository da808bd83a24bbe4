// Allowed and refused uses of a captured step: steps in between, reused
// weights, mistakes of the caller.
#include "graphed_step_fixture.hpp"

namespace te_fl::nn::testing::graphed_step_rules_test {
namespace {

TEST_F(GraphedSteps, GradientsThatAreNotFiniteChangeNothing) {
  Small small(recorder.device());
  auto graphed = take(GraphedStep::create(recorder.device(), [&] { return small.step(); },
                                          {.inputs = {small.x}, .optimizer = small.adam.get()}));
  const Tensor good = tensor({2, 4}, random_values(8, 1));
  const Tensor bad = tensor({2, 4}, {1, 2, INFINITY, 4, 5, 6, 7, 8});
  for (int i = 0; i < 5; ++i) ASSERT_OK(graphed->run({{good}}).status());
  const auto weight = [&] {
    return values_of(take(small.linear->parameters()[0].value().to(Device())));
  };
  EXPECT_GT(take(item(small.adam->grad_norm())), 0);
  const Values before = weight();
  ASSERT_OK(graphed->run({{bad}}).status());
  EXPECT_EQ(weight(), before);
  EXPECT_FALSE(std::isfinite(take(item(small.adam->grad_norm()))));
  ASSERT_OK(graphed->run({{good}}).status());
  EXPECT_NE(weight(), before) << "the flag is cleared";
  EXPECT_EQ(small.adam->steps(), 7);
}

TEST_F(GraphedSteps, EagerStepsMayComeBetween) {
  Small one(recorder.device()), two(recorder.device());
  auto graphed = take(GraphedStep::create(recorder.device(), [&] { return one.step(); },
                                          {.inputs = {one.x}, .optimizer = one.adam.get()}));
  for (uint64_t i = 0; i < 9; ++i) {
    const Tensor x = tensor({2, 4}, random_values(8, i));
    if (i == 5 || i == 6) {
      one.x = take(x.to(recorder.device()));
      ASSERT_OK(one.step().status());
    } else {
      ASSERT_OK(graphed->run({{x}}).status());
    }
    two.x = take(x.to(recorder.device()));
    ASSERT_OK(two.step().status());
  }
  EXPECT_EQ(values_of(take(one.linear->parameters()[0].value().to(Device()))),
            values_of(take(two.linear->parameters()[0].value().to(Device()))));
}

TEST_F(GraphedSteps, WeightsAreReusedByAValueOnTheDevice) {
  const Device device = recorder.device();
  Small small(device);
  small.linear =
      take(Linear::create({.in_features = 4, .out_features = 4, .bias = false, .device = device}));
  small.adam = take(Adam::create(small.linear->parameters(), {}));
  const Tensor reuse = take(Tensor::zeros({1}, DType::kF32, device));
  const Tensor x = tensor({2, 4}, random_values(8, 1)), no = tensor({1}, {0}),
               yes = tensor({1}, {1});
  auto graphed = take(GraphedStep::create(
      device,
      [&]() -> Result<std::vector<Tensor>> {
        autocast fp8(true, Float8CurrentScaling{});
        TE_FL_ASSIGN_OR_RETURN(Tensor y,
                               small.linear->forward(small.x, nullptr, {.reuse_weights = reuse}));
        TE_FL_RETURN_IF_ERROR(fp8.exit());
        return std::vector<Tensor>{y};
      },
      {.inputs = {small.x, reuse}}));
  const auto run = [&](const Tensor& flag) {
    return values_of(take(take(graphed->run({{x, flag}}))[0].to(Device())));
  };
  const auto learn = [&] { ASSERT_OK(small.step().status()); };
  small.x = take(x.to(device));
  const Values first = run(no);
  EXPECT_EQ(run(yes), first);
  learn();
  const Values second = run(yes);  // eager: the host sees that the weights have changed
  EXPECT_NE(second, first);
  EXPECT_EQ(run(no), second);
  ASSERT_TRUE(graphed->captured());
  learn();
  EXPECT_EQ(run(yes), second);
  const Values third = run(no);
  EXPECT_NE(third, second);
  learn();
  EXPECT_EQ(run(yes), third);
  // An eager step with another recipe caches its quantised weights in separate memory; the graph's
  // memory stays valid.
  {
    autocast fp8(true, Float8BlockScaling{});
    ASSERT_OK(small.linear->forward(small.x, nullptr, {.reuse_weights = reuse}).status());
  }
  EXPECT_EQ(run(yes), third);
}

TEST_F(GraphedSteps, MistakesWithReusedWeightsAreReported) {
  const Device device = recorder.device();
  Small small(device);
  const Tensor flag = take(Tensor::zeros({1}, DType::kF32, device));
  const auto forward = [&](const ForwardOptions& options) {
    autocast fp8(true, Float8CurrentScaling{});
    return small.linear->forward(small.x, nullptr, options).status();
  };
  EXPECT_FAILS(forward({.is_first_microbatch = true, .reuse_weights = flag}), kInvalidArgument,
               "is_first_microbatch and reuse_weights are both set");
  EXPECT_FAILS(forward({.reuse_weights = tensor({1}, {0})}), kInvalidArgument,
               "reuse_weights is f32[1] cpu; it must be f32[1] on ext:recorder:0");
  EXPECT_FAILS(forward({.reuse_weights = take(Tensor::zeros({2}, DType::kF32, device))}),
               kInvalidArgument, "reuse_weights is f32[2]");
  auto graphed = take(GraphedStep::create(
      device,
      [&]() -> Result<std::vector<Tensor>> {
        const bool capturing = take(devices::is_capturing(device, devices::current_stream()));
        autocast fp8(true, Float8CurrentScaling{});
        TE_FL_ASSIGN_OR_RETURN(
            Tensor y, small.linear->forward(small.x, nullptr,
                                            {.reuse_weights = capturing ? flag : Tensor()}));
        TE_FL_RETURN_IF_ERROR(fp8.exit());
        return std::vector<Tensor>{y};
      },
      {.inputs = {small.x}}));
  Status status;
  for (int i = 0; i < 4; ++i) status = graphed->run({}).status();
  EXPECT_FAILS(status, kFailedPrecondition, "run it once before the capture");
}

TEST_F(GraphedSteps, OutputsOutliveTheGraph) {
  Tensor kept;
  {
    Small small(recorder.device());
    auto graphed = take(GraphedStep::create(recorder.device(), [&] { return small.step(); },
                                            {.inputs = {small.x}, .optimizer = small.adam.get()}));
    for (int i = 0; i < 5; ++i) {
      kept = take(graphed->run({{tensor({2, 4}, random_values(8, 9))}}))[0];
    }
  }
  const Values values = values_of(take(kept.to(Device())));
  // The values must not be the pattern that fills freed memory.
  for (double v : values) EXPECT_LT(std::fabs(v), 1e3);
}

TEST_F(GraphedSteps, MistakesAreReportedBeforeAnythingIsLaunched) {
  const Device device = recorder.device();
  const auto nothing = []() -> Result<std::vector<Tensor>> { return std::vector<Tensor>(); };
  EXPECT_FAILS(GraphedStep::create(Device(), nothing, {}).status(), kUnsupported,
               "cpu cannot capture graphs (its begin_capture is NULL)");
  EXPECT_FAILS(GraphedStep::create(device, nothing, {.warmup = 1}).status(), kInvalidArgument,
               "warmup is 1; it must be at least 2");
  Small plain(device, false), small(device);
  EXPECT_FAILS(GraphedStep::create(device, nothing, {.optimizer = plain.adam.get()}).status(),
               kInvalidArgument, "capturable = true");
  EXPECT_FAILS(plain.adam->advance(), kFailedPrecondition, "capturable = true");
  const Tensor host = tensor({2, 4}, random_values(8, 1));
  EXPECT_FAILS(GraphedStep::create(device, nothing, {.inputs = {host}}).status(), kInvalidArgument,
               "static input 0 is f32[2,4] cpu");

  auto graphed = take(GraphedStep::create(device, [&] { return small.step(); },
                                          {.inputs = {small.x}, .optimizer = small.adam.get()}));
  EXPECT_FAILS(graphed->run({{host, host}}).status(), kInvalidArgument,
               "2 inputs, but the step has 1");
  EXPECT_FAILS(graphed->run({{tensor({3, 4}, random_values(12, 1))}}).status(), kInvalidArgument,
               "input 0 is f32[3,4] cpu; the step was made for f32[2,4] ext:recorder:0");
  EXPECT_EQ(small.adam->steps(), 0);
}

TEST_F(GraphedSteps, WhatCannotBeCapturedIsNamedAndMayBeMended) {
  const Device device = recorder.device();
  Small small(device), plain(device, false);
  const Tensor host = tensor({2, 4}, random_values(8, 1));
  enum { kItem, kUpload, kHostOptimizer, kNoUpdate, kFine } fault = kItem;
  const auto step = [&]() -> Result<std::vector<Tensor>> {
    TE_FL_ASSIGN_OR_RETURN(std::vector<Tensor> result, small.step());
    const bool capturing = take(devices::is_capturing(device, devices::current_stream()));
    if (!capturing) return result;
    if (fault == kItem) TE_FL_RETURN_IF_ERROR(item(small.adam->grad_norm()).status());
    if (fault == kUpload) TE_FL_RETURN_IF_ERROR(host.to(device).status());
    if (fault == kHostOptimizer) TE_FL_RETURN_IF_ERROR(plain.adam->step());
    if (fault == kNoUpdate) {
      Ctx ctx;
      autocast fp8(true, DelayedScaling{});
      TE_FL_ASSIGN_OR_RETURN(Tensor y, small.linear->forward(small.x, &ctx));
      TE_FL_RETURN_IF_ERROR(small.linear->backward(y, ctx).status());
    }
    return result;
  };
  {  // creates FP8 state and op plans before the capture
    Ctx ctx;
    autocast fp8(true, DelayedScaling{});
    const Tensor y = take(small.linear->forward(small.x, &ctx));
    ASSERT_OK(small.linear->backward(y, ctx).status());
  }
  ASSERT_OK(backward_end());
  auto graphed =
      take(GraphedStep::create(device, step, {.inputs = {small.x}, .optimizer = small.adam.get()}));
  for (int i = 0; i < 3; ++i) ASSERT_OK(graphed->run().status());
  const int64_t launches = recorder.launches();
  EXPECT_FAILS(graphed->run().status(), kFailedPrecondition,
               "a copy of 4 bytes to host memory cannot be captured");
  fault = kUpload;
  EXPECT_FAILS(graphed->run().status(), kFailedPrecondition,
               "a copy of 32 bytes from host memory cannot be captured on ext:recorder:0");
  fault = kHostOptimizer;
  EXPECT_FAILS(graphed->run().status(), kFailedPrecondition, "capturable = true");
  fault = kNoUpdate;
  EXPECT_FAILS(graphed->run().status(), kFailedPrecondition, "call backward_end() inside the step");
  fault = kFine;
  {
    autocast fp8(false);
    EXPECT_FAILS(graphed->run().status(), kFailedPrecondition, "open the autocast inside the step");
  }
  EXPECT_EQ(recorder.launches(), launches);
  EXPECT_EQ(small.adam->steps(), 3) << "a failed capture counts nothing";
  ASSERT_OK(graphed->run().status());
  EXPECT_EQ(recorder.launches(), launches + 1);
  EXPECT_EQ(small.adam->steps(), 4);
}

TEST_F(GraphedSteps, AnOpMayHaveItsFirstScratchInTheCapture) {
  const Device device = recorder.device();
  const Tensor x = take(Tensor::zeros({4, 4}, DType::kF32, device));
  ASSERT_OK(devices::synchronize(device));
  // This step runs its op on the stream for the first time during the capture.
  const auto step = [&]() -> Result<std::vector<Tensor>> {
    if (!take(devices::is_capturing(device, devices::current_stream()))) {
      return std::vector<Tensor>();
    }
    te_fl_fill_args args{};
    args.output = x;
    args.value = 7;
    TE_FL_RETURN_IF_ERROR(ops::fill(args, {.stream = devices::current_stream()}));
    return std::vector<Tensor>();
  };
  auto graphed = take(GraphedStep::create(device, step, {}));
  for (int i = 0; i < 4; ++i) ASSERT_OK(graphed->run().status());
  ASSERT_OK(devices::synchronize(device, graphed->stream()));
  EXPECT_EQ(take(x.to(Device())).data<float>()[15], 7);
}

TEST_F(GraphedSteps, GradientsAreMadeBeforeTheCaptureAndStayTheGraphs) {
  const Device device = recorder.device();
  auto linear = take(Linear::create({.in_features = 4, .out_features = 4, .device = device}));
  const auto parameters = linear->parameters();
  const Tensor x = take(Tensor::zeros({2, 4}, DType::kF32, device));
  // This step's first backward runs during the capture.
  const auto step = [&]() -> Result<std::vector<Tensor>> {
    Ctx ctx;
    TE_FL_ASSIGN_OR_RETURN(Tensor y, linear->forward(x, &ctx));
    TE_FL_ASSIGN_OR_RETURN(const bool captured,
                           devices::is_capturing(device, devices::current_stream()));
    if (captured) TE_FL_RETURN_IF_ERROR(linear->backward(y, ctx).status());
    return std::vector<Tensor>{y};
  };
  auto graphed = take(GraphedStep::create(device, step, {.warmup = 2}));
  for (int i = 0; i < 2; ++i) ASSERT_OK(graphed->run().status());
  EXPECT_HAS(graphed->run().status().to_string(), "has no gradient yet, whose memory would be");
  for (const NamedParameter& p : parameters) {
    EXPECT_FALSE(p.grad().defined());
    ASSERT_OK(p.parameter->ensure_grad());
  }
  ASSERT_OK(graphed->run().status());
  EXPECT_TRUE(graphed->captured());
  // Kept alive, so that the next gradient has another address.
  const Tensor before = parameters[0].grad();
  ASSERT_OK(linear->set_grad_dtype(DType::kF32));
  EXPECT_HAS(graphed->run().status().to_string(), "was dropped or replaced after the capture");
  for (const NamedParameter& p : parameters) ASSERT_OK(p.parameter->ensure_grad());
  EXPECT_FALSE(graphed->run().ok());
  ASSERT_OK(devices::synchronize(device, graphed->stream()));
}

// A framework lends the parameters, captures the graph itself and reads the gradients, which are in
// the graph's memory and overwritten by each launch. A split weight also needs scratch memory.
TEST_F(GraphedSteps, AFrameworkCapturesBackwardsOfLentTensors) {
  const Device device = recorder.device();
  for (const bool split : {false, true}) {
    std::vector<ParameterPart> parts;
    if (split) parts = {{"a", 1}, {"b", 3}};
    auto linear = take(Linear::create(
        {.in_features = 4, .out_features = 4, .device = device, .parameters_split = parts}));
    std::vector<Tensor> lent;
    const auto parameters = linear->parameters();
    for (const NamedParameter& p : parameters) lent.push_back(take(p.value().clone()));
    const Stream stream = take(Stream::create(device));
    const Tensor x = take(tensor({2, 4}, random_values(8, 3)).to(device));
    const Tensor dy = take(tensor({2, 4}, random_values(8, 4)).to(device));
    ASSERT_OK(devices::synchronize(device));
    const auto backward = [&] {
      for (size_t i = 0; i < lent.size(); ++i)
        ASSERT_OK(parameters[i].parameter->borrow(lent[i], 1));
      Ctx ctx;
      take(linear->forward(x, &ctx));
      take(linear->backward(dy, ctx));
    };
    const auto taken = [&] {
      std::vector<Tensor> grads;
      for (const NamedParameter& p : parameters) grads.push_back(p.parameter->take_grad());
      return grads;
    };
    const auto values = [&](const std::vector<Tensor>& grads) {
      check(devices::synchronize(device, stream.get()));
      Values all;
      for (const Tensor& grad : grads) {
        for (const float v : values_of(take(grad.to(Device())))) all.push_back(v);
      }
      return all;
    };
    std::vector<Tensor> eager, captured;
    Graph graph;
    {
      const StreamScope scope(stream.get());
      backward();
      eager = taken();
      Capture capture = take(Capture::begin(device, stream.get()));
      backward();
      captured = taken();
      graph = take(capture.end());
    }
    const Values want = values(eager);
    for (int launch = 0; launch < 2; ++launch) {
      ASSERT_OK(graph.launch());
      EXPECT_EQ(values(captured), want) << "launch " << launch << ", split " << split;
    }
  }
}

// An eager inference caches the cast weight between calls; a graph must not use that cache.
TEST_F(GraphedSteps, AnInferenceInAGraphReadsTheWeightsOfEachLaunch) {
  const Device device = recorder.device();
  auto linear = take(Linear::create({.in_features = 4,
                                     .out_features = 4,
                                     .bias = false,
                                     .activation_dtype = DType::kBF16,
                                     .device = device}));
  const Tensor x = take(tensor({1, 4}, {1, 2, 3, 4}, DType::kBF16).to(device));
  const auto step = [&]() -> Result<std::vector<Tensor>> {
    TE_FL_ASSIGN_OR_RETURN(Tensor y, linear->forward(x, nullptr));
    return std::vector<Tensor>{y};
  };
  auto graphed = take(GraphedStep::create(device, step, {.warmup = 2}));
  const auto result = [&] {
    const Tensor y = take(graphed->run())[0];
    check(devices::synchronize(device, graphed->stream()));
    return values_of(take(y.to(Device())));
  };
  Values first;
  for (int i = 0; i < 4; ++i) first = result();
  EXPECT_TRUE(graphed->captured());
  EXPECT_NE(first, Values(4, 0.0));
  ASSERT_OK(linear->load_state({{"weight", tensor({4, 4}, Values(16, 0.0))}}, "zeros"));
  ASSERT_OK(devices::synchronize(device));
  EXPECT_EQ(result(), Values(4, 0.0));
}

TEST(GraphedStepOps, AnOpThatIsNotGraphSafeIsRefusedByName) {
  RecordingDevice recorder("generic_gemm");
  {
    Small small(recorder.device());
    auto graphed = take(GraphedStep::create(recorder.device(), [&] { return small.step(); },
                                            {.optimizer = small.adam.get()}));
    for (int i = 0; i < 3; ++i) ASSERT_OK(graphed->run().status());
    const Status refused = graphed->run().status();
    EXPECT_HAS(refused.to_string(), "generic_gemm");
    EXPECT_HAS(refused.to_string(), "captured into a graph, which it does not allow");
  }
  ASSERT_OK(devices::remove(recorder.device()));
  EXPECT_EQ(recorder.blocks(), 0u);
}

}  // namespace
}  // namespace te_fl::nn::testing::graphed_step_rules_test
