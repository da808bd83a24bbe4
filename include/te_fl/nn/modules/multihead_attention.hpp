#pragma once

#include <memory>

#include "te_fl/nn/modules/attention_inputs.hpp"
#include "te_fl/nn/modules/attention_options.hpp"
#include "te_fl/nn/modules/module.hpp"

namespace te_fl::nn {

// y = proj(attention(split(norm(x) Wqkv^T + b))). x is [S, B, hidden], [B, S, hidden] or [T,
// hidden], by layout; y has the same shape. Submodules: layernorm_qkv (or qkv), q_norm and k_norm
// (kRMSNorm, kLayerNorm), core_attention, proj.
//
// The rows of the QKV weight [(H + 2G) D, hidden] are interleaved by group: for each of the G
// groups its H/G query heads, its key head and its value head, with D rows each. Without
// interleaving: all query heads, then all key heads, then all value heads. Cross-attention instead
// has layernorm_query (or query_layer) [H D, hidden] for x and key_value [2 G D, hidden] for the
// encoder output; interleaved, key_value has for each group its key head and its value head.
class TE_FL_API MultiheadAttention : public Module {
 public:
  static Result<std::unique_ptr<MultiheadAttention>> create(
      const MultiheadAttentionOptions& options);
  ~MultiheadAttention() override;
  // residual (of x's shape) is added to the output; its gradient is dy itself. layernorm_output and
  // its gradient are as in LayerNormLinear; they require input_layernorm.
  Result<Tensor> forward(const Tensor& x, Ctx* ctx, const AttentionInputs& inputs = {},
                         const ForwardOptions& options = {}, const Tensor* residual = nullptr,
                         Tensor* layernorm_output = nullptr);
  // residual_grad is added to dx. dbias and encoder_grad, if not null, receive the gradients of
  // inputs.bias and inputs.encoder_output.
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx, const Tensor* residual_grad = nullptr,
                          Tensor* dbias = nullptr, const Tensor* layernorm_output_grad = nullptr,
                          Tensor* encoder_grad = nullptr);

 private:
  struct Impl;
  explicit MultiheadAttention(const MultiheadAttentionOptions& options);
  std::unique_ptr<Impl> impl_;
};

}  // namespace te_fl::nn
