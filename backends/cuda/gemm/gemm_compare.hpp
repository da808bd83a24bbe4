// Compares the results of two cuBLASLt algorithms for the same GEMM.
#pragma once

#include <cstdint>
#include <limits>

namespace te_fl::cuda {

// True if a different order of summation explains the difference of `got` and `expected`: at most
// one rounding step of the result's type (`step`, relative to the value) plus the absolute
// tolerance `atol`. NaN equals NaN, and infinities of the same sign are equal.
constexpr bool explained(float expected, float got, float step, float atol) {
  if (expected == got) return true;
  if (expected != expected || got != got) return expected != expected && got != got;
  constexpr float kMost = std::numeric_limits<float>::max();
  if (expected > kMost || expected < -kMost || got > kMost || got < -kMost) return false;
  const float distance = expected > got ? expected - got : got - expected;
  return distance <= step * (expected < 0 ? -expected : expected) + atol;
}

// Tolerance for a different order of summation, relative to the root mean square of the results.
// While they accumulate, FP8 GEMMs keep little more than 13 mantissa bits, all others 23.
constexpr float kFp8Tolerance = 1.0f / 64, kTolerance = 1.0f / 1024;

// True if all `count` elements at `got` agree with those at `expected`; both are device memory of a
// te_fl dtype (float or FP8). `share`: kFp8Tolerance or kTolerance. `stream`: a cudaStream_t, for
// which this waits.
bool results_agree(const void* expected, const void* got, int64_t count, int dtype, float share,
                   void* stream);

}  // namespace te_fl::cuda
