// Element formats narrower than FP32: exact decoding, correctly rounded encoding.
//
// | type     | bits  | layout | largest | min normal | min subnormal | special values
// |----------|-------|--------|---------|------------|---------------|----------------------------
// | half     | 16    | e5m10  | 65504   | 2^-14      | 2^-24         | IEEE infinities and NaN
// | bfloat16 | 16    | e8m7   | 3.39e38 | 2^-126     | 2^-133        | IEEE infinities and NaN
// | fp8e4m3  | 8     | e4m3   | 448     | 2^-6       | 2^-9          | no infinity; NaN 0x7F, 0xFF
// | fp8e5m2  | 8     | e5m2   | 57344   | 2^-14      | 2^-16         | inf 0x7C; NaN 0x7D to 0x7F
// | fp4e2m1  | low 4 | e2m1   | 6       | 1          | 0.5           | none
// | e8m0     | 8     | e8     | 2^127   | 2^-127     | none          | NaN 0xFF; no sign, no zero
//
// Encoding rounds the given FP32 or FP64 value once, to nearest, ties to even, with these
// exceptions:
// - half and bfloat16 overflow to infinity. A NaN becomes a quiet NaN with the same sign and
//   leading payload bits.
// - fp8e4m3, fp8e5m2 and fp4e2m1 saturate: finite overflow and infinities become the largest finite
//   value with the same sign. NaN becomes 0x7F in FP8, whatever its sign, and +6 in FP4, which has
//   no NaN.
// - e8m0 holds block scales and rounds up: to the smallest power of two that is at least |x|, at
//   most 2^127 (0xFE). 0 becomes 0x00, infinity 0xFE, NaN 0xFF; the sign is ignored.
// Every format with a sign keeps the sign of zero, and of values that round to zero.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace te_fl::numeric {

namespace detail {

// Bit layout of the source type of a conversion, FP32 or FP64.
template <class T>
struct IeeeSource;
template <>
struct IeeeSource<float> {
  using Bits = std::uint32_t;
  static constexpr int kMantissaBits = 23, kBias = 127;
};
template <>
struct IeeeSource<double> {
  using Bits = std::uint64_t;
  static constexpr int kMantissaBits = 52, kBias = 1023;
};

// A source value split into its fields. exponent() is the exponent of the significand's hidden bit,
// so that |value| = significand * 2^(exponent - kMantissaBits) also holds for subnormal values.
template <class T>
struct Unpacked {
  using Source = IeeeSource<T>;
  using Bits = typename Source::Bits;
  static constexpr Bits kHidden = Bits{1} << Source::kMantissaBits;
  static constexpr Bits kInfinity = (~Bits{0} >> 1) & ~(kHidden - 1);

  constexpr explicit Unpacked(T value)
      : negative((std::bit_cast<Bits>(value) >> (sizeof(T) * 8 - 1)) != 0),
        magnitude(std::bit_cast<Bits>(value) & (~Bits{0} >> 1)) {}

  constexpr bool is_nan() const { return magnitude > kInfinity; }
  constexpr bool is_infinite() const { return magnitude == kInfinity; }
  constexpr int exponent() const {
    return std::max(static_cast<int>(magnitude >> Source::kMantissaBits), 1) - Source::kBias;
  }
  constexpr Bits significand() const {
    return (magnitude & (kHidden - 1)) | (magnitude >= kHidden ? kHidden : Bits{0});
  }

