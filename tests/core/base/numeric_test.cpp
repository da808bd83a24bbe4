// Element formats against independent oracles: values come from each format's definition evaluated
// in FP64, and encodings from a search over those values.
#include "te_fl/numeric.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ios>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace te_fl::numeric {
namespace {

constexpr float kFloatInf = std::numeric_limits<float>::infinity();

// A sign-and-magnitude format with the parameters of its specification.
struct Definition {
  int exponent_bits, mantissa_bits, bias;
  unsigned max_finite;  // code of the largest finite value
  bool saturates;       // true: overflow saturates; false: it gives infinity, whose code is
                        // max_finite + 1
  unsigned sign() const { return 1u << (exponent_bits + mantissa_bits); }

  // (-1)^s 2^(e - bias) (1 + m / 2^M); for e = 0, (-1)^s 2^(1 - bias) (m / 2^M).
  double value(unsigned code) const {
    const unsigned magnitude = code % sign();
    const int e = static_cast<int>(magnitude >> mantissa_bits);
    const double fraction = std::ldexp(magnitude % (1u << mantissa_bits), -mantissa_bits);
    const double absolute =
        e == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1.0 + fraction, e - bias);
    return code >= sign() ? -absolute : absolute;
  }
};

const Definition kFp16{5, 10, 15, 0x7BFF, false};
const Definition kBf16{8, 7, 127, 0x7F7F, false};
const Definition kE4m3{4, 3, 7, 0x7E, true};
const Definition kE5m2{5, 2, 15, 0x7B, true};
const Definition kE2m1{2, 1, 1, 0x7, true};

class Oracle {
 public:
  explicit Oracle(const Definition& definition) : definition_(definition) {
    for (unsigned code = 0; code <= definition.max_finite; ++code) {
      values_.push_back(definition.value(code));
    }
    // Adds the value that would follow the largest finite one, so that overflow to infinity is
    // ordinary rounding.
    if (!definition.saturates) values_.push_back(definition.value(definition.max_finite + 1));
  }

  // Returns the code of the nearest value; a tie goes to the even code. x must not be NaN.
  unsigned encode(double x) const {
    const double absolute = std::fabs(x);
    unsigned code = static_cast<unsigned>(values_.size()) - 1;
    if (absolute < values_.back()) {
      const auto above = std::upper_bound(values_.begin(), values_.end(), absolute);
      const unsigned low = static_cast<unsigned>(above - values_.begin()) - 1;
      const double middle = (values_[low] + values_[low + 1]) / 2;  // exact in FP64
      const bool up = absolute > middle || (absolute == middle && low % 2 == 1);
      code = up ? low + 1 : low;
    }
    return code | (std::signbit(x) ? definition_.sign() : 0u);
  }

  // Returns every representable value, every midpoint, and the neighbours of each in T, with both
  // signs.
  template <class T>
  std::vector<T> boundaries() const {
    std::vector<T> result;
    const T infinity = std::numeric_limits<T>::infinity();
    const auto add = [&](double exact) {
      const T x = static_cast<T>(exact);
      EXPECT_EQ(static_cast<double>(x), exact);
      for (const T y : {std::nextafter(x, -infinity), x, std::nextafter(x, infinity)}) {
        result.push_back(y);
        result.push_back(-y);
      }
    };
    for (std::size_t i = 0; i < values_.size(); ++i) {
      // Skips 2^128 in the list of BF16 values, because FP32 has no such value.
      if (values_[i] > std::numeric_limits<T>::max()) continue;
      add(values_[i]);
      if (i + 1 < values_.size()) add(values_[i] + (values_[i + 1] - values_[i]) / 2);
    }
    for (const T x : {infinity, std::numeric_limits<T>::max(), std::numeric_limits<T>::min(),
                      std::numeric_limits<T>::denorm_min()}) {
      result.push_back(x);
      result.push_back(-x);
    }
    return result;
  }

 private:
  Definition definition_;
  std::vector<double> values_;
};

template <class T>
struct Case {
  using Type = T;
  const Definition& definition;
};

