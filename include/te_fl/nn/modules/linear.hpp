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
  DType activation_dtype = DType::kF32;  // of the output
  Device device = {};
  uint64_t seed = 0;
  float init_std = 0.023f;  // weight ~ N(0, init_std^2), bias 0
  init::Shard shard = {};   // of the weight, whose initial values are then those of the whole there
  // Use this [out, in] parameter as the weight instead of a new one (tied embeddings).
  std::shared_ptr<Parameter> tied_weight = nullptr;
  // Never use FP8 here, whatever the autocast says (e.g. the output layer of a language model).
  bool high_precision = false;
  // The weight and the bias in parts, from row 0 on, in place of `weight` and `bias`; still one
  // product and one FP8 scale. Empty: whole.
  std::vector<ParameterPart> parameters_split = {};
  // The bias is a parameter that the caller adds; the forward leaves it out, and the backward has
  // no gradient of it.
  bool return_bias = false;
  // The map is one rank's of those that divide it so: features and shard are this rank's, as
  // shard_of() makes them.
  ParallelMode parallel_mode = ParallelMode::kNone;
  TensorParallel parallel = {};
};

// The part that this rank of `parallel` has of the map `whole`, by columns or by rows.
// INVALID_ARGUMENT if the number of ranks does not divide the features.
TE_FL_API Result<LinearOptions> shard_of(LinearOptions whole, ParallelMode mode,
                                         const TensorParallel& parallel);

// y = x W^T + b. x [..., in] -> [..., out]. Parameters: weight [out, in], bias [out], or those of
// the parts. FP8 site: fp8.
class TE_FL_API Linear : public Module {
 public:
  static Result<std::unique_ptr<Linear>> create(const LinearOptions& options);
  ~Linear() override;
  // ctx null: nothing is kept, no backward follows, and delayed scaling's scales are read but not
  // changed, whatever the recipe's history length; its amaxes count in the thread's next update,
  // and before the first one scales are 1 (autocast.hpp). residual (the output's shape): added to
  // the output; its gradient is dy itself. Under delayed scaling x and dy may be row-wise codes
  // scaled by tensor; training fills their column-wise copy, for which they bring the room. `into`:
  // a compact tensor of the result's shape to write to, which may be codes, in memory that neither
  // the product nor the backward reads, else INVALID_ARGUMENT. Under sequence
  // parallelism x of kColumn and the output of kRow are this rank's rows, and neither x of kColumn
  // nor dy of kRow may be codes.
  Result<Tensor> forward(const Tensor& x, Ctx* ctx, const ForwardOptions& options = {},
                         const Tensor* residual = nullptr, const Tensor* into = nullptr);
  // dy [..., out] -> dx [..., in] in x's dtype (the activation dtype if x was codes); adds to the
  // parameters' gradients.
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx, const Tensor* into = nullptr);

 private:
  Linear();
  std::unique_ptr<detail::GemmUnit> gemm_;
  std::unique_ptr<detail::SplitParameters> split_;  // null: whole
  ParallelMode mode_ = ParallelMode::kNone;         // kNone where nothing is divided
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
  init::Shard shard = {};                            // as in Linear
  std::vector<ParameterPart> parameters_split = {};  // as in Linear
  bool return_bias = false;                          // as in Linear
  TensorParallel parallel = {};  // of ranks that divide out_features, as Linear's kColumn
};

// As of Linear, by columns.
TE_FL_API Result<LayerNormLinearOptions> shard_of(LayerNormLinearOptions whole,
                                                  const TensorParallel& parallel);

// y = norm(x) W^T + b; in FP8 the norm writes the quantised GEMM input itself. Parameters:
// layer_norm_weight [in], layer_norm_bias [in] (LayerNorm), weight [out, in], bias [out]. FP8 site:
// fp8.
class TE_FL_API LayerNormLinear : public Module {
 public:
  static Result<std::unique_ptr<LayerNormLinear>> create(const LayerNormLinearOptions& options);
  ~LayerNormLinear() override;
  // dy may be codes, `into` is as in Linear, and so is what ctx null means. layernorm_output: if
  // not null, receives norm(x), x's shape, in the activation dtype; without FP8 the backward reads
  // the same memory, so it is not to be written before.
  Result<Tensor> forward(const Tensor& x, Ctx* ctx, const ForwardOptions& options = {},
                         const Tensor* into = nullptr, Tensor* layernorm_output = nullptr);
  // residual_grad (x's shape): the gradient that reaches x past this module; added to dx.
  // layernorm_output_grad (x's shape): what reaches norm(x) by way of layernorm_output.
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx, const Tensor* residual_grad = nullptr,
                          const Tensor* layernorm_output_grad = nullptr);

 private:
  LayerNormLinear();
  std::unique_ptr<detail::NormCore> norm_;
  std::unique_ptr<detail::GemmUnit> gemm_;
  std::unique_ptr<detail::SplitParameters> split_;  // null: whole
  TensorParallel parallel_;
};

}  // namespace te_fl::nn
