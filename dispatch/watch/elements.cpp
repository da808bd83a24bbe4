#include "dispatch/watch/elements.hpp"

#include <cstddef>
#include <cstring>

#include "te_fl/dtype.hpp"
#include "te_fl/numeric.hpp"

namespace te_fl::dispatch {
namespace {

template <class T>
T load(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

uint32_t nibble(const char* base, int64_t i) {
  return static_cast<uint8_t>(base[i / 2]) >> (i % 2 * 4) & 15u;
}

}  // namespace

double element(int dtype, const char* base, int64_t i) {
  switch (dtype) {
    case TE_FL_F64:
      return load<double>(base + 8 * i);
    case TE_FL_F32:
      return load<float>(base + 4 * i);
    case TE_FL_F16:
      return numeric::fp16_to_float(load<uint16_t>(base + 2 * i));
    case TE_FL_BF16:
      return numeric::bf16_to_float(load<uint16_t>(base + 2 * i));
    case TE_FL_F8E4M3:
      return numeric::e4m3_to_float(load<uint8_t>(base + i));
    case TE_FL_F8E5M2:
      return numeric::e5m2_to_float(load<uint8_t>(base + i));
    case TE_FL_F8E8M0:
      return numeric::e8m0_to_float(load<uint8_t>(base + i));
    case TE_FL_F4E2M1:
      return numeric::e2m1_to_float(static_cast<uint8_t>(nibble(base, i)));
    case TE_FL_I8:
      return load<int8_t>(base + i);
    case TE_FL_I16:
      return load<int16_t>(base + 2 * i);
    case TE_FL_I32:
      return load<int32_t>(base + 4 * i);
    case TE_FL_I64:
      return static_cast<double>(load<int64_t>(base + 8 * i));
    case TE_FL_U16:
      return load<uint16_t>(base + 2 * i);
    case TE_FL_U32:
      return load<uint32_t>(base + 4 * i);
    case TE_FL_U64:
      return static_cast<double>(load<uint64_t>(base + 8 * i));
    default:  // U8, BOOL
      return load<uint8_t>(base + i);
  }
}

bool is_float(int dtype) { return dtype <= TE_FL_F8E8M0; }
bool is_code(int dtype) { return dtype >= TE_FL_F8E4M3 && dtype <= TE_FL_F4E2M1; }

uint64_t raw(int dtype, const char* base, int64_t i) {
  uint64_t bits = 0;
  const auto width = static_cast<size_t>(te_fl::bits(static_cast<DType>(dtype)) / 8);
  std::memcpy(&bits, base + static_cast<int64_t>(width) * i, width);
  return bits;
}

int code_ordinal(int dtype, const char* base, int64_t i) {
  const uint32_t code = dtype == TE_FL_F4E2M1 ? nibble(base, i) : static_cast<uint8_t>(base[i]);
  const uint32_t sign = dtype == TE_FL_F4E2M1 ? 0x8 : 0x80;
  const int magnitude = static_cast<int>(code & (sign - 1));
  return (code & sign) != 0 ? -magnitude : magnitude;
}

Steps steps_of(int dtype) {
  if (dtype == TE_FL_F8E4M3) return {0x1p-3, 0x1p-9};
  if (dtype == TE_FL_F8E5M2) return {0x1p-2, 0x1p-16};
  return {0x1p-1, 0.5};
}

double unit_of(int dtype) {
  switch (dtype) {
    case TE_FL_F16:
      return 0x1p-11;
    case TE_FL_BF16:
      return 0x1p-8;
    case TE_FL_F8E4M3:
    case TE_FL_F8E5M2:
    case TE_FL_F4E2M1:
      return 0x1p-6;
    default:
      return 0x1p-24;
  }
}

}  // namespace te_fl::dispatch
