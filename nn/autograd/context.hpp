#pragma once

#include <cstdint>

#include "core/base/lock_level.hpp"
#include "te_fl/nn/autograd/context.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn::detail {

// The RNG state that all copies of one Context share.
struct RandomState {
  core::Mutex mutex{core::LockLevel::kRandomPosition};
  RandomPosition position;
  // Set during the capture of a graph: the device tensor U64 [2] {seed, offset}. At each launch of
  // the graph its contents replace `captured_at`, the RNG offset at the capture.
  Tensor captured;
  uint64_t captured_at = 0;
};

}  // namespace te_fl::nn::detail
