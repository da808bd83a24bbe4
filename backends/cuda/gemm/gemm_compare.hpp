// Compares the results of two cuBLASLt algorithms for the same GEMM.
#pragma once

#include <cstdint>
#include <limits>

namespace te_fl::cuda {

// True if a different order of summation explains the difference of `got` and `expected`: at most
// one rounding step of the result's type (`step`, relative to the value) plus the absolute
// tolerance `slack`. NaN equals NaN, and infinities of the same sign are equal.
constexpr bool explained(float expected, float got, float step, float slack) {
  if (expected == got) return true;
  if (expected != expected || got != got) return expected != expected && got != got;
  constexpr float kMost = std::numeric_limits<float>::max();
  if (expected > kMost || expected < -kMost || got > kMost || got < -kMost) return false;
  const float distance = expected > got ? expected - got : got - expected;
  return distance <= step * (expected < 0 ? -expected : expected) + slack;
}

// Tolerance for a different order of summation, relative to the root mean square of the results.
// While they accumulate, FP8 GEMMs keep little more than 13 mantissa bits, all others 23.
constexpr float kFp8Slack = 1.0f / 64, kSlack = 1.0f / 1024;

// True if all `count` elements at `got` agree with those at `expected`; both are device memory of a
// te_fl dtype (float or FP8). `share`: kFp8Slack or kSlack. `stream`: a cudaStream_t, for which
// this waits.
bool results_agree(const void* expected, const void* got, int64_t count, int dtype, float share,
                   void* stream);

}  // namespace te_fl::cuda
