#include "te_fl/nn/modules/multihead_attention.hpp"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "nn/autograd/ctx.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/fp8/autocast.hpp"
#include "nn/modules/make_gemm.hpp"
#include "nn/modules/qkv_transform.hpp"
#include "nn/modules/tensor_parallel.hpp"
#include "te_fl/nn/modules/attention.hpp"
#include "te_fl/nn/modules/init.hpp"
#include "te_fl/nn/modules/linear.hpp"

namespace te_fl::nn {
namespace {

constexpr const char* kName = "MultiheadAttention";

struct MhaRecord : Ctx::Record {
  Ctx q, kv, core, proj;  // q: in self-attention for q, k and v together
  detail::QkvTransform::Record heads;
  Shape shape, encoder_shape;  // of x and of the encoder output
  detail::Fp8Mode fp8;         // mode of the attention op itself
  void visit_tensors(const Ctx::Visitor& visitor) {
    for (Ctx* part : {&q, &kv, &core, &proj, &heads.q_norm, &heads.k_norm}) part->visit(visitor);
    detail::Rotation& turned = heads.rotation;
    for (Tensor* t : {&turned.q, &turned.k, &turned.start_positions, &turned.cu_seqlens_q,
                      &turned.cu_seqlens_kv}) {
      visitor.mask(*t);
    }
  }
};

Shape with_tail(const Shape& lead, std::initializer_list<int64_t> tail) {
  Shape shape = lead;
  shape.insert(shape.end(), tail);
  return shape;
}

const Tensor* optional_input(const Tensor& tensor) { return tensor.defined() ? &tensor : nullptr; }

}  // namespace

struct MultiheadAttention::Impl {
  MultiheadAttentionOptions options;
  int64_t heads = 0, groups = 0, dim = 0;
  detail::QkvTransform transform;
  // One of norm_linear and linear is null. The other computes q, and in self-attention also k and
  // v.
  std::unique_ptr<LayerNormLinear> norm_linear;
  std::unique_ptr<Linear> linear;
  std::unique_ptr<Linear> key_value;  // only in cross-attention
  std::unique_ptr<DotProductAttention> core;
  std::unique_ptr<Linear> proj;

