// The SIMD conversions against te_fl/numeric.hpp, bit for bit: every code of the narrow formats,
// every FP32 exponent with the mantissas around every rounding boundary, and tails of every length.
#include "backends/cpu/convert.hpp"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <ios>
#include <vector>

#include "te_fl/numeric.hpp"
#include "te_fl/plugin.h"

namespace te_fl::cpu::convert_test {
namespace {

// Every test runs for each SIMD target that is compiled in and supported by this machine.
class CpuConvert : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    if (GetParam() != 0 && (hwy::SupportedTargets() & GetParam()) == 0) GTEST_SKIP();
    hwy::SetSupportedTargetsForTest(GetParam() != 0 ? GetParam() : int64_t{HWY_STATIC_TARGET});
    hwy::GetChosenTarget().DeInit();
  }
  void TearDown() override {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().DeInit();
  }
};
#if HWY_ARCH_X86
INSTANTIATE_TEST_SUITE_P(Target, CpuConvert, ::testing::Values(HWY_AVX3, HWY_AVX2, 0));
#else
INSTANTIATE_TEST_SUITE_P(Target, CpuConvert, ::testing::Values(0));
#endif

uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }

// FP32 bit patterns. For every sign and exponent: the mantissas next to multiples of 2^12 and 2^19,
// which include the boundaries and midpoints of all four formats; then all patterns of the 16 high
// bits.
std::vector<float> boundary_values() {
  std::vector<float> values;
  // Two per FP16 value: the value itself and the midpoint to the next one.
  for (uint32_t high = 0; high < 1u << 11; ++high) {
    for (uint32_t sign_exponent = 0; sign_exponent < 512; ++sign_exponent) {
      for (const uint32_t low : {0u, 1u, 0xFFFu}) {
        values.push_back(std::bit_cast<float>(sign_exponent << 23 | high << 12 | low));
      }
    }
  }
  return values;
}

template <class T>
void expect_stores_like(int dtype) {
  const std::vector<float> values = boundary_values();
  std::vector<T> stored(values.size());
  for (size_t i = 0; i < values.size(); i += kChunk) {
    const auto n = std::min<size_t>(kChunk, values.size() - i);
    store_f32(dtype, values.data() + i, static_cast<int64_t>(n), stored.data() + i);
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const T expected(values[i]);
    ASSERT_EQ(stored[i].bits, expected.bits)
        << std::hexfloat << values[i] << " 0x" << std::hex << bits_of(values[i]);
  }
}

TEST_P(CpuConvert, StoresHalf) { expect_stores_like<numeric::half>(TE_FL_F16); }
TEST_P(CpuConvert, StoresBfloat16) { expect_stores_like<numeric::bfloat16>(TE_FL_BF16); }
TEST_P(CpuConvert, StoresE4m3) { expect_stores_like<numeric::fp8e4m3>(TE_FL_F8E4M3); }
TEST_P(CpuConvert, StoresE5m2) { expect_stores_like<numeric::fp8e5m2>(TE_FL_F8E5M2); }

template <class T>
void expect_loads_like(int dtype) {
  constexpr size_t kCodes = size_t{1} << (8 * sizeof(T));
  std::vector<T> codes(kCodes);
  for (size_t i = 0; i < kCodes; ++i) {
    codes[i] = T::from_bits(static_cast<decltype(T::bits)>(i));
  }
  std::vector<float> loaded(kCodes + kPad);
  load_f32(dtype, codes.data(), static_cast<int64_t>(kCodes), loaded.data());
  for (size_t i = 0; i < kCodes; ++i) {
    ASSERT_EQ(bits_of(loaded[i]), bits_of(numeric::to_float(codes[i]))) << "code " << i;
  }
}

TEST_P(CpuConvert, LoadsHalf) { expect_loads_like<numeric::half>(TE_FL_F16); }
TEST_P(CpuConvert, LoadsBfloat16) { expect_loads_like<numeric::bfloat16>(TE_FL_BF16); }
TEST_P(CpuConvert, LoadsE4m3) { expect_loads_like<numeric::fp8e4m3>(TE_FL_F8E4M3); }
TEST_P(CpuConvert, LoadsE5m2) { expect_loads_like<numeric::fp8e5m2>(TE_FL_F8E5M2); }

TEST_P(CpuConvert, QuantizesWithAmaxWithoutNan) {
  for (int64_t n = 0; n < 70; ++n) {
    std::vector<float> values(static_cast<size_t>(n));
    float amax = 0.0f;
    for (int64_t i = 0; i < n; ++i) {
      values[static_cast<size_t>(i)] =
          i % 7 == 3 ? std::nanf("") : (i % 2 != 0 ? -0.37f : 0.41f) * i;
      amax = numeric::amax_accumulate(amax, values[static_cast<size_t>(i)]);
    }
    std::vector<numeric::fp8e4m3> codes(static_cast<size_t>(n) + 1, numeric::fp8e4m3(3.0f));
    EXPECT_EQ(quantize_f32(TE_FL_F8E4M3, values.data(), n, 13.7f, codes.data()), amax);
    EXPECT_EQ(amax_f32(values.data(), n), amax);
    for (int64_t i = 0; i < n; ++i) {
      const auto at = static_cast<size_t>(i);
      EXPECT_EQ(codes[at].bits, numeric::quantize<numeric::fp8e4m3>(values[at], 13.7f).bits);
    }
    EXPECT_EQ(codes.back().bits, numeric::fp8e4m3(3.0f).bits) << "written past the end, n " << n;
  }
}

TEST_P(CpuConvert, LoadPadsWithZerosAndNoFurther) {
  const std::vector<float> ones(64, 1.0f);
  for (int64_t n = 0; n < 48; ++n) {
    std::vector<float> out(96, 7.0f);
    load_f32(TE_FL_F32, ones.data(), n, out.data());
    for (int64_t i = 0; i < 96; ++i) {
      const float expected = i < n ? 1.0f : i < padded(n) ? 0.0f : 7.0f;
      ASSERT_EQ(out[static_cast<size_t>(i)], expected) << "n " << n << ", element " << i;
    }
  }
}

TEST_P(CpuConvert, TransposesBytesOfAnyShape) {
  for (const int64_t rows : {0, 1, 15, 16, 17, 64, 67}) {
    for (const int64_t cols : {0, 1, 16, 31, 48, 130}) {
      std::vector<uint8_t> in(static_cast<size_t>(rows * cols)), out(in.size(), 0xEE);
      for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint8_t>(i * 37 + i / 256);
      transpose_bytes(in.data(), cols, rows, cols, out.data(), rows);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < cols; ++c) {
          ASSERT_EQ(out[static_cast<size_t>(c * rows + r)], in[static_cast<size_t>(r * cols + c)]);
        }
      }
    }
  }
}

TEST_P(CpuConvert, Fp8ToBf16IsExact) {
  for (const int dtype : {TE_FL_F8E4M3, TE_FL_F8E5M2}) {
    uint8_t codes[256];
    for (int i = 0; i < 256; ++i) codes[i] = static_cast<uint8_t>(i);
    uint16_t out[256];
    fp8_to_bf16(dtype, codes, 256, out);
    for (int i = 0; i < 256; ++i) {
      const auto code = static_cast<uint8_t>(i);
      const float value =
          dtype == TE_FL_F8E4M3 ? numeric::e4m3_to_float(code) : numeric::e5m2_to_float(code);
      EXPECT_EQ(bits_of(numeric::bf16_to_float(out[i])), bits_of(value)) << "code " << i;
    }
  }
}

}  // namespace
}  // namespace te_fl::cpu::convert_test
