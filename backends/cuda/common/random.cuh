// Dropout's random decisions with Philox 4x32-10. Element i uses word i mod 4 of the Philox output
// for counter offset + i / 4.
#pragma once

#include "common/element.cuh"
#include "te_fl/numeric/philox.hpp"

namespace te_fl::cuda {

struct DropoutStream {
  uint64_t seed, offset;
  const uint64_t* seed_address;    // in device memory; replaces `seed` unless NULL
  const uint64_t* offset_address;  // in device memory; added to `offset` unless NULL
  uint32_t threshold;              // fits 32 bits, because the argument check keeps p well below 1

  DropoutStream(const te_fl_rng& rng, float p)
      : seed(rng.seed),
        offset(rng.offset),
        seed_address(rng.seed_address),
        offset_address(rng.offset_address),
        threshold(static_cast<uint32_t>(numeric::dropout_threshold(p))) {}
  // Bit j is set if element first + j is kept. `first` must be a multiple of 8.
  __device__ uint32_t keep_eight(int64_t first) const {
    const uint64_t key = seed_address != nullptr ? *seed_address : seed;
    const uint64_t base = offset + (offset_address != nullptr ? *offset_address : 0) +
                          static_cast<uint64_t>(first) / 4;
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
