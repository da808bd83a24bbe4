#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "te_fl/tensor.hpp"

// The text format in which files of ranks describe the position of their tensors.
namespace te_fl::nn::detail {

// Formats non-negative numbers for metadata: "64,32".
std::string list_text(std::span<const int64_t> values);
// Parses list_text() and appends the numbers to `values`. False for any other text.
bool parse_list(std::string_view text, Shape& values);
// The parameter to which a checkpoint's tensor belongs: NAME for "optimizer.exp_avg.NAME".
std::string parameter_name(const std::string& name);

}  // namespace te_fl::nn::detail