  bool cross() const { return options.attention_type == AttentionType::kCross; }
  bool thd() const { return options.attention.layout == Layout::kTHD; }
  // The position of this rank's rows of a projection (for q, for k and v, or for all three) in the
  // projection for all heads.
  init::Shard shard(bool q, bool kv) const;
  Status create_products(MultiheadAttention& module);
  Status create_core(MultiheadAttention& module);
  Status check(const Tensor& x, const AttentionInputs& inputs, bool wants_norm) const;
  int64_t length(const Tensor& x, int64_t longest) const {
    if (thd()) return longest;
    return whole_lead(x.shape())[options.attention.layout == Layout::kSBHD ? 0 : 1];
  }
  // All extents but the last, for the rows of all ranks.
  Shape whole_lead(std::span<const int64_t> shape) const {
    Shape lead(shape.begin(), shape.end() - 1);
    if (options.parallel.divides_sequence()) lead.front() *= options.parallel.size();
    return lead;
  }
  // Runs the projections before the attention.
  Result<detail::PackedHeads> project(const Tensor& x, const Tensor& encoder, MhaRecord& record,
                                      bool training, const ForwardOptions& forward,
                                      Tensor* layernorm_output);
  // The gradient of the projections' output, computed from that of the attention's output.
  Result<detail::PackedHeads> attention_backward(const Tensor& d_o, MhaRecord& record,
                                                 Tensor* dbias);
};

init::Shard MultiheadAttention::Impl::shard(bool q, bool kv) const {
  const int64_t whole = options.groups_whole, begin = options.groups_begin;
  if (whole == 0) return {};
  const int64_t q_rows = q ? heads / groups * dim : 0;  // per group
  const int64_t rows = q_rows + (kv ? 2 * dim : 0);
  init::Shard shard{{whole * rows, options.hidden_size}, {begin * rows, 0}};
  if (!kv || (options.fuse_qkv_params && options.qkv_weight_interleaved)) return shard;
  if (q) shard.rows.push_back({begin * q_rows, groups * q_rows});
  for (int64_t part : {0, 1}) {
    shard.rows.push_back({whole * (q_rows + part * dim) + begin * dim, groups * dim});
  }
  return shard;
}

Status MultiheadAttention::Impl::create_products(MultiheadAttention& module) {
  const int64_t q_width = heads * dim, kv_width = groups * dim;
  std::vector<ParameterPart> parts, kv_parts;
  if (!options.fuse_qkv_params) {
    parts = {{"query", q_width}};
    kv_parts = {{"key", kv_width}, {"value", kv_width}};
    if (!cross()) parts.insert(parts.end(), kv_parts.begin(), kv_parts.end());
  }
  const bool bias = options.qkv_bias.value_or(options.bias);
  const int64_t width = cross() ? q_width : q_width + 2 * kv_width;
  if (options.input_layernorm) {
    TE_FL_ASSIGN_OR_RETURN(
        norm_linear, LayerNormLinear::create({.in_features = options.hidden_size,
                                              .out_features = width,
                                              .bias = bias,
                                              .normalization = options.normalization,
                                              .epsilon = options.epsilon,
                                              .zero_centered_gamma = options.zero_centered_gamma,
                                              .param_dtype = options.param_dtype,
                                              .activation_dtype = options.activation_dtype,
                                              .device = options.device,
                                              .seed = init::subseed(options.seed, 1),
                                              .init_std = options.init_std,
                                              .shard = shard(true, !cross()),
                                              .parameters_split = parts,
                                              .parallel = options.parallel}));
    module.register_module(cross() ? "layernorm_query" : "layernorm_qkv", *norm_linear);
  } else {
    // Transformer Engine's query_layer is one parameter, whatever fuse_qkv_params is.
    if (cross()) parts.clear();
    TE_FL_ASSIGN_OR_RETURN(linear, Linear::create({.in_features = options.hidden_size,
                                                   .out_features = width,
                                                   .bias = bias,
                                                   .param_dtype = options.param_dtype,
                                                   .activation_dtype = options.activation_dtype,
                                                   .device = options.device,
                                                   .seed = init::subseed(options.seed, 1),
                                                   .init_std = options.init_std,
                                                   .shard = shard(true, !cross()),
                                                   .parameters_split = parts,
                                                   .parallel_mode = ParallelMode::kColumn,
                                                   .parallel = options.parallel}));
    module.register_module(cross() ? "query_layer" : "qkv", *linear);
  }
  if (!cross()) return {};
  TE_FL_ASSIGN_OR_RETURN(key_value, Linear::create({.in_features = options.hidden_size,
                                                    .out_features = 2 * kv_width,
                                                    .bias = bias,
                                                    .param_dtype = options.param_dtype,
                                                    .activation_dtype = options.activation_dtype,
                                                    .device = options.device,
                                                    .seed = init::subseed(options.seed, 3),
                                                    .init_std = options.init_std,
                                                    .shard = shard(false, true),
                                                    .parameters_split = kv_parts,
                                                    .parallel_mode = ParallelMode::kColumn,
                                                    .parallel = options.parallel}));
  module.register_module("key_value", *key_value);
  return {};
}

Status MultiheadAttention::Impl::create_core(MultiheadAttention& module) {
  TE_FL_ASSIGN_OR_RETURN(core,
                         DotProductAttention::create({.num_attention_heads = heads,
                                                      .head_dim = dim,
                                                      .num_gqa_groups = groups,
                                                      .attention = options.attention,
                                                      .activation_dtype = options.activation_dtype,
                                                      .device = options.device}));
  module.register_module("core_attention", *core);
  init::Shard columns;  // shard of proj
  if (options.groups_whole != 0) {
    const int64_t width = heads / groups * dim;  // per group
    columns = {{options.hidden_size, options.groups_whole * width},
               {0, options.groups_begin * width}};
  }
  TE_FL_ASSIGN_OR_RETURN(proj, Linear::create({.in_features = heads * dim,
                                               .out_features = options.hidden_size,
                                               .bias = options.proj_bias.value_or(options.bias),
                                               .param_dtype = options.param_dtype,
                                               .activation_dtype = options.activation_dtype,
                                               .device = options.device,
                                               .seed = init::subseed(options.seed, 2),
                                               .init_std = options.output_init_std,
                                               .shard = columns,
                                               .return_bias = options.return_bias,
                                               .parallel_mode = ParallelMode::kRow,
                                               .parallel = options.parallel}));
  module.register_module("proj", *proj);
  return {};
}

Result<MultiheadAttentionOptions> shard_of(MultiheadAttentionOptions whole,
                                           const TensorParallel& parallel) {
  whole.parallel = parallel;
  if (!parallel.divides()) return whole;
  const int64_t heads = whole.num_attention_heads, size = parallel.size();
  const int64_t groups = whole.num_gqa_groups == 0 ? heads : whole.num_gqa_groups;
  if (whole.groups_whole != 0 || heads % size != 0 || groups % size != 0) {
    return invalid_argument("MultiheadAttention: num_attention_heads is " + std::to_string(heads) +
                            " and num_gqa_groups " + std::to_string(groups) +
                            "; both must be multiples of the number of tensor-parallel ranks, "
                            "which is " +
                            std::to_string(size) + ", and groups_whole must be 0");
  }
  if (whole.kv_channels == 0 && heads > 0) whole.kv_channels = whole.hidden_size / heads;
  whole.groups_whole = groups;
  whole.num_attention_heads = heads / size;
  whole.num_gqa_groups = groups / size;
  whole.groups_begin = parallel.rank() * whole.num_gqa_groups;
  return whole;
}

MultiheadAttention::MultiheadAttention(const MultiheadAttentionOptions& options)
    : impl_(std::make_unique<Impl>()) {
  impl_->options = options;
}
MultiheadAttention::~MultiheadAttention() = default;

Result<std::unique_ptr<MultiheadAttention>> MultiheadAttention::create(
    const MultiheadAttentionOptions& options) {
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
  if (impl.groups < 1 || heads % impl.groups != 0) {
    return invalid_argument("MultiheadAttention: num_gqa_groups is " + std::to_string(impl.groups) +
                            "; it must divide num_attention_heads, which is " +
                            std::to_string(heads));
  }
  const bool sharded = options.groups_whole != 0 || options.groups_begin != 0;
  if (sharded &&
      (options.groups_begin < 0 || options.groups_begin > options.groups_whole - impl.groups)) {
    return invalid_argument("MultiheadAttention: groups_begin is " +
                            std::to_string(options.groups_begin) + " and groups_whole " +
                            std::to_string(options.groups_whole) +
                            "; groups_begin + num_gqa_groups, which is " +
                            std::to_string(impl.groups) + ", must be at most groups_whole");
  }
  TE_FL_RETURN_IF_ERROR(impl.transform.init(options, heads, impl.groups, impl.dim));
  if (impl.transform.q_norm() != nullptr) {
    module->register_module("q_norm", *impl.transform.q_norm());
    module->register_module("k_norm", *impl.transform.k_norm());
    if (options.parallel.divides()) {  // each rank normalises its own heads
      for (Module* norm : {impl.transform.q_norm(), impl.transform.k_norm()}) {
        for (const NamedParameter& p : norm->parameters()) p.parameter->partial_grad = true;
      }
    }
  }
  TE_FL_RETURN_IF_ERROR(impl.create_products(*module));
  TE_FL_RETURN_IF_ERROR(impl.create_core(*module));
  return module;
}

Status MultiheadAttention::Impl::check(const Tensor& x, const AttentionInputs& inputs,
                                       bool wants_norm) const {
  const int rank = thd() ? 2 : 3;
  const auto expect = [&](const char* name, const Tensor& t) -> Status {
    if (t.defined() && t.rank() == rank && t.size(-1) == options.hidden_size) return {};
    return invalid_argument(std::string("MultiheadAttention: ") + name + " is " +
                            (t.defined() ? t.describe() : std::string("undefined")) +
                            "; it must have rank " + std::to_string(rank) + " and last dimension " +
                            std::to_string(options.hidden_size));
  };
  TE_FL_RETURN_IF_ERROR(expect("x", x));
  if (wants_norm && !options.input_layernorm) {
    return invalid_argument(
        "MultiheadAttention: layernorm_output is requested, and the module has no norm; create it "
        "with input_layernorm");
  }
  const Tensor& encoder = inputs.encoder_output;
  if (!cross()) {
    if (!encoder.defined()) return {};
    return invalid_argument(
        "MultiheadAttention: encoder_output is given to self-attention; create the module with "
        "attention_type kCross, or leave it out");
  }
  TE_FL_RETURN_IF_ERROR(expect("encoder_output", encoder));
  const bool lengths = inputs.cu_seqlens_q.defined() && !inputs.cu_seqlens_kv.defined();
  if (lengths || (inputs.padding_mask_q.defined() && !inputs.padding_mask_kv.defined())) {
    return invalid_argument(std::string("MultiheadAttention: ") +
                            (lengths ? "cu_seqlens_q" : "padding_mask_q") +
                            " is given to cross-attention without that of the keys, " +
                            (lengths ? "cu_seqlens_kv" : "padding_mask_kv") + "; give both");
  }
  return {};
}

Result<detail::PackedHeads> MultiheadAttention::Impl::project(const Tensor& x,
                                                              const Tensor& encoder,
                                                              MhaRecord& record, bool training,
                                                              const ForwardOptions& forward,
                                                              Tensor* layernorm_output) {
  detail::PackedHeads packed;
  Tensor codes;  // FP8 data of q, k and v with a common scale
  if (record.fp8.fp8 && !cross() && transform.direct(record.heads.rotation)) {
    TE_FL_ASSIGN_OR_RETURN(codes,
                           core->codes(record.fp8, DotProductAttention::Codes::kQkv,
                                       with_tail(record.heads.q_lead, {transform.qkv_width()})));
  }
  Ctx* q_ctx = training ? &record.q : nullptr;
  Tensor& made = cross() ? packed.q : packed.qkv;
  if (norm_linear != nullptr) {
    TE_FL_ASSIGN_OR_RETURN(
        made, norm_linear->forward(x, q_ctx, forward, optional_input(codes), layernorm_output));
  } else {
    TE_FL_ASSIGN_OR_RETURN(made,
                           linear->forward(x, q_ctx, forward, nullptr, optional_input(codes)));
  }
  if (cross()) {
    TE_FL_ASSIGN_OR_RETURN(packed.kv,
                           key_value->forward(encoder, training ? &record.kv : nullptr, forward));
  }
  return packed;
}

Result<Tensor> MultiheadAttention::forward(const Tensor& x, Ctx* ctx, const AttentionInputs& inputs,
                                           const ForwardOptions& options, const Tensor* residual,
                                           Tensor* layernorm_output) {
  TE_FL_ASSIGN_OR_RETURN(auto record, detail::new_record<MhaRecord>(ctx, kName));
  Impl& impl = *impl_;
  TE_FL_RETURN_IF_ERROR(impl.check(x, inputs, layernorm_output != nullptr));
  const Tensor& encoder = impl.cross() ? inputs.encoder_output : x;
  record->shape.assign(x.shape().begin(), x.shape().end());
  record->encoder_shape.assign(encoder.shape().begin(), encoder.shape().end());
  record->heads.q_lead = impl.whole_lead(record->shape);
  record->heads.kv_lead = impl.whole_lead(record->encoder_shape);
  const int64_t longest_kv = impl.cross() ? inputs.max_seqlen_kv : inputs.max_seqlen_q;
  TE_FL_ASSIGN_OR_RETURN(record->heads.rotation,
                         impl.transform.rotation(inputs, impl.length(x, inputs.max_seqlen_q),
                                                 impl.length(encoder, longest_kv)));
  const bool training = ctx != nullptr;
  TE_FL_ASSIGN_OR_RETURN(record->fp8, impl.core->begin(training));
  detail::Heads parts;
  {
    TE_FL_ASSIGN_OR_RETURN(const detail::PackedHeads packed,
                           impl.project(x, encoder, *record, training, options, layernorm_output));
    TE_FL_ASSIGN_OR_RETURN(parts, impl.transform.forward(packed, record->heads, training));
  }
  AttentionInputs core_inputs = inputs;
  core_inputs.encoder_output = Tensor();  // not needed any more
  Tensor o;
  {
    const TensorParallel& parallel = impl.options.parallel;
    const detail::OwnRandom own(parallel, parallel.divides(), impl.options.device);
    TE_FL_ASSIGN_OR_RETURN(
        o, impl.core->forward_codes(parts.q, parts.k, parts.v, training ? &record->core : nullptr,
                                    core_inputs, training));
  }
  parts = {};
  TE_FL_ASSIGN_OR_RETURN(Tensor merged,
                         o.view(with_tail(record->heads.q_lead, {impl.heads * impl.dim})));
  TE_FL_ASSIGN_OR_RETURN(
      Tensor y, impl.proj->forward(merged, training ? &record->proj : nullptr, options, residual));
  if (training) TE_FL_RETURN_IF_ERROR(ctx->store(this, std::move(record)));
  return y;
}

Result<detail::PackedHeads> MultiheadAttention::Impl::attention_backward(const Tensor& d_o,
                                                                         MhaRecord& record,
                                                                         Tensor* dbias) {
  detail::PackedHeads packed;
  DotProductAttention::Gradients into;
  const bool direct = transform.direct(record.heads.rotation);
  if (direct) {
    detail::PackedHeads rows;
    if (record.fp8.fp8 && !cross()) {
      const Shape merged = with_tail(record.heads.q_lead, {transform.qkv_width()});
      TE_FL_ASSIGN_OR_RETURN(packed.qkv,
                             core->codes(record.fp8, DotProductAttention::Codes::kQkvGrad, merged));
      rows.qkv = packed.qkv.rowwise_only();
    } else {
      TE_FL_ASSIGN_OR_RETURN(packed, transform.empty(record.heads, options.activation_dtype));
      rows = packed;
    }
    TE_FL_ASSIGN_OR_RETURN(detail::Heads parts, transform.views(rows, record.heads));
    into = {parts.q, parts.k, parts.v, Tensor()};
  }
  TE_FL_ASSIGN_OR_RETURN(auto grads, core->backward(d_o, record.core, direct ? &into : nullptr));
  if (dbias != nullptr) *dbias = grads.dbias;
  if (direct) return packed;
  return transform.backward({grads.dq, grads.dk, grads.dv}, record.heads);
}

Result<Tensor> MultiheadAttention::backward(const Tensor& dy, Ctx& ctx, const Tensor* residual_grad,
                                            Tensor* dbias, const Tensor* layernorm_output_grad,
                                            Tensor* encoder_grad) {
  Impl& impl = *impl_;
  TE_FL_ASSIGN_OR_RETURN(auto taken, ctx.take(this, kName));
  auto& record = static_cast<MhaRecord&>(*taken);
  TE_FL_RETURN_IF_ERROR(detail::check_gradient(dy, record.shape, impl.options.hidden_size, kName));
  TE_FL_ASSIGN_OR_RETURN(Tensor residual, detail::residual_matrix(
                                              residual_grad, record.shape, impl.options.hidden_size,
                                              "MultiheadAttention: residual_grad"));
  if (residual.defined()) {
    TE_FL_ASSIGN_OR_RETURN(residual, residual.view(record.shape));
  }
  if (layernorm_output_grad != nullptr && impl.norm_linear == nullptr) {
    return invalid_argument(
        "MultiheadAttention: layernorm_output_grad is given, and the module has no norm; leave it "
        "out");
  }
  Tensor d_codes;
  if (record.fp8.fp8) {
    TE_FL_ASSIGN_OR_RETURN(
        d_codes, impl.core->codes(record.fp8, DotProductAttention::Codes::kOutputGrad,
                                  with_tail(record.heads.q_lead, {impl.heads * impl.dim})));
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor d_merged,
                         impl.proj->backward(dy, record.proj, optional_input(d_codes)));
  TE_FL_ASSIGN_OR_RETURN(Tensor d_o,
                         d_merged.view(with_tail(record.heads.q_lead, {impl.heads, impl.dim})));
  TE_FL_ASSIGN_OR_RETURN(detail::PackedHeads packed, impl.attention_backward(d_o, record, dbias));
  if (impl.cross()) {
    TE_FL_ASSIGN_OR_RETURN(Tensor d_encoder, impl.key_value->backward(packed.kv, record.kv));
    if (encoder_grad != nullptr) *encoder_grad = std::move(d_encoder);
  }
  const Tensor& d_mixed = impl.cross() ? packed.q : packed.qkv;
  if (impl.norm_linear != nullptr) {
    return impl.norm_linear->backward(d_mixed, record.q, optional_input(residual),
                                      layernorm_output_grad);
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor dx, impl.linear->backward(d_mixed, record.q));
  if (residual.defined()) TE_FL_RETURN_IF_ERROR(detail::add(dx, residual, dx));
  return dx;
}

}  // namespace te_fl::nn
