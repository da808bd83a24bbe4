// The CUDA plugin's E8M0 scales against the rule that all backends share. Needs no GPU.
#include "backends/cuda/common/mxfp8.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <ios>

#include "te_fl/numeric/scaling.hpp"

namespace te_fl::cuda::mxfp8_test {
namespace {

uint32_t by_rule(uint32_t bits, bool is_e5m2) {
  const float fp8_max = is_e5m2 ? numeric::kE5m2Max : numeric::kE4m3Max;
  return numeric::mxfp8_scale(std::bit_cast<float>(bits), fp8_max).bits;
}

// Tests every exponent of the amax, with the significands at which the scale may change and with
// every 4099th significand.
TEST(CudaMxfp8, CodesAreThoseOfTheRule) {
  for (const bool is_e5m2 : {false, true}) {
    const auto check = [&](uint32_t bits) {
      ASSERT_EQ(mxfp8_code(bits, is_e5m2), by_rule(bits, is_e5m2)) << std::hex << bits;
    };
    for (uint32_t exponent = 0; exponent < 255; ++exponent) {
      const uint32_t power = exponent << 23;
      for (uint32_t significand = 0; significand < 1u << 23; significand += 4099) {
        check(power | significand);
      }
      for (const uint32_t middle : {0u, 0x400000u, 0x600000u, 0x7FFFFCu}) {
        for (uint32_t near = 0; near < 4; ++near) {
          check(power | (middle + near));
          if (middle > 0) check(power | (middle - near));
        }
      }
    }
    check(0x7F800000u);  // infinity
  }
  EXPECT_EQ(mxfp8_code(0x80000000u, false), 0u) << "a lower bound of -0";
}

TEST(CudaMxfp8, FactorsAreReciprocalsOfScales) {
  for (uint32_t code = 0; code < 0xFF; ++code) {
    const auto scale = numeric::e8m0::from_bits(static_cast<uint8_t>(code));
    EXPECT_EQ(mxfp8_factor_bits(code), std::bit_cast<uint32_t>(numeric::e8m0_reciprocal(scale)))
        << code;
  }
}

TEST(CudaMxfp8, ScalesArePaddedToTilesOf128) {
  EXPECT_EQ(mxfp8_row_pitch(1), 4);
  EXPECT_EQ(mxfp8_row_pitch(128), 4);
  EXPECT_EQ(mxfp8_row_pitch(129), 8);
  EXPECT_EQ(mxfp8_column_pitch(96), 128);
  EXPECT_EQ(mxfp8_padded_rows(130), 256);
  EXPECT_EQ(mxfp8_padded_rows(0), 0);
}

}  // namespace
}  // namespace te_fl::cuda::mxfp8_test
