#pragma once

#include <memory>
#include <optional>

#include "te_fl/export.hpp"
#include "te_fl/nn/fp8/amax_reduction.hpp"
#include "te_fl/nn/fp8/recipe.hpp"
#include "te_fl/status.hpp"

namespace te_fl::nn {

namespace detail {
struct AutocastFrame;
}

struct AutocastOptions {
  bool enabled = true;
  // With enabled = false and DelayedScaling: compute in high precision, but collect amaxes and
  // update scales, so that FP8 training or export can later start with good scales.
  bool calibrating = false;
  // With DelayedScaling: the ranks whose amaxes determine the scales. Null: this rank only.
  std::shared_ptr<AmaxReduction> amax_reduction = nullptr;
};

// Module forwards on this thread use FP8 by `recipe` until the scope ends; any thread may end it.
// Scopes nest; the innermost open scope applies. A backward needs no scope: it uses the settings of
// its forward.
//   { nn::autocast fp8(true, nn::DelayedScaling{}); y = layer->forward(x, &ctx); }
//   layer->backward(dy, ctx);  nn::backward_end();
// With delayed scaling, the end of the outermost scope updates the scales of the forward tensors
// that were used inside. If all forwards inside were inferences (no ctx), the scales do not change,
// and the amaxes are included in the next update on this thread. If the last training forward
// inside failed, scales and amaxes are restored to their state before the scope, unless ranks share
// the amaxes or exit() says otherwise. Scales are 1 until the first update; an inference that
// saturates for this reason logs a warning. An invalid recipe makes every forward inside the scope
// fail with a message about the recipe.
class [[nodiscard]] TE_FL_API autocast {
 public:
  explicit autocast(bool enabled, Recipe recipe = DelayedScaling{})
      : autocast(AutocastOptions{.enabled = enabled}, std::move(recipe)) {}
  explicit autocast(AutocastOptions options, Recipe recipe = DelayedScaling{});
  // Calls exit(). An error is logged and returned by the next backward_end().
  ~autocast();
  autocast(const autocast&) = delete;
  autocast& operator=(const autocast&) = delete;

  // Ends the scope now and returns the outcome of the scale update. Further calls do nothing.
  // `updates`: whether the end of the outermost scope updates the scales; nullopt: it does if a
  // forward inside was not an inference. Calibration always updates them. Amaxes that are not used
  // now are included in the thread's next update.
  Status exit(std::optional<bool> updates = std::nullopt);

 private:
  std::shared_ptr<detail::AutocastFrame> frame_;
};

// True inside a scope with enabled = true.
TE_FL_API bool fp8_enabled();
// True inside a scope with calibrating = true.
TE_FL_API bool fp8_calibrating();
// The recipe of the innermost scope, enabled or not. nullopt outside of all scopes.
TE_FL_API std::optional<Recipe> current_recipe();

// Updates the scales of the gradients that backward passes have quantised since the last call
// (delayed scaling; with other recipes there is nothing to do). This covers the backward passes of
// all forwards of this thread, whatever thread and Context they ran in. Call it when a step's
// backward is complete: once per microbatch or once per optimizer step. Without this call,
// Optimizer::step() does the update; with an optimizer that is not te-fl's, the first backward
// after the gradients were cleared does it. Also returns an error of an autocast's destructor, if
// there is one.
TE_FL_API Status backward_end();

}  // namespace te_fl::nn
