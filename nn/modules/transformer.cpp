#include "te_fl/nn/modules/transformer.hpp"

#include <string>
#include <utility>

#include "nn/autograd/ctx.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/modules/make_gemm.hpp"
#include "nn/modules/tensor_parallel.hpp"
#include "te_fl/nn/modules/embedding.hpp"
#include "te_fl/nn/modules/init.hpp"
#include "te_fl/nn/modules/norm.hpp"

namespace te_fl::nn {
namespace {

constexpr const char* kLayerName = "TransformerLayer";

// The end of a branch: computes residual + drop_path(dropout(branch)).
class BranchAdd {
 public:
  struct Saved {
    Ctx dropout, path, add;
  };
  // The addition applies dropout itself, unless drop_path follows.
  BranchAdd(float dropout, float drop_path)
      : dropout_(dropout),
        path_(drop_path),
        add_(drop_path > 0 ? 0 : dropout),
        paths_(drop_path > 0) {}

  Result<Tensor> forward(const Tensor& residual, const Tensor& branch, Saved* saved) {
    if (!paths_) return add_.forward(residual, branch, saved == nullptr ? nullptr : &saved->add);
    if (saved == nullptr) return add_.forward(residual, branch, nullptr);
    TE_FL_ASSIGN_OR_RETURN(const Tensor dropped, dropout_.forward(branch, &saved->dropout));
    TE_FL_ASSIGN_OR_RETURN(const Tensor kept, path_.forward(dropped, &saved->path));
    return add_.forward(residual, kept, &saved->add);
  }
  // The gradient of the branch; the gradient of the residual is dy.
  Result<Tensor> backward(const Tensor& dy, Saved& saved) {
    TE_FL_ASSIGN_OR_RETURN(Tensor grad, add_.backward(dy, saved.add));
    if (!paths_) return grad;
    TE_FL_ASSIGN_OR_RETURN(grad, path_.backward(grad, saved.path));
    return dropout_.backward(grad, saved.dropout);
  }

 private:
  Dropout dropout_;
  DropPath path_;
  Residual add_;
  bool paths_;
};

// The backward record of one branch of a layer (attention or MLP) with its residual connection.
struct PartRecord {
  Ctx part;
  BranchAdd::Saved add;
  bool joined = false;     // the branch's last GEMM adds the residual
  bool post_norm = false;  // the residual is the output of the branch's norm
};

struct LayerRecord : Ctx::Record {
  PartRecord attention, inter, mlp;
  Ctx layernorm;
  Shape shape;  // of x
  void visit_tensors(const Ctx::Visitor& visitor) {
    for (Ctx* part : {&attention.part, &inter.part, &mlp.part, &layernorm}) part->visit(visitor);
  }
};

MultiheadAttentionOptions attention_options(const TransformerLayerOptions& o) {
  return {.hidden_size = o.hidden_size,
          .num_attention_heads = o.num_attention_heads,
          .num_gqa_groups = o.num_gqa_groups,
          .kv_channels = o.kv_channels,
          .input_layernorm = !o.output_layernorm,
          .normalization = o.normalization,
          .epsilon = o.epsilon,
          .zero_centered_gamma = o.zero_centered_gamma,
          .bias = o.bias,
          .attention = o.attention,
          .rotary_interleaved = o.rotary_interleaved,
          .param_dtype = o.param_dtype,
          .activation_dtype = o.activation_dtype,
          .device = o.device,
          .seed = init::subseed(o.seed, 1),
          .init_std = o.init_std,
          .output_init_std = o.output_init_std,
          .fuse_qkv_params = o.fuse_qkv_params,
          .qkv_weight_interleaved = o.qkv_weight_interleaved,
          .qk_norm = o.qk_norm,
          .qk_norm_epsilon = o.qk_norm_epsilon,
          .qk_norm_before_rope = o.qk_norm_before_rope,
          .groups_whole = o.groups_whole,
          .groups_begin = o.groups_begin,
          .parallel = o.parallel};
}

MultiheadAttentionOptions inter_options(const TransformerLayerOptions& o) {
  MultiheadAttentionOptions options = attention_options(o);
  options.attention_type = AttentionType::kCross;
  options.input_layernorm = true;
  options.attention.mask_type = o.enc_dec_mask_type;
  options.attention.window_left = o.enc_dec_window_left;
  options.attention.window_right = o.enc_dec_window_right;
  options.seed = init::subseed(o.seed, 3);
  return options;
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
          .output_init_std = o.output_init_std,
          .glu_linear_offset = o.glu_linear_offset,
          .ffn_whole = o.ffn_whole,
          .ffn_begin = o.ffn_begin,
          .parallel = o.parallel};
}

Status check_options(const TransformerLayerOptions& o) {
  TE_FL_RETURN_IF_ERROR(detail::check_dropout(kLayerName, "hidden_dropout", o.hidden_dropout));
  TE_FL_RETURN_IF_ERROR(detail::check_dropout(kLayerName, "drop_path_rate", o.drop_path_rate));
  if (!o.parallel_attention_mlp) return {};
  const char* other = o.layer_type == LayerType::kDecoder ? "layer_type kDecoder"
                      : o.apply_residual_connection_post_layernorm
                          ? "apply_residual_connection_post_layernorm"
                      : o.output_layernorm ? "output_layernorm"
                                           : nullptr;
  if (other == nullptr) return {};
  return invalid_argument(
      std::string("TransformerLayer: parallel_attention_mlp is set together with ") + other +
      "; attention and MLP in parallel are defined for the pre-norm encoder alone, so leave one of "
      "them out");
}

}  // namespace

