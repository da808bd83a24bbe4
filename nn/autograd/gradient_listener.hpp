#pragma once

#include <cstddef>

namespace te_fl::nn::detail {

// Receives events about the gradients of parameters (ParameterState::listener), on the thread that
// causes them.
class GradientListener {
 public:
  virtual ~GradientListener() = default;
  // Work that writes gradient number `gradient` has been enqueued.
  virtual void wrote(size_t gradient) = 0;
  // A gradient was cleared, so a new step begins.
  virtual void cleared() = 0;
};

}  // namespace te_fl::nn::detail
