#pragma once

#include <memory>
#include <optional>

#include "te_fl/nn/modules/activation.hpp"
#include "te_fl/nn/modules/linear.hpp"
#include "te_fl/nn/modules/norm.hpp"

namespace te_fl::nn {

struct LayerNormMLPOptions {
  int64_t hidden_size = 0;
  int64_t ffn_hidden_size = 0;
  Activation activation = Activation::kGelu;
  float clamp_limit = 7.0f;    // only for kClampedSwiglu
  float clamp_alpha = 1.702f;  // only for kClampedSwiglu
  bool bias = true;
  Normalization normalization = Normalization::kLayerNorm;
  float epsilon = 1e-5f;
  bool zero_centered_gamma = false;
  DType param_dtype = DType::kF32;
  DType activation_dtype = DType::kF32;
  Device device = {};
  uint64_t seed = 0;
  float init_std = 0.023f;
  float output_init_std = 0.023f;     // standard deviation of fc2
  std::optional<bool> fc1_bias = {};  // if set, replaces `bias`
  std::optional<bool> fc2_bias = {};
  bool return_bias = false;        // for fc2; see LinearOptions
  float glu_linear_offset = 1.0f;  // only for kClampedSwiglu: added to the clamped linear half
  // For a shard of an MLP: ffn_whole is the number of features of the full MLP (0: not a shard).
  // The shard has the features [ffn_begin, ffn_begin + ffn_hidden_size). Its initial weights are
  // those of the same features in the full MLP: rows of fc1 (of both halves if gated) and columns
  // of fc2.
  int64_t ffn_whole = 0;
  int64_t ffn_begin = 0;
  // False: x is already normalised, for example because ranks normalise their own rows before they
  // exchange them. The module then has no layer_norm parameters and no layernorm_output.
  bool normalizes = true;
  // The ranks among which the features are sharded. shard_of() sets this member.
  TensorParallel parallel = {};
};

// This rank's shard of the MLP `whole`. INVALID_ARGUMENT if the number of ranks does not divide
// ffn_hidden_size.
TE_FL_API Result<LayerNormMLPOptions> shard_of(LayerNormMLPOptions whole,
                                               const TensorParallel& parallel);

// A norm followed by an MLP: y = act(norm(x) W1^T + b1) W2^T + b2. x [..., hidden] -> [...,
// hidden]. Parameters: layer_norm_weight [hidden], layer_norm_bias [hidden] (LayerNorm), fc1_weight
// [ffn or 2 ffn if gated, hidden], fc1_bias, fc2_weight [hidden, ffn], fc2_bias [hidden]. FP8
// states: fc1_fp8, fc2_fp8.
class TE_FL_API LayerNormMLP : public Module {
 public:
  static Result<std::unique_ptr<LayerNormMLP>> create(const LayerNormMLPOptions& options);
  ~LayerNormMLP() override;
  // residual (of x's shape) is added to the output; its gradient is dy itself. layernorm_output and
  // its gradient are as in LayerNormLinear.
  Result<Tensor> forward(const Tensor& x, Ctx* ctx, const ForwardOptions& options = {},
                         const Tensor* residual = nullptr, Tensor* layernorm_output = nullptr);
  // residual_grad (of x's shape): the gradient of x from outside of this module; added to dx.
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx, const Tensor* residual_grad = nullptr,
                          const Tensor* layernorm_output_grad = nullptr);

 private:
  struct Impl;
  explicit LayerNormMLP(const LayerNormMLPOptions& options);
  std::unique_ptr<Impl> impl_;
};

}  // namespace te_fl::nn
