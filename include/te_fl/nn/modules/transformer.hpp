#pragma once

#include <memory>

#include "te_fl/nn/modules/mlp.hpp"
#include "te_fl/nn/modules/multihead_attention.hpp"

namespace te_fl::nn {

// A decoder layer has cross-attention between self-attention and the MLP.
enum class LayerType : uint8_t { kEncoder, kDecoder };

struct TransformerLayerOptions {
  int64_t hidden_size = 0;
  int64_t ffn_hidden_size = 0;
  int64_t num_attention_heads = 0;
  int64_t num_gqa_groups = 0;  // 0: num_attention_heads
  int64_t kv_channels = 0;     // head size; 0: hidden_size / num_attention_heads
  Activation activation = Activation::kGelu;
  float clamp_limit = 7.0f;    // only for kClampedSwiglu
  float clamp_alpha = 1.702f;  // only for kClampedSwiglu
  Normalization normalization = Normalization::kLayerNorm;
  float epsilon = 1e-5f;
  bool zero_centered_gamma = false;
  bool bias = true;
  float hidden_dropout = 0;
  bool parallel_attention_mlp = false;  // y = x + dropout(attn(x)) + dropout(mlp(x))
  // for self-attention; a decoder's cross-attention has its own mask and window
  AttentionOptions attention = {};
  bool rotary_interleaved = false;
  DType param_dtype = DType::kF32;
  DType activation_dtype = DType::kF32;
  Device device = {};
  uint64_t seed = 0;
  float init_std = 0.023f;
  // standard deviation of proj and fc2; often init_std / sqrt(2 layers)
  float output_init_std = 0.023f;
  LayerType layer_type = LayerType::kEncoder;
  // The residual branch starts after the norm instead of before it.
  bool apply_residual_connection_post_layernorm = false;
  // Normalise the output (submodule layernorm) instead of self-attention's input, as BERT does.
  bool output_layernorm = false;
  float drop_path_rate = 0;  // see DropPath; applies to self-attention and the MLP
  // See MultiheadAttentionOptions.
  bool fuse_qkv_params = true;
  bool qkv_weight_interleaved = true;
  QkNorm qk_norm = QkNorm::kNone;
  float qk_norm_epsilon = 1e-6f;
  bool qk_norm_before_rope = false;
  // Mask and window of a decoder's cross-attention.
  MaskType enc_dec_mask_type = MaskType::kNone;
  int64_t enc_dec_window_left = -1;
  int64_t enc_dec_window_right = -1;
  float glu_linear_offset = 1.0f;  // only for kClampedSwiglu
  // For a shard of a layer: groups_whole and ffn_whole are the numbers of key heads and features of
  // the full layer (0: not a shard), as in MultiheadAttentionOptions and LayerNormMLPOptions.
  // kv_channels must be set in a shard.
  int64_t groups_whole = 0;
  int64_t groups_begin = 0;
  int64_t ffn_whole = 0;
  int64_t ffn_begin = 0;
  // The ranks among which the layer is sharded. shard_of() sets this member. Under sequence
  // parallelism x, y and a decoder's encoder_output are this rank's rows.
  TensorParallel parallel = {};
};

// This rank's shard of the layer `whole`. INVALID_ARGUMENT if the number of ranks does not divide
// heads, groups and ffn_hidden_size.
TE_FL_API Result<TransformerLayerOptions> shard_of(TransformerLayerOptions whole,
                                                   const TensorParallel& parallel);

// A pre-norm Transformer block: h = x + dropout(attention(x)); y = h + dropout(mlp(h)). x is [S, B,
// hidden], [B, S, hidden] or [T, hidden], by layout; y has the same shape. In a decoder, h +
// dropout(cross-attention(h, encoder output)) replaces h before the MLP. Submodules:
// self_attention, inter_attention (decoder), layernorm_mlp, layernorm (output_layernorm). A Llama
// block is {.normalization = kRMSNorm, .activation = kSwiglu, .bias = false} with
// AttentionInputs::rotary_angles.
class TE_FL_API TransformerLayer : public Module {
 public:
  static Result<std::unique_ptr<TransformerLayer>> create(const TransformerLayerOptions& options);
  ~TransformerLayer() override;
  // ctx null: inference; nothing is saved and dropout is off. `cross`: the inputs of a decoder's
  // cross-attention, including encoder_output.
  Result<Tensor> forward(const Tensor& x, Ctx* ctx, const AttentionInputs& inputs = {},
                         const ForwardOptions& options = {},
                         const AttentionInputs* cross = nullptr);
  // dbias, encoder_grad and cross_dbias, if not null, receive the gradients of inputs.bias,
  // cross->encoder_output and cross->bias.
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx, Tensor* dbias = nullptr,
                          Tensor* encoder_grad = nullptr, Tensor* cross_dbias = nullptr);

 private:
  struct Impl;
  explicit TransformerLayer(const TransformerLayerOptions& options);
  std::unique_ptr<Impl> impl_;
};

}  // namespace te_fl::nn