template <class F>
void for_each_format(F&& f) {
  f(Case<half>{kFp16});
  f(Case<bfloat16>{kBf16});
  f(Case<fp8e4m3>{kE4m3});
  f(Case<fp8e5m2>{kE5m2});
  f(Case<fp4e2m1>{kE2m1});
}

std::vector<float> random_floats(int count) {
  std::mt19937 generator(20240607);
  std::vector<float> result;
  while (static_cast<int>(result.size()) < count) {
    const float any = std::bit_cast<float>(static_cast<std::uint32_t>(generator()));
    if (!std::isnan(any)) result.push_back(any);
    // Adds exponents of the narrow formats, which uniformly random bits rarely hit.
    const int exponent = static_cast<int>(generator() % 48) - 30;
    result.push_back(
        std::ldexp(static_cast<float>(static_cast<std::int32_t>(generator())), exponent - 31));
  }
  return result;
}

const std::vector<std::uint32_t>& nan_patterns() {
  static const std::vector<std::uint32_t> patterns{0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001,
                                                   0x7FFFFFFF, 0xFFFFFFFF, 0x7FBFFFFF, 0xFFA5A5A5};
  return patterns;
}

TEST(NumericFormats, ElementsAreTrivialAndRawSized) {
  static_assert(std::is_trivial_v<half> && std::is_standard_layout_v<half> && sizeof(half) == 2);
  static_assert(std::is_trivial_v<bfloat16> && sizeof(bfloat16) == 2);
  static_assert(std::is_trivial_v<fp8e4m3> && sizeof(fp8e4m3) == 1);
  static_assert(std::is_trivial_v<fp8e5m2> && sizeof(fp8e5m2) == 1);
  static_assert(std::is_trivial_v<fp4e2m1> && sizeof(fp4e2m1) == 1);
  static_assert(std::is_trivial_v<e8m0> && sizeof(e8m0) == 1);
  static_assert(!std::is_convertible_v<float, half> && !std::is_convertible_v<half, float>);
  static_assert(float_to_e4m3(1.0f) == 0x38 && e5m2_to_float(0x3C) == 1.0f,
                "usable at compile time");
  // The conversions also take float and double, for generic code over element types.
  EXPECT_EQ(to_float(1.5), 1.5f);
  EXPECT_EQ(to_float(from_float<float>(0.1f)), 0.1f);
  EXPECT_EQ(from_float<double>(0.1f), static_cast<double>(0.1f));
  EXPECT_EQ(to_double(from_double<double>(0.1)), 0.1);
  EXPECT_EQ(from_double<float>(0.1), 0.1f);
  EXPECT_EQ(to_double(half::from_bits(0x3C01)), 1.0 + 0x1p-10);
}

TEST(NumericFormats, LargestFiniteValues) {
  EXPECT_EQ(largest_finite<float>, 3.40282346638528859812e38f);
  EXPECT_EQ(largest_finite<half>, 65504.0f);
  EXPECT_EQ(largest_finite<bfloat16>, 0x1.FEp127f);
  EXPECT_EQ(kE4m3Max, 448.0f);
  EXPECT_EQ(kE5m2Max, 57344.0f);
  EXPECT_EQ(kE2m1Max, 6.0f);
}

TEST(NumericFormats, EveryFiniteCodeDecodesExactlyAndComesBack) {
  for_each_format([](auto c) {
    using T = typename decltype(c)::Type;
    for (unsigned magnitude = 0; magnitude <= c.definition.max_finite; ++magnitude) {
      for (const unsigned code : {magnitude, magnitude | c.definition.sign()}) {
        const auto bits = static_cast<typename T::Bits>(code);
        const double value = c.definition.value(code);
        const float decoded = to_float(T::from_bits(bits));
        ASSERT_EQ(decoded, value) << std::hex << code;
        ASSERT_EQ(std::signbit(decoded), code >= c.definition.sign()) << std::hex << code;
        ASSERT_EQ(from_float<T>(decoded).bits, bits) << std::hex << code;
        ASSERT_EQ(from_double<T>(value).bits, bits) << std::hex << code;
      }
    }
  });
}

