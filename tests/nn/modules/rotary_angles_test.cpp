// RoPE angles against numbers worked out by hand and against the formulas of the papers.
#include <numbers>

#include "nn_test_util.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::rotary_angles_test {
namespace {

// Returns the frequency of each pair, which is its angle at position 1.
Values frequencies(init::RotaryOptions options) {
  options.max_seqlen = 1;
  options.first_position = 1;
  const Values row = values_of(take(init::rotary_angles(options)));
  return Values(row.begin(), row.begin() + options.dim / 2);
}

double own(double base, int64_t pair, int64_t dim) {
  return std::pow(base, -2.0 * static_cast<double>(pair) / static_cast<double>(dim));
}

void expect_close(const Values& got, const Values& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_NEAR(got[i], want[i], std::abs(want[i]) * 1e-6) << "pair " << i;
  }
}

TEST(RotaryAngles, FirstPositionShiftsTheTable) {
  const init::RotaryOptions whole{.dim = 8, .max_seqlen = 12};
  init::RotaryOptions tail = whole;
  tail.max_seqlen = 5;
  tail.first_position = 7;
  const Tensor expected = take(take(init::rotary_angles(whole)).slice(0, 7, 12));
  EXPECT_TRUE(same_bits(take(init::rotary_angles(tail)), expected));
}

TEST(RotaryAngles, LinearDividesEveryFrequency) {
  // Without scaling, base 10000 and dim 8 give 1, 1/10, 1/100, 1/1000.
  expect_close(frequencies({.dim = 8, .scaling = init::RotaryScaling::kLinear, .factor = 4}),
               {0.25, 0.025, 0.0025, 0.00025});
}

TEST(RotaryAngles, NtkKeepsTheFastestPairAndInterpolatesTheSlowest) {
  // NTK scaling changes the base to 10000 * 8^(8/6); the slowest frequency, base^(-6/8), becomes
  // 10000^(-6/8) / 8.
  const Values got = frequencies({.dim = 8, .scaling = init::RotaryScaling::kNtk, .factor = 8});
  // The frequencies of the two pairs in between are multiplied by 8^(-1/3) = 1/2 and 8^(-2/3) =
  // 1/4.
  expect_close(got, {1, 0.05, 0.0025, 0.000125});
}

TEST(RotaryAngles, Llama3KeepsFastPairsAndInterpolatesSlowOnes) {
  // Settings of Llama 3.1: head size 128, base 500000, factor 8, 8192 positions. A wavelength below
  // 8192 / 4 keeps its frequency, one above 8192 has an eighth of it, and between them 8192 /
  // wavelength decides.
  const Values got = frequencies({.dim = 128,
                                  .base = 500000,
                                  .scaling = init::RotaryScaling::kLlama3,
                                  .factor = 8,
                                  .original_max_positions = 8192});
  Values want;
  int kept = 0, divided = 0;
  for (int64_t i = 0; i < 64; ++i) {
    const double f = own(500000, i, 128), wavelength = 2 * std::numbers::pi / f;
    if (wavelength < 2048) {
      want.push_back(f);
      ++kept;
    } else if (wavelength > 8192) {
      want.push_back(f / 8);
      ++divided;
    } else {
      const double smooth = (8192 / wavelength - 1) / (4 - 1);
      want.push_back((1 - smooth) * f / 8 + smooth * f);
    }
  }
  EXPECT_EQ(kept, 29);     // 500000^(-i/64) > pi / 1024 up to i = 28
  EXPECT_EQ(divided, 29);  // 500000^(-i/64) < pi / 4096 from i = 35 on
  expect_close(got, want);
}

TEST(RotaryAngles, YarnKeepsFastPairsAndInterpolatesSlowOnes) {
  // Llama 2 with its context extended 16 times: head size 128, base 10000, 4096 positions. The pair
  // that makes r turns has the index 64 ln(4096 / (2 pi r)) / ln 10000: 20.94 for r = 32, 45.03 for
  // r = 1, so the ramp goes from 20 to 46.
  const Values got = frequencies({.dim = 128,
                                  .scaling = init::RotaryScaling::kYarn,
                                  .factor = 16,
                                  .original_max_positions = 4096});
  Values want;
  for (int64_t i = 0; i < 64; ++i) {
    const double f = own(10000, i, 128);
    const double ramp = i <= 20 ? 0 : i >= 46 ? 1 : static_cast<double>(i - 20) / 26;
    want.push_back(f * (1 - ramp) + f / 16 * ramp);
  }
  expect_close(got, want);
}

TEST(RotaryAngles, YarnSoftmaxScale) {
  EXPECT_DOUBLE_EQ(init::yarn_softmax_scale(1), 1);
  // 0.1 ln 16 + 1 = 1.2772588722239781
  EXPECT_NEAR(init::yarn_softmax_scale(16), 1.2772588722239781 * 1.2772588722239781, 1e-12);
}

TEST(RotaryAngles, FactorOneChangesNothing) {
  const Tensor plain = take(init::rotary_angles({.dim = 16, .max_seqlen = 9}));
  for (const auto scaling : {init::RotaryScaling::kLinear, init::RotaryScaling::kNtk}) {
    EXPECT_TRUE(same_bits(
        take(init::rotary_angles({.dim = 16, .max_seqlen = 9, .scaling = scaling})), plain));
  }
}

TEST(RotaryAngles, WrongOptionsAreNamed) {
  const auto fails = [](init::RotaryOptions options, const char* what) {
    options.max_seqlen = 4;
    EXPECT_FAILS(init::rotary_angles(options).status(), kInvalidArgument, what);
  };
  fails({.dim = 8, .factor = 2}, "scaling kNone");
  fails({.dim = 8, .first_position = -1}, "first_position is -1");
  fails({.dim = 8, .scaling = init::RotaryScaling::kLinear, .factor = 0.5}, "factor is 0.5");
  fails({.dim = 2, .scaling = init::RotaryScaling::kNtk, .factor = 2}, "at least 4");
  fails({.dim = 8, .scaling = init::RotaryScaling::kYarn, .factor = 2},
        "original_max_positions is 0");
  fails({.dim = 8,
         .scaling = init::RotaryScaling::kLlama3,
         .factor = 2,
         .original_max_positions = 64,
         .high_freq_factor = 1},
        "high_freq_factor 1.0");
}

}  // namespace
}  // namespace te_fl::nn::testing::rotary_angles_test
