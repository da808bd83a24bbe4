// Layer and RMS normalisation of one row, in FP32 buffers that are padded (see convert.hpp).
#pragma once

#include <cstdint>

namespace te_fl::cpu {

double row_sum(const float* x, int64_t n);
// The mean of a row, roughly to FP32's precision, as the shift for row_moments(). n must be at
// least 1.
float rough_mean(const float* x, int64_t n);
struct Moments {
  double sum = 0;      // sum of x - shift
  double squares = 0;  // sum of (x - shift)^2
};
// Computes the sums of x - shift and (x - shift)^2. A shift near the mean keeps precision even if
// the mean is large.
Moments row_moments(const float* x, int64_t n, float shift);
// z = (x - mean) rsigma g + beta. `beta` may be NULL; z may be x. mean + mean_rest is the mean in
// higher precision.
void normalise(const float* x, int64_t n, float mean, float mean_rest, float rsigma, const float* g,
               const float* beta, float* z);

struct NormSums {
  float d = 0.0f;   // sum of d = dz g
  float dn = 0.0f;  // sum of d n, n = (x - mean) rsigma
};
// Returns the sums of d and d n of one row. Also adds dz n to dgamma and, unless dbeta is NULL, dz
// to dbeta; dgamma and dbeta must be padded.
NormSums norm_sums(const float* dz, const float* x, const float* g, int64_t n, float mean,
                   float rsigma, float* dgamma, float* dbeta);
// dx = rsigma (d - mean_d - n mean_dn), plus `add` unless it is NULL. dx may be dz.
void norm_gradient(const float* dz, const float* x, const float* g, const float* add, int64_t n,
                   float mean, float rsigma, float mean_d, float mean_dn, float* dx);

}  // namespace te_fl::cpu
