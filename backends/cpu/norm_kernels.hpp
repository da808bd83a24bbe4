// One row of layer and RMS normalisation on FP32 buffers, padded (see convert.hpp).
#pragma once

#include <cstdint>

namespace te_fl::cpu {

double row_sum(const float* x, int64_t n);
// Sum of (x - mean)^2. The mean comes in two parts, the second what FP32 rounded away, so that a
// large common offset costs no digits.
double row_squares(const float* x, int64_t n, float mean, float mean_rest);
// z = (x - mean) rsigma g + beta; beta may be null; z may be x.
void normalise(const float* x, int64_t n, float mean, float mean_rest, float rsigma, const float* g,
               const float* beta, float* z);

struct NormSums {
  float d = 0.0f;   // sum of d = dz g
  float dn = 0.0f;  // sum of d n, n = (x - mean) rsigma
};
// Sums of one row; dgamma += dz n and, if it is not null, dbeta += dz.
NormSums norm_sums(const float* dz, const float* x, const float* g, int64_t n, float mean,
                   float rsigma, double* dgamma, double* dbeta);
// dx = rsigma (d - mean_d - n mean_dn), plus add if it is not null. dx may be dz.
void norm_gradient(const float* dz, const float* x, const float* g, const float* add, int64_t n,
                   float mean, float rsigma, float mean_d, float mean_dn, float* dx);

}  // namespace te_fl::cpu
