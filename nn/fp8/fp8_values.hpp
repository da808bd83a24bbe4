#pragma once

#include <memory>
#include <string_view>

#include "nn/fp8/fp8_state.hpp"
#include "te_fl/nn/fp8/fp8_parameters.hpp"

namespace te_fl::nn::detail {

// The options of the innermost quantized_model_init scope; null outside of a scope, or if it is
// disabled.
struct Fp8Init {
  QuantizedModelInitOptions options;
  Status invalid;  // the reason if the recipe is invalid
  Fp8Init* outer = nullptr;
};
const Fp8Init* current_fp8_init() noexcept;

// Quantises new values into an FP8-only parameter. Not thread-safe, like its module.
class Fp8Values {
 public:
  explicit Fp8Values(Recipe recipe) : recipe_(std::move(recipe)) {}
  // Called by the first linear map that reads the parameter: sets the state and slot whose scale a
  // delayed recipe uses.
  void bind(std::shared_ptr<Fp8State> state, int64_t slot);
  // Quantises `high` into `value` and sets the amax of `value`. `own_scale`: computes the scale
  // from that amax, whatever the recipe.
  Status write(const Tensor& high, const Tensor& value, bool own_scale = false) const;

 private:
  Recipe recipe_;
  std::shared_ptr<Fp8State> state_;
  int64_t slot_ = 0;
};

// Copies FP8 data [value's shape] with scale_inv [1] and amax [1] into `value`. If amax is
// undefined, uses that of the FP8 data.
Status load_codes(const Tensor& codes, const Tensor& scale_inv, const Tensor& amax,
                  const Tensor& value);
// The FP8 data of `value` as an unscaled tensor that shares its memory.
Result<Tensor> wrap_codes(const Tensor& value);
// Copies `value` to new memory and adds column-wise data to the copy.
Result<Tensor> with_columns(const Tensor& value);
// Dequantises the parameter into `out`, which may have any high-precision dtype.
Status copy_values(const Tensor& value, const Tensor& out);

}  // namespace te_fl::nn::detail
