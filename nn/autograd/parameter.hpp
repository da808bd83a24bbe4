#pragma once

#include <string_view>

#include "nn/autograd/parameter_state.hpp"
#include "te_fl/nn/autograd/parameter.hpp"

namespace te_fl::nn::detail {

// Must be called before a backward pass writes the gradient. Allocates the gradient if there is
// none. Returns true if the backward must add to the gradient, false if it must overwrite it. The
// result is valid until wrote(). All captures that nn did not begin count as one capture.
// FAILED_PRECONDITION if the gradient would have to be allocated during a capture.
Result<bool> adds(Parameter& parameter);
void wrote(Parameter& parameter);
// Drops the gradient and its flags, as if no backward pass had written it.
void drop_grad(Parameter& parameter) noexcept;
// FAILED_PRECONDITION with `who` if a part of the gradient is still deferred to backward_dw().
Status check_complete(std::string_view who, const NamedParameter& p);
// FAILED_PRECONDITION with `who` if the parameter holds borrowed FP8 data, which only its owner
// writes.
Status check_writable(std::string_view who, std::string_view name, const Parameter& parameter);

}  // namespace te_fl::nn::detail
