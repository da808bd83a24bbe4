// Tests the scaling rules and dropout's random stream against published values and values derived
// by hand.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "te_fl/numeric.hpp"

namespace te_fl::numeric {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kFltMax = std::numeric_limits<float>::max();

TEST(ScaleFromAmax, DividesInFp32) {
  EXPECT_EQ(scale_from_amax(448.0f, kE4m3Max, 0.0f, false, kFltMax), 1.0f);
  EXPECT_EQ(scale_from_amax(3.5f, kE4m3Max, 0.0f, false, kFltMax), 128.0f);
  EXPECT_EQ(scale_from_amax(3.0f, kE4m3Max, 0.0f, false, kFltMax), 0x1.2AAAAAp7f);  // 149.33..
  EXPECT_EQ(scale_from_amax(7.0f, kE5m2Max, 0.0f, false, kFltMax), 8192.0f);
}

TEST(ScaleFromAmax, EpsilonIsAFloor) {
  EXPECT_EQ(scale_from_amax(1.0f, kE4m3Max, 7.0f, false, kFltMax), 64.0f);
  EXPECT_EQ(scale_from_amax(0.0f, kE4m3Max, 7.0f, false, kFltMax), 64.0f);
  EXPECT_EQ(scale_from_amax(14.0f, kE4m3Max, 7.0f, false, kFltMax), 32.0f);
}

TEST(ScaleFromAmax, ZeroInfiniteAndNanGiveOne) {
  for (const bool pow2 : {false, true}) {
    for (const float amax : {0.0f, -0.0f, kInf, kNan, -kNan}) {
      EXPECT_EQ(scale_from_amax(amax, kE4m3Max, 0.0f, pow2, kFltMax), 1.0f);
    }
    EXPECT_EQ(scale_from_amax(kNan, kE4m3Max, 7.0f, pow2, kFltMax), 1.0f);
    EXPECT_EQ(scale_from_amax(1.0f, kE4m3Max, kInf, pow2, kFltMax), 1.0f);
  }
}

TEST(ScaleFromAmax, InfiniteScaleIsReplaced) {
  const float tiny = 0x1p-140f;  // 448 / tiny = 1.75 * 2^148
  EXPECT_EQ(scale_from_amax(tiny, kE4m3Max, 0.0f, false, kFltMax), kFltMax);
  EXPECT_EQ(scale_from_amax(tiny, kE4m3Max, 0.0f, true, kFltMax), 0x1p127f);
  EXPECT_EQ(scale_from_amax(tiny, kE4m3Max, 0.0f, false, largest_finite<half>), 65504.0f);
  EXPECT_EQ(scale_from_amax(tiny, kE4m3Max, 0.0f, true, largest_finite<half>), 32768.0f);
  EXPECT_EQ(scale_from_amax(tiny, kE4m3Max, 0.0f, true, largest_finite<bfloat16>), 0x1p127f);
  // The smallest amax whose scale is still finite: 1.75 * 2^127.
  EXPECT_EQ(scale_from_amax(0x1p-119f, kE4m3Max, 0.0f, false, 1.0f), 0x1.Cp127f);
  EXPECT_EQ(scale_from_amax(0x1p-120f, kE4m3Max, 0.0f, false, 1.0f), 1.0f);
}

TEST(ScaleFromAmax, PowerOfTwoTruncates) {
  EXPECT_EQ(scale_from_amax(1.0f, kE4m3Max, 0.0f, true, kFltMax), 256.0f);
  // 448 / 449 = 0.9978 rounds down.
  EXPECT_EQ(scale_from_amax(449.0f, kE4m3Max, 0.0f, true, kFltMax), 0.5f);
  EXPECT_EQ(scale_from_amax(448.0f, kE4m3Max, 0.0f, true, kFltMax), 1.0f);
  EXPECT_EQ(truncate_to_power_of_two(0x1.FFFFFEp3f), 8.0f);
  EXPECT_EQ(truncate_to_power_of_two(-5.0f), -4.0f);
  EXPECT_EQ(truncate_to_power_of_two(0.0f), 0.0f);
  EXPECT_EQ(truncate_to_power_of_two(kInf), kInf);
}

TEST(Amax, IgnoresNanAndSign) {
  float amax = 0.0f;
  for (const float x : {1.0f, -3.0f, kNan, -0.0f, 2.0f, -kNan}) amax = amax_accumulate(amax, x);
  EXPECT_EQ(amax, 3.0f);
  EXPECT_EQ(amax_accumulate(amax, -kInf), kInf);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(amax_accumulate(0.0f, -0.0f)), 0u);
}