TEST(NumericFormats, Fp8SpecialCodes) {
  for (const unsigned code : {0x7Fu, 0xFFu}) EXPECT_TRUE(std::isnan(e4m3_to_float(code)));
  for (const unsigned code : {0x7Du, 0x7Eu, 0x7Fu, 0xFDu, 0xFEu, 0xFFu}) {
    EXPECT_TRUE(std::isnan(e5m2_to_float(code))) << code;
    EXPECT_EQ(float_to_e5m2(e5m2_to_float(code)), 0x7F);
  }
  EXPECT_EQ(e5m2_to_float(0x7C), kFloatInf);
  EXPECT_EQ(e5m2_to_float(0xFC), -kFloatInf);
  EXPECT_EQ(float_to_e4m3(e4m3_to_float(0xFF)), 0x7F);
}

TEST(NumericFormats, HandDerivedVectors) {
  EXPECT_EQ(float_to_e4m3(448.0f), 0x7E);
  EXPECT_EQ(float_to_e4m3(464.0f), 0x7E);  // a tie between 448 and 480, whose code is that of NaN:
                                           // saturates
  EXPECT_EQ(float_to_e4m3(1e30f), 0x7E);
  EXPECT_EQ(float_to_e4m3(-kFloatInf), 0xFE);
  EXPECT_EQ(float_to_e4m3(0x1p-10f), 0x00);  // half the smallest value: ties to even
  EXPECT_EQ(float_to_e4m3(-0x1.8p-9f), 0x82);
  EXPECT_EQ(float_to_e4m3(-0.0f), 0x80);
  EXPECT_EQ(float_to_e4m3(17.0f), 0x58);  // a tie between 16 and 18
  EXPECT_EQ(float_to_e4m3(19.0f), 0x5A);  // a tie between 18 and 20
  EXPECT_EQ(float_to_e5m2(61440.0f), 0x7B);
  EXPECT_EQ(float_to_e5m2(-kFloatInf), 0xFB);
  EXPECT_EQ(float_to_e5m2(0x1p-17f), 0x00);
  EXPECT_EQ(float_to_e5m2(0x1.8p-17f), 0x01);
  EXPECT_EQ(float_to_fp16(65519.996f), 0x7BFF);
  EXPECT_EQ(float_to_fp16(65520.0f), 0x7C00);
  EXPECT_EQ(float_to_bf16(0x1.FEFFFEp127f), 0x7F7F);
  EXPECT_EQ(float_to_bf16(0x1.FFp127f), 0x7F80);
  EXPECT_EQ(float_to_e2m1(0.25f), 0x0);
  EXPECT_EQ(float_to_e2m1(0.75f), 0x2);
  EXPECT_EQ(float_to_e2m1(-2.5f), 0xC);
  EXPECT_EQ(float_to_e2m1(5.0f), 0x6);
  EXPECT_EQ(float_to_e2m1(100.0f), 0x7);
  EXPECT_EQ(e2m1_to_float(0xF5), 3.0f);  // the high nibble is ignored
}