Result<TransformerLayerOptions> shard_of(TransformerLayerOptions whole,
                                         const TensorParallel& parallel) {
  MultiheadAttentionOptions attention = attention_options(whole);
  LayerNormMLPOptions mlp = mlp_options(whole);
  TE_FL_ASSIGN_OR_RETURN(attention, shard_of(attention, parallel));
  TE_FL_ASSIGN_OR_RETURN(mlp, shard_of(mlp, parallel));
  whole.num_attention_heads = attention.num_attention_heads;
  whole.num_gqa_groups = attention.num_gqa_groups;
  whole.kv_channels = attention.kv_channels;
  whole.groups_whole = attention.groups_whole;
  whole.groups_begin = attention.groups_begin;
  whole.ffn_hidden_size = mlp.ffn_hidden_size;
  whole.ffn_whole = mlp.ffn_whole;
  whole.ffn_begin = mlp.ffn_begin;
  whole.parallel = parallel;
  return whole;
}

struct TransformerLayer::Impl {
  explicit Impl(const TransformerLayerOptions& o)
      : options(o),
        attention_add(o.hidden_dropout, o.drop_path_rate),
        inter_add(o.hidden_dropout, 0),
        mlp_add(o.hidden_dropout, o.drop_path_rate) {}
  TransformerLayerOptions options;
  std::unique_ptr<MultiheadAttention> attention;
  std::unique_ptr<MultiheadAttention> inter;  // for decoders
  std::unique_ptr<LayerNormMLP> mlp;
  std::unique_ptr<Norm> layernorm;  // for output_layernorm
  BranchAdd attention_add, inter_add, mlp_add;

  // True if the GEMM before the addition can add the residual itself, since no op is between the
  // two.
  bool joins(const Tensor& x, float drop_path) const {
    return options.hidden_dropout == 0 && drop_path == 0 && x.defined() &&
           x.dtype() == options.activation_dtype;
  }
  Status create_norm();
  Status check_cross(const AttentionInputs* cross) const;
  // Runs an attention and adds its residual.
  Result<Tensor> attend(MultiheadAttention& module, BranchAdd& add, const Tensor& x,
                        PartRecord& record, bool training, const AttentionInputs& inputs,
                        const ForwardOptions& forward);
  Result<Tensor> attend_backward(MultiheadAttention& module, BranchAdd& add, const Tensor& dh,
                                 PartRecord& record, const Tensor* past, Tensor* dbias,
                                 Tensor* encoder_grad);
  // Runs the MLP on `x` and adds `residual`, or the output of the MLP's norm.
  Result<Tensor> transform(const Tensor& x, const Tensor& residual, PartRecord& record,
                           bool training, const ForwardOptions& forward);
  // The gradient of `x`, including that of the residual.
  Result<Tensor> transform_backward(const Tensor& dy, PartRecord& record);
};

TransformerLayer::TransformerLayer(const TransformerLayerOptions& options)
    : impl_(std::make_unique<Impl>(options)) {}
TransformerLayer::~TransformerLayer() = default;

