#pragma once

#include <cstdint>

#include "core/base/lock_level.hpp"
#include "te_fl/nn/autograd/context.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn::detail {

// The random state that all copies of one Context share.
struct RandomState {
  core::Mutex mutex{core::LockLevel::kRandomPosition};
  RandomPosition position;
  // During the capture of a graph: U64 [2] {seed, offset} on the device. At each launch it replaces
  // the position `captured_at`.
  Tensor captured;
  uint64_t captured_at = 0;
};

}  // namespace te_fl::nn::detail
