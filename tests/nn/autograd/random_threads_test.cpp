// Threads that draw from one Context.
#include <gtest/gtest.h>

#include <mutex>

#include "nn/autograd/context.hpp"
#include "nn/autograd/random.hpp"
#include "nn/base/run_log.hpp"
#include "support/expect.hpp"
#include "support/threads.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn {
namespace {

// Two threads draw random numbers inside a checkpointed section, which records the RNG offsets for
// its recomputation; a third captures a step, as GraphedStep does; a fourth reads and sets the RNG
// state.
TEST(RandomThreads, DrawNoteAndCapture) {
  Context context(3);
  detail::RandomState& state = context.state();
  const Tensor position = Tensor::zeros({2}, DType::kU64).value();
  const auto capture = [&](int) {
    for (const Tensor& captured : {position, Tensor()}) {
      const std::lock_guard lock(state.mutex);
      state.captured = captured;
      state.captured_at = state.position.offset;
    }
  };
  const auto draw = [&](int) {
    const ContextScope scope(context);
    detail::RunLog log;
    const detail::RunScope first(log, false);
    EXPECT_OK(detail::random_options(8, Device()));
    EXPECT_EQ(log.size(), 1u);
  };
  te_fl::testing::together(
      200, {draw, draw, capture, [&](int) { context.set_random(context.random()); }});
}

}  // namespace
}  // namespace te_fl::nn
