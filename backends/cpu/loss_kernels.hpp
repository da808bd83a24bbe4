// Pieces of a row of cross-entropy on FP32 buffers, padded (see convert.hpp).
#pragma once

#include <cstdint>

namespace te_fl::cpu {

// The largest of `so_far` and x; NaN if one of them is.
float max_of(float so_far, const float* x, int64_t n);
// Sum of exp(x - shift), where shift is finite and no x is above it or NaN. Terms below exp(-87)
// count as exp(-87).
double sum_of_exp(const float* x, int64_t n, float shift);
// out = g (exp(x - shift) - less); out may be x.
void exp_gradient(const float* x, int64_t n, float shift, float less, float g, float* out);

}  // namespace te_fl::cpu