  bool negative;
  Bits magnitude;  // the bit pattern without the sign bit
};

// Rounds a finite magnitude to Format, to nearest even, as if Format's exponent had no upper bound.
// One expression gives subnormal and normal results: code = (biased - 1) * 2^m + quotient, where
// the quotient of a normal result includes the hidden bit. A carry out of the mantissa increments
// the exponent automatically.
template <class Format, class T>
constexpr std::uint32_t round_magnitude(const Unpacked<T>& x) {
  using Bits = typename Unpacked<T>::Bits;
  constexpr int kSourceBits = IeeeSource<T>::kMantissaBits;
  const int exponent = x.exponent();
  const int biased = std::max(exponent + Format::kBias, 1);
  // With a shift of kSourceBits + 2 or more, every significand is less than half a step.
  const int shift = std::min(
      kSourceBits - Format::kMantissaBits + (biased - Format::kBias - exponent), kSourceBits + 2);
  const Bits significand = x.significand();
  const Bits quotient = significand >> shift;
  const Bits remainder = significand & ((Bits{1} << shift) - 1);
  const Bits half_step = Bits{1} << (shift - 1);
  const bool up = remainder > half_step || (remainder == half_step && (quotient & 1) != 0);
  return (static_cast<std::uint32_t>(biased - 1) << Format::kMantissaBits) +
         static_cast<std::uint32_t>(quotient) + (up ? 1u : 0u);
}

// Encodes into a sign-and-magnitude format. Format defines the codes for NaN and for overflow.
template <class Format, class T>
constexpr typename Format::Bits encode(T value) {
  const Unpacked<T> x(value);
  if (x.is_nan()) return Format::encode_nan(x);
  std::uint32_t code = Format::kOverflow;
  if (!x.is_infinite()) {
    code = round_magnitude<Format>(x);
    if (code > Format::kMaxFinite) code = Format::kOverflow;
  }
  return static_cast<typename Format::Bits>(code | (x.negative ? Format::kSign : 0u));
}

// Decodes a finite magnitude. All values of Format must be normal FP32 numbers.
template <class Format>
constexpr float decode_finite(std::uint32_t code) {
  const std::uint32_t sign = (code & Format::kSign) != 0 ? 0x80000000u : 0u;
  const std::uint32_t magnitude = code & (Format::kSign - 1);
  constexpr int kShift = 23 - Format::kMantissaBits;
  constexpr std::uint32_t kRebias = static_cast<std::uint32_t>(127 - Format::kBias) << 23;
  if (magnitude >> Format::kMantissaBits != 0) {
    return std::bit_cast<float>(sign | ((magnitude << kShift) + kRebias));
  }
  // Subnormal: an integer times a power of two. Both factors and the product are exact in FP32.
  constexpr float kStep = std::bit_cast<float>(
      static_cast<std::uint32_t>(127 + 1 - Format::kBias - Format::kMantissaBits) << 23);
  const float absolute = static_cast<float>(magnitude) * kStep;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(absolute));
}

// Encodes a NaN in 16 bits. Keeps the leading payload bits, as the x86 and Arm instructions do.
template <class Format, class T>
constexpr std::uint16_t encode_nan16(const Unpacked<T>& x) {
  constexpr std::uint32_t kQuiet = 1u << (Format::kMantissaBits - 1);
  const auto payload =
      static_cast<std::uint32_t>((x.magnitude & (Unpacked<T>::kHidden - 1)) >>
                                 (IeeeSource<T>::kMantissaBits - Format::kMantissaBits));
  return static_cast<std::uint16_t>((x.negative ? Format::kSign : 0u) | Format::kInfinity | kQuiet |
                                    payload);
}

struct Fp16Format {
  using Bits = std::uint16_t;
  static constexpr int kMantissaBits = 10, kBias = 15;
  static constexpr std::uint32_t kSign = 0x8000, kMaxFinite = 0x7BFF, kInfinity = 0x7C00,
                                 kOverflow = kInfinity;
  template <class T>
  static constexpr Bits encode_nan(const Unpacked<T>& x) {
    return encode_nan16<Fp16Format>(x);
  }
  template <class T>
  static constexpr Bits encode(T value) {
    return detail::encode<Fp16Format>(value);
  }
  // A NaN becomes a quiet NaN with the same payload, as with a conversion instruction.
  static constexpr float decode(Bits code) {
    if ((code & kInfinity) != kInfinity) return decode_finite<Fp16Format>(code);
    const std::uint32_t payload = (code & 0x3FFu) << 13;
    const std::uint32_t quiet = payload != 0 ? 0x00400000u : 0u;
    return std::bit_cast<float>((code & kSign) << 16 | 0x7F800000u | quiet | payload);
  }
};

struct Bf16Format {
  using Bits = std::uint16_t;
  static constexpr int kMantissaBits = 7, kBias = 127;
  static constexpr std::uint32_t kSign = 0x8000, kMaxFinite = 0x7F7F, kInfinity = 0x7F80,
                                 kOverflow = kInfinity;
  template <class T>
  static constexpr Bits encode_nan(const Unpacked<T>& x) {
    return encode_nan16<Bf16Format>(x);
  }
  template <class T>
  static constexpr Bits encode(T value) {
    return detail::encode<Bf16Format>(value);
  }
  // Rounds off the lower 16 bits of the FP32 pattern, since bfloat16 is its upper half. The
  // increment carries into the exponent, and up to infinity, automatically.
  static constexpr Bits encode(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<Bits>(bits >> 16 | 0x0040u);
    return static_cast<Bits>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
  }
  static constexpr float decode(Bits code) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(code) << 16);
  }
};

inline constexpr float kQuietNan = std::bit_cast<float>(0x7FC00000u);

