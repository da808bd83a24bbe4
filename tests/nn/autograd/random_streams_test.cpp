// Tests of RandomStreams, which keeps random streams by name.
#include "te_fl/nn/autograd/random_streams.hpp"

#include "nn_test_util.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::random_streams_test {
namespace {

Tensor ones() { return tensor({16, 16}, Values(256, 1)); }

Values dropped(RandomStreams* streams, const char* name) {
  Dropout dropout(0.5f);
  Ctx ctx;
  const auto scope = streams == nullptr ? nullptr : take(streams->fork(name));
  return values_of(take(dropout.forward(ones(), &ctx)));
}

TEST(RandomStreams, AreIndependentOfEachOther) {
  RandomStreams streams;
  check(streams.add("a", 1));
  check(streams.add("b", 2));
  const ContextScope scope(Context(3));
  const Values a1 = dropped(&streams, "a"), b1 = dropped(&streams, "b");
  const Values a2 = dropped(&streams, "a"), own = dropped(nullptr, "");
  EXPECT_NE(a1, b1);
  EXPECT_NE(a1, a2);
  EXPECT_NE(own, a1);
  // Each stream's numbers depend on its own seed only, not on draws from the other streams.
  const ContextScope other(Context(1));
  EXPECT_EQ(dropped(nullptr, ""), a1);
  EXPECT_EQ(dropped(nullptr, ""), a2);
}

TEST(RandomStreams, ContinueFromTheirState) {
  RandomStreams streams, again;
  for (RandomStreams* s : {&streams, &again}) {
    check(s->add("a", 1));
    check(s->add("b", 2));
  }
  (void)dropped(&streams, "a");
  check(again.load_state(streams.state()));
  EXPECT_EQ(dropped(&again, "a"), dropped(&streams, "a"));
  EXPECT_EQ(again.state(), streams.state());
  auto state = streams.state();
  state.erase("b");
  EXPECT_FAILS(again.load_state(state), kNotFound, "no \"b\"");
  state["c"] = {};
  EXPECT_FAILS(again.load_state(state), kNotFound, "\"c\"");
}

TEST(RandomStreams, WhatIsWrongIsNamed) {
  RandomStreams streams;
  EXPECT_FAILS(streams.fork("a"), kNotFound, "none");
  check(streams.add("a", 1));
  EXPECT_FAILS(streams.add("a", 2), kInvalidArgument, "there already");
  EXPECT_FAILS(streams.add("b", 1), kInvalidArgument, "that of \"a\"");
  EXPECT_FAILS(streams.add("", 1), kInvalidArgument, "empty");
  EXPECT_FAILS(streams.fork("z"), kNotFound, "there are: \"a\"");
}

// A recomputed (checkpointed) section draws the same random numbers from each stream as its first
// forward.
TEST(RandomStreams, AreReplayed) {
  RandomStreams streams;
  check(streams.add("a", 1));
  Dropout dropout(0.5f);
  const Segment segment = [&](const Tensor& x) -> Result<SegmentRun> {
    TE_FL_ASSIGN_OR_RETURN(const auto scope, streams.fork("a"));
    return run_segment(dropout, x);
  };
  auto run = take(checkpoint(segment, ones()));
  (void)dropped(&streams, "a");
  const auto state = streams.state();
  EXPECT_EQ(values_of(take(run.backward(ones()))), values_of(run.y));
  EXPECT_EQ(streams.state(), state);
}

}  // namespace
}  // namespace te_fl::nn::testing::random_streams_test
