#pragma once

// Checks for backends. They check numbers and list lengths of a call, as far as op schemas cannot
// express the rules. All throw INVALID_ARGUMENT, clean, and read metadata only. Header-only.

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "te_fl/backend.hpp"
#include "te_fl/numeric/formats.hpp"
#include "te_fl/ops/quantize.h"

namespace te_fl::backend {

// Returns the integer that the op `fill` stores: `value` rounded towards zero. Throws if the
// integer lies outside of [low, above_high). `type` is the dtype's name for the message.
template <class T>
T whole_number(double value, const char* type, double low, double above_high) {
  const double whole = std::trunc(value);
  if (whole >= low && whole < above_high) return static_cast<T>(whole);
  invalid("value is " + std::to_string(value) + ", which " + type + " cannot hold; it takes " +
          std::to_string(low) + " to " + std::to_string(above_high - 1));
}
// Calls whole_number() above with the full range of the integer type T.
template <class T>
T whole_number(double value, const char* type) {
  return whole_number<T>(value, type, static_cast<double>(std::numeric_limits<T>::min()),
                         std::ldexp(1.0, std::numeric_limits<T>::digits));
}

// Checks that the outputs of split_quantize have as many rows as the input in total.
inline void check_parts(const te_fl_split_quantize_args& args) {
  const int64_t expected = as_matrix(*args.input).rows;
  int64_t rows = 0;
  for (int64_t i = 0; i < args.outputs_count; ++i) {
    const int64_t part = as_matrix(*args.outputs[i]).rows;
    if (part > expected - rows) {  // checked before adding, since the sum may overflow
      invalid("outputs[" + std::to_string(i) + "] has " + std::to_string(part) + " rows behind " +
              std::to_string(rows) + ", input has " + std::to_string(expected) +
              "; the parts must cover the input");
    }
    rows += part;
  }
  if (rows == expected) return;
  invalid("the rows of outputs sum to " + std::to_string(rows) + ", input has " +
          std::to_string(expected) + "; the parts must cover the input");
}

// Checks that amax_reduction_buffer, if given, has one amax for each tensor.
inline void check_reduced_amaxes(
    const te_fl_fused_amax_and_scale_update_after_reduction_args& args) {
  if (args.amax_reduction_buffer == nullptr) return;
  int64_t tensors = 0;
  for (int64_t i = 0; i < args.scales_count; ++i) tensors += numel(*args.scales[i]);
  const int64_t amaxes = numel(*args.amax_reduction_buffer);
  if (amaxes == tensors) return;
  invalid("amax_reduction_buffer has " + std::to_string(amaxes) + " elements for " +
          std::to_string(tensors) + " tensors; give one element per tensor");
}

// Returns fp8_max * 2^-margin, the numerator of a delayed scaling factor; the denominator is an
// amax.
inline float largest_with_margin(
    const te_fl_fused_amax_and_scale_update_after_reduction_args& args) {
  const float fp8_max =
      args.fp8_dtype == TE_FL_FP8_FORMAT_E5M2 ? numeric::kE5m2Max : numeric::kE4m3Max;
  const float reduced = fp8_max * std::exp2(-args.margin);
  if (std::isnormal(reduced) && std::isfinite(args.margin)) return reduced;
  invalid("margin is " + std::to_string(args.margin) +
          "; fp8_max * 2^-margin must be a normal FP32 number (margin between about -110 and 130)");
}

}  // namespace te_fl::backend
