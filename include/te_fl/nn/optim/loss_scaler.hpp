#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "te_fl/export.hpp"
#include "te_fl/nn/modules/module.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn {

struct LossScalerOptions {
  float init_scale = 65536;  // at least 1, like every later scale
  // applied after growth_interval steps in a row without overflow; 1: the scale never grows
  float growth_factor = 2;
  float backoff_factor = 0.5f;  // applied after a step with overflow; in (0, 1]
  int64_t growth_interval = 2000;
  Device device = {};
};

// Dynamic loss scaling for F16 gradients: the loss is multiplied by a scale, the optimizer divides
// the gradients by it, and a step whose gradients are not finite changes nothing.
//   tape.backward(loss, scaler->scale());  // or CrossEntropyLoss::backward(ctx, scale())
//   optimizer->step(*scaler);              // checks for overflow on the device, waits for nothing
//   scaler->update();                      // adapts the scale
// Several optimizers may use one scaler before its update(), each for one step: a second step of an
// optimizer would forget what its first one found. Each skips its own step if its own gradients are
// not finite, and the scale is lowered if any did. For use by one thread.
class TE_FL_API LossScaler {
 public:
  static Result<std::unique_ptr<LossScaler>> create(const LossScalerOptions& options);
  LossScaler(const LossScaler&) = delete;
  LossScaler& operator=(const LossScaler&) = delete;

  // F32 [1] on the device. Its memory never moves, so that captured graphs read the current scale
  // at each launch.
  const Tensor& scale() const noexcept { return scale_; }
  // I32 [1] on the device, for code that updates parameters without te-fl's optimizers. A value
  // other than 0 reports an overflow to the next update(). te-fl's optimizers do not write it.
  const Tensor& found_inf() const noexcept { return found_inf_; }
  // Call this after the steps, or after the launch of a graph that contains them. Lowers the scale
  // if a step since the last update() overflowed; raises it after enough updates without overflow.
  // Returns whether a step was skipped. Reads and resets the overflow flags, which is a
  // synchronisation point. FAILED_PRECONDITION in a capture, where nothing can be read.
  Result<bool> update();

  // The state for a checkpoint: the scale and the number of steps without overflow since it last
  // changed.
  struct State {
    float scale = 0;
    int64_t good_steps = 0;
  };
  State state() const noexcept { return state_; }
  Status load_state(State state);

 private:
  friend class Optimizer;
  explicit LossScaler(const LossScalerOptions& options) : options_(options) {}
  Status write_scale();
  // Registers an optimizer's overflow flag, I32 [1], which update() reads. It stays registered,
  // since a graph may contain the step that writes it.
  void watch(const Tensor& flag);

  LossScalerOptions options_;
  State state_;
  Tensor scale_, found_inf_;
  std::vector<Tensor> flags_;  // found_inf_ and the optimizers' flags
};

}  // namespace te_fl::nn
