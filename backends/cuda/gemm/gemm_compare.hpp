// True if two cuBLASLt algorithms computed the same product.
#pragma once

#include <cstdint>
#include <limits>

namespace te_fl::cuda {

// True if `got` differs from `expected` by no more than the order of a product's sums explains: by
// one step of the result's type, which is `step` relative to the value, and by `slack`. Not a
// number agrees with the same, an infinity with itself.
constexpr bool explained(float expected, float got, float step, float slack) {
  if (expected == got) return true;
  if (expected != expected || got != got) return expected != expected && got != got;
  constexpr float kMost = std::numeric_limits<float>::max();
  if (expected > kMost || expected < -kMost || got > kMost || got < -kMost) return false;
  const float distance = expected > got ? expected - got : got - expected;
  return distance <= step * (expected < 0 ? -expected : expected) + slack;
}

// The part of the results' root mean square that the order of sums may make: products of FP8 keep
// few more than 13 bits while they add, all others 23.
constexpr float kFp8Slack = 1.0f / 64, kSlack = 1.0f / 1024;

// True if all `count` elements of a te_fl dtype (floats and FP8) at `got` agree with those at
// `expected`, both device memory; `share` is one of the above. Waits for the stream, a
// cudaStream_t.
bool results_agree(const void* expected, const void* got, int64_t count, int dtype, float share,
                   void* stream);

}  // namespace te_fl::cuda
