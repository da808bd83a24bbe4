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

// One thread is in a piece that is recomputed later, whose draws are noted, another one captures a
// step, as GraphedStep does, and a third one reads and sets the position.
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
