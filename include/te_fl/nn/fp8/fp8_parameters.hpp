#pragma once

#include <memory>

#include "te_fl/export.hpp"
#include "te_fl/nn/fp8/recipe.hpp"

namespace te_fl::nn {

namespace detail {
struct Fp8Init;
}

struct QuantizedModelInitOptions {
  bool enabled = true;  // false: what is created is as outside of all scopes
  // Says how the codes get their scale when they are written; Float8BlockScaling is refused.
  Recipe recipe = DelayedScaling{};
  // Parameter::initial_value keeps, on the host, what the codes were made from; an optimizer takes
  // its master weights from it.
  bool preserve_high_precision_init_val = false;
};

// While one is alive, modules that the thread creates hold the weights of their linear maps as FP8
// codes alone: one byte an element, and one more for the column-wise copy from the first training
// forward on. Linear's with high_precision, biases, norms and embeddings stay as they are.
//   { nn::quantized_model_init fp8; model = Gpt::create(...); }
// Parameter::value is then quantised (E4M3, scaled by tensor). Forwards under per-tensor FP8
// recipes read the codes and quantise nothing; without FP8 they dequantise them. Optimizers keep
// F32 master weights and write the codes: under DelayedScaling with the scale that the module's
// amax history gives (the tensor's own amax until there is one), else with that of its own amax.
// Parameter::write() writes them likewise. Scopes nest; destroy them in reverse order. An invalid
// recipe makes the creation of modules inside fail with its message.
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
