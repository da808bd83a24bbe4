#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "te_fl/tensor.hpp"

// The words in which files of ranks say where their tensors lie.
namespace te_fl::nn::detail {

// Numbers of at least 0 in metadata: "64,32".
std::string list_text(std::span<const int64_t> values);
// Appends them to `values`; false if there is something else.
bool parse_list(std::string_view text, Shape& values);
// The parameter that a tensor of a checkpoint belongs to: "optimizer.exp_avg.NAME" to NAME.
std::string parameter_of(const std::string& name);

}  // namespace te_fl::nn::detail