TEST(Mxfp8Scale, RoundsUp) {
  EXPECT_EQ(mxfp8_scale(448.0f).bits, 127);
  EXPECT_EQ(mxfp8_scale(std::nextafter(448.0f, kInf)).bits, 128);
  EXPECT_EQ(mxfp8_scale(std::nextafter(448.0f, 0.0f)).bits, 127);
  EXPECT_EQ(mxfp8_scale(224.0f).bits, 126);
  EXPECT_EQ(mxfp8_scale(1.0f).bits, 119);  // 1/448 = 1.14 * 2^-9
  EXPECT_EQ(mxfp8_scale(57344.0f, kE5m2Max).bits, 127);
  EXPECT_EQ(mxfp8_scale(0.0f).bits, 0x00);
  EXPECT_EQ(mxfp8_scale(kInf).bits, 0xFE);
  EXPECT_EQ(mxfp8_scale(kNan).bits, 0xFF);
  EXPECT_EQ(mxfp8_scale(kFltMax).bits, 247);  // 2^128 / 448 = 1.14 * 2^119
}

// The scaled block maximum never saturates and lies in the format's top binade.
TEST(Mxfp8Scale, KeepsTheMaximumInRange) {
  for (int exponent = -110; exponent < 128; ++exponent) {
    for (const float mantissa : {1.0f, 1.5f, 1.75f, 0x1.C00002p0f, 0x1.FFFFFEp0f}) {
      const float amax = std::ldexp(mantissa, exponent);
      const double scaled =
          static_cast<double>(amax) * static_cast<double>(e8m0_reciprocal(mxfp8_scale(amax)));
      ASSERT_LE(scaled, 448.0) << amax;
      ASSERT_GT(scaled, 224.0) << amax;
    }
  }
}

// An amax history [length, 2] of two tensors; an update of one column must not change the other.
struct History {
  explicit History(std::vector<float> column) : length(column.size()) {
    for (const float value : column) {
      rows.push_back(value);
      rows.push_back(-77.0f);
    }
  }
  AmaxHistory view() { return {rows.data(), length, 2}; }
  std::vector<float> column() const {
    std::vector<float> result;
    for (std::size_t i = 0; i < length; ++i) {
      EXPECT_EQ(rows[2 * i + 1], -77.0f);
      result.push_back(rows[2 * i]);
    }
    return result;
  }
  std::size_t length;
  std::vector<float> rows;
};

using Column = std::vector<float>;

TEST(DelayedScaling, RollsAndTakesTheLargest) {
  History history({7, 3.5f, 1, 2});  // row 0 collects the current amax; rows 1 to 3: oldest to
                                     // newest
  EXPECT_EQ(delayed_scaling_update(history.view(), 0.0f, 5.0f, {}), 64.0f);
  EXPECT_EQ(history.column(), (Column{0, 1, 2, 7}));
  // This update removes the oldest entry from the history, but its scale still includes that entry.
  History leaving({1, 14, 2, 3});
  EXPECT_EQ(delayed_scaling_update(leaving.view(), 0.0f, 5.0f, {}), 32.0f);
  EXPECT_EQ(leaving.column(), (Column{0, 2, 3, 1}));
  EXPECT_EQ(delayed_scaling_update(leaving.view(), 3.5f, 5.0f, {}), 128.0f);
  EXPECT_EQ(leaving.column(), (Column{0, 3, 1, 3.5f}));
}

TEST(DelayedScaling, MostRecentUsesLast) {
  History history({3.5f, 7, 28, 14});
  const DelayedScalingRule rule{.algo = AmaxComputeAlgo::kMostRecent};
  EXPECT_EQ(delayed_scaling_update(history.view(), 0.0f, 5.0f, rule), 128.0f);
  EXPECT_EQ(history.column(), (Column{0, 28, 14, 3.5f}));
}

