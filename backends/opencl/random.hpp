// Dropout's random state as kernels take it.
#pragma once

#include "launch.hpp"
#include "te_fl/numeric/philox.hpp"

namespace te_fl::opencl {

// The arguments seed, offset, state, threshold of a kernel.
inline Launch& random(Launch& launch, const te_fl_rng& rng, float p) {
  return launch.value<uint64_t>(rng.seed)
      .value<uint64_t>(rng.offset)
      .memory(rng.state)
      .value<uint64_t>(numeric::dropout_threshold(p));
}

inline float kept(float p) { return static_cast<float>(1.0 - static_cast<double>(p)); }

}  // namespace te_fl::opencl
