#include <algorithm>

#include "nn/make_gemm.hpp"
#include "nn/runtime.hpp"
#include "nn/tensor_ops.hpp"
#include "te_fl/nn/attention.hpp"
#include "te_fl/nn/init.hpp"

namespace te_fl::nn {
namespace {

struct MhaRecord : Ctx::Record {
  Ctx qkv, core, proj;
  Tensor angles;  // undefined without RoPE
  AttentionInputs inputs;
  Shape shape;          // of x
  detail::Fp8Mode fp8;  // of the attention itself
};

struct Heads {
  Tensor q, k, v;
};

}  // namespace

struct MultiheadAttention::Impl {
  MultiheadAttentionOptions options;
  int64_t heads = 0, groups = 0, dim = 0;
  std::unique_ptr<LayerNormLinear> layernorm_qkv;
  std::unique_ptr<Linear> qkv;
  std::unique_ptr<DotProductAttention> core;
  std::unique_ptr<Linear> proj;

  bool thd() const { return options.layout == Layout::kTHD; }
  int64_t q_per_group() const { return heads / groups * dim; }
  int64_t group_width() const { return q_per_group() + 2 * dim; }
  // The leading dimensions of x followed by `tail`.
  static Shape lead(std::span<const int64_t> shape, std::initializer_list<int64_t> tail) {
    Shape result(shape.begin(), shape.end() - 1);
    result.insert(result.end(), tail);
    return result;
  }
  Result<Tensor> angles(const AttentionInputs& inputs, const Tensor& x) const;
  // `kept`: a backward will read them, so views must not hold what it does not read.
  Result<Heads> split(const Tensor& packed, const Tensor& angles, const AttentionInputs& inputs,
                      bool kept);
  Result<Heads> split_plain(const Tensor& packed, bool own_qk, bool kept);
  Result<Tensor> merge(Heads grads, const MhaRecord& record);
  // Whether the gradients of q, k and v can be written where they belong in the packed one.
  bool packs_directly(const MhaRecord& record) const {
    return !record.angles.defined() && heads == groups;
  }
  Result<Tensor> merge_plain(const Heads& grads, std::span<const int64_t> x_shape);
  // In place, thd layout.
  Status rotate(const Tensor& x, const Tensor& angles, const AttentionInputs& inputs,
                bool backward) const;
};

// The rows of the angle table that the call can need.
Result<Tensor> MultiheadAttention::Impl::angles(const AttentionInputs& inputs,
                                                const Tensor& x) const {
  const Tensor& table = inputs.rotary_angles;
  if (!table.defined()) {
    if (!inputs.rotary_start_positions.defined()) return Tensor();
    return invalid_argument(
        "MultiheadAttention: rotary_start_positions is given without rotary_angles, so nothing is "
        "rotated; give both, or neither");
  }
  const int64_t length =
      thd() ? inputs.max_seqlen_q : x.size(options.layout == Layout::kSBHD ? 0 : 1);
  const bool fits = table.rank() == 4 && table.size(0) >= length && table.size(1) == 1 &&
                    table.size(2) == 1 && table.size(3) <= dim && table.size(3) % 2 == 0;
  if (!fits) {
    return invalid_argument("MultiheadAttention: rotary_angles is " + table.describe() +
                            "; it must be f32[positions >= " + std::to_string(length) +
                            ", 1, 1, even and at most " + std::to_string(dim) + "]");
  }
  if (thd() || inputs.rotary_start_positions.defined()) return table;
  return table.slice(0, 0, length);
}

Result<Heads> MultiheadAttention::Impl::split_plain(const Tensor& packed, bool own_qk, bool kept) {
  const int last = packed.rank() - 1;
  const int64_t qw = q_per_group();
  const std::span<const int64_t> shape = packed.shape();
  Heads parts;
  TE_FL_ASSIGN_OR_RETURN(parts.q, packed.slice(last, 0, qw));
  TE_FL_ASSIGN_OR_RETURN(parts.k, packed.slice(last, qw, qw + dim));
  TE_FL_ASSIGN_OR_RETURN(parts.v, packed.slice(last, qw + dim, qw + 2 * dim));
  // Heads of one group lie closer together than those of two: only with one head per group is q a
  // strided view.
  const bool own_q = own_qk || heads != groups;
  if (own_q) {
    TE_FL_ASSIGN_OR_RETURN(parts.q, detail::compact(parts.q));
    Shape q_shape(shape.begin(), shape.end() - 2);
    q_shape.insert(q_shape.end(), {heads, dim});
    TE_FL_ASSIGN_OR_RETURN(parts.q, parts.q.view(q_shape));
  }
  if (own_qk || (own_q && kept)) {
    TE_FL_ASSIGN_OR_RETURN(parts.k, detail::compact(parts.k));
  }
  if (own_q && kept) {
    TE_FL_ASSIGN_OR_RETURN(parts.v, detail::compact(parts.v));
  }
  return parts;
}

Status MultiheadAttention::Impl::rotate(const Tensor& x, const Tensor& angles,
                                        const AttentionInputs& inputs, bool backward) const {
  te_fl_rope_rope_args args{};
  args.input = x;
  args.freqs = angles;
  args.output = x;
  args.start_positions = inputs.rotary_start_positions;
  args.cu_seqlens =
      inputs.cu_seqlens_q_padded.defined() ? inputs.cu_seqlens_q_padded : inputs.cu_seqlens_q;
  args.layout = static_cast<int32_t>(options.layout);
  args.interleaved = options.rotary_interleaved;
  return backward ? ops::fused_rope_backward(args, detail::call_options(options.device))
                  : ops::fused_rope_forward(args, detail::call_options(options.device));
}

Result<Heads> MultiheadAttention::Impl::split(const Tensor& packed, const Tensor& angles,
                                              const AttentionInputs& inputs, bool kept) {
  if (!angles.defined()) return split_plain(packed, false, kept);
  if (thd()) {
    TE_FL_ASSIGN_OR_RETURN(Heads parts, split_plain(packed, true, kept));
    TE_FL_RETURN_IF_ERROR(rotate(parts.q, angles, inputs, false));
    TE_FL_RETURN_IF_ERROR(rotate(parts.k, angles, inputs, false));
    return parts;
  }
  const int64_t a = packed.size(0), b = packed.size(1);
  Heads parts;
  const DType dtype = packed.dtype();
  TE_FL_ASSIGN_OR_RETURN(parts.q, Tensor::empty({a, b, heads, dim}, dtype, options.device));
  TE_FL_ASSIGN_OR_RETURN(parts.k, Tensor::empty({a, b, groups, dim}, dtype, options.device));
  TE_FL_ASSIGN_OR_RETURN(parts.v, Tensor::empty({a, b, groups, dim}, dtype, options.device));
  te_fl_fused_qkv_rope_forward_args args{};
  args.qkv_input = packed;
  args.q_freqs = angles;
  args.k_freqs = angles;
  args.q_out = parts.q;
  args.k_out = parts.k;
  args.v_out = parts.v;
  args.start_positions = inputs.rotary_start_positions;
  args.q_dim = q_per_group();
  args.k_dim = dim;
  args.v_dim = dim;
  args.layout = static_cast<int32_t>(options.layout);
  args.interleaved = options.rotary_interleaved;
  TE_FL_RETURN_IF_ERROR(ops::fused_qkv_rope_forward(args, detail::call_options(options.device)));
  return parts;
}

Result<Tensor> MultiheadAttention::Impl::merge_plain(const Heads& grads,
                                                     std::span<const int64_t> x_shape) {
  const int64_t qw = q_per_group();
  TE_FL_ASSIGN_OR_RETURN(Tensor packed, Tensor::empty(lead(x_shape, {groups, group_width()}),
                                                      grads.q.dtype(), options.device));
  const int last = packed.rank() - 1;
  TE_FL_ASSIGN_OR_RETURN(Tensor q, grads.q.view(lead(x_shape, {groups, qw})));
  TE_FL_ASSIGN_OR_RETURN(Tensor to_q, packed.slice(last, 0, qw));
  TE_FL_ASSIGN_OR_RETURN(Tensor to_k, packed.slice(last, qw, qw + dim));
  TE_FL_ASSIGN_OR_RETURN(Tensor to_v, packed.slice(last, qw + dim, qw + 2 * dim));
  TE_FL_RETURN_IF_ERROR(detail::copy(q, to_q));
  TE_FL_RETURN_IF_ERROR(detail::copy(grads.k, to_k));
  TE_FL_RETURN_IF_ERROR(detail::copy(grads.v, to_v));
  return packed;
}

Result<Tensor> MultiheadAttention::Impl::merge(Heads grads, const MhaRecord& record) {
  if (!record.angles.defined()) return merge_plain(grads, record.shape);
  if (thd()) {
    TE_FL_RETURN_IF_ERROR(rotate(grads.q, record.angles, record.inputs, true));
    TE_FL_RETURN_IF_ERROR(rotate(grads.k, record.angles, record.inputs, true));
    return merge_plain(grads, record.shape);
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor packed, Tensor::empty(lead(record.shape, {groups, group_width()}),
                                                      grads.q.dtype(), options.device));
  te_fl_fused_qkv_rope_backward_args args{};
  args.q_grad = grads.q;
  args.k_grad = grads.k;
  args.v_grad = grads.v;
  args.q_freqs = record.angles;
  args.k_freqs = record.angles;
  args.qkv_grad = packed;
  args.start_positions = record.inputs.rotary_start_positions;
  args.q_dim = q_per_group();
  args.k_dim = dim;
  args.v_dim = dim;
  args.layout = static_cast<int32_t>(options.layout);
  args.interleaved = options.rotary_interleaved;
  TE_FL_RETURN_IF_ERROR(ops::fused_qkv_rope_backward(args, detail::call_options(options.device)));
  return packed;
}

MultiheadAttention::MultiheadAttention(const MultiheadAttentionOptions& options)
    : impl_(std::make_unique<Impl>()) {
  impl_->options = options;
}
MultiheadAttention::~MultiheadAttention() = default;

Result<std::unique_ptr<MultiheadAttention>> MultiheadAttention::create(
    const MultiheadAttentionOptions& options) {
  constexpr const char* kName = "MultiheadAttention";
  const int64_t heads = options.num_attention_heads;
  TE_FL_RETURN_IF_ERROR(detail::check_size(kName, "hidden_size", options.hidden_size));
  TE_FL_RETURN_IF_ERROR(detail::check_size(kName, "num_attention_heads", heads));
  if (options.kv_channels == 0 && options.hidden_size % heads != 0) {
    return invalid_argument("MultiheadAttention: hidden_size is " +
                            std::to_string(options.hidden_size) +
                            "; it must be a multiple of num_attention_heads, which is " +
                            std::to_string(heads) + ", or kv_channels must be given");
  }
  std::unique_ptr<MultiheadAttention> module(new MultiheadAttention(options));
  Impl& impl = *module->impl_;
  impl.heads = heads;
  impl.groups = options.num_gqa_groups == 0 ? heads : options.num_gqa_groups;
  impl.dim = options.kv_channels == 0 ? options.hidden_size / heads : options.kv_channels;
  TE_FL_ASSIGN_OR_RETURN(
      impl.core, DotProductAttention::create({.num_attention_heads = heads,
                                              .head_dim = impl.dim,
                                              .num_gqa_groups = impl.groups,
                                              .layout = options.layout,
                                              .mask_type = options.mask_type,
                                              .window_left = options.window_left,
                                              .window_right = options.window_right,
                                              .softmax_type = options.softmax_type,
                                              .softmax_scale = options.softmax_scale,
                                              .attention_dropout = options.attention_dropout,
                                              .activation_dtype = options.activation_dtype,
                                              .device = options.device}));
  const int64_t qkv_width = impl.groups * impl.group_width();
  if (options.input_layernorm) {
    TE_FL_ASSIGN_OR_RETURN(
        impl.layernorm_qkv,
        LayerNormLinear::create({.in_features = options.hidden_size,
                                 .out_features = qkv_width,
                                 .bias = options.bias,
                                 .normalization = options.normalization,
                                 .epsilon = options.epsilon,
                                 .zero_centered_gamma = options.zero_centered_gamma,
                                 .param_dtype = options.param_dtype,
                                 .activation_dtype = options.activation_dtype,
                                 .device = options.device,
                                 .seed = init::subseed(options.seed, 1),
                                 .init_std = options.init_std}));
    module->register_module("layernorm_qkv", *impl.layernorm_qkv);
  } else {
    TE_FL_ASSIGN_OR_RETURN(impl.qkv, Linear::create({.in_features = options.hidden_size,
                                                     .out_features = qkv_width,
                                                     .bias = options.bias,
                                                     .param_dtype = options.param_dtype,
                                                     .activation_dtype = options.activation_dtype,
                                                     .device = options.device,
                                                     .seed = init::subseed(options.seed, 1),
                                                     .init_std = options.init_std}));
    module->register_module("qkv", *impl.qkv);
  }
  module->register_module("core_attention", *impl.core);
  TE_FL_ASSIGN_OR_RETURN(impl.proj, Linear::create({.in_features = heads * impl.dim,
                                                    .out_features = options.hidden_size,
                                                    .bias = options.bias,
                                                    .param_dtype = options.param_dtype,
                                                    .activation_dtype = options.activation_dtype,
                                                    .device = options.device,
                                                    .seed = init::subseed(options.seed, 2),
                                                    .init_std = options.output_init_std}));
  module->register_module("proj", *impl.proj);
  return module;
}

Result<Tensor> MultiheadAttention::forward(const Tensor& x, Ctx* ctx, const AttentionInputs& inputs,
                                           const ForwardOptions& options, const Tensor* residual) {
  Impl& impl = *impl_;
  const int rank = impl.thd() ? 2 : 3;
  if (!x.defined() || x.rank() != rank || x.size(-1) != impl.options.hidden_size) {
    return invalid_argument("MultiheadAttention: x is " +
                            (x.defined() ? x.describe() : std::string("undefined")) +
                            "; it must have rank " + std::to_string(rank) + " and last dimension " +
                            std::to_string(impl.options.hidden_size));
  }
  TE_FL_ASSIGN_OR_RETURN(auto record, detail::new_record<MhaRecord>(ctx, "MultiheadAttention"));
  record->inputs = inputs;
  record->shape.assign(x.shape().begin(), x.shape().end());
  TE_FL_ASSIGN_OR_RETURN(record->angles, impl.angles(inputs, x));
  const bool training = ctx != nullptr;
  Ctx* qkv_ctx = training ? &record->qkv : nullptr;
  TE_FL_ASSIGN_OR_RETURN(record->fp8, impl.core->begin(training));
  Tensor codes;  // of q, k and v, which share a scale
  if (record->fp8.fp8 && impl.packs_directly(*record)) {
    TE_FL_ASSIGN_OR_RETURN(
        codes,
        impl.core->codes(record->fp8, DotProductAttention::Codes::kQkv,
                         Impl::lead(x.shape(), {impl.groups * impl.group_width()}), training));
  }
  const Tensor* into = codes.defined() ? &codes : nullptr;
  TE_FL_ASSIGN_OR_RETURN(Tensor mixed, impl.layernorm_qkv != nullptr
                                           ? impl.layernorm_qkv->forward(x, qkv_ctx, options, into)
                                           : impl.qkv->forward(x, qkv_ctx, options, nullptr, into));
  TE_FL_ASSIGN_OR_RETURN(Tensor packed,
                         mixed.view(Impl::lead(x.shape(), {impl.groups, impl.group_width()})));
  TE_FL_ASSIGN_OR_RETURN(Heads parts, impl.split(packed, record->angles, inputs, training));
  TE_FL_ASSIGN_OR_RETURN(
      Tensor o, impl.core->forward_codes(parts.q, parts.k, parts.v,
                                         training ? &record->core : nullptr, inputs, training));
  TE_FL_ASSIGN_OR_RETURN(Tensor merged, o.view(Impl::lead(x.shape(), {impl.heads * impl.dim})));
  TE_FL_ASSIGN_OR_RETURN(
      Tensor y,
      impl.proj->forward(merged, ctx == nullptr ? nullptr : &record->proj, options, residual));
  if (ctx != nullptr) TE_FL_RETURN_IF_ERROR(ctx->store(this, std::move(record)));
  return y;
}

Result<Tensor> MultiheadAttention::backward(const Tensor& dy, Ctx& ctx, const Tensor* residual_grad,
                                            Tensor* dbias) {
  Impl& impl = *impl_;
  TE_FL_ASSIGN_OR_RETURN(auto taken, ctx.take(this, "MultiheadAttention"));
  auto& record = static_cast<MhaRecord&>(*taken);
  TE_FL_RETURN_IF_ERROR(
      detail::check_gradient(dy, record.shape, impl.options.hidden_size, "MultiheadAttention"));
  TE_FL_ASSIGN_OR_RETURN(Tensor residual, detail::residual_matrix(
                                              residual_grad, record.shape, impl.options.hidden_size,
                                              "MultiheadAttention: residual_grad"));
  if (residual.defined()) {
    TE_FL_ASSIGN_OR_RETURN(residual, residual.view(record.shape));
  }
  Tensor d_codes;
  if (record.fp8.fp8) {
    TE_FL_ASSIGN_OR_RETURN(
        d_codes, impl.core->codes(record.fp8, DotProductAttention::Codes::kOutputGrad,
                                  Impl::lead(record.shape, {impl.heads * impl.dim}), true));
  }
  TE_FL_ASSIGN_OR_RETURN(
      Tensor d_merged,
      impl.proj->backward(dy, record.proj, d_codes.defined() ? &d_codes : nullptr));
  TE_FL_ASSIGN_OR_RETURN(Tensor d_o,
                         d_merged.view(Impl::lead(record.shape, {impl.heads, impl.dim})));
  Tensor packed;
  DotProductAttention::Gradients into;
  const bool direct = impl.packs_directly(record);
  if (direct) {
    const Shape shape = Impl::lead(record.shape, {impl.groups, impl.group_width()});
    Tensor heads;
    if (record.fp8.fp8) {
      const Shape merged = Impl::lead(record.shape, {impl.groups * impl.group_width()});
      TE_FL_ASSIGN_OR_RETURN(
          packed, impl.core->codes(record.fp8, DotProductAttention::Codes::kQkvGrad, merged, true));
      TE_FL_ASSIGN_OR_RETURN(heads, packed.rowwise_only().view(shape));
    } else {
      TE_FL_ASSIGN_OR_RETURN(
          packed, Tensor::empty(shape, impl.options.activation_dtype, impl.options.device));
      heads = packed;
    }
    TE_FL_ASSIGN_OR_RETURN(Heads parts, impl.split_plain(heads, false, false));
    into = {parts.q, parts.k, parts.v, Tensor()};
  }
  TE_FL_ASSIGN_OR_RETURN(auto grads,
                         impl.core->backward(d_o, record.core, direct ? &into : nullptr));
  if (dbias != nullptr) *dbias = grads.dbias;
  if (!direct) {
    TE_FL_ASSIGN_OR_RETURN(packed, impl.merge({grads.dq, grads.dk, grads.dv}, record));
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor d_mixed,
                         packed.view(Impl::lead(record.shape, {impl.groups * impl.group_width()})));
  if (impl.layernorm_qkv != nullptr) {
    return impl.layernorm_qkv->backward(d_mixed, record.qkv,
                                        residual.defined() ? &residual : nullptr);
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor dx, impl.qkv->backward(d_mixed, record.qkv));
  if (residual.defined()) TE_FL_RETURN_IF_ERROR(detail::add(dx, residual, dx));
  return dx;
}

}  // namespace te_fl::nn
