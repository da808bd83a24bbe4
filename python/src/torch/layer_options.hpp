// Written by tools/modulegen.py from nn/modules.yaml; do not edit.
#pragma once

#include "te_fl/nn/modules/grouped_linear.hpp"
#include "te_fl/nn/modules/linear.hpp"
#include "te_fl/nn/modules/mlp.hpp"
#include "te_fl/nn/modules/moe_layer.hpp"
#include "te_fl/nn/modules/norm.hpp"
#include "te_fl/nn/modules/transformer.hpp"

// Each function hands the name and the member of each option that Python may set to `fields`.
namespace te_fl::python {

template <class Fields>
void read(Fields& fields, nn::AttentionOptions& o) {
  fields("layout", o.layout);
  fields("mask_type", o.mask_type);
  fields("window_left", o.window_left);
  fields("window_right", o.window_right);
  fields("softmax_type", o.softmax_type);
  fields("softmax_scale", o.softmax_scale);
  fields("attention_dropout", o.attention_dropout);
  fields("softcap", o.softcap);
}

template <class Fields>
void read(Fields& fields, nn::LinearOptions& o) {
  fields("in_features", o.in_features);
  fields("out_features", o.out_features);
  fields("bias", o.bias);
  fields("param_dtype", o.param_dtype);
  fields("device", o.device);
  fields("high_precision", o.high_precision);
  fields("parameters_split", o.parameters_split);
  fields("return_bias", o.return_bias);
}

template <class Fields>
void read(Fields& fields, nn::GroupedLinearOptions& o) {
  fields("num_gemms", o.num_gemms);
  fields("in_features", o.in_features);
  fields("out_features", o.out_features);
  fields("bias", o.bias);
  fields("param_dtype", o.param_dtype);
  fields("device", o.device);
  fields("return_bias", o.return_bias);
  fields("single_grouped_weight", o.single_grouped_weight);
  fields("single_grouped_bias", o.single_grouped_bias);
}

template <class Fields>
void read(Fields& fields, nn::MoELayerOptions& o) {
  fields("hidden_size", o.hidden_size);
  fields("ffn_hidden_size", o.ffn_hidden_size);
  fields("num_experts", o.num_experts);
  fields("top_k", o.top_k);
  fields("activation", o.activation);
  fields("clamp_limit", o.clamp_limit);
  fields("clamp_alpha", o.clamp_alpha);
  fields("glu_linear_offset", o.glu_linear_offset);
  fields("bias", o.bias);
  fields("score_function", o.score_function);
  fields("use_pre_softmax", o.use_pre_softmax);
  fields("num_groups", o.num_groups);
  fields("group_topk", o.group_topk);
  fields("scaling_factor", o.scaling_factor);
  fields("expert_bias", o.expert_bias);
  fields("aux_loss_coeff", o.aux_loss_coeff);
  fields("z_loss_coeff", o.z_loss_coeff);
  fields("shared_ffn_hidden_size", o.shared_ffn_hidden_size);
  fields("shared_expert_gate", o.shared_expert_gate);
  fields("single_grouped_weight", o.single_grouped_weight);
  fields("param_dtype", o.param_dtype);
  fields("device", o.device);
}

template <class Fields>
void read(Fields& fields, nn::LayerNormLinearOptions& o) {
  fields("in_features", o.in_features);
  fields("out_features", o.out_features);
  fields("bias", o.bias);
  fields("normalization", o.normalization);
  fields("epsilon", o.epsilon);
  fields("zero_centered_gamma", o.zero_centered_gamma);
  fields("param_dtype", o.param_dtype);
  fields("device", o.device);
  fields("parameters_split", o.parameters_split);
  fields("return_bias", o.return_bias);
}

template <class Fields>
void read(Fields& fields, nn::LayerNormMLPOptions& o) {
  fields("hidden_size", o.hidden_size);
  fields("ffn_hidden_size", o.ffn_hidden_size);
  fields("activation", o.activation);
  fields("clamp_limit", o.clamp_limit);
  fields("clamp_alpha", o.clamp_alpha);
  fields("bias", o.bias);
  fields("normalization", o.normalization);
  fields("epsilon", o.epsilon);
  fields("zero_centered_gamma", o.zero_centered_gamma);
  fields("param_dtype", o.param_dtype);
  fields("device", o.device);
  fields("return_bias", o.return_bias);
  fields("glu_linear_offset", o.glu_linear_offset);
  fields("normalizes", o.normalizes);
}

template <class Fields>
void read(Fields& fields, nn::NormOptions& o) {
  fields("hidden_size", o.hidden_size);
  fields("epsilon", o.epsilon);
  fields("zero_centered_gamma", o.zero_centered_gamma);
  fields("param_dtype", o.param_dtype);
  fields("device", o.device);
}

template <class Fields>
void read(Fields& fields, nn::DotProductAttentionOptions& o) {
  fields("num_attention_heads", o.num_attention_heads);
  fields("head_dim", o.head_dim);
  fields("num_gqa_groups", o.num_gqa_groups);
  read(fields, o.attention);
  fields("device", o.device);
  fields("value_head_dim", o.value_head_dim);
}

template <class Fields>
void read(Fields& fields, nn::TransformerLayerOptions& o) {
  fields("hidden_size", o.hidden_size);
  fields("ffn_hidden_size", o.ffn_hidden_size);
  fields("num_attention_heads", o.num_attention_heads);
  fields("num_gqa_groups", o.num_gqa_groups);
  fields("kv_channels", o.kv_channels);
  fields("activation", o.activation);
  fields("clamp_limit", o.clamp_limit);
  fields("clamp_alpha", o.clamp_alpha);
  fields("normalization", o.normalization);
  fields("epsilon", o.epsilon);
  fields("zero_centered_gamma", o.zero_centered_gamma);
  fields("bias", o.bias);
  fields("hidden_dropout", o.hidden_dropout);
  fields("parallel_attention_mlp", o.parallel_attention_mlp);
  read(fields, o.attention);
  fields("rotary_interleaved", o.rotary_interleaved);
  fields("param_dtype", o.param_dtype);
  fields("device", o.device);
  fields("apply_residual_connection_post_layernorm", o.apply_residual_connection_post_layernorm);
  fields("output_layernorm", o.output_layernorm);
  fields("fuse_qkv_params", o.fuse_qkv_params);
  fields("qkv_weight_interleaved", o.qkv_weight_interleaved);
  fields("qk_norm", o.qk_norm);
  fields("qk_norm_epsilon", o.qk_norm_epsilon);
  fields("qk_norm_before_rope", o.qk_norm_before_rope);
  fields("glu_linear_offset", o.glu_linear_offset);
}

}  // namespace te_fl::python
