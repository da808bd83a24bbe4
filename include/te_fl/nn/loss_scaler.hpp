#pragma once

#include <cstdint>
#include <memory>

#include "te_fl/export.hpp"
#include "te_fl/nn/module.hpp"
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
//   tape.backward(loss, scaler->scale());      // or CrossEntropyLoss::backward(ctx, scale())
//   optimizer->step(*scaler);                  // looks for overflow on the device, waits for
//   nothing scaler->update();                          // adapts the scale
// For one thread.
class TE_FL_API LossScaler {
 public:
  static Result<std::unique_ptr<LossScaler>> create(const LossScalerOptions& options);
  LossScaler(const LossScaler&) = delete;
  LossScaler& operator=(const LossScaler&) = delete;

  // F32 [1] on the device; its memory stays the same, so captured graphs read each launch's scale.
  const Tensor& scale() const noexcept { return scale_; }
  // I32 [1] on the device: not 0 if the last step met a gradient that was not finite.
  const Tensor& found_inf() const noexcept { return found_inf_; }
  // After a step, or a graph's launch of one: lowers the scale if it overflowed, and raises it
  // after enough that did not. Whether that step was left out. Reads found_inf on the host: a
  // synchronisation point. FAILED_PRECONDITION in a capture, where nothing can be read.
  Result<bool> update();

  // A checkpoint saves this: the scale and the number of good steps since it changed.
  struct State {
    float scale = 0;
    int64_t good_steps = 0;
  };
  State state() const noexcept { return state_; }
  Status load_state(State state);

 private:
  explicit LossScaler(const LossScalerOptions& options) : options_(options) {}
  Status write_scale();

  LossScalerOptions options_;
  State state_;
  Tensor scale_, found_inf_;
};

}  // namespace te_fl::nn
