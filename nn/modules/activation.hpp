#pragma once

#include <string_view>

#include "te_fl/nn/modules/activation.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/tensor.hpp"

// The activation ops of the catalogue, applied to tensors.
namespace te_fl::nn::detail {

struct ActivationOps {
  std::string_view name;
  OpId forward;
  OpId backward;
  OpId dbias;  // backward fused with the bias gradient; ungated only
  bool gated;
};
const ActivationOps& activation_ops(Activation activation);

// out = act(pre).
Status activate(const ActivationOptions& options, const Tensor& pre, const Tensor& out);
// out = act'(pre) grad.
Status activate_backward(const ActivationOptions& options, const Tensor& grad, const Tensor& pre,
                         const Tensor& out);

}  // namespace te_fl::nn::detail
