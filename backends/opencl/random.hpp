// Dropout's random state as kernel arguments.
#pragma once

#include "launch.hpp"
#include "te_fl/numeric/philox.hpp"

namespace te_fl::opencl {

// Flags for kernels: seed_at or offset_at is present. Not every driver lets a kernel detect a null
// pointer.
enum : uint32_t { kSeedAddress = 1, kOffsetAddress = 2 };  // same values as in common.cl

// Sets the kernel arguments seed, offset, seed_at, offset_at, at and threshold.
inline Launch& random(Launch& launch, const te_fl_rng& rng, float p) {
  return launch.value<uint64_t>(rng.seed)
      .value<uint64_t>(rng.offset)
      .memory(rng.seed_address)
      .memory(rng.offset_address)
      .value<uint32_t>((rng.seed_address != nullptr ? kSeedAddress : 0) |
                       (rng.offset_address != nullptr ? kOffsetAddress : 0))
      .value<uint64_t>(numeric::dropout_threshold(p));
}

inline float kept(float p) { return static_cast<float>(1.0 - static_cast<double>(p)); }

}  // namespace te_fl::opencl
