#pragma once

#include <cstdint>
#include <string_view>

#include "te_fl/nn/modules/attention_inputs.hpp"

// Brings what a module's user may say of masks into the form that the attention ops take.
namespace te_fl::nn::detail {

// INVALID_ARGUMENT naming the module unless each bound is at least -1.
Status check_window(std::string_view module, int64_t left, int64_t right);

// `mask` [.., .., 1|q, 1|kv] as the compact [.., .., q, kv] that the ops want; an undefined one
// stays so, and one of another rank or extent is left for the op to refuse.
Result<Tensor> expand_mask(const Tensor& mask, int64_t length_q, int64_t length_kv);

}  // namespace te_fl::nn::detail
