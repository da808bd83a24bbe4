// E8M0 scales of MXFP8 in integer arithmetic. The results equal those of numeric::mxfp8_scale for
// every amax, without its division. For host and device.
#pragma once

#include <cstdint>

namespace te_fl::cuda {

constexpr int kMxfp8Block = 32;

// Returns the E8M0 code of amax / fp8_max, rounded up to a power of two. `amax_bits`: the bits of
// an FP32 amax that is not NaN; the sign is ignored. fp8_max is 1.75 * 2^8 for E4M3 and 1.75 * 2^15
// for E5M2, so a significand above 1.75 rounds up to the next power.
constexpr uint32_t mxfp8_code(uint32_t amax_bits, bool is_e5m2) {
  const uint32_t bits = amax_bits & 0x7FFFFFFFu, shift = is_e5m2 ? 15 : 8;
  if (bits == 0x7F800000u) return 0xFE;
  const uint32_t exponent = (bits + 0x1FFFFFu) >> 23;
  // For this one amax, amax / fp8_max is subnormal in FP32 and is rounded down to 2^-127.
  const bool rounds_down = bits == (shift << 23 | 0x600001u);
  return exponent > shift && !rounds_down ? exponent - shift : 0;
}

// Returns the FP32 bits of 1 / scale for an E8M0 code, which must not be that of NaN.
constexpr uint32_t mxfp8_factor_bits(uint32_t code) {
  return code == 0xFE ? 0x00400000u : (0xFE - code) << 23;
}

// Extents of the scale tensors of an [m, k] matrix, padded to tiles of 128 x 128 elements: bytes
// per row of the row-wise scales, bytes per row of the column-wise scales, and rows of the row-wise
// scales.
constexpr int64_t mxfp8_row_pitch(int64_t k) { return (k + 127) / 128 * 4; }
constexpr int64_t mxfp8_column_pitch(int64_t k) { return (k + 127) / 128 * 128; }
constexpr int64_t mxfp8_padded_rows(int64_t m) { return (m + 127) / 128 * 128; }

}  // namespace te_fl::cuda
