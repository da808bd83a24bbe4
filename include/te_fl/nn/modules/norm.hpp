#pragma once

#include <memory>

#include "te_fl/nn/modules/module.hpp"

namespace te_fl::nn {

enum class Normalization : uint8_t { kLayerNorm, kRMSNorm };

struct NormOptions {
  int64_t hidden_size = 0;
  float epsilon = 1e-5f;
  // the stored weight is the actual weight minus 1 (and starts at 0)
  bool zero_centered_gamma = false;
  DType param_dtype = DType::kF32;
  DType activation_dtype = DType::kF32;  // dtype of the output
  Device device = {};
};

namespace detail {
class NormCore;
}

// Normalisation over the last dimension. x [..., hidden] in any high-precision dtype -> [...,
// hidden]. Parameters: weight [hidden] and, for LayerNorm, bias [hidden].
class TE_FL_API Norm : public Module {
 public:
  ~Norm() override;
  // ctx null: nothing is saved and no backward follows.
  Result<Tensor> forward(const Tensor& x, Ctx* ctx);
  // dy [..., hidden] -> dx in x's dtype. Adds to the parameters' gradients. residual_grad (of dx's
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
