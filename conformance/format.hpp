#pragma once

// Element formats implemented from their definitions, independent of te-fl's conversions: the value
// of a code, and the code nearest to a value. A double represents all values of these formats
// exactly.

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

#include "te_fl/plugin.h"

namespace te_fl::conformance {

// A binary floating-point format: the numbers of exponent and mantissa bits, the bias, and the
// meaning of the largest exponent.
struct Format {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  bool has_infinity;  // the largest exponent means infinity or NaN
  bool saturates;     // overflow and infinity become the largest finite value
  double max;
};

inline const Format& format_of(int dtype) {
  static const Format f16{5, 10, 15, true, false, 65504.0};
  static const Format bf16{8, 7, 127, true, false, 0x1.fep127};
  static const Format e4m3{4, 3, 7, false, true, 448.0};
  static const Format e5m2{5, 2, 15, true, true, 57344.0};
  static const Format e2m1{2, 1, 1, false, true, 6.0};
  switch (dtype) {
    case TE_FL_F16:
      return f16;
    case TE_FL_BF16:
      return bf16;
    case TE_FL_F8E4M3:
      return e4m3;
    case TE_FL_F8E5M2:
      return e5m2;
    default:
      return e2m1;
  }
}

// Replacements for functions of the C library, which would take most of the run time of the cases:
// 2^exponent, and the exponent of |x|. Valid if the result is a normal double, as for all values
// and steps of these formats.
inline double power_of_two(int exponent) {
  return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}
inline int binary_exponent(double x) {
  return static_cast<int>(std::bit_cast<uint64_t>(x) >> 52 & 0x7ff) - 1023;
}

inline double nan_value() { return std::numeric_limits<double>::quiet_NaN(); }
inline double infinity() { return std::numeric_limits<double>::infinity(); }

inline double decode_bits(const Format& f, uint32_t bits) {
  const int width = 1 + f.exponent_bits + f.mantissa_bits;
  const double sign = (bits >> (width - 1)) & 1 ? -1.0 : 1.0;
  const uint32_t mantissa = bits & ((1u << f.mantissa_bits) - 1);
  const uint32_t exponent = (bits >> f.mantissa_bits) & ((1u << f.exponent_bits) - 1);
  const uint32_t top = (1u << f.exponent_bits) - 1;
  if (exponent == top && f.has_infinity) return mantissa == 0 ? sign * infinity() : nan_value();
  if (exponent == top && f.exponent_bits == 4 && mantissa == 7)
    return nan_value();  // the only NaN of E4M3
  if (exponent == 0) return sign * mantissa * power_of_two(1 - f.bias - f.mantissa_bits);
  return sign * (mantissa + (1u << f.mantissa_bits)) *
         power_of_two(static_cast<int>(exponent) - f.bias - f.mantissa_bits);
}

// The code of the nearest value, ties to even. NaN becomes 0x7F for FP8, whatever its sign.
inline uint32_t encode_bits(const Format& f, double x) {
  const int width = 1 + f.exponent_bits + f.mantissa_bits;
  const uint32_t sign = std::signbit(x) ? 1u << (width - 1) : 0;
  const uint32_t infinity_code = ((1u << f.exponent_bits) - 1) << f.mantissa_bits;
  if (std::isnan(x)) return width == 8 ? 0x7f : infinity_code | (1u << (f.mantissa_bits - 1));
  const double a = std::fabs(x);
  int exponent = 1 - f.bias;
  if (a >= power_of_two(exponent) && !std::isinf(a)) exponent = binary_exponent(a);
  const double quantum = power_of_two(exponent - f.mantissa_bits);
  double rounded = std::isinf(a) ? a : std::nearbyint(a / quantum) * quantum;
  if (rounded > f.max) {
    if (!f.saturates) return sign | infinity_code;
    rounded = f.max;
  }
  if (rounded == 0) return sign;
  exponent = binary_exponent(rounded);
  if (exponent < 1 - f.bias)
    return sign | static_cast<uint32_t>(rounded * power_of_two(f.bias - 1 + f.mantissa_bits));
  const auto mantissa = static_cast<uint32_t>(rounded * power_of_two(f.mantissa_bits - exponent)) -
                        (1u << f.mantissa_bits);
  return sign | (static_cast<uint32_t>(exponent + f.bias) << f.mantissa_bits) | mantissa;
}

inline uint32_t float_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float bits_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

inline bool is_fp8(int d) { return d == TE_FL_F8E4M3 || d == TE_FL_F8E5M2; }
inline bool is_float(int d) { return d <= TE_FL_F8E8M0; }
inline double largest(int dtype) {
  if (dtype == TE_FL_F64) return std::numeric_limits<double>::max();
  if (dtype == TE_FL_F32) return std::numeric_limits<float>::max();
  return format_of(dtype).max;
}

// The number of bits per element.
inline int storage_bits(int dtype) {
  static const int widths[] = {64, 32, 16, 16, 8, 8, 4, 8, 8, 16, 32, 64, 8, 16, 32, 64, 8};
  return widths[dtype];
}
inline size_t bytes_for(int dtype, int64_t count) {
  return static_cast<size_t>((count * storage_bits(dtype) + 7) / 8);
}

inline const char* name_of(int dtype) {
  static const char* const names[] = {"f64",    "f32",    "f16", "bf16", "f8e4m3", "f8e5m2",
                                      "f4e2m1", "f8e8m0", "i8",  "i16",  "i32",    "i64",
                                      "u8",     "u16",    "u32", "u64",  "bool"};
  return names[dtype];
}

inline te_fl_dtype c_dtype(int dtype) {
  static const uint8_t codes[] = {TE_FL_CODE_FLOAT,         TE_FL_CODE_FLOAT,
                                  TE_FL_CODE_FLOAT,         TE_FL_CODE_BFLOAT,
                                  TE_FL_CODE_FLOAT8_E4M3FN, TE_FL_CODE_FLOAT8_E5M2,
                                  TE_FL_CODE_FLOAT4_E2M1FN, TE_FL_CODE_FLOAT8_E8M0FNU,
                                  TE_FL_CODE_INT,           TE_FL_CODE_INT,
                                  TE_FL_CODE_INT,           TE_FL_CODE_INT,
                                  TE_FL_CODE_UINT,          TE_FL_CODE_UINT,
                                  TE_FL_CODE_UINT,          TE_FL_CODE_UINT,
                                  TE_FL_CODE_BOOL};
  return {codes[dtype], static_cast<uint8_t>(storage_bits(dtype)), 1};
}

// Element `i` of compact storage as a double. 64-bit integers above 2^53 lose bits; compare their
// bytes instead.
inline double load(int dtype, const uint8_t* p, int64_t i) {
  auto read = [&]<class T>(T) {
    T v;
    std::memcpy(&v, p + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return v;
  };
  switch (dtype) {
    case TE_FL_F64:
      return read(double{});
    case TE_FL_F32:
      return static_cast<double>(read(float{}));
    case TE_FL_F16:
    case TE_FL_BF16:
      return decode_bits(format_of(dtype), read(uint16_t{}));
    case TE_FL_F8E4M3:
    case TE_FL_F8E5M2:
      return decode_bits(format_of(dtype), p[i]);
    case TE_FL_F4E2M1:
      return decode_bits(format_of(dtype), (p[i / 2] >> (i % 2 * 4)) & 0xf);
    case TE_FL_F8E8M0:
      return p[i] == 0xff ? nan_value() : std::ldexp(1.0, p[i] - 127);
    case TE_FL_I8:
      return read(int8_t{});
    case TE_FL_I16:
      return read(int16_t{});
    case TE_FL_I32:
      return read(int32_t{});
    case TE_FL_I64:
      return static_cast<double>(read(int64_t{}));
    case TE_FL_U16:
      return read(uint16_t{});
    case TE_FL_U32:
      return read(uint32_t{});
    case TE_FL_U64:
      return static_cast<double>(read(uint64_t{}));
    default:
      return p[i];
  }
}

// Stores a value, rounded once.
inline void store(int dtype, uint8_t* p, int64_t i, double x) {
  auto write = [&]<class T>(T v) {
    std::memcpy(p + i * static_cast<int64_t>(sizeof(T)), &v, sizeof(T));
  };
  switch (dtype) {
    case TE_FL_F64:
      return write(x);
    case TE_FL_F32:
      return write(static_cast<float>(x));
    case TE_FL_F16:
    case TE_FL_BF16:
      return write(static_cast<uint16_t>(encode_bits(format_of(dtype), x)));
    case TE_FL_F8E4M3:
    case TE_FL_F8E5M2:
      return write(static_cast<uint8_t>(encode_bits(format_of(dtype), x)));
    case TE_FL_F4E2M1: {
      const int shift = static_cast<int>(i % 2) * 4;
      p[i / 2] = static_cast<uint8_t>((p[i / 2] & ~(0xf << shift)) |
                                      (encode_bits(format_of(dtype), x) << shift));
      return;
    }
    case TE_FL_F8E8M0:
      return write(static_cast<uint8_t>(std::isnan(x) ? 0xff : std::ilogb(x) + 127));
    case TE_FL_I8:
      return write(static_cast<int8_t>(x));
    case TE_FL_I16:
      return write(static_cast<int16_t>(x));
    case TE_FL_I32:
      return write(static_cast<int32_t>(x));
    case TE_FL_I64:
      return write(static_cast<int64_t>(x));
    case TE_FL_U16:
      return write(static_cast<uint16_t>(static_cast<int64_t>(x)));
    case TE_FL_U32:
      return write(static_cast<uint32_t>(static_cast<int64_t>(x)));
    case TE_FL_U64:
      return write(x < 0 ? static_cast<uint64_t>(static_cast<int64_t>(x))
                         : static_cast<uint64_t>(x));
    case TE_FL_BOOL:
      return write(static_cast<uint8_t>(x != 0));
    default:
      return write(static_cast<uint8_t>(static_cast<int64_t>(x)));
  }
}

// The value after rounding to dtype.
inline double rounded(int dtype, double x) {
  uint8_t bytes[8] = {};
  store(dtype, bytes, 0, x);
  return load(dtype, bytes, 0);
}

}  // namespace te_fl::conformance
