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
  // position of this weight in the full weight; the initial values are those at this position
  init::Shard shard = {};
  // Use this [out, in] parameter as the weight instead of a new one (tied embeddings).
  std::shared_ptr<Parameter> tied_weight = nullptr;
  // Never use FP8 in this layer, even inside an autocast (e.g. the output layer of a language
  // model).
  bool high_precision = false;
  // Splits the rows of weight and bias, from row 0 on, into several parameters that replace
  // `weight` and `bias`. The layer still computes one GEMM with one FP8 scale. Empty: no split.
  std::vector<ParameterPart> parameters_split = {};
  // Leave the bias to the caller: the parameter exists, but the forward does not add it and the
  // backward does not compute its gradient.
  bool return_bias = false;
  // For a shard of a layer: `parallel` has the ranks, and parallel_mode the dimension that is
  // sharded. Features and shard are those of this rank, as shard_of() computes them.
  ParallelMode parallel_mode = ParallelMode::kNone;
  TensorParallel parallel = {};
};

// This rank's shard of the layer `whole`, sharded by columns or rows. INVALID_ARGUMENT if the
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
  // compact tensor of the result's shape that receives the result; it may be an FP8 tensor.
  // INVALID_ARGUMENT if the GEMM or the backward still reads its memory.
  //
  // Under delayed scaling x and dy may be FP8 tensors with row-wise data and one scale per tensor.
  // Training then also writes their column-wise data, which must have memory. Under sequence
  // parallelism x of a kColumn layer and the output of a kRow layer are this rank's rows, and x of
  // a kColumn layer and dy of a kRow layer must not be FP8 tensors.
  Result<Tensor> forward(const Tensor& x, Ctx* ctx, const ForwardOptions& options = {},
                         const Tensor* residual = nullptr, const Tensor* into = nullptr);
  // dy [..., out] -> dx [..., in] in x's dtype, or in the activation dtype if x was an FP8 tensor.
  // Adds to the parameters' gradients.
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx, const Tensor* into = nullptr);

 private:
  Linear();
  std::unique_ptr<detail::GemmUnit> gemm_;
  std::unique_ptr<detail::SplitParameters> split_;  // null: no split
  ParallelMode mode_ = ParallelMode::kNone;         // kNone: not sharded
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
  TensorParallel parallel = {};  // shards out_features, as with kColumn in Linear
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
  // ctx null means inference, as in Linear. `into` is as in Linear, and dy may be an FP8 tensor.
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
