// What te-fl tune pins: gains above the noise of timing only.
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

TEST(Tune, PinsWhereTheUsualChoiceCouldNotBeTimed) {
  EXPECT_TRUE(dispatch::worth_pinning(row_of({{"a", 1.0, 1}}, 0)));
}

TEST(Tune, DoesNotPinOneThatServesSomeOfTheCallsOnly) {
  EXPECT_FALSE(dispatch::worth_pinning(row_of({{"b", 0.1, 1}}, 1.0, 2)));
}

}  // namespace
}  // namespace te_fl
