#pragma once

#include <memory>

#include "te_fl/nn/modules/attention_inputs.hpp"
#include "te_fl/nn/modules/attention_options.hpp"
#include "te_fl/nn/modules/module.hpp"

namespace te_fl::nn {

// y = proj(attention(split(norm(x) Wqkv^T + b))). x [S, B, hidden], [B, S, hidden] or [T, hidden]
// by layout -> same shape. Submodules: q_norm and k_norm (kRMSNorm, kLayerNorm), layernorm_qkv (or
// qkv), core_attention, proj. The rows of the QKV weight [(H + 2G) D, hidden] are interleaved by
// group: for each of the G groups its H/G query heads, its key head, its value head, D rows each;
// or, not interleaved, all query heads, all key heads, all value heads. Cross-attention has
// layernorm_query (or query_layer) [H D, hidden] for x and key_value [2 G D, hidden] for the
// encoder output in their place; interleaved: for each group its key head and its value head.
class TE_FL_API MultiheadAttention : public Module {
 public:
  static Result<std::unique_ptr<MultiheadAttention>> create(
      const MultiheadAttentionOptions& options);
  ~MultiheadAttention() override;
  // residual (x's shape): added to the output; its gradient is dy itself. layernorm_output and its
  // gradient are as in LayerNormLinear; they need input_layernorm.
  Result<Tensor> forward(const Tensor& x, Ctx* ctx, const AttentionInputs& inputs = {},
                         const ForwardOptions& options = {}, const Tensor* residual = nullptr,
                         Tensor* layernorm_output = nullptr);
  // residual_grad: added to dx. dbias: receives the gradient of inputs.bias if not null.
  // encoder_grad: receives that of inputs.encoder_output if not null.
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx, const Tensor* residual_grad = nullptr,
                          Tensor* dbias = nullptr, const Tensor* layernorm_output_grad = nullptr,
                          Tensor* encoder_grad = nullptr);

 private:
  struct Impl;
  explicit MultiheadAttention(const MultiheadAttentionOptions& options);
  std::unique_ptr<Impl> impl_;
};

}  // namespace te_fl::nn
