#pragma once

#include <functional>
#include <optional>
#include <string_view>

#include "te_fl/tensor.hpp"

namespace te_fl::nn {

// Returns true for parameters that weight decay applies to. Null: all parameters.
using DecayFilter = std::function<bool(std::string_view name, const Tensor& value)>;

// A group of parameters with its own learning rate and weight decay.
struct ParamGroup {
  DecayFilter selects;  // must not be null; a parameter belongs to the first group that selects it
  float lr_scale = 1;   // factor of the optimizer's learning rate
  // replaces the options' weight decay, for parameters that decay
  std::optional<float> weight_decay = {};
};

}  // namespace te_fl::nn
