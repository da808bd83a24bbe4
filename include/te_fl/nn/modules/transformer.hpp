#pragma once

#include <memory>

#include "te_fl/nn/modules/mlp.hpp"
#include "te_fl/nn/modules/multihead_attention.hpp"

namespace te_fl::nn {

// A decoder has cross-attention between self-attention and the MLP.
enum class LayerType : uint8_t { kEncoder, kDecoder };

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
  bool parallel_attention_mlp = false;  // y = x + dropout(attn(x)) + dropout(mlp(x))
  AttentionOptions attention = {};      // a decoder's cross-attention has its own mask and window
  bool rotary_interleaved = false;
  DType param_dtype = DType::kF32;
  DType activation_dtype = DType::kF32;
  Device device = {};
  uint64_t seed = 0;
  float init_std = 0.023f;
  float output_init_std = 0.023f;  // proj and fc2; often init_std / sqrt(2 layers)
  LayerType layer_type = LayerType::kEncoder;
  // The residual branch starts after the norm instead of before it.
  bool apply_residual_connection_post_layernorm = false;
  // Normalise the output (submodule layernorm) instead of self-attention's input, as BERT does.
  bool output_layernorm = false;
  float drop_path_rate = 0;  // see DropPath; of self-attention and the MLP
  // As in MultiheadAttentionOptions.
  bool fuse_qkv_params = true;
  bool qkv_weight_interleaved = true;
  QkNorm qk_norm = QkNorm::kNone;
  float qk_norm_epsilon = 1e-6f;
  bool qk_norm_before_rope = false;
  // These are of a decoder's cross-attention.
  MaskType enc_dec_mask_type = MaskType::kNone;
  int64_t enc_dec_window_left = -1;
  int64_t enc_dec_window_right = -1;
  float glu_linear_offset = 1.0f;  // kClampedSwiglu
  // The layer is a shard of one with groups_whole key heads and ffn_whole features (0: whole), as
  // in MultiheadAttention and LayerNormMLP; kv_channels is given then.
  int64_t groups_whole = 0;
  int64_t groups_begin = 0;
  int64_t ffn_whole = 0;
  int64_t ffn_begin = 0;
  // The ranks among which the layer is divided so, as shard_of() divides it. Under sequence
  // parallelism x, y and a decoder's encoder_output are this rank's rows.
  TensorParallel parallel = {};
};

// The part that this rank of `parallel` has of the layer `whole`. INVALID_ARGUMENT if the number of
// ranks does not divide heads, groups and ffn_hidden_size.
TE_FL_API Result<TransformerLayerOptions> shard_of(TransformerLayerOptions whole,
                                                   const TensorParallel& parallel);

// A pre-norm Transformer block: h = x + dropout(attention(x)); y = h + dropout(mlp(h)). x [S, B,
// hidden], [B, S, hidden] or [T, hidden] by layout -> same shape. A decoder's h goes through
// h + dropout(cross-attention(h, encoder output)) first. Submodules: self_attention,
// inter_attention (decoder), layernorm_mlp, layernorm (output_layernorm). A Llama block is
// {.normalization = kRMSNorm, .activation = kSwiglu, .bias = false} with
// AttentionInputs::rotary_angles.
class TE_FL_API TransformerLayer : public Module {
 public:
  static Result<std::unique_ptr<TransformerLayer>> create(const TransformerLayerOptions& options);
  ~TransformerLayer() override;
  // ctx null: inference; nothing is kept and there is no dropout. `cross`: a decoder's inputs of
  // cross-attention, encoder_output among them.
  Result<Tensor> forward(const Tensor& x, Ctx* ctx, const AttentionInputs& inputs = {},
                         const ForwardOptions& options = {},
                         const AttentionInputs* cross = nullptr);
  // Each of the last three that is not null receives the gradient of inputs.bias, of
  // cross->encoder_output, of cross->bias.
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx, Tensor* dbias = nullptr,
                          Tensor* encoder_grad = nullptr, Tensor* cross_dbias = nullptr);

 private:
  struct Impl;
  explicit TransformerLayer(const TransformerLayerOptions& options);
  std::unique_ptr<Impl> impl_;
};

}  // namespace te_fl::nn