Status TransformerLayer::Impl::create_norm() {
  const NormOptions norm{.hidden_size = options.hidden_size,
                         .epsilon = options.epsilon,
                         .zero_centered_gamma = options.zero_centered_gamma,
                         .param_dtype = options.param_dtype,
                         .activation_dtype = options.activation_dtype,
                         .device = options.device};
  if (options.normalization == Normalization::kLayerNorm) {
    TE_FL_ASSIGN_OR_RETURN(layernorm, LayerNorm::create(norm));
  } else {
    TE_FL_ASSIGN_OR_RETURN(layernorm, RMSNorm::create(norm));
  }
  return {};
}

Result<std::unique_ptr<TransformerLayer>> TransformerLayer::create(
    const TransformerLayerOptions& options) {
  TE_FL_RETURN_IF_ERROR(check_options(options));
  std::unique_ptr<TransformerLayer> layer(new TransformerLayer(options));
  Impl& impl = *layer->impl_;
  TE_FL_ASSIGN_OR_RETURN(impl.attention, MultiheadAttention::create(attention_options(options)));
  layer->register_module("self_attention", *impl.attention);
  if (options.layer_type == LayerType::kDecoder) {
    TE_FL_ASSIGN_OR_RETURN(impl.inter, MultiheadAttention::create(inter_options(options)));
    layer->register_module("inter_attention", *impl.inter);
  }
  TE_FL_ASSIGN_OR_RETURN(impl.mlp, LayerNormMLP::create(mlp_options(options)));
  layer->register_module("layernorm_mlp", *impl.mlp);
  if (options.output_layernorm) {
    TE_FL_RETURN_IF_ERROR(impl.create_norm());
    for (const NamedParameter& p : impl.layernorm->parameters()) {
      detail::mark_partial(options.parallel, p.parameter.get());
    }
    layer->register_module("layernorm", *impl.layernorm);
  }
  return layer;
}

Status TransformerLayer::Impl::check_cross(const AttentionInputs* cross) const {
  const bool decoder = options.layer_type == LayerType::kDecoder;
  if (decoder == (cross != nullptr)) return {};
  return invalid_argument(
      decoder
          ? "TransformerLayer: a decoder needs the inputs of cross-attention; give `cross` with "
            "its encoder_output"
          : "TransformerLayer: `cross` is given to an encoder, which has no cross-attention; "
            "create the layer with layer_type kDecoder, or leave it out");
}

Result<Tensor> TransformerLayer::Impl::attend(MultiheadAttention& module, BranchAdd& add,
                                              const Tensor& x, PartRecord& record, bool training,
                                              const AttentionInputs& inputs,
                                              const ForwardOptions& forward) {
  Ctx* ctx = training ? &record.part : nullptr;
  Tensor normed;
  TE_FL_ASSIGN_OR_RETURN(Tensor branch,
                         module.forward(x, ctx, inputs, forward, record.joined ? &x : nullptr,
                                        record.post_norm ? &normed : nullptr));
  if (record.joined) return branch;
  const detail::OwnRandom own(options.parallel, options.parallel.divides_sequence(),
                              options.device);
  return add.forward(record.post_norm ? normed : x, branch, training ? &record.add : nullptr);
}

Result<Tensor> TransformerLayer::Impl::attend_backward(MultiheadAttention& module, BranchAdd& add,
                                                       const Tensor& dh, PartRecord& record,
                                                       const Tensor* past, Tensor* dbias,
                                                       Tensor* encoder_grad) {
  Tensor d_branch = dh;
  if (!record.joined) {
    TE_FL_ASSIGN_OR_RETURN(d_branch, add.backward(dh, record.add));
  }
  return module.backward(d_branch, record.part, record.post_norm ? nullptr : past, dbias,
                         record.post_norm ? &dh : nullptr, encoder_grad);
}

Result<Tensor> TransformerLayer::Impl::transform(const Tensor& x, const Tensor& residual,
                                                 PartRecord& record, bool training,
                                                 const ForwardOptions& forward) {
  Ctx* ctx = training ? &record.part : nullptr;
  Tensor normed;
  TE_FL_ASSIGN_OR_RETURN(Tensor branch,
                         mlp->forward(x, ctx, forward, record.joined ? &residual : nullptr,
                                      record.post_norm ? &normed : nullptr));
  if (record.joined) return branch;
  const detail::OwnRandom own(options.parallel, options.parallel.divides_sequence(),
                              options.device);
  return mlp_add.forward(record.post_norm ? normed : residual, branch,
                         training ? &record.add : nullptr);
}