// Decoding table of a format with at most 8 bits, indexed by code.
template <class Format, std::size_t kCodes>
constexpr std::array<float, kCodes> make_table() {
  std::array<float, kCodes> table{};
  for (std::size_t code = 0; code < kCodes; ++code) {
    table[code] = Format::decode_slow(static_cast<std::uint32_t>(code));
  }
  return table;
}

struct E4m3Format {
  using Bits = std::uint8_t;
  static constexpr int kMantissaBits = 3, kBias = 7;
  static constexpr std::uint32_t kSign = 0x80, kMaxFinite = 0x7E, kOverflow = kMaxFinite;
  template <class T>
  static constexpr Bits encode_nan(const Unpacked<T>&) {
    return 0x7F;
  }
  template <class T>
  static constexpr Bits encode(T value) {
    return detail::encode<E4m3Format>(value);
  }
  static constexpr float decode_slow(std::uint32_t code) {
    return (code & 0x7Fu) == 0x7Fu ? kQuietNan : decode_finite<E4m3Format>(code);
  }
  static constexpr float decode(Bits code);
};

struct E5m2Format {
  using Bits = std::uint8_t;
  static constexpr int kMantissaBits = 2, kBias = 15;
  static constexpr std::uint32_t kSign = 0x80, kMaxFinite = 0x7B, kOverflow = kMaxFinite;
  template <class T>
  static constexpr Bits encode_nan(const Unpacked<T>&) {
    return 0x7F;
  }
  template <class T>
  static constexpr Bits encode(T value) {
    return detail::encode<E5m2Format>(value);
  }
  static constexpr float decode_slow(std::uint32_t code) {
    if ((code & 0x7Fu) > 0x7Cu) return kQuietNan;
    if ((code & 0x7Fu) == 0x7Cu) return std::bit_cast<float>((code & kSign) << 24 | 0x7F800000u);
    return decode_finite<E5m2Format>(code);
  }
  static constexpr float decode(Bits code);
};

struct E2m1Format {
  using Bits = std::uint8_t;
  static constexpr int kMantissaBits = 1, kBias = 1;
  static constexpr std::uint32_t kSign = 0x8, kMaxFinite = 0x7, kOverflow = kMaxFinite;
  template <class T>
  static constexpr Bits encode_nan(const Unpacked<T>&) {
    return kMaxFinite;
  }
  template <class T>
  static constexpr Bits encode(T value) {
    return detail::encode<E2m1Format>(value);
  }
  static constexpr float decode_slow(std::uint32_t code) { return decode_finite<E2m1Format>(code); }
  static constexpr float decode(Bits code);  // reads the low four bits only
};

inline constexpr std::array<float, 256> kE4m3Table = make_table<E4m3Format, 256>();
inline constexpr std::array<float, 256> kE5m2Table = make_table<E5m2Format, 256>();
inline constexpr std::array<float, 16> kE2m1Table = make_table<E2m1Format, 16>();

constexpr float E4m3Format::decode(Bits code) { return kE4m3Table[code]; }
constexpr float E5m2Format::decode(Bits code) { return kE5m2Table[code]; }
constexpr float E2m1Format::decode(Bits code) { return kE2m1Table[code & 0xFu]; }

struct E8m0Format {
  using Bits = std::uint8_t;
  template <class T>
  static constexpr Bits encode(T value) {
    const Unpacked<T> x(value);
    if (x.is_nan()) return 0xFF;
    if (x.is_infinite()) return 0xFE;
    const auto significand = x.significand();
    if (significand == 0) return 0x00;
    // Now |x| lies in (2^(width - 1), 2^width], in units of the significand's last bit.
    const int width = static_cast<int>(std::bit_width(significand - 1));
    const int exponent = x.exponent() - IeeeSource<T>::kMantissaBits + width;
    return static_cast<Bits>(std::clamp(exponent, -127, 127) + 127);
  }
  static constexpr float decode(Bits code) {
    if (code == 0xFF) return kQuietNan;
    if (code == 0) return std::bit_cast<float>(0x00400000u);  // 2^-127, subnormal in FP32
    return std::bit_cast<float>(static_cast<std::uint32_t>(code) << 23);
  }
};

}  // namespace detail

// Conversions of FP32 to raw bit patterns. The rules are at the top of this file.
constexpr std::uint16_t float_to_fp16(float x) { return detail::Fp16Format::encode(x); }
constexpr std::uint16_t float_to_bf16(float x) { return detail::Bf16Format::encode(x); }
constexpr std::uint8_t float_to_e4m3(float x) { return detail::E4m3Format::encode(x); }
constexpr std::uint8_t float_to_e5m2(float x) { return detail::E5m2Format::encode(x); }
constexpr std::uint8_t float_to_e2m1(float x) { return detail::E2m1Format::encode(x); }
constexpr std::uint8_t float_to_e8m0(float x) { return detail::E8m0Format::encode(x); }

