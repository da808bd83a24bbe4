#pragma once

#include <string_view>

#include "nn/autograd/parameter_state.hpp"
#include "te_fl/nn/autograd/parameter.hpp"

namespace te_fl::nn::detail {

// Before a backward writes the gradient, which is allocated if there is none: whether it has to
// add; holds until wrote(). Captures that nn did not begin cannot be told apart and are taken for
// one. FAILED_PRECONDITION if the gradient would have to be allocated in a capture.
Result<bool> adds(Parameter& parameter);
void wrote(Parameter& parameter);
// As if none had ever been written.
void drop_grad(Parameter& parameter) noexcept;
// FAILED_PRECONDITION naming `who` if a part of the gradient is still left to backward_dw().
Status check_complete(std::string_view who, const NamedParameter& p);
// FAILED_PRECONDITION naming `who` if the parameter holds borrowed codes, which their owner writes.
Status check_writable(std::string_view who, std::string_view name, const Parameter& parameter);

}  // namespace te_fl::nn::detail