TEST(DelayedScaling, ReducedAmaxReplacesRowZero) {
  for (const AmaxComputeAlgo algo : {AmaxComputeAlgo::kMax, AmaxComputeAlgo::kMostRecent}) {
    History history({1, 0, 0});
    EXPECT_EQ(delayed_scaling_update(history.view(), 14.0f, 5.0f, {.algo = algo}), 32.0f);
    EXPECT_EQ(history.column(), (Column{0, 0, 14}));
  }
}

TEST(DelayedScaling, LengthOne) {
  for (const AmaxComputeAlgo algo : {AmaxComputeAlgo::kMax, AmaxComputeAlgo::kMostRecent}) {
    History history({7});
    EXPECT_EQ(delayed_scaling_update(history.view(), 0.0f, 5.0f, {.algo = algo}), 64.0f);
    EXPECT_EQ(history.column(), Column{0});
    EXPECT_EQ(delayed_scaling_update(history.view(), 3.5f, 64.0f, {.algo = algo}), 128.0f);
    EXPECT_EQ(history.column(), Column{0});
    EXPECT_EQ(delayed_scaling_update(history.view(), 0.0f, 128.0f, {.algo = algo}), 128.0f);
    EXPECT_EQ(history.column(), Column{0});
  }
}

TEST(DelayedScaling, WithoutAnAmaxNeitherHistoryNorScaleChanges) {
  for (const AmaxComputeAlgo algo : {AmaxComputeAlgo::kMax, AmaxComputeAlgo::kMostRecent}) {
    for (const Column& column :
         {Column{0, 2, 1, 4}, {0, 7, 3.5f}, {0, kInf, 1}, {0, kNan}, {0, 0, 0}, {0}}) {
      for (const float reduced : {0.0f, -0.0f}) {
        History history(column);
        EXPECT_EQ(delayed_scaling_update(history.view(), reduced, 7.0f, {.algo = algo}), 7.0f);
        for (std::size_t i = 0; i < column.size(); ++i) {
          EXPECT_TRUE(history.column()[i] == column[i] || std::isnan(column[i]));
        }
      }
    }
  }
}

TEST(DelayedScaling, InfiniteAmaxKeepsTheScaleUntilItLeaves) {
  History history({kInf, 1, 7});
  EXPECT_EQ(delayed_scaling_update(history.view(), 0.0f, 5.0f, {}), 5.0f);
  EXPECT_EQ(history.column(), (Column{0, 7, kInf}));
  EXPECT_EQ(delayed_scaling_update(history.view(), 1.0f, 5.0f, {}), 5.0f);
  EXPECT_EQ(history.column(), (Column{0, kInf, 1}));
  EXPECT_EQ(delayed_scaling_update(history.view(), 3.5f, 5.0f, {}), 5.0f);
  EXPECT_EQ(history.column(), (Column{0, 1, 3.5f}));
  EXPECT_EQ(delayed_scaling_update(history.view(), 3.5f, 5.0f, {}), 128.0f);
}

TEST(DelayedScaling, NanAmax) {
  History history({kNan, 1, 7});  // row 0 is NaN and not zero, so it is rolled into the history
  // From the other entries.
  EXPECT_EQ(delayed_scaling_update(history.view(), 0.0f, 5.0f, {}), 64.0f);
  const Column column = history.column();
  EXPECT_EQ(column[0], 0.0f);
  EXPECT_EQ(column[1], 7.0f);
  EXPECT_TRUE(std::isnan(column[2]));
  EXPECT_EQ(
      delayed_scaling_update(history.view(), kNan, 5.0f, {.algo = AmaxComputeAlgo::kMostRecent}),
      5.0f);
  History only({kNan});
  EXPECT_EQ(delayed_scaling_update(only.view(), 0.0f, 5.0f, {}), 5.0f);
  EXPECT_EQ(only.column(), Column{0});
}

