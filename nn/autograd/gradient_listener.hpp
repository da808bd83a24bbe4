#pragma once

#include <cstddef>

namespace te_fl::nn::detail {

// Told of what happens to the gradients of parameters (ParameterState::listener), by the thread
// that does it.
class GradientListener {
 public:
  virtual ~GradientListener() = default;
  // Work that writes gradient number `gradient` has been enqueued.
  virtual void wrote(size_t gradient) = 0;
  // A gradient is cleared: another step begins.
  virtual void cleared() = 0;
};

}  // namespace te_fl::nn::detail
