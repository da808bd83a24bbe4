// Tests decisions that an eager step makes on the host. A captured step must make them on the
// device in each launch, or its capture is refused.
#include "nn_test_util.hpp"
#include "support/expect.hpp"
#include "support/recording_device.hpp"

namespace te_fl::nn::testing::captured_decisions_test {
namespace {

using te_fl::testing::RecordingDevice;

class CapturedDecisions : public ::testing::Test {
 protected:
  void TearDown() override { ASSERT_OK(devices::remove(recorder.device())); }
  const Device& device() const { return recorder.device(); }
  RecordingDevice recorder;
};

// A parameter whose gradient is constant.
struct Constant {
  std::unique_ptr<Linear> linear;
  std::shared_ptr<Parameter> weight;
  explicit Constant(const Device& device) {
    linear = take(Linear::create(
        {.in_features = 2, .out_features = 2, .bias = false, .device = device, .seed = 3}));
    weight = linear->parameters()[0].parameter;
    weight->grad = take(tensor({2, 2}, {1, -2, 3, 4}).to(device));
  }
  Values values() const { return values_of(take(weight->value.to(Device()))); }
};

// Returns the weights after `eager` eager SGD steps and `launches` more, which are graph launches
// if `graphed`.
Result<Values> sgd(const Device& device, bool graphed, float dampening, int eager, int launches) {
  Constant c(device);
  const auto sgd =
      take(SGD::create(c.linear->parameters(),
                       {.lr = 0.1f, .momentum = 0.9f, .dampening = dampening, .capturable = true}));
  const Stream stream = take(Stream::create(device));
  const StreamScope scope(stream);
  check(devices::synchronize(device));
  for (int i = 0; i < eager; ++i) check(sgd->step());
  Graph graph;
  if (graphed) {
    Capture capture = take(Capture::begin(device, stream.get()));
    const Status step = sgd->step();
    graph = take(capture.end());
    TE_FL_RETURN_IF_ERROR(step);
  }
  for (int i = 0; i < launches; ++i) {
    check(graphed ? sgd->advance() : sgd->step());
    if (graphed) check(graph.launch());
  }
  check(stream.synchronize());
  return c.values();
}

// SGD's momentum starts with the first gradient. A graph captured from the second step on continues
// that momentum.
TEST_F(CapturedDecisions, AGraphAfterOneStepGoesOnWithTheMomentum) {
  for (const float dampening : {0.0f, 0.5f}) {
    EXPECT_EQ(take(sgd(device(), true, dampening, 1, 4)),
              take(sgd(device(), false, dampening, 1, 4)));
  }
  EXPECT_EQ(take(sgd(device(), true, 0, 0, 4)), take(sgd(device(), false, 0, 0, 4)));
}

TEST_F(CapturedDecisions, AFirstStepThatDiffersFromTheOthersIsRefused) {
  const Status status = sgd(device(), true, 0.5f, 0, 4).status();
  EXPECT_FAILS(status, kFailedPrecondition, "dampening");
}

// Runs a step eagerly three times, then captures it; returns the status of the capture.
Status capture_step(const Device& device, const GraphedStep::Step& step,
                    GraphedStepOptions options = {}) {
  const auto graphed = take(GraphedStep::create(device, step, std::move(options)));
  for (int i = 0; i < 3; ++i) check(graphed->run().status());
  EXPECT_FALSE(graphed->captured());
  const Status status = graphed->run().status();
  EXPECT_EQ(graphed->captured(), status.ok());
  return status;
}

TEST_F(CapturedDecisions, AnOptimizerThatTheStepDoesNotNameIsRefused) {
  Constant one(device()), two(device());
  const auto first = take(Adam::create(one.linear->parameters(), {.capturable = true}));
  const auto second = take(Adam::create(two.linear->parameters(), {.capturable = true}));
  const auto step_first = [&]() -> Result<std::vector<Tensor>> {
    TE_FL_RETURN_IF_ERROR(first->step());
    return std::vector<Tensor>();
  };
  const auto step_both = [&]() -> Result<std::vector<Tensor>> {
    TE_FL_RETURN_IF_ERROR(first->step());
    TE_FL_RETURN_IF_ERROR(second->step());
    return std::vector<Tensor>();
  };
  for (const Status& status : {capture_step(device(), step_first),
                               capture_step(device(), step_both, {.optimizer = first.get()})}) {
    EXPECT_FAILS(status, kFailedPrecondition, "GraphedStepOptions::optimizer");
  }
  EXPECT_EQ(first->steps(), 6);
  ASSERT_OK(capture_step(device(), step_first, {.optimizer = first.get()}));
  EXPECT_EQ(first->steps(), 10);
}

// Graph launches advance the random numbers of the step's own context only.
TEST_F(CapturedDecisions, RandomNumbersOfAnotherContextAreRefused) {
  const Context own(7);
  Dropout dropout(0.5f);
  const Tensor x = take(tensor({1, 32}, Values(32, 1.0)).to(device()));
  const auto drop = [&]() -> Result<std::vector<Tensor>> {
    Ctx ctx;
    TE_FL_ASSIGN_OR_RETURN(const Tensor y, dropout.forward(x, &ctx));
    return std::vector<Tensor>{y};
  };
  const Status status = capture_step(device(), [&] {
    const ContextScope scope(own.with_stream(device(), devices::current_stream(device())));
    return drop();
  });
  EXPECT_FAILS(status, kFailedPrecondition, "the same random numbers");
  EXPECT_EQ(own.random().offset, 3 * 8u) << "what is refused draws none";
  ASSERT_OK(capture_step(device(), drop));

  const Stream stream = take(Stream::create(device()));
  const StreamScope scope(stream);
  ASSERT_OK(drop().status());
  Capture capture = take(Capture::begin(device(), stream.get()));
  EXPECT_EQ(drop().status().code(), StatusCode::kFailedPrecondition);
  ASSERT_OK(capture.end().status());
}

}  // namespace
}  // namespace te_fl::nn::testing::captured_decisions_test