TEST(DelayedScaling, MarginAndFormat) {
  History history({7});
  EXPECT_EQ(delayed_scaling_update(history.view(), 7.0f, 5.0f, {.margin = 2}), 16.0f);
  EXPECT_EQ(delayed_scaling_update(history.view(), 7.0f, 5.0f, {.margin = -1}), 128.0f);
  EXPECT_EQ(delayed_scaling_update(history.view(), 7.0f, 5.0f, {.fp8_max = kE5m2Max}), 8192.0f);
  // The new scale is 448 / 4 / 3 with a single rounding.
  EXPECT_EQ(delayed_scaling_update(history.view(), 3.0f, 5.0f, {.margin = 2}), 0x1.2AAAAAp5f);
}

TEST(DelayedScaling, InfiniteScaleBecomesFltMax) {
  History history({0, 0});
  EXPECT_EQ(delayed_scaling_update(history.view(), 0x1p-140f, 5.0f, {}), kFltMax);
  EXPECT_EQ(delayed_scaling_update(history.view(), kInf, kInf, {}), kFltMax);
}

TEST(Philox, PublishedKnownAnswers) {
  using Block = std::array<std::uint32_t, 4>;
  EXPECT_EQ(philox4x32_10({0, 0, 0, 0}, {0, 0}),
            (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const std::uint32_t ones = 0xffffffff;
  EXPECT_EQ(philox4x32_10({ones, ones, ones, ones}, {ones, ones}),
            (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(
      philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
      (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, SeedAndCounterFillLowWordFirst) {
  EXPECT_EQ(philox4x32(0, 0), philox4x32_10({0, 0, 0, 0}, {0, 0}));
  EXPECT_EQ(philox4x32(0x299f31d0a4093822, 0x85a308d3243f6a88),
            philox4x32_10({0x243f6a88, 0x85a308d3, 0, 0}, {0xa4093822, 0x299f31d0}));
  for (std::uint64_t i = 0; i < 12; ++i) {
    EXPECT_EQ(dropout_word(9, 5, i), philox4x32(9, 5 + i / 4)[i % 4]);
  }
  // The counter wraps around.
  EXPECT_EQ(dropout_word(9, ~std::uint64_t{0}, 4), philox4x32(9, 0)[0]);
}

TEST(Dropout, KeepsFromTheExactThreshold) {
  EXPECT_EQ(dropout_threshold(0.5f), 0x80000000u);
  EXPECT_FALSE(dropout_keep(0x7FFFFFFF, 0.5f));  // 0x7FFFFFFF / 2^32 rounds to 0.5 in FP32
  EXPECT_TRUE(dropout_keep(0x80000000, 0.5f));
  EXPECT_EQ(dropout_threshold(0.1f), 0x199999A0u);  // 0.1f is 0x1.99999Ap-4
  // 0x1.000002p-9 lies in the lowest binade in which every FP32 value is a multiple of 2^-32; for
  // smaller p the threshold rounds up.
  EXPECT_EQ(dropout_threshold(0x1.000002p-9f), 0x800001u);
  EXPECT_EQ(dropout_threshold(0x1.000002p-10f), 0x400001u);  // 0x400000.8, rounded up
  EXPECT_FALSE(dropout_keep(0x400000, 0x1.000002p-10f));
  EXPECT_TRUE(dropout_keep(0x400001, 0x1.000002p-10f));
  EXPECT_EQ(dropout_threshold(std::numeric_limits<float>::denorm_min()), 1u);
}

TEST(Dropout, EndsOfTheRange) {
  for (const std::uint32_t word : {0u, 1u, 0xFFFFFFFFu}) {
    EXPECT_TRUE(dropout_keep(word, 0.0f));
    EXPECT_TRUE(dropout_keep(word, -1.0f));
    EXPECT_FALSE(dropout_keep(word, 1.0f));
    EXPECT_FALSE(dropout_keep(word, 2.0f));
    EXPECT_FALSE(dropout_keep(word, kNan));
  }
  // With the largest p below 1, only the 256 largest random 32-bit words keep their element.
  EXPECT_EQ(dropout_threshold(std::nextafter(1.0f, 0.0f)), 0xFFFFFF00u);
}

}  // namespace
}  // namespace te_fl::numeric
