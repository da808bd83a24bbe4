#include "model.hpp"

#include <array>
#include <cmath>

namespace train_gpt {

namespace nn = te_fl::nn;
using te_fl::Result;
using te_fl::Status;
using te_fl::Tensor;

Result<std::unique_ptr<Gpt>> Gpt::create(const Options& options, te_fl::Device device,
                                         const nn::TensorParallel& parallel) {
  std::unique_ptr<Gpt> model(new Gpt(parallel));
  TE_FL_RETURN_IF_ERROR(model->build(options, device));
  return model;
}

Status Gpt::build(const Options& o, te_fl::Device device) {
  device_ = device;
  TE_FL_ASSIGN_OR_RETURN(const te_fl::DType dtype, te_fl::parse_dtype(o.dtype));
  const bool llama = o.style == "llama";
  nn::EmbeddingOptions table{.num_embeddings = kVocabulary,
                             .hidden_size = o.hidden,
                             .param_dtype = dtype,
                             .activation_dtype = dtype,
                             .device = device,
                             .seed = nn::init::subseed(o.seed, 0)};
  TE_FL_ASSIGN_OR_RETURN(const nn::EmbeddingOptions own, nn::shard_of(table, parallel_));
  TE_FL_ASSIGN_OR_RETURN(tokens_, nn::Embedding::create(own));
  register_module("tokens", *tokens_);
  if (llama) {
    TE_FL_ASSIGN_OR_RETURN(
        attention_.rotary_angles,
        nn::init::rotary_angles(
            {.dim = o.hidden / o.heads, .max_seqlen = o.seq_len, .device = device}));
  } else {
    table.num_embeddings = o.seq_len;
    table.seed = nn::init::subseed(o.seed, 1);
    TE_FL_ASSIGN_OR_RETURN(positions_, nn::Embedding::create(table));
    positions_->weight()->partial_grad = parallel_.divides_sequence();
    register_module("positions", *positions_);
    const int64_t parts = o.dp * (o.sp ? o.tp : 1);
    TE_FL_ASSIGN_OR_RETURN(training_positions_, make_positions(o.batch / parts, o.seq_len));
  }
  // The loss is the mean over microbatches, and so are the auxiliary losses.
  const std::array<float, 1> share = {1 / static_cast<float>(o.microbatches)};
  TE_FL_ASSIGN_OR_RETURN(Tensor aux_loss_grad, Tensor::from_values({1}, share));
  if (!device.is_host()) {
    TE_FL_ASSIGN_OR_RETURN(aux_loss_grad, aux_loss_grad.to(device));
  }
  for (int64_t i = 0; i < o.layers; ++i) {
    nn::TransformerLayerOptions layer{
        .hidden_size = o.hidden,
        .ffn_hidden_size = llama ? (o.hidden * 8 / 3 + 15) / 16 * 16 : 4 * o.hidden,
        .num_attention_heads = o.heads,
        .num_gqa_groups = o.groups,
        .activation = llama ? nn::Activation::kSwiglu : nn::Activation::kGelu,
        .normalization = llama ? nn::Normalization::kRMSNorm : nn::Normalization::kLayerNorm,
        .bias = !llama,
        .hidden_dropout = static_cast<float>(o.dropout),
        .attention = {.layout = nn::Layout::kBSHD,
                      .attention_dropout = static_cast<float>(o.dropout)},
        .param_dtype = dtype,
        .activation_dtype = dtype,
        .device = device,
        .seed = nn::init::subseed(o.seed, 2 + static_cast<uint64_t>(i)),
        .init_std = 0.02f,
        .output_init_std = 0.02f / std::sqrt(2.0f * static_cast<float>(o.layers))};
    TE_FL_ASSIGN_OR_RETURN(layer, nn::shard_of(layer, parallel_));
    if (o.experts != 0) {
      TE_FL_ASSIGN_OR_RETURN(auto made, Block::create(layer, o.experts, o.top_k, aux_loss_grad));
      layers_.push_back(std::move(made));
    } else {
      TE_FL_ASSIGN_OR_RETURN(auto made, Block::create(layer));
      layers_.push_back(std::move(made));
    }
    register_module("layers_" + std::to_string(i), layers_.back()->module());
  }
  const nn::NormOptions norm{
      .hidden_size = o.hidden, .param_dtype = dtype, .activation_dtype = dtype, .device = device};
  if (llama) {
    TE_FL_ASSIGN_OR_RETURN(auto made, nn::RMSNorm::create(norm));
    rms_norm_ = made.get();
    norm_ = std::move(made);
  } else {
    TE_FL_ASSIGN_OR_RETURN(auto made, nn::LayerNorm::create(norm));
    layer_norm_ = made.get();
    norm_ = std::move(made);
  }
  register_module("final_norm", *norm_);
  for (const nn::NamedParameter& p : norm_->parameters()) {
    p.parameter->partial_grad = parallel_.divides_sequence();
  }
  nn::LinearOptions head{.in_features = o.hidden,
                         .out_features = kVocabulary,
                         .bias = false,
                         .param_dtype = dtype,
                         .activation_dtype = dtype,
                         .device = device,
                         .seed = nn::init::subseed(o.seed, 1000),
                         .init_std = 0.02f,
                         .high_precision = true};
  TE_FL_ASSIGN_OR_RETURN(head, nn::shard_of(head, nn::ParallelMode::kColumn, parallel_));
  TE_FL_ASSIGN_OR_RETURN(head_, nn::Linear::create(head));
  register_module("head", *head_);
  return {};
}

Result<Tensor> Gpt::make_positions(int64_t batch, int64_t seq_len) const {
  TE_FL_ASSIGN_OR_RETURN(Tensor indices, Tensor::empty({batch, seq_len}, te_fl::DType::kI32));
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t s = 0; s < seq_len; ++s)
      indices.data<int32_t>()[b * seq_len + s] = static_cast<int32_t>(s);
  }
  return device_.is_host() ? Result<Tensor>(std::move(indices)) : indices.to(device_);
}

