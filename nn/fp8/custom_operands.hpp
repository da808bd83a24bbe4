#pragma once

#include <memory>

#include "nn/fp8/fp8_state.hpp"
#include "te_fl/nn/fp8/recipe.hpp"
#include "te_fl/tensor.hpp"

// Operands of products in formats that a user's quantiser chooses, or that GEMMs do not read.
namespace te_fl::nn::detail {

// Dequantises the row-wise data if there are, else the column-wise data.
Result<Tensor> dequantised(const Tensor& codes, DType dtype);

// GEMMs do not read NVFP4. Replaces such a tensor by its values.
Status read_nvfp4(Tensor& operand);

// Calls a quantiser of a custom recipe. A null quantiser returns `values` for both operands, as
// does one of an empty tensor.
Result<QuantisedOperand> quantise_custom(const std::shared_ptr<const TensorQuantiser>& quantiser,
                                         const Tensor& values, Copies copies);

}  // namespace te_fl::nn::detail