TEST(NumericFormats, RoundingBoundariesFromFp32) {
  for_each_format([](auto c) {
    using T = typename decltype(c)::Type;
    const Oracle oracle(c.definition);
    for (const float x : oracle.template boundaries<float>()) {
      ASSERT_EQ(from_float<T>(x).bits, oracle.encode(x)) << std::hexfloat << x;
    }
    for (const float x : random_floats(200'000)) {
      ASSERT_EQ(from_float<T>(x).bits, oracle.encode(x)) << std::hexfloat << x;
    }
  });
}

// At one FP64 unit beyond a midpoint, a conversion through FP32 would round twice.
TEST(NumericFormats, RoundingBoundariesFromFp64) {
  for_each_format([](auto c) {
    using T = typename decltype(c)::Type;
    const Oracle oracle(c.definition);
    for (const double x : oracle.template boundaries<double>()) {
      ASSERT_EQ(from_double<T>(x).bits, oracle.encode(x)) << std::hexfloat << x;
    }
  });
  EXPECT_EQ(double_to_e4m3(17.0 + 0x1p-40), 0x59);
  EXPECT_EQ(float_to_e4m3(static_cast<float>(17.0 + 0x1p-40)), 0x58);
}

TEST(NumericFormats, NanInputs) {
  for (const std::uint32_t pattern : nan_patterns()) {
    const float nan = std::bit_cast<float>(pattern);
    EXPECT_EQ(float_to_e4m3(nan), 0x7F) << std::hex << pattern;
    EXPECT_EQ(float_to_e5m2(nan), 0x7F) << std::hex << pattern;
    EXPECT_EQ(float_to_e2m1(nan), 0x7) << std::hex << pattern;
    const unsigned sign = pattern >> 31 << 15;
    EXPECT_EQ(float_to_fp16(nan), sign | 0x7E00u | (pattern >> 13 & 0x3FFu)) << std::hex << pattern;
    EXPECT_EQ(float_to_bf16(nan), sign | 0x7FC0u | (pattern >> 16 & 0x7Fu)) << std::hex << pattern;
  }
  for (const double sign : {1.0, -1.0}) {
    const double nan = std::copysign(std::numeric_limits<double>::quiet_NaN(), sign);
    const unsigned bit = sign < 0 ? 0x8000u : 0u;
    EXPECT_EQ(double_to_fp16(nan), 0x7E00u | bit);
    EXPECT_EQ(double_to_bf16(nan), 0x7FC0u | bit);
    EXPECT_EQ(double_to_e4m3(nan), 0x7F);
    EXPECT_EQ(double_to_e5m2(nan), 0x7F);
    EXPECT_EQ(double_to_e2m1(nan), 0x7);
  }
}

TEST(NumericFormats, SixteenBitNanCodesStayNan) {
  for (unsigned code = 0; code < 0x10000; ++code) {
    const bool fp16_nan = (code & 0x7FFF) > 0x7C00, bf16_nan = (code & 0x7FFF) > 0x7F80;
    ASSERT_EQ(std::isnan(fp16_to_float(code)), fp16_nan) << std::hex << code;
    ASSERT_EQ(std::isnan(bf16_to_float(code)), bf16_nan) << std::hex << code;
    if (fp16_nan) {
      ASSERT_EQ(float_to_fp16(fp16_to_float(code)), code | 0x200u);
    }
    if (bf16_nan) {
      ASSERT_EQ(float_to_bf16(bf16_to_float(code)), code | 0x40u);
    }
  }
  EXPECT_EQ(fp16_to_float(0xFC00), -kFloatInf);
  EXPECT_EQ(bf16_to_float(0x7F80), kFloatInf);
}

// Quantises all 65,536 values of both 16-bit types to both FP8 formats, with several scales. The
// product of two FP32 values is exact in FP64, so a single rounding of it gives the FP32 product
// independently.
TEST(NumericFormats, EverySixteenBitInputToFp8) {
  const Oracle e4m3(kE4m3), e5m2(kE5m2);
  const auto check = [&](float x, float scale) {
    const unsigned a = quantize<fp8e4m3>(x, scale).bits, b = quantize<fp8e5m2>(x, scale).bits;
    const float product = static_cast<float>(static_cast<double>(x) * scale);
    EXPECT_EQ(a, std::isnan(product) ? 0x7F : e4m3.encode(product)) << x << " * " << scale;
    EXPECT_EQ(b, std::isnan(product) ? 0x7F : e5m2.encode(product)) << x << " * " << scale;
  };
  for (const float scale : {1.0f, 0.5f, 3.7f, 448.0f / 3.0f, 0x1p-20f, 1e10f, 0x1p100f, 1e-38f,
                            1e-40f, std::numeric_limits<float>::max()}) {
    for (unsigned code = 0; code < 0x10000; ++code) {
      check(to_float(half::from_bits(code)), scale);
      check(to_float(bfloat16::from_bits(code)), scale);
      ASSERT_FALSE(HasFailure()) << std::hex << code;
    }
  }
}

// BF16 is the high half of FP32, so the low half alone decides the rounding.
TEST(NumericFormats, Bf16FollowsFromTheHalvesOfFp32) {
  for (std::uint32_t high = 0; high < 0x10000; ++high) {
    if ((high & 0x7F80) == 0x7F80) continue;  // infinities and NaN
    for (const std::uint32_t low : {0x0000u, 0x0001u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      const bool up = low > 0x8000 || (low == 0x8000 && high % 2 == 1);
      ASSERT_EQ(float_to_bf16(std::bit_cast<float>(high << 16 | low)), high + (up ? 1 : 0));
    }
  }
}

#if defined(__x86_64__)
__attribute__((target("f16c"))) std::uint16_t hardware_fp16(float x) {
  const __m128i packed = _mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT);
  return static_cast<std::uint16_t>(_mm_cvtsi128_si32(packed));
}
__attribute__((target("f16c"))) float hardware_from_fp16(std::uint16_t code) {
  return _cvtsh_ss(code);
}

TEST(NumericFormats, Fp16MatchesTheProcessorBitForBit) {
  if (!__builtin_cpu_supports("avx2")) GTEST_SKIP() << "no F16C on this processor";
  for (unsigned code = 0; code < 0x10000; ++code) {
    ASSERT_EQ(std::bit_cast<std::uint32_t>(fp16_to_float(code)),
              std::bit_cast<std::uint32_t>(hardware_from_fp16(code)))
        << std::hex << code;
  }
  std::vector<float> inputs = Oracle(kFp16).boundaries<float>();
  for (const float x : random_floats(500'000)) inputs.push_back(x);
  for (const std::uint32_t nan : nan_patterns()) inputs.push_back(std::bit_cast<float>(nan));
  for (const float x : inputs) {
    ASSERT_EQ(float_to_fp16(x), hardware_fp16(x)) << std::hexfloat << x;
  }
}
#endif

#if defined(__FLT16_MANT_DIG__) && defined(__GNUC__) && !defined(__clang__)
TEST(NumericFormats, Fp16MatchesTheCompilersType) {
  for (const double x : Oracle(kFp16).boundaries<double>()) {
    ASSERT_EQ(double_to_fp16(x), std::bit_cast<std::uint16_t>(static_cast<_Float16>(x)))
        << std::hexfloat << x;
  }
}
#endif

TEST(NumericFormats, E8m0EveryCode) {
  for (int code = 0; code < 255; ++code) {
    const float scale = e8m0_to_float(static_cast<std::uint8_t>(code));
    ASSERT_EQ(scale, std::ldexp(1.0, code - 127));
    ASSERT_EQ(float_to_e8m0(scale), code);
    ASSERT_EQ(double_to_e8m0(scale), code);
    ASSERT_EQ(float_to_e8m0(std::nextafter(scale, kFloatInf)), std::min(code + 1, 254));
    ASSERT_EQ(double_to_e8m0(std::nextafter(static_cast<double>(scale), 1e300)),
              std::min(code + 1, 254));
    // float_to_e8m0() rounds up: a value just below 2^k gives 2^k. Values below the smallest scale
    // give the smallest scale.
    ASSERT_EQ(float_to_e8m0(std::nextafter(scale, 0.0f)), code);
    ASSERT_EQ(float_to_e8m0(-scale), code);
    ASSERT_EQ(e8m0_reciprocal(e8m0::from_bits(static_cast<std::uint8_t>(code))),
              std::ldexp(1.0, 127 - code));
  }
  EXPECT_TRUE(std::isnan(e8m0_to_float(0xFF)));
  EXPECT_TRUE(std::isnan(e8m0_reciprocal(e8m0::from_bits(0xFF))));
  EXPECT_EQ(float_to_e8m0(0.0f), 0x00);
  EXPECT_EQ(float_to_e8m0(std::numeric_limits<float>::denorm_min()), 0x00);
  EXPECT_EQ(float_to_e8m0(kFloatInf), 0xFE);
  EXPECT_EQ(float_to_e8m0(std::numeric_limits<float>::max()), 0xFE);
  for (const std::uint32_t nan : nan_patterns()) {
    EXPECT_EQ(float_to_e8m0(std::bit_cast<float>(nan)), 0xFF);
  }
  EXPECT_EQ(double_to_e8m0(1e300), 0xFE);
  EXPECT_EQ(double_to_e8m0(1e-300), 0x00);
  EXPECT_EQ(double_to_e8m0(0.0), 0x00);
  EXPECT_EQ(double_to_e8m0(-std::numeric_limits<double>::infinity()), 0xFE);
  EXPECT_EQ(double_to_e8m0(std::numeric_limits<double>::quiet_NaN()), 0xFF);
}

}  // namespace
}  // namespace te_fl::numeric
