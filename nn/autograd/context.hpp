#pragma once

#include <cstdint>

#include "core/base/lock_level.hpp"
#include "te_fl/nn/autograd/context.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn::detail {

// Shared by the copies of one Context.
struct RandomState {
  core::Mutex mutex{core::LockLevel::kRandomPosition};
  RandomPosition position;
  // While a graph is captured: U64 [2] {seed, offset} on its device, which stands for `captured_at`
  // at every launch.
  Tensor captured;
  uint64_t captured_at = 0;
};

}  // namespace te_fl::nn::detail
