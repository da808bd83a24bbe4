// Fixture for training steps captured into graphs on a RecordingDevice.
#pragma once

#include <memory>
#include <vector>

#include "nn_test_util.hpp"
#include "support/expect.hpp"
#include "support/recording_device.hpp"

namespace te_fl::nn::testing {

using te_fl::testing::RecordingDevice;

class GraphedSteps : public ::testing::Test {
 protected:
  void TearDown() override {
    ASSERT_OK(devices::remove(recorder.device()));
    EXPECT_EQ(recorder.blocks(), 0u) << "memory outlives the graphs";
  }
  RecordingDevice recorder;
};

// A small Linear with Adam on the fixture's device, for tests that capture a second step.
struct Small {
  std::unique_ptr<Linear> linear;
  std::unique_ptr<Adam> adam;
  Tensor x, out;
  explicit Small(const Device& device, bool capturable = true) {
    linear = take(Linear::create({.in_features = 4, .out_features = 4, .device = device}));
    adam =
        take(Adam::create(linear->parameters(), {.max_grad_norm = 1.0f, .capturable = capturable}));
    x = take(Tensor::zeros({2, 4}, DType::kF32, device));
  }
  Result<std::vector<Tensor>> step() {
    Ctx ctx;
    TE_FL_RETURN_IF_ERROR(linear->zero_grad());
    TE_FL_ASSIGN_OR_RETURN(Tensor y, linear->forward(x, &ctx));
    TE_FL_RETURN_IF_ERROR(linear->backward(y, ctx).status());
    TE_FL_RETURN_IF_ERROR(adam->step());
    return std::vector<Tensor>{y};
  }
};

}  // namespace te_fl::nn::testing
