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
  // update scales, so that FP8 can start (or be exported) with good scales.
  bool calibrating = false;
  // With DelayedScaling: the ranks whose amaxes the scales come from. Null: this one alone.
  std::shared_ptr<AmaxReduction> amax_reduction = nullptr;
};

// Module forwards on this thread use FP8 by `recipe` until the scope ends, on whatever thread that
// is. Scopes nest, the innermost that has not ended counts. When the outermost ends, the scales of
// the forward tensors used inside it are updated (delayed scaling). If all forwards inside were
// inferences (no ctx), scales stay as they are: their amaxes count in the next update on this
// thread. If the last forward that trained inside failed, scales and amaxes are as before the
// scope, unless ranks share the amaxes or exit() says otherwise. Before the first update scales are
// 1; an inference that saturates then says so in the log. Backward calls need no scope: they follow
// their forward.
//   { nn::autocast fp8(true, nn::DelayedScaling{}); y = layer->forward(x, &ctx); }
//   layer->backward(dy, ctx);  nn::backward_end();
// An invalid recipe makes every forward inside the scope fail with its message.
class [[nodiscard]] TE_FL_API autocast {
 public:
  explicit autocast(bool enabled, Recipe recipe = DelayedScaling{})
      : autocast(AutocastOptions{.enabled = enabled}, std::move(recipe)) {}
  explicit autocast(AutocastOptions options, Recipe recipe = DelayedScaling{});
  // Calls exit(); an error is logged and returned by the next backward_end().
  ~autocast();
  autocast(const autocast&) = delete;
  autocast& operator=(const autocast&) = delete;

  // Ends the scope now and returns the outcome of the scale update. Does nothing the second time.
  // `updates`: whether the outermost scope's end updates scales; nullopt: if a forward inside was
  // no inference. Calibration updates them in any case. What is not updated now counts in the
  // thread's next update.
  Status exit(std::optional<bool> updates = std::nullopt);

 private:
  std::shared_ptr<detail::AutocastFrame> frame_;
};

// True inside a scope with enabled = true.
TE_FL_API bool fp8_enabled();
// True inside a scope that calibrates.
TE_FL_API bool fp8_calibrating();
// The innermost scope's recipe, whether enabled or not; nullopt outside.
TE_FL_API std::optional<Recipe> current_recipe();

// Updates the scales of the gradients that the backwards of this thread's forwards quantised since
// the last call (delayed scaling; otherwise there is nothing to do), on whatever thread and under
// whatever Context they ran. Call it when a step's backward is complete: once per microbatch or
// once per optimizer step. A step whose backward nobody ended is ended by Optimizer::step(), or
// else, with another optimizer, by the first backward after its gradients were cleared. Returns an
// error that an autocast's end could not return, if there is one.
TE_FL_API Status backward_end();

}  // namespace te_fl::nn
