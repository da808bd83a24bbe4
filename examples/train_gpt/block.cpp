#include "block.hpp"

namespace train_gpt {

namespace nn = te_fl::nn;
using te_fl::Result;
using te_fl::Tensor;

Result<std::unique_ptr<Block>> Block::create(const nn::TransformerLayerOptions& options) {
  std::unique_ptr<Block> block(new Block);
  TE_FL_ASSIGN_OR_RETURN(block->layer_, nn::TransformerLayer::create(options));
  return block;
}

Result<std::unique_ptr<Block>> Block::create(const nn::TransformerLayerOptions& o, int64_t experts,
                                             int64_t top_k, const Tensor& aux_loss_grad) {
  std::unique_ptr<Block> block(new Block);
  TE_FL_ASSIGN_OR_RETURN(block->attention_, nn::MultiheadAttention::create(
                                                {.hidden_size = o.hidden_size,
                                                 .num_attention_heads = o.num_attention_heads,
                                                 .num_gqa_groups = o.num_gqa_groups,
                                                 .normalization = o.normalization,
                                                 .bias = o.bias,
                                                 .attention = o.attention,
                                                 .param_dtype = o.param_dtype,
                                                 .activation_dtype = o.activation_dtype,
                                                 .device = o.device,
                                                 .seed = nn::init::subseed(o.seed, 1),
                                                 .init_std = o.init_std,
                                                 .output_init_std = o.output_init_std}));
  const nn::NormOptions norm{.hidden_size = o.hidden_size,
                             .param_dtype = o.param_dtype,
                             .activation_dtype = o.activation_dtype,
                             .device = o.device};
  if (o.normalization == nn::Normalization::kRMSNorm) {
    TE_FL_ASSIGN_OR_RETURN(block->norm_, nn::RMSNorm::create(norm));
  } else {
    TE_FL_ASSIGN_OR_RETURN(block->norm_, nn::LayerNorm::create(norm));
  }
  TE_FL_ASSIGN_OR_RETURN(block->moe_, nn::MoELayer::create({.hidden_size = o.hidden_size,
                                                            .ffn_hidden_size = o.ffn_hidden_size,
                                                            .num_experts = experts,
                                                            .top_k = top_k,
                                                            .activation = o.activation,
                                                            .bias = o.bias,
                                                            .aux_loss_coeff = 1e-2f,
                                                            .z_loss_coeff = 1e-3f,
                                                            .param_dtype = o.param_dtype,
                                                            .activation_dtype = o.activation_dtype,
                                                            .device = o.device,
                                                            .seed = nn::init::subseed(o.seed, 2),
                                                            .init_std = o.init_std,
                                                            .output_init_std = o.output_init_std}));
  block->sum_ = std::make_unique<nn::Residual>(o.hidden_dropout);
  block->aux_loss_grad_ = aux_loss_grad;
  block->register_module("attention", *block->attention_);
  block->register_module("norm", *block->norm_);
  block->register_module("moe", *block->moe_);
  return block;
}

Result<Tensor> Block::forward(const Tensor& x, Contexts* c, const nn::AttentionInputs& attention,
                              const nn::ForwardOptions& options) {
  nn::Ctx* const first = c != nullptr ? &c->layer : nullptr;
  if (layer_ != nullptr) return layer_->forward(x, first, attention, options);
  TE_FL_ASSIGN_OR_RETURN(const Tensor h, attention_->forward(x, first, attention, options, &x));
  TE_FL_ASSIGN_OR_RETURN(const Tensor normed, norm_->forward(h, c != nullptr ? &c->norm : nullptr));
  nn::MoEAuxiliary auxiliary;
  auxiliary.aux_loss_grad = aux_loss_grad_;
  TE_FL_ASSIGN_OR_RETURN(
      const Tensor y, moe_->forward(normed, c != nullptr ? &c->moe : nullptr, options, &auxiliary));
  return sum_->forward(h, y, c != nullptr ? &c->sum : nullptr);
}

Result<Tensor> Block::backward(const Tensor& dy, Contexts& c) {
  if (layer_ != nullptr) return layer_->backward(dy, c.layer);
  TE_FL_ASSIGN_OR_RETURN(const Tensor d_moe, sum_->backward(dy, c.sum));
  TE_FL_ASSIGN_OR_RETURN(const Tensor d_normed, moe_->backward(d_moe, c.moe));
  TE_FL_ASSIGN_OR_RETURN(const Tensor dh, norm_->backward(d_normed, c.norm, &dy));
  return attention_->backward(dh, c.layer, &dh);
}

}  // namespace train_gpt
