#pragma once

#include <memory>

#include "te_fl/nn/modules/mlp.hpp"

namespace te_fl::nn {

struct ActivationOptions {
  Activation activation = Activation::kGelu;
  float clamp_limit = 7.0f;        // kClampedSwiglu
  float clamp_alpha = 1.702f;      // kClampedSwiglu
  float glu_linear_offset = 1.0f;  // kClampedSwiglu: added to the clamped linear half
};

// One of the catalogue's activations as a module without parameters: x [..., n] -> [..., n], the
// gated ones [..., 2 n] -> [..., n], in x's dtype.
class TE_FL_API ActivationLayer : public Module {
 public:
  static Result<std::unique_ptr<ActivationLayer>> create(const ActivationOptions& options);
  // ctx null: nothing is kept, no backward follows.
  Result<Tensor> forward(const Tensor& x, Ctx* ctx);
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx);

 private:
  explicit ActivationLayer(const ActivationOptions& options) : options_(options) {}
  ActivationOptions options_;
};

}  // namespace te_fl::nn
