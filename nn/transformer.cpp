#include "te_fl/nn/transformer.hpp"

#include "nn/make_gemm.hpp"
#include "nn/tensor_ops.hpp"
#include "te_fl/nn/embedding.hpp"
#include "te_fl/nn/init.hpp"

namespace te_fl::nn {
namespace {

struct LayerRecord : Ctx::Record {
  Ctx attention, attention_add, mlp, mlp_add;
  Shape shape;          // of x
  bool joined = false;  // no separate adds
};

MultiheadAttentionOptions attention_options(const TransformerLayerOptions& o) {
  return {.hidden_size = o.hidden_size,
          .num_attention_heads = o.num_attention_heads,
          .num_gqa_groups = o.num_gqa_groups,
          .kv_channels = o.kv_channels,
          .normalization = o.normalization,
          .epsilon = o.epsilon,
          .zero_centered_gamma = o.zero_centered_gamma,
          .bias = o.bias,
          .layout = o.layout,
          .mask_type = o.mask_type,
          .window_left = o.window_left,
          .window_right = o.window_right,
          .softmax_type = o.softmax_type,
          .softmax_scale = o.softmax_scale,
          .attention_dropout = o.attention_dropout,
          .rotary_interleaved = o.rotary_interleaved,
          .param_dtype = o.param_dtype,
          .activation_dtype = o.activation_dtype,
          .device = o.device,
          .seed = init::subseed(o.seed, 1),
          .init_std = o.init_std,
          .output_init_std = o.output_init_std};
}

LayerNormMLPOptions mlp_options(const TransformerLayerOptions& o) {
  return {.hidden_size = o.hidden_size,
          .ffn_hidden_size = o.ffn_hidden_size,
          .activation = o.activation,
          .clamp_limit = o.clamp_limit,
          .clamp_alpha = o.clamp_alpha,
          .bias = o.bias,
          .normalization = o.normalization,
          .epsilon = o.epsilon,
          .zero_centered_gamma = o.zero_centered_gamma,
          .param_dtype = o.param_dtype,
          .activation_dtype = o.activation_dtype,
          .device = o.device,
          .seed = init::subseed(o.seed, 2),
          .init_std = o.init_std,
          .output_init_std = o.output_init_std};
}

}  // namespace

struct TransformerLayer::Impl {
  explicit Impl(const TransformerLayerOptions& o)
      : options(o), attention_add(o.hidden_dropout), mlp_add(o.hidden_dropout) {}
  TransformerLayerOptions options;
  std::unique_ptr<MultiheadAttention> attention;
  std::unique_ptr<LayerNormMLP> mlp;
  Residual attention_add;
  Residual mlp_add;

  // The products before them add the residuals themselves where nothing comes between.
  bool joins(const Tensor& x) const {
    return options.hidden_dropout == 0 && x.defined() && x.dtype() == options.activation_dtype;
  }
};

TransformerLayer::TransformerLayer(const TransformerLayerOptions& options)
    : impl_(std::make_unique<Impl>(options)) {}
TransformerLayer::~TransformerLayer() = default;

Result<std::unique_ptr<TransformerLayer>> TransformerLayer::create(
    const TransformerLayerOptions& options) {
  TE_FL_RETURN_IF_ERROR(
      detail::check_dropout("TransformerLayer", "hidden_dropout", options.hidden_dropout));
  std::unique_ptr<TransformerLayer> layer(new TransformerLayer(options));
  Impl& impl = *layer->impl_;
  TE_FL_ASSIGN_OR_RETURN(impl.attention, MultiheadAttention::create(attention_options(options)));
  TE_FL_ASSIGN_OR_RETURN(impl.mlp, LayerNormMLP::create(mlp_options(options)));
  layer->register_module("self_attention", *impl.attention);
  layer->register_module("layernorm_mlp", *impl.mlp);
  return layer;
}

Result<Tensor> TransformerLayer::forward(const Tensor& x, Ctx* ctx, const AttentionInputs& inputs,
                                         const ForwardOptions& options) {
  Impl& impl = *impl_;
  TE_FL_ASSIGN_OR_RETURN(auto record, detail::new_record<LayerRecord>(ctx, "TransformerLayer"));
  auto keep = [&](Ctx& part) { return ctx == nullptr ? nullptr : &part; };
  const bool joins = record->joined = impl.joins(x);
  TE_FL_ASSIGN_OR_RETURN(Tensor h, impl.attention->forward(x, keep(record->attention), inputs,
                                                           options, joins ? &x : nullptr));
  if (!joins) {
    TE_FL_ASSIGN_OR_RETURN(h, impl.attention_add.forward(x, h, keep(record->attention_add)));
  }
  const Tensor& mlp_input = impl.options.parallel_attention_mlp ? x : h;
  TE_FL_ASSIGN_OR_RETURN(
      Tensor y, impl.mlp->forward(mlp_input, keep(record->mlp), options, joins ? &h : nullptr));
  if (!joins) {
    TE_FL_ASSIGN_OR_RETURN(y, impl.mlp_add.forward(h, y, keep(record->mlp_add)));
  }
  record->shape.assign(x.shape().begin(), x.shape().end());
  if (ctx != nullptr) TE_FL_RETURN_IF_ERROR(ctx->store(this, std::move(record)));
  return y;
}

Result<Tensor> TransformerLayer::backward(const Tensor& dy, Ctx& ctx, Tensor* dbias) {
  Impl& impl = *impl_;
  TE_FL_ASSIGN_OR_RETURN(auto taken, ctx.take(this, "TransformerLayer"));
  auto& record = static_cast<LayerRecord&>(*taken);
  TE_FL_RETURN_IF_ERROR(
      detail::check_gradient(dy, record.shape, impl.options.hidden_size, "TransformerLayer"));
  Tensor d_transformed = dy;
  if (!record.joined) {
    TE_FL_ASSIGN_OR_RETURN(d_transformed, impl.mlp_add.backward(dy, record.mlp_add));
  }
  // What the MLP passes down, with dy, which goes past it, already added.
  TE_FL_ASSIGN_OR_RETURN(Tensor below_mlp, impl.mlp->backward(d_transformed, record.mlp, &dy));
  const Tensor& dh = impl.options.parallel_attention_mlp ? dy : below_mlp;
  Tensor d_attended = dh;
  if (!record.joined) {
    TE_FL_ASSIGN_OR_RETURN(d_attended, impl.attention_add.backward(dh, record.attention_add));
  }
  return impl.attention->backward(d_attended, record.attention, &below_mlp, dbias);
}

}  // namespace te_fl::nn
