// Tests MaskRule: the keys that a query attends to and the queries that attend to a key are
// consistent.
#include "te_fl/attention/mask.hpp"

#include <gtest/gtest.h>

namespace te_fl {
namespace {

using backend::KeyRange;
using backend::MaskRule;

void expect_both_sides(const MaskRule& rule, int64_t q_len, int64_t kv_len) {
  for (int64_t j = 0; j < kv_len + 3; ++j) {
    const KeyRange seen = rule.queries(j, q_len, kv_len);
    for (int64_t i = 0; i < q_len; ++i) {
      const bool sees = j < kv_len && !rule.masked(i, j, q_len, kv_len);
      ASSERT_EQ(i >= seen.begin && i < seen.end, sees)
          << "query " << i << " of " << q_len << ", key " << j << " of " << kv_len << ", causal "
          << rule.causal << ", bottom right " << rule.bottom_right << ", window "
          << rule.window_left << ", " << rule.window_right;
    }
    ASSERT_LE(seen.end, q_len);
    ASSERT_GE(seen.begin, 0);
  }
}

TEST(MaskRuleQueries, AreThoseThatSeeTheKey) {
  constexpr int32_t kTypes[] = {TE_FL_MASK_TYPE_NONE, TE_FL_MASK_TYPE_CAUSAL,
                                TE_FL_MASK_TYPE_CAUSAL_BOTTOM_RIGHT};
  constexpr int64_t kLengths[][2] = {{0, 3}, {3, 0}, {1, 1}, {5, 5}, {3, 9}, {9, 3}};
  for (const int32_t type : kTypes) {
    for (const int64_t left : {-1, 0, 2, 20}) {
      for (const int64_t right : {-1, 0, 3, 20}) {
        for (const auto& [q_len, kv_len] : kLengths) {
          expect_both_sides(backend::mask_rule(type, left, right), q_len, kv_len);
        }
      }
    }
  }
}

TEST(MaskRuleQueries, NeverMoveBackFromKeyToKey) {
  const MaskRule rule = backend::mask_rule(TE_FL_MASK_TYPE_CAUSAL_BOTTOM_RIGHT, 3, -1);
  KeyRange before = rule.queries(0, 12, 7);
  for (int64_t j = 1; j < 7; ++j) {
    const KeyRange now = rule.queries(j, 12, 7);
    EXPECT_GE(now.begin, before.begin);
    EXPECT_GE(now.end, before.end);
    before = now;
  }
}

TEST(MaskRuleQueries, SurviveWindowsBeyondEverySequence) {
  const MaskRule rule = backend::mask_rule(TE_FL_MASK_TYPE_NONE, INT64_MAX, INT64_MAX);
  EXPECT_EQ(rule.queries(2, 5, 7).begin, 0);
  EXPECT_EQ(rule.queries(2, 5, 7).end, 5);
}

}  // namespace
}  // namespace te_fl
