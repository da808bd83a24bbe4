// Passes the RNG state of dropout to kernels as arguments.
#pragma once

#include "launch.hpp"
#include "te_fl/numeric/philox.hpp"

namespace te_fl::opencl {

// Flags that tell a kernel whether seed_at and offset_at are present. They are needed because with
// some drivers a kernel cannot detect a null pointer.
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
