// Computes scales from amaxes and quantises scaled values. Every backend must produce exactly these
// bits. The functions use plain FP32 arithmetic; each result is rounded in one division or one
// product only, so the compiler finds no multiply-add to contract.
#pragma once

#include <bit>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "te_fl/numeric/formats.hpp"

namespace te_fl::numeric {

namespace detail {
constexpr std::uint32_t magnitude_bits(float x) {
  return std::bit_cast<std::uint32_t>(x) & 0x7FFFFFFFu;
}
constexpr bool is_infinite(float x) { return magnitude_bits(x) == 0x7F800000u; }
constexpr bool is_finite(float x) { return magnitude_bits(x) < 0x7F800000u; }
}  // namespace detail

// max(amax, |x|), ignoring a NaN x as fmax does; an infinite x counts. Start with amax = 0.
constexpr float amax_accumulate(float amax, float x) {
  const float absolute = std::bit_cast<float>(detail::magnitude_bits(x));
  return absolute > amax ? absolute : amax;
}

// Quantises x: x * scale is rounded to FP32 first, and then to T.
template <class T>
constexpr T quantize(float x, float scale) {
  return from_float<T>(x * scale);
}

// Clears the mantissa: returns the largest power of two that is at most |x|, with x's sign. Zero
// and infinity are unchanged; FP32 subnormals become zero.
constexpr float truncate_to_power_of_two(float x) {
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) & 0xFF800000u);
}

// Scale for current and block scaling, from the amax of a tensor or block (>= 0, infinite or NaN).
//   1. An amax below epsilon is replaced by epsilon.
//   2. If amax is now 0, infinite or NaN, the scale is 1.
//   3. Otherwise the scale is fp8_max / amax in FP32. An infinite quotient is replaced by
//      inf_scale_replacement (FLT_MAX for per-tensor scaling, largest_finite<input type> for block
//      scaling).
//   4. With pow2 the result, replaced or not, is truncated to a power of two.
constexpr float scale_from_amax(float amax, float fp8_max, float epsilon, bool pow2,
                                float inf_scale_replacement) {
  if (amax < epsilon) amax = epsilon;  // the comparison is false for a NaN
  if (amax == 0.0f || !detail::is_finite(amax)) return 1.0f;
  float scale = fp8_max / amax;
  if (detail::is_infinite(scale)) scale = inf_scale_replacement;
  return pow2 ? truncate_to_power_of_two(scale) : scale;
}

// Block scale of MXFP8: amax / fp8_max in FP32, rounded up to a power of two (see e8m0).
// Dequantisation multiplies by this scale, quantisation by its e8m0_reciprocal.
constexpr e8m0 mxfp8_scale(float amax, float fp8_max = kE4m3Max) { return e8m0(amax / fp8_max); }

// 1 / scale, exact for every code: from 2^127 for 0x00 to 2^-127 (an FP32 subnormal) for 0xFE. NaN
// for NaN.
constexpr float e8m0_reciprocal(e8m0 scale) {
  if (scale.bits == 0xFF) return to_float(scale);
  return to_float(e8m0::from_bits(static_cast<std::uint8_t>(254 - scale.bits)));
}

enum class AmaxComputeAlgo {
  kMax,         // the largest amax of the history
  kMostRecent,  // the amax of the step that just ended
};

struct DelayedScalingRule {
  float fp8_max = kE4m3Max;
  int margin = 0;  // headroom in powers of two; fp8_max * 2^-margin must be a normal FP32 number
  AmaxComputeAlgo algo = AmaxComputeAlgo::kMax;
};

// Returns fp8_max * 2^-margin, the numerator of a delayed scale, of the format E4M3 or E5M2.
inline float delayed_scaling_numerator(bool e5m2, float margin) {
  return (e5m2 ? kE5m2Max : kE4m3Max) * std::exp2(-margin);
}

// The amax history of one tensor: a column of a row-major array [length, num_tensors]. Row i is
// data[i * stride]. Row 0 collects the amax of the current step. The memory is borrowed.
struct AmaxHistory {
  float* data;
  std::size_t length;  // >= 1
  std::size_t stride;  // in elements; num_tensors for a dense history
};

// Ends a step of delayed scaling for one tensor: shifts its history and returns the new scale. The
// caller stores the scale and its inverse.
//   last = reduced_amax (the maximum over the data- or tensor-parallel group; 0: not reduced), or
//     row 0 if reduced_amax is 0.
//   If last is 0, the tensor had no amax in this step; history and scale do not change.
//   Otherwise the history shifts by one row: row i gets the value of row i + 1, the last row gets
//     `last`, and row 0 is set to 0.
//   amax = last (kMostRecent), or the maximum of last and rows 1.. (kMax), ignoring NaN.
//   scale = fp8_max * 2^-margin / amax. If amax is zero, negative or not finite, the scale stays
//     old_scale. An infinite scale becomes FLT_MAX.
// No other thread may access this column of the history meanwhile; different columns may be updated
// concurrently.
inline float delayed_scaling_update(AmaxHistory history, float reduced_amax, float old_scale,
                                    const DelayedScalingRule& rule) {
  assert(history.data != nullptr && history.length >= 1);
  const auto row = [&history](std::size_t i) -> float& { return history.data[i * history.stride]; };
  const float last = reduced_amax != 0.0f ? reduced_amax : row(0);  // a NaN is not zero

  float largest = 0.0f;
  for (std::size_t i = 0; last != 0.0f && i < history.length; ++i) {
    const float entry = i + 1 < history.length ? row(i + 1) : last;
    if (entry > largest) largest = entry;
    row(i) = i == 0 ? 0.0f : entry;
  }

  const float amax = rule.algo == AmaxComputeAlgo::kMax ? largest : last;
  float scale = old_scale;
  if (amax > 0.0f && detail::is_finite(amax)) {
    scale = std::ldexp(rule.fp8_max, -rule.margin) / amax;
  }
  return detail::is_infinite(scale) ? std::numeric_limits<float>::max() : scale;
}

}  // namespace te_fl::numeric
