#pragma once

#include <cstdint>
#include <string_view>

#include "te_fl/nn/modules/attention_inputs.hpp"

// Converts the masks that users pass to modules into the form that the attention ops need.
namespace te_fl::nn::detail {

// INVALID_ARGUMENT with the module's name unless both bounds are at least -1.
Status check_window(std::string_view module, int64_t left, int64_t right);

// Expands `mask` [.., .., 1|q, 1|kv] to a compact [.., .., q, kv]. Returns an undefined mask, and
// one of another rank or extent, unchanged; the op refuses the latter.
Result<Tensor> expand_mask(const Tensor& mask, int64_t length_q, int64_t length_kv);

}  // namespace te_fl::nn::detail
