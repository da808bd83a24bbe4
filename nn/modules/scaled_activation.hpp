#pragma once

#include "te_fl/nn/modules/activation.hpp"
#include "te_fl/tensor.hpp"

// Activations with one factor per row, as a mixture of experts applies probabilities.
namespace te_fl::nn::detail {

// True if the catalogue has this activation with factors.
bool has_scaled(Activation activation) noexcept;
// out = factors act(pre). pre [R, ..], factors F32 [R].
Status activate_scaled(const ActivationOptions& options, const Tensor& pre, const Tensor& factors,
                       const Tensor& out);
// out = factors act'(pre) grad, and d_factors F32 [R] = the sums over each row of act(pre) grad.
Status activate_scaled_backward(const ActivationOptions& options, const Tensor& grad,
                                const Tensor& pre, const Tensor& factors, const Tensor& out,
                                const Tensor& d_factors);

}  // namespace te_fl::nn::detail
