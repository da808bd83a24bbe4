#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "te_fl/nn/modules/init.hpp"
#include "te_fl/nn/modules/module.hpp"
#include "te_fl/nn/modules/norm.hpp"
#include "te_fl/nn/modules/parameter_part.hpp"
#include "te_fl/nn/modules/tensor_parallel.hpp"

namespace te_fl::nn {

namespace detail {
class GemmUnit;
class SplitParameters;
}  // namespace detail

struct LinearOptions {
  int64_t in_features = 0;
  int64_t out_features = 0;
  bool bias = true;
  DType param_dtype = DType::kF32;
  DType activation_dtype = DType::kF32;  // dtype of the output
  Device device = {};
  uint64_t seed = 0;
  float init_std = 0.023f;  // weight ~ N(0, init_std^2), bias 0
  // position of the weight in a whole weight, from whose initial values it takes its own
  init::Shard shard = {};
  // Use this [out, in] parameter as the weight instead of a new one (tied embeddings).
  std::shared_ptr<Parameter> tied_weight = nullptr;
  // Never use FP8 in this layer, even inside an autocast (e.g. the output layer of a language
  // model).
  bool high_precision = false;
  // Splits the rows of weight and bias, from row 0 on, into several parameters that replace
  // `weight` and `bias`. The layer still computes one product with one FP8 scale. Empty: no split.
  std::vector<ParameterPart> parameters_split = {};
  // Leave the bias to the caller: the parameter exists, but the forward does not add it and the
  // backward does not compute its gradient.
  bool return_bias = false;
  // This layer is one rank's shard of a layer that `parallel` divides by `parallel_mode`. Features
  // and shard are those of this rank, as shard_of() computes them.
  ParallelMode parallel_mode = ParallelMode::kNone;
  TensorParallel parallel = {};
};

// This rank's shard of the layer `whole`, divided by columns or rows. INVALID_ARGUMENT if the
// number of ranks does not divide the features.
TE_FL_API Result<LinearOptions> shard_of(LinearOptions whole, ParallelMode mode,
                                         const TensorParallel& parallel);

// Linear layer: y = x W^T + b. x [..., in] -> [..., out]. Parameters: weight [out, in], bias [out],
// or those of parameters_split. FP8 state: fp8.
class TE_FL_API Linear : public Module {
 public:
  static Result<std::unique_ptr<Linear>> create(const LinearOptions& options);
  ~Linear() override;
  // ctx null: inference. Nothing is saved and no backward follows. Delayed scaling's scales are
  // used but not updated, whatever the recipe's history length; the amaxes are included in the
  // thread's next update, and scales are 1 before the first one (autocast.hpp).
  //
  // residual (of the output's shape) is added to the output; its gradient is dy itself. `into`: a
  // compact tensor of the result's shape that receives the result, possibly as codes.
  // INVALID_ARGUMENT if the product or the backward still reads its memory.
  //
  // Under delayed scaling x and dy may be row-wise codes with per-tensor scaling; training then
  // writes their column-wise copies, for which they must have memory. Under sequence parallelism x
  // of a kColumn layer and the output of a kRow layer are this rank's rows, and x of a kColumn
  // layer and dy of a kRow layer must not be codes.
  Result<Tensor> forward(const Tensor& x, Ctx* ctx, const ForwardOptions& options = {},
                         const Tensor* residual = nullptr, const Tensor* into = nullptr);
  // dy [..., out] -> dx [..., in] in x's dtype, or in the activation dtype if x was codes. Adds to
  // the parameters' gradients.
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx, const Tensor* into = nullptr);

 private:
  Linear();
  std::unique_ptr<detail::GemmUnit> gemm_;
  std::unique_ptr<detail::SplitParameters> split_;  // null: no split
  ParallelMode mode_ = ParallelMode::kNone;         // kNone if nothing is divided
  TensorParallel parallel_;
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
  init::Shard shard = {};                            // see LinearOptions
  std::vector<ParameterPart> parameters_split = {};  // see LinearOptions
  bool return_bias = false;                          // see LinearOptions
  TensorParallel parallel = {};  // ranks that divide out_features, as with kColumn in Linear
};

// This rank's shard; see shard_of() for Linear with kColumn.
TE_FL_API Result<LayerNormLinearOptions> shard_of(LayerNormLinearOptions whole,
                                                  const TensorParallel& parallel);

// A norm followed by a linear layer: y = norm(x) W^T + b. In FP8 the norm directly writes the
// quantised input of the GEMM. Parameters: layer_norm_weight [in], layer_norm_bias [in]
// (LayerNorm), weight [out, in], bias [out]. FP8 state: fp8.
class TE_FL_API LayerNormLinear : public Module {
 public:
  static Result<std::unique_ptr<LayerNormLinear>> create(const LayerNormLinearOptions& options);
  ~LayerNormLinear() override;
  // ctx null means inference, as in Linear. `into` is as in Linear, and dy may be codes.
  // layernorm_output, if not null, receives norm(x), with x's shape, in the activation dtype.
  // Without FP8 the backward reads this memory, so do not write to it before the backward.
  Result<Tensor> forward(const Tensor& x, Ctx* ctx, const ForwardOptions& options = {},
                         const Tensor* into = nullptr, Tensor* layernorm_output = nullptr);
  // residual_grad (of x's shape): the gradient of x from outside of this module; added to dx.
  // layernorm_output_grad (of x's shape): the gradient of norm(x) from uses of layernorm_output.
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx, const Tensor* residual_grad = nullptr,
                          const Tensor* layernorm_output_grad = nullptr);

 private:
  LayerNormLinear();
  std::unique_ptr<detail::NormCore> norm_;
  std::unique_ptr<detail::GemmUnit> gemm_;
  std::unique_ptr<detail::SplitParameters> split_;  // null: no split
  TensorParallel parallel_;
};

}  // namespace te_fl::nn
