// Functions on rows for the router and for permuted tokens, in FP32 buffers that are padded (see
// convert.hpp).
#pragma once

#include <cstdint>

namespace te_fl::cpu {

// y = 1 / (1 + exp(-x)). y may be x.
void sigmoid_f32(const float* x, int64_t n, float* y);
// y = sqrt(log(1 + exp(x))). y may be x.
void sqrt_softplus_f32(const float* x, int64_t n, float* y);
// Returns the dot product of a and b, accumulated in FP32. The padding must be 0.
float dot_f32(const float* a, const float* b, int64_t n);
// acc += factor x.
void add_scaled_f32(const float* x, float factor, int64_t n, float* acc);

}  // namespace te_fl::cpu
