// Pieces of rows of the router and of permuted tokens on FP32 buffers, padded (see convert.hpp).
#pragma once

#include <cstdint>

namespace te_fl::cpu {

// y = 1 / (1 + exp(-x)); y may be x.
void sigmoid_f32(const float* x, int64_t n, float* y);
// y = sqrt(log(1 + exp(x))); y may be x.
void sqrt_softplus_f32(const float* x, int64_t n, float* y);
// Sum of a b, whose padding is 0: in FP32 for each lane.
float dot_f32(const float* a, const float* b, int64_t n);
// acc += factor x.
void add_scaled_f32(const float* x, float factor, int64_t n, float* acc);

}  // namespace te_fl::cpu
