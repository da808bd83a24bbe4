#pragma once

#include <memory>

#include "te_fl/nn/modules/module.hpp"

namespace te_fl::nn {

enum class Normalization : uint8_t { kLayerNorm, kRMSNorm };

struct NormOptions {
  int64_t hidden_size = 0;
  float epsilon = 1e-5f;
  bool zero_centered_gamma = false;  // the weight is stored minus 1 (and starts at 0)
  DType param_dtype = DType::kF32;
  DType activation_dtype = DType::kF32;  // of the output
  Device device = {};
};

namespace detail {
class NormCore;
}

// Normalisation over the last dimension. x [..., hidden] of any high-precision dtype -> [...,
// hidden]. Parameters: weight [hidden] and, for LayerNorm, bias [hidden].
class TE_FL_API Norm : public Module {
 public:
  ~Norm() override;
  // ctx null: nothing is kept, no backward follows.
  Result<Tensor> forward(const Tensor& x, Ctx* ctx);
  // dy [..., hidden] -> dx in x's dtype; adds to the parameters' gradients. residual_grad (dx's
  // shape) is added to dx.
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx, const Tensor* residual_grad = nullptr);

 protected:
  Norm();
  Status init(Normalization kind, const NormOptions& options);

 private:
  std::unique_ptr<detail::NormCore> core_;
};

class TE_FL_API LayerNorm : public Norm {
 public:
  static Result<std::unique_ptr<LayerNorm>> create(const NormOptions& options);

 private:
  LayerNorm() = default;
};

class TE_FL_API RMSNorm : public Norm {
 public:
  static Result<std::unique_ptr<RMSNorm>> create(const NormOptions& options);

 private:
  RMSNorm() = default;
};

}  // namespace te_fl::nn
