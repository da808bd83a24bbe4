// te-fl tune pins an implementation only if its gain exceeds the timing noise.
#include "dispatch/watch/tune.hpp"

#include <gtest/gtest.h>

namespace te_fl {
namespace {

TunedSignature make_row(std::vector<TunedTime> times, double usual, int calls = 1) {
  TunedSignature row;
  row.times = std::move(times);
  row.usual_seconds = usual;
  row.calls = calls;
  return row;
}

TEST(Tune, PinsWhatIsClearlyFaster) {
  EXPECT_TRUE(dispatch::worth_pinning(make_row({{"b", 0.94, 1}, {"a", 1.0, 1}}, 1.0)));
  EXPECT_FALSE(dispatch::worth_pinning(make_row({{"b", 0.96, 1}, {"a", 1.0, 1}}, 1.0)));
}

TEST(Tune, LeavesTheUsualChoiceAlone) {
  EXPECT_FALSE(dispatch::worth_pinning(make_row({{"a", 1.0, 1}, {"b", 3.0, 1}}, 1.0)));
  EXPECT_FALSE(dispatch::worth_pinning(make_row({}, 0)));
}

TEST(Tune, DoesNotPinForNanosecondsOfACall) {
  TunedSignature row = make_row({{"reference", 60e-9, 1}, {"a", 63e-9 * 1.2, 1}}, 63e-9 * 1.2);
  row.count = 1;
  EXPECT_FALSE(dispatch::worth_pinning(row));
  row.count = 1000, row.times[0].seconds = 60e-6, row.usual_seconds = 75.6e-6;
  EXPECT_FALSE(dispatch::worth_pinning(row)) << "16 ns of each";
}

TEST(Tune, EverySizeIsInOneClass) {
  SignatureList before;
  dispatch::set_size_class(before, 0);
  EXPECT_EQ(before.min_bytes, 0u);
  while (before.max_bytes != UINT64_MAX) {
    SignatureList next, last;
    dispatch::set_size_class(next, before.max_bytes + 1);
    dispatch::set_size_class(last, next.max_bytes);
    EXPECT_EQ(next.min_bytes, before.max_bytes + 1);
    EXPECT_EQ(last, next);
    before = next;
  }
  SignatureList small, large;
  dispatch::set_size_class(small, 64), dispatch::set_size_class(large, 8 << 20);
  EXPECT_EQ(small.min_bytes, 32u);
  EXPECT_EQ(small.max_bytes, 255u);
  EXPECT_GT(large.min_bytes, small.max_bytes);
}

TEST(Tune, PinsWhereTheUsualChoiceCouldNotBeTimed) {
  EXPECT_TRUE(dispatch::worth_pinning(make_row({{"a", 1.0, 1}}, 0)));
}

TEST(Tune, DoesNotPinOneThatRunsOnlySomeOfTheCalls) {
  EXPECT_FALSE(dispatch::worth_pinning(make_row({{"b", 0.1, 1}}, 1.0, 2)));
}

}  // namespace
}  // namespace te_fl
