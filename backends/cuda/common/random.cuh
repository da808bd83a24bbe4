// Dropout's random decisions: Philox 4x32-10, element i uses word i mod 4 of counter offset + i/4.
#pragma once

#include "common/element.cuh"
#include "te_fl/numeric/philox.hpp"

namespace te_fl::cuda {

struct DropoutStream {
  uint64_t seed, offset;
  const uint64_t* state;  // {seed, offset to add} in device memory, or null
  uint32_t threshold;     // the argument's range keeps p so far below 1 that 32 bits hold it

  DropoutStream(const te_fl_rng& rng, float p)
      : seed(rng.seed),
        offset(rng.offset),
        state(rng.state),
        threshold(static_cast<uint32_t>(numeric::dropout_threshold(p))) {}
  // Bit j: element first + j is kept; first is a multiple of 8.
  __device__ uint32_t keep_eight(int64_t first) const {
    const uint64_t key = state != nullptr ? state[0] : seed;
    const uint64_t base =
        offset + (state != nullptr ? state[1] : 0) + static_cast<uint64_t>(first) / 4;
    uint32_t bits = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto words = numeric::philox4x32(key, base + half);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        bits |= (words[j] >= threshold ? 1u : 0u) << (half * 4 + j);
      }
    }
    return bits;
  }
};

}  // namespace te_fl::cuda
