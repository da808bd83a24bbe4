// Tests that te-fl tune pins gains above the noise of timing only.
#include "dispatch/watch/tune.hpp"

#include <gtest/gtest.h>

namespace te_fl {
namespace {

TunedSignature row_of(std::vector<TunedTime> times, double usual, int calls = 1) {
  TunedSignature row;
  row.times = std::move(times);
  row.usual_seconds = usual;
  row.calls = calls;
  return row;
}

TEST(Tune, PinsWhatIsClearlyFaster) {
  EXPECT_TRUE(dispatch::worth_pinning(row_of({{"b", 0.94, 1}, {"a", 1.0, 1}}, 1.0)));
  EXPECT_FALSE(dispatch::worth_pinning(row_of({{"b", 0.96, 1}, {"a", 1.0, 1}}, 1.0)));
}

TEST(Tune, LeavesTheUsualChoiceAlone) {
  EXPECT_FALSE(dispatch::worth_pinning(row_of({{"a", 1.0, 1}, {"b", 3.0, 1}}, 1.0)));
  EXPECT_FALSE(dispatch::worth_pinning(row_of({}, 0)));
}

TEST(Tune, DoesNotPinForNanosecondsOfACall) {
  TunedSignature row = row_of({{"reference", 60e-9, 1}, {"a", 63e-9 * 1.2, 1}}, 63e-9 * 1.2);
  row.count = 1;
  EXPECT_FALSE(dispatch::worth_pinning(row));
  row.count = 1000, row.times[0].seconds = 60e-6, row.usual_seconds = 75.6e-6;
  EXPECT_FALSE(dispatch::worth_pinning(row)) << "16 ns of each";
}

TEST(Tune, WhatSmallCallsGainNoLargeOneMayLose) {
  const auto of = [](double own, double usual) {
    return dispatch::TunedSize{{{"b", own}, {"a", usual}}, usual, 10};
  };
  const int small = dispatch::size_class_of(64), large = dispatch::size_class_of(8 << 20);
  EXPECT_TRUE(dispatch::holds_for_all_sizes("b", false, {{small, of(1e-3, 9e-3)}}));
  EXPECT_FALSE(dispatch::holds_for_all_sizes("b", false,
                                             {{small, of(1e-3, 9e-3)}, {large, of(3e-3, 2e-3)}}));
  EXPECT_FALSE(dispatch::holds_for_all_sizes("b", true, {{small, of(1e-3, 9e-3)}}))
      << "a reference on 16 elements";
  EXPECT_TRUE(dispatch::holds_for_all_sizes("b", true, {{large, of(1e-3, 9e-3)}}));
}

TEST(Tune, PinsWhereTheUsualChoiceCouldNotBeTimed) {
  EXPECT_TRUE(dispatch::worth_pinning(row_of({{"a", 1.0, 1}}, 0)));
}

TEST(Tune, DoesNotPinOneThatServesSomeOfTheCallsOnly) {
  EXPECT_FALSE(dispatch::worth_pinning(row_of({{"b", 0.1, 1}}, 1.0, 2)));
}

}  // namespace
}  // namespace te_fl
