#pragma once

#include <memory>

#include "te_fl/nn/attention.hpp"
#include "te_fl/nn/mlp.hpp"

namespace te_fl::nn {

struct TransformerLayerOptions {
  int64_t hidden_size = 0;
  int64_t ffn_hidden_size = 0;
  int64_t num_attention_heads = 0;
  int64_t num_gqa_groups = 0;  // 0: num_attention_heads
  int64_t kv_channels = 0;     // head size; 0: hidden_size / num_attention_heads
  Activation activation = Activation::kGelu;
  float clamp_limit = 7.0f;    // kClampedSwiglu
  float clamp_alpha = 1.702f;  // kClampedSwiglu
  Normalization normalization = Normalization::kLayerNorm;
  float epsilon = 1e-5f;
  bool zero_centered_gamma = false;
  bool bias = true;
  float hidden_dropout = 0;
  float attention_dropout = 0;
  bool parallel_attention_mlp = false;  // y = x + dropout(attn(x)) + dropout(mlp(x))
  Layout layout = Layout::kSBHD;
  MaskType mask_type = MaskType::kCausal;
  int64_t window_left = -1;
  int64_t window_right = -1;
  SoftmaxType softmax_type = SoftmaxType::kVanilla;
  float softmax_scale = 0;  // 0: 1/sqrt(head size)
  bool rotary_interleaved = false;
  DType param_dtype = DType::kF32;
  DType activation_dtype = DType::kF32;
  Device device = {};
  uint64_t seed = 0;
  float init_std = 0.023f;
  float output_init_std = 0.023f;  // proj and fc2; often init_std / sqrt(2 layers)
};

// A pre-norm Transformer block: h = x + dropout(attention(x)); y = h + dropout(mlp(h)). x [S, B,
// hidden], [B, S, hidden] or [T, hidden] by layout -> same shape. Submodules: self_attention,
// layernorm_mlp. A Llama block is
// {.normalization = kRMSNorm, .activation = kSwiglu, .bias = false} with
// AttentionInputs::rotary_angles.
class TE_FL_API TransformerLayer : public Module {
 public:
  static Result<std::unique_ptr<TransformerLayer>> create(const TransformerLayerOptions& options);
  ~TransformerLayer() override;
  // ctx null: inference; nothing is kept and there is no dropout.
  Result<Tensor> forward(const Tensor& x, Ctx* ctx, const AttentionInputs& inputs = {},
                         const ForwardOptions& options = {});
  // dbias: receives the gradient of inputs.bias if not null.
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx, Tensor* dbias = nullptr);

 private:
  struct Impl;
  explicit TransformerLayer(const TransformerLayerOptions& options);
  std::unique_ptr<Impl> impl_;
};

}  // namespace te_fl::nn