Result<Tensor> Gpt::forward(const Tensor& inputs, Contexts* c, const nn::ForwardOptions& options) {
  if (c != nullptr) c->layers.resize(layers_.size());
  TE_FL_ASSIGN_OR_RETURN(Tensor x, tokens_->forward(inputs, c ? &c->tokens : nullptr));
  if (positions_) {
    Tensor indices = training_positions_;
    if (indices.size(0) != x.size(0) || indices.size(1) != x.size(1)) {
      TE_FL_ASSIGN_OR_RETURN(indices, make_positions(x.size(0), x.size(1)));
    }
    TE_FL_ASSIGN_OR_RETURN(const Tensor p,
                           positions_->forward(indices, c ? &c->positions : nullptr));
    TE_FL_ASSIGN_OR_RETURN(x, sum_.forward(x, p, c ? &c->sum : nullptr));
  }
  for (size_t i = 0; i < layers_.size(); ++i) {
    TE_FL_ASSIGN_OR_RETURN(
        x, layers_[i]->forward(x, c ? &c->layers[i] : nullptr, attention_, options));
  }
  nn::Ctx* norm_ctx = c ? &c->norm : nullptr;
  TE_FL_ASSIGN_OR_RETURN(
      x, layer_norm_ ? layer_norm_->forward(x, norm_ctx) : rms_norm_->forward(x, norm_ctx));
  return head_->forward(x, c ? &c->head : nullptr, options);
}

Status Gpt::backward(const Tensor& dlogits, Contexts& c) {
  TE_FL_ASSIGN_OR_RETURN(Tensor dx, head_->backward(dlogits, c.head));
  TE_FL_ASSIGN_OR_RETURN(
      dx, layer_norm_ ? layer_norm_->backward(dx, c.norm) : rms_norm_->backward(dx, c.norm));
  for (size_t i = layers_.size(); i-- > 0;) {
    TE_FL_ASSIGN_OR_RETURN(dx, layers_[i]->backward(dx, c.layers[i]));
  }
  if (positions_) {
    TE_FL_ASSIGN_OR_RETURN(const Tensor dp, sum_.backward(dx, c.sum));
    TE_FL_RETURN_IF_ERROR(positions_->backward(dp, c.positions));
  }
  return tokens_->backward(dx, c.tokens);
}

}  // namespace train_gpt