// Conversions of FP64. They round once and do not go through FP32.
constexpr std::uint16_t double_to_fp16(double x) { return detail::Fp16Format::encode(x); }
constexpr std::uint16_t double_to_bf16(double x) { return detail::Bf16Format::encode(x); }
constexpr std::uint8_t double_to_e4m3(double x) { return detail::E4m3Format::encode(x); }
constexpr std::uint8_t double_to_e5m2(double x) { return detail::E5m2Format::encode(x); }
constexpr std::uint8_t double_to_e2m1(double x) { return detail::E2m1Format::encode(x); }
constexpr std::uint8_t double_to_e8m0(double x) { return detail::E8m0Format::encode(x); }

// Exact conversions to FP32. FP16 and BF16 NaNs keep sign and payload (FP16 NaNs become quiet, BF16
// bits are only shifted). FP8 and E8M0 NaNs decode to the positive quiet NaN 0x7FC00000.
constexpr float fp16_to_float(std::uint16_t bits) { return detail::Fp16Format::decode(bits); }
constexpr float bf16_to_float(std::uint16_t bits) { return detail::Bf16Format::decode(bits); }
constexpr float e4m3_to_float(std::uint8_t bits) { return detail::E4m3Format::decode(bits); }
constexpr float e5m2_to_float(std::uint8_t bits) { return detail::E5m2Format::decode(bits); }
constexpr float e2m1_to_float(std::uint8_t bits) { return detail::E2m1Format::decode(bits); }
constexpr float e8m0_to_float(std::uint8_t bits) { return detail::E8m0Format::decode(bits); }

// One stored element. It is trivial and has the size, alignment and bits of the raw type, so that
// an array of raw bits may be copied onto an array of elements. Use to_float to compare values and
// `bits` to compare bits.
template <class Format>
struct Element {
  using Bits = typename Format::Bits;

  Element() = default;
  constexpr explicit Element(float value) : bits(Format::encode(value)) {}
  constexpr explicit Element(double value) : bits(Format::encode(value)) {}
  constexpr explicit operator float() const { return Format::decode(bits); }
  static constexpr Element from_bits(Bits bits) {
    Element element(0.0f);
    element.bits = bits;
    return element;
  }

  Bits bits;
};

using half = Element<detail::Fp16Format>;
using bfloat16 = Element<detail::Bf16Format>;
using fp8e4m3 = Element<detail::E4m3Format>;
using fp8e5m2 = Element<detail::E5m2Format>;
using fp4e2m1 = Element<detail::E2m1Format>;  // one value per byte, in the low four bits
using e8m0 = Element<detail::E8m0Format>;

// Converts to FP32: exact for every type but double, which is rounded to nearest even.
constexpr float to_float(float x) { return x; }
constexpr float to_float(double x) { return static_cast<float>(x); }
template <class Format>
constexpr float to_float(Element<Format> x) {
  return static_cast<float>(x);
}

// Converts to FP64: exact for every type.
constexpr double to_double(double x) { return x; }
template <class T>
constexpr double to_double(T x) {
  return static_cast<double>(to_float(x));
}

// from_float<T>(x) and from_double<T>(x) round once, by T's rule. T may also be float or double.
template <class T>
constexpr T from_float(float x) {
  return static_cast<T>(x);
}
template <class T>
constexpr T from_double(double x) {
  return static_cast<T>(x);
}

namespace detail {
template <class T>
// undefined for double, whose value does not fit FP32, and for e8m0, which holds scales
struct LargestFinite;
template <>
struct LargestFinite<float> {
  static constexpr float kValue = std::numeric_limits<float>::max();
};
template <class Format>
requires requires { Format::kMaxFinite; }
struct LargestFinite<Element<Format>> {
  static constexpr float kValue = Format::decode(Format::kMaxFinite);
};
}  // namespace detail

// Largest finite value of T: float, half, bfloat16, fp8e4m3, fp8e5m2 or fp4e2m1. For FP8 it is the
// "fp8_max" of the scaling rules. For an input type it replaces an infinite block scale.
template <class T>
inline constexpr float largest_finite = detail::LargestFinite<T>::kValue;

inline constexpr float kE4m3Max = largest_finite<fp8e4m3>;
inline constexpr float kE5m2Max = largest_finite<fp8e5m2>;
inline constexpr float kE2m1Max = largest_finite<fp4e2m1>;

}  // namespace te_fl::numeric
