#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "te_fl/export.hpp"
#include "te_fl/nn/modules/module.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn {

struct LossScalerOptions {
  float init_scale = 65536;  // at least 1, as every later one
  float growth_factor = 2;  // after growth_interval steps in a row without overflow; 1: never grows
  float backoff_factor = 0.5f;  // after one with; in (0, 1]
  int64_t growth_interval = 2000;
  Device device = {};
};

// Dynamic loss scaling, for gradients in F16: the loss is multiplied by a scale, the optimizer
// divides the gradients by it, and a step whose gradients are not finite changes nothing.
//   tape.backward(loss, scaler->scale());  // or CrossEntropyLoss::backward(ctx, scale())
//   optimizer->step(*scaler);              // looks for overflow on the device, waits for nothing
//   scaler->update();                      // adapts the scale
// Several optimizers may step on one scaler before its update(), each of them once, since a second
// step forgets what the first one found: each leaves out its own step if its own gradients are not
// finite, and the scale falls if any did. For one thread.
class TE_FL_API LossScaler {
 public:
  static Result<std::unique_ptr<LossScaler>> create(const LossScalerOptions& options);
  LossScaler(const LossScaler&) = delete;
  LossScaler& operator=(const LossScaler&) = delete;

  // F32 [1] on the device; its memory stays the same, so captured graphs read each launch's scale.
  const Tensor& scale() const noexcept { return scale_; }
  // I32 [1] on the device, for an update of the caller's own: what sets it to another value than 0
  // tells the next update() of an overflow. Steps of te-fl's optimizers do not touch it.
  const Tensor& found_inf() const noexcept { return found_inf_; }
  // After the steps, or a graph's launch of them: lowers the scale if one of them since the last
  // update() overflowed, and raises it after enough updates without. Returns whether a step was
  // left out. Reads what the steps found, and forgets it: a synchronisation point.
  // FAILED_PRECONDITION in a capture, where nothing can be read.
  Result<bool> update();

  // A checkpoint saves this: the scale and the number of good steps since it changed.
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
  // Makes update() read an optimizer's flag, I32 [1]. It keeps it for good, as a graph may hold the
  // step that writes it.
  void watch(const Tensor& flag);

  LossScalerOptions options_;
  State state_;
  Tensor scale_, found_inf_;
  std::vector<Tensor> flags_;  // found_inf_ and those of optimizers
};

}  // namespace te_fl::nn
