// Steps of cross-entropy on parts of a row, in FP32 buffers that are padded (see convert.hpp).
#pragma once

#include <cstdint>

namespace te_fl::cpu {

// Returns the maximum of `so_far` and all elements of x; NaN if any of these is NaN.
float running_max(float so_far, const float* x, int64_t n);
// Returns the sum of exp(x - shift). `shift` must be finite and not less than any x, and no x may
// be NaN. Terms below exp(-87) are replaced by exp(-87).
double sum_of_exp(const float* x, int64_t n, float shift);
// out = g (exp(x - shift) - less). `out` may be x.
void exp_gradient(const float* x, int64_t n, float shift, float less, float g, float* out);

}  // namespace te_fl::cpu