Result<Tensor> TransformerLayer::Impl::transform_backward(const Tensor& dy, PartRecord& record) {
  Tensor d_branch = dy;
  if (!record.joined) {
    TE_FL_ASSIGN_OR_RETURN(d_branch, mlp_add.backward(dy, record.add));
  }
  if (record.post_norm) return mlp->backward(d_branch, record.part, nullptr, &dy);
  return mlp->backward(d_branch, record.part, &dy);
}

Result<Tensor> TransformerLayer::forward(const Tensor& x, Ctx* ctx, const AttentionInputs& inputs,
                                         const ForwardOptions& options,
                                         const AttentionInputs* cross) {
  TE_FL_ASSIGN_OR_RETURN(auto record, detail::new_record<LayerRecord>(ctx, kLayerName));
  Impl& impl = *impl_;
  TE_FL_RETURN_IF_ERROR(impl.check_cross(cross));
  const bool training = ctx != nullptr;
  const bool post = impl.options.apply_residual_connection_post_layernorm;
  // With output_layernorm the self-attention has no norm of its own.
  record->attention.post_norm = post && !impl.options.output_layernorm;
  record->inter.post_norm = record->mlp.post_norm = post;
  record->attention.joined =
      !record->attention.post_norm && impl.joins(x, impl.options.drop_path_rate);
  record->mlp.joined = !post && impl.joins(x, impl.options.drop_path_rate);
  record->inter.joined = !post && impl.joins(x, 0);
  TE_FL_ASSIGN_OR_RETURN(Tensor h, impl.attend(*impl.attention, impl.attention_add, x,
                                               record->attention, training, inputs, options));
  if (impl.inter != nullptr) {
    TE_FL_ASSIGN_OR_RETURN(
        h, impl.attend(*impl.inter, impl.inter_add, h, record->inter, training, *cross, options));
  }
  const Tensor& mlp_input = impl.options.parallel_attention_mlp ? x : h;
  TE_FL_ASSIGN_OR_RETURN(Tensor y, impl.transform(mlp_input, h, record->mlp, training, options));
  if (impl.layernorm != nullptr) {
    TE_FL_ASSIGN_OR_RETURN(y, impl.layernorm->forward(y, training ? &record->layernorm : nullptr));
  }
  record->shape.assign(x.shape().begin(), x.shape().end());
  if (training) TE_FL_RETURN_IF_ERROR(ctx->store(this, std::move(record)));
  return y;
}

Result<Tensor> TransformerLayer::backward(const Tensor& dy, Ctx& ctx, Tensor* dbias,
                                          Tensor* encoder_grad, Tensor* cross_dbias) {
  Impl& impl = *impl_;
  TE_FL_ASSIGN_OR_RETURN(auto taken, ctx.take(this, kLayerName));
  auto& record = static_cast<LayerRecord&>(*taken);
  TE_FL_RETURN_IF_ERROR(
      detail::check_gradient(dy, record.shape, impl.options.hidden_size, kLayerName));
  Tensor d_sum = dy;
  if (impl.layernorm != nullptr) {
    TE_FL_ASSIGN_OR_RETURN(d_sum, impl.layernorm->backward(dy, record.layernorm));
  }
  // The gradient of the MLP branch's input: the sum of the MLP's gradient and that of the residual
  // connection.
  TE_FL_ASSIGN_OR_RETURN(Tensor below, impl.transform_backward(d_sum, record.mlp));
  if (impl.options.parallel_attention_mlp) {
    return impl.attend_backward(*impl.attention, impl.attention_add, d_sum, record.attention,
                                &below, dbias, nullptr);
  }
  if (impl.inter != nullptr) {
    const Tensor dh = below;
    TE_FL_ASSIGN_OR_RETURN(
        below, impl.attend_backward(*impl.inter, impl.inter_add, dh, record.inter, &dh, cross_dbias,
                                    encoder_grad));
  }
  return impl.attend_backward(*impl.attention, impl.attention_add, below, record.attention, &below,
                              dbias, nullptr);
}

}  // namespace te_fl::nn
