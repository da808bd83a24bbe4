#pragma once

#include <memory>

#include "te_fl/nn/module.hpp"
#include "te_fl/nn/norm.hpp"

namespace te_fl::nn {

namespace detail {
class GemmUnit;
}

struct LinearOptions {
  int64_t in_features = 0;
  int64_t out_features = 0;
  bool bias = true;
  DType param_dtype = DType::kF32;
  DType activation_dtype = DType::kF32;  // of the output
  Device device = {};
  uint64_t seed = 0;
  float init_std = 0.023f;  // weight ~ N(0, init_std^2), bias 0
  // Use this [out, in] parameter as the weight instead of a new one (tied embeddings).
  std::shared_ptr<Parameter> tied_weight = nullptr;
  // Never use FP8 here, whatever the autocast says (e.g. the output layer of a language model).
  bool high_precision = false;
};

// y = x W^T + b. x [..., in] -> [..., out]. Parameters: weight [out, in], bias [out]. FP8 site:
// fp8.
class TE_FL_API Linear : public Module {
 public:
  static Result<std::unique_ptr<Linear>> create(const LinearOptions& options);
  ~Linear() override;
  // ctx null: nothing is kept, no backward follows, and delayed-scaling state is read but not
  // changed, whatever the recipe's history length; FAILED_PRECONDITION if there is none yet, or its
  // scales are still the initial 1 (no autocast has ended since amaxes were first collected).
  // residual (the output's shape): added to the output; its gradient is dy itself.
  // Under delayed scaling x and dy may be row-wise codes scaled by tensor; training fills their
  // column-wise copy, for which they bring the room. `into`: a compact tensor of the result's shape
  // to write to, which may be codes.
  Result<Tensor> forward(const Tensor& x, Ctx* ctx, const ForwardOptions& options = {},
                         const Tensor* residual = nullptr, const Tensor* into = nullptr);
  // dy [..., out] -> dx [..., in] in x's dtype (the activation dtype if x was codes); adds to the
  // parameters' gradients.
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx, const Tensor* into = nullptr);

 private:
  Linear();
  std::unique_ptr<detail::GemmUnit> gemm_;
};

struct LayerNormLinearOptions {
  int64_t in_features = 0;
  int64_t out_features = 0;
  bool bias = true;
  Normalization normalization = Normalization::kLayerNorm;
  float epsilon = 1e-5f;
  bool zero_centered_gamma = false;
  DType param_dtype = DType::kF32;
  DType activation_dtype = DType::kF32;
  Device device = {};
  uint64_t seed = 0;
  float init_std = 0.023f;
};

// y = norm(x) W^T + b; in FP8 the norm writes the quantised GEMM input itself. Parameters:
// layer_norm_weight [in], layer_norm_bias [in] (LayerNorm), weight [out, in], bias [out]. FP8 site:
// fp8.
class TE_FL_API LayerNormLinear : public Module {
 public:
  static Result<std::unique_ptr<LayerNormLinear>> create(const LayerNormLinearOptions& options);
  ~LayerNormLinear() override;
  // dy may be codes, `into` is as in Linear, and so is what ctx null means.
  Result<Tensor> forward(const Tensor& x, Ctx* ctx, const ForwardOptions& options = {},
                         const Tensor* into = nullptr);
  // residual_grad (x's shape): the gradient that reaches x past this module; added to dx.
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx, const Tensor* residual_grad = nullptr);

 private:
  LayerNormLinear();
  std::unique_ptr<detail::NormCore> norm_;
  std::unique_ptr<detail::GemmUnit> gemm_;
};

}  // namespace te_fl::nn
