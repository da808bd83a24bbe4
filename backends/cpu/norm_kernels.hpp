// One row of layer and RMS normalisation on FP32 buffers, padded (see convert.hpp).
#pragma once

#include <cstdint>

namespace te_fl::cpu {

double row_sum(const float* x, int64_t n);
// The mean of a row, to about the digits of FP32: a shift for row_moments(). n is 1 or more.
float rough_mean(const float* x, int64_t n);
struct Moments {
  double sum = 0;      // of x - shift
  double squares = 0;  // of (x - shift)^2
};
// With a shift near the mean, a large common offset costs no digits.
Moments row_moments(const float* x, int64_t n, float shift);
// z = (x - mean) rsigma g + beta; beta may be null; z may be x.
void normalise(const float* x, int64_t n, float mean, float mean_rest, float rsigma, const float* g,
               const float* beta, float* z);

struct NormSums {
  float d = 0.0f;   // sum of d = dz g
  float dn = 0.0f;  // sum of d n, n = (x - mean) rsigma
};
// Sums of one row; dgamma += dz n and, if it is not null, dbeta += dz, both padded.
NormSums norm_sums(const float* dz, const float* x, const float* g, int64_t n, float mean,
                   float rsigma, float* dgamma, float* dbeta);
// dx = rsigma (d - mean_d - n mean_dn), plus add if it is not null. dx may be dz.
void norm_gradient(const float* dz, const float* x, const float* g, const float* add, int64_t n,
                   float mean, float rsigma, float mean_d, float mean_dn, float* dx);

}  // namespace te_fl::cpu
