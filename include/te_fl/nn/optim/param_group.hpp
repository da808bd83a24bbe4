#pragma once

#include <functional>
#include <optional>
#include <string_view>

#include "te_fl/tensor.hpp"

namespace te_fl::nn {

// Answers true for parameters that weight decay applies to; null: all.
using DecayFilter = std::function<bool(std::string_view name, const Tensor& value)>;

// Parameters that an optimizer treats in another way than its options say.
struct ParamGroup {
  DecayFilter selects;  // not null; the first group that selects a parameter has it
  float lr_scale = 1;   // times the optimizer's learning rate
  std::optional<float> weight_decay = {};  // in place of the options', for those that decay
};

}  // namespace te_fl::nn
