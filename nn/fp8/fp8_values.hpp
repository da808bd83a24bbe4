#pragma once

#include <memory>
#include <string_view>

#include "nn/fp8/fp8_state.hpp"
#include "te_fl/nn/fp8/fp8_parameters.hpp"

namespace te_fl::nn::detail {

// The innermost scope's wish; null outside of all, or where it is not enabled.
struct Fp8Init {
  QuantizedModelInitOptions options;
  Status invalid;  // says why the recipe cannot be used
  Fp8Init* outer = nullptr;
};
const Fp8Init* current_fp8_init() noexcept;

// Writes the codes of an FP8-only parameter. Not thread-safe, like its module.
class Fp8Values {
 public:
  explicit Fp8Values(Recipe recipe) : recipe_(std::move(recipe)) {}
  // The linear map that first reads the codes names the state whose scale a delayed recipe takes.
  void bind(std::shared_ptr<Fp8State> state, int64_t slot);
  // Quantises `high` into `value`, whose amax becomes that of `high`. `own_scale`: with the scale
  // of that amax whatever the recipe is.
  Status write(const Tensor& high, const Tensor& value, bool own_scale = false) const;

 private:
  Recipe recipe_;
  std::shared_ptr<Fp8State> state_;
  int64_t slot_ = 0;
};

// Copies codes [value's shape], their scale_inv [1] and the amax [1] of what they were made from
// (undefined: that of the codes) into `value`.
Status load_codes(const Tensor& codes, const Tensor& scale_inv, const Tensor& amax,
                  const Tensor& value);
// The codes as a tensor of their own, which shares the memory.
Result<Tensor> codes_of(const Tensor& value);
// `value` with a column-wise copy as well, in new memory.
Result<Tensor> with_columns(const Tensor& value);
// The parameter's values into `out`, of any high-precision dtype.
Status copy_values(const Tensor& value, const Tensor& out);

}  // namespace te_fl::nn::detail
