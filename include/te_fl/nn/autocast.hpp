#pragma once

#include <memory>
#include <optional>

#include "te_fl/export.hpp"
#include "te_fl/nn/context.hpp"
#include "te_fl/nn/recipe.hpp"
#include "te_fl/status.hpp"

namespace te_fl::nn {

struct AutocastOptions {
  bool enabled = true;
  // With enabled = false and DelayedScaling: compute in high precision, but collect amaxes and
  // update scales, so that FP8 can start (or be exported) with good scales.
  bool calibrating = false;
};

// Module forwards on this thread use FP8 by `recipe` until the scope ends, on whatever thread that
// is. Scopes nest, the innermost that has not ended counts. When the outermost ends, the scales of
// the forward tensors used inside it are updated (delayed scaling). Backward calls need no scope:
// they follow their forward.
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
  Status exit();

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
