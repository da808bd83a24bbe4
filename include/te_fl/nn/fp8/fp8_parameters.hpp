#pragma once

#include <memory>

#include "te_fl/export.hpp"
#include "te_fl/nn/fp8/recipe.hpp"

namespace te_fl::nn {

namespace detail {
struct Fp8Init;
}

struct QuantizedModelInitOptions {
  bool enabled = true;  // false: modules are created as outside of all scopes
  // The recipe that determines the scale with which weights are quantised. Float8BlockScaling is
  // not supported.
  Recipe recipe = DelayedScaling{};
  // Keep the unquantised initial values of each FP8 weight in Parameter::initial_value, on the
  // host. An optimizer initialises its master weights with them.
  bool preserve_high_precision_init_val = false;
};

// While this scope is alive, modules that the thread creates store the weights of linear layers in
// FP8 only: one byte per element, and from the first training forward on one more byte for the
// column-wise data. Linear layers with high_precision, biases, norms and embeddings are not
// affected.
//   { nn::quantized_model_init fp8; model = Gpt::create(...); }
// Parameter::value is then quantised (E4M3, one scale per tensor). Forwards under per-tensor FP8
// recipes use this FP8 data without quantising; forwards without FP8 dequantise it. Optimizers keep
// F32 master weights and write the FP8 data. With DelayedScaling they use the scale from the
// module's amax history (until there is one, from the tensor's own amax), otherwise the scale from
// the tensor's own amax. Parameter::write() uses the same scales. Scopes nest; destroy them in
// reverse order. An invalid recipe makes the creation of modules in the scope fail with a message
// about the recipe.
class [[nodiscard]] TE_FL_API quantized_model_init {
 public:
  explicit quantized_model_init(QuantizedModelInitOptions options = {});
  ~quantized_model_init();
  quantized_model_init(const quantized_model_init&) = delete;
  quantized_model_init& operator=(const quantized_model_init&) = delete;

 private:
  std::unique_ptr<detail::Fp8Init> init_;
};

}  // namespace te_fl::nn
