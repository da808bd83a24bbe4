#include "te_fl/nn/modules/attention.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "nn/autograd/ctx.hpp"
#include "nn/autograd/gradients.hpp"
#include "nn/autograd/random.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/fp8/autocast.hpp"
#include "nn/fp8/fp8_state.hpp"
#include "nn/modules/attention_inputs.hpp"
#include "nn/modules/make_gemm.hpp"
#include "te_fl/nn/modules/init.hpp"

namespace te_fl::nn {
namespace {

// The slots of the forward and backward FP8 states.
constexpr int64_t kQkvSlot = 0, kSSlot = 1, kOSlot = 2;
constexpr int64_t kDoSlot = 0, kDpSlot = 1, kDqkvSlot = 2;

struct AttentionRecord : Ctx::Record {
  detail::Fp8Mode mode;
  Tensor q, k, v, o;                // quantised if mode.fp8
  DType q_dtype, k_dtype, v_dtype;  // dtypes of the gradients
  Tensor s_quant;                   // FP8 only: scale and amax of the probabilities
  Tensor lse;
  AttentionInputs inputs;
  te_fl_rng rng;
  te_fl_saved saved{};
  Tensor saved_storage;
  void visit_tensors(const Ctx::Visitor& visitor) {
    for (Tensor* t : {&q, &k, &v, &o, &lse}) visitor(*t);
    for (Tensor* t :
         {&inputs.attn_mask, &inputs.bias, &inputs.alibi_slopes, &inputs.cu_seqlens_q,
          &inputs.cu_seqlens_kv, &inputs.cu_seqlens_q_padded, &inputs.cu_seqlens_kv_padded,
          &inputs.rotary_angles, &inputs.rotary_start_positions, &inputs.rotary_angles_kv}) {
      visitor.mask(*t);
    }
  }
};

// The extents that q, k and v have in common. For thd, batch is 1 and the lengths are those of the
// longest sequences.
struct Extents {
  int64_t batch = 1, length_q = 0, length_kv = 0;
};

// Zeros the rows between the sequences of a packed layout. Implementations need not write them, but
// later ops read them.
Status clear_gaps(Layout layout, const Tensor& out) {
  if (layout != Layout::kTHD) return {};
  return detail::fill(out.quantized() ? out.rowwise_codes() : out, 0);
}

Status shape_error(const char* name, const Tensor& tensor, const std::string& want) {
  return invalid_argument(std::string("DotProductAttention: ") + name + " is " +
                          (tensor.defined() ? tensor.describe() : std::string("undefined")) +
                          "; it must be " + want);
}

// Refuses a mask tensor together with a padding mask type, which uses only lengths.
Status check_mask(const AttentionInputs& inputs, MaskType type) {
  const bool padding = type == MaskType::kPadding || type == MaskType::kPaddingCausal ||
                       type == MaskType::kPaddingCausalBottomRight;
  if (!padding || !inputs.attn_mask.defined()) return {};
  return invalid_argument(
      "DotProductAttention: attn_mask is given with " +
      std::string(type == MaskType::kPadding         ? "kPadding"
                  : type == MaskType::kPaddingCausal ? "kPaddingCausal"
                                                     : "kPaddingCausalBottomRight") +
      ", and is read with kArbitrary alone; give padding_mask_q (and padding_mask_kv where keys "
      "differ), or cu_seqlens_q");
}

Status check_softcap(float softcap) {
  if (softcap >= 0 && std::isfinite(softcap)) return {};
  return invalid_argument("DotProductAttention: softcap is " + std::to_string(softcap) +
                          "; it must be finite and at least 0 (0: scores have no cap)");
}

}  // namespace

struct DotProductAttention::Impl {
  explicit Impl(const DotProductAttentionOptions& o)
      : options(o),
        forward_state(std::make_shared<detail::Fp8State>(3, o.device)),
        backward_state(std::make_shared<detail::Fp8State>(3, o.device)) {}

  DotProductAttentionOptions options;
  int64_t groups = 0;
  int64_t value_dim = 0;
  float scale = 1;
  std::shared_ptr<Parameter> sink;
  std::shared_ptr<detail::Fp8State> forward_state, backward_state;

  Result<Extents> check(const Tensor& q, const Tensor& k, const Tensor& v,
                        const AttentionInputs& inputs) const;
  // The output's shape for q's shape.
  Shape output_shape(const Tensor& q) const { return detail::with_last(q.shape(), value_dim); }
  Result<detail::Fp8Mode> begin(bool training);
  Result<Tensor> quantized(const detail::Fp8Mode& mode, detail::Role role,
                           std::span<const int64_t> shape, int64_t slot,
                           bool columns = false) const;
  // Allocates FP8 data for heads [.., H, D] with the shape [.., H D], in which the next GEMM reads
  // them.
  Result<Tensor> merged_codes(const detail::Fp8Mode& mode, std::span<const int64_t> shape,
                              bool columns) const;
  Result<Tensor> quantize(const detail::Fp8Mode& mode, const Tensor& x, detail::Role role,
                          int64_t slot) const;
  Result<Tensor> dequantize(const Tensor& x, DType dtype) const;
  // Runs the attention. An FP8 output is allocated by merged_codes().
  Result<Tensor> run_forward(AttentionRecord& record, const Extents& extents, bool training,
                             bool columns);
  Result<Gradients> run_backward(AttentionRecord& record, const Tensor& d_o, const Gradients* into);

  // Sets the members that both argument structs have.
  template <class Args>
  void set_common(Args& args, const AttentionRecord& record) const {
    const AttentionInputs& in = record.inputs;
    args.q = record.q;
    args.k = record.k;
    args.v = record.v;
    args.o = record.o;
    args.softmax_lse = record.lse;
    args.bias = in.bias;
    args.alibi_slopes = in.alibi_slopes;
    args.attn_mask = in.attn_mask;
    args.cu_seqlens_q = in.cu_seqlens_q;
    args.cu_seqlens_kv = in.cu_seqlens_kv;
    args.cu_seqlens_q_padded = in.cu_seqlens_q_padded;
    args.cu_seqlens_kv_padded = in.cu_seqlens_kv_padded;
    if (sink != nullptr) args.softmax_sink = sink->value;
    args.s_quant = record.s_quant;
    args.layout = static_cast<int32_t>(options.attention.layout);
    args.mask_type = static_cast<int32_t>(in.mask_type.value_or(options.attention.mask_type));
    args.softmax_type = static_cast<int32_t>(options.attention.softmax_type);
    args.scale = scale;
    args.softcap = in.softcap.value_or(options.attention.softcap);
    args.window_left = in.window_left.value_or(options.attention.window_left);
    args.window_right = in.window_right.value_or(options.attention.window_right);
    args.max_seqlen_q = in.max_seqlen_q;
    args.max_seqlen_kv = in.max_seqlen_kv;
  }
};

Result<Extents> DotProductAttention::Impl::check(const Tensor& q, const Tensor& k, const Tensor& v,
                                                 const AttentionInputs& inputs) const {
  const bool thd = options.attention.layout == Layout::kTHD;
  const int rank = thd ? 3 : 4;
  const std::string lead = thd                                         ? "[tokens, "
                           : options.attention.layout == Layout::kSBHD ? "[sequence, batch, "
                                                                       : "[batch, sequence, ";
  auto expect = [&](const char* name, const Tensor& t, int64_t heads, int64_t dim) -> Status {
    if (t.defined() && t.rank() == rank && t.size(rank - 2) == heads && t.size(rank - 1) == dim) {
      return {};
    }
    return shape_error(name, t, lead + std::to_string(heads) + ", " + std::to_string(dim) + "]");
  };
  TE_FL_RETURN_IF_ERROR(expect("q", q, options.num_attention_heads, options.head_dim));
  TE_FL_RETURN_IF_ERROR(expect("k", k, groups, options.head_dim));
  TE_FL_RETURN_IF_ERROR(expect("v", v, groups, value_dim));
  Extents extents;
  if (thd) {
    extents.length_q = inputs.max_seqlen_q;
    extents.length_kv = inputs.max_seqlen_kv;
    if (options.attention.attention_dropout > 0 &&
        (extents.length_q < 1 || extents.length_kv < 1)) {
      return invalid_argument(
          "DotProductAttention: dropout with the thd layout needs max_seqlen_q and max_seqlen_kv "
          "(the random numbers taken depend on them)");
    }
    return extents;
  }
  const int sequence = options.attention.layout == Layout::kSBHD ? 0 : 1;
  extents.batch = q.size(1 - sequence);
  extents.length_q = q.size(sequence);
  extents.length_kv = k.size(sequence);
  return extents;
}

Result<detail::Fp8Mode> DotProductAttention::Impl::begin(bool training) {
  TE_FL_ASSIGN_OR_RETURN(detail::Fp8Mode mode, detail::current_mode());
  const DelayedScaling* delayed = mode.delayed();
  if (!mode.fp8 || delayed == nullptr || !delayed->fp8_dpa) return detail::Fp8Mode{};
  TE_FL_RETURN_IF_ERROR(detail::begin_delayed(mode, training, forward_state, backward_state));
  return mode;
}

Result<Tensor> DotProductAttention::Impl::quantized(const detail::Fp8Mode& mode, detail::Role role,
                                                    std::span<const int64_t> shape, int64_t slot,
                                                    bool columns) const {
  const auto& state = role == detail::Role::kGradient ? *backward_state : *forward_state;
  return detail::empty_quantized(*mode.recipe, role, shape,
                                 {.rowwise = true, .columnwise = columns}, options.device, state,
                                 slot);
}

Result<Tensor> DotProductAttention::Impl::merged_codes(const detail::Fp8Mode& mode,
                                                       std::span<const int64_t> shape,
                                                       bool columns) const {
  Shape merged(shape.begin(), shape.end() - 1);
  merged.back() *= shape.back();
  return quantized(mode, detail::Role::kInput, merged, kOSlot, columns);
}

Result<Tensor> DotProductAttention::Impl::quantize(const detail::Fp8Mode& mode, const Tensor& x,
                                                   detail::Role role, int64_t slot) const {
  TE_FL_ASSIGN_OR_RETURN(Tensor q, quantized(mode, role, x.shape(), slot));
  // Compact, since not every implementation quantises strided tensors.
  TE_FL_ASSIGN_OR_RETURN(const Tensor rows, detail::compact(x));
  TE_FL_RETURN_IF_ERROR(detail::quantize(rows, q));
  return q;
}

Result<Tensor> DotProductAttention::Impl::dequantize(const Tensor& x, DType dtype) const {
  TE_FL_ASSIGN_OR_RETURN(Tensor high, detail::empty_like(x, dtype));
  te_fl_dequantize_args args{};
  args.input = x;
  args.output = high;
  TE_FL_RETURN_IF_ERROR(ops::dequantize(args, detail::call_options(options.device)));
  return high;
}

Result<Tensor> DotProductAttention::Impl::run_forward(AttentionRecord& record,
                                                      const Extents& extents, bool training,
                                                      bool columns) {
  const bool fp8 = record.mode.fp8;
  const Shape shape_of_o = output_shape(record.q);
  Tensor merged;
  if (fp8) {
    TE_FL_ASSIGN_OR_RETURN(merged, merged_codes(record.mode, shape_of_o, columns));
    TE_FL_ASSIGN_OR_RETURN(record.o, merged.rowwise_only().view(shape_of_o));
    const Shape one = {1};
    TE_FL_ASSIGN_OR_RETURN(record.s_quant,
                           quantized(record.mode, detail::Role::kInput, one, kSSlot));
    if (training) {  // copies the scale, which an update may change before the backward
      TE_FL_ASSIGN_OR_RETURN(record.s_quant, detail::with_own_scale(record.s_quant));
    }
  } else {
    TE_FL_ASSIGN_OR_RETURN(record.o,
                           Tensor::empty(shape_of_o, options.activation_dtype, options.device));
  }
  TE_FL_RETURN_IF_ERROR(clear_gaps(options.attention.layout, record.o));
  const int64_t heads = options.num_attention_heads;
  if (training) {
    const Shape shape = options.attention.layout == Layout::kTHD
                            ? Shape{record.q.size(0), heads}
                            : Shape{extents.batch, heads, extents.length_q};
    TE_FL_ASSIGN_OR_RETURN(record.lse, Tensor::empty(shape, DType::kF32, options.device));
  }
  te_fl_fused_attn_fwd_args args{};
  set_common(args, record);
  CallOptions call = detail::call_options(options.device);
  if (training && options.attention.attention_dropout > 0) {
    args.dropout_p = options.attention.attention_dropout;
    int64_t batch = extents.batch;
    if (options.attention.layout == Layout::kTHD) batch = record.inputs.cu_seqlens_q.numel() - 1;
    TE_FL_ASSIGN_OR_RETURN(
        call, detail::random_options(batch * heads * extents.length_q * extents.length_kv,
                                     options.device));
  }
  record.rng = call.rng;
  if (training) {
    args.saved = &record.saved;
    TE_FL_ASSIGN_OR_RETURN(size_t bytes,
                           OpManager::instance().saved_bytes(op::fused_attn_fwd, &args, call));
    if (bytes > 0) {
      TE_FL_ASSIGN_OR_RETURN(record.saved_storage, Tensor::empty({static_cast<int64_t>(bytes)},
                                                                 DType::kU8, options.device));
      record.saved.storage = record.saved_storage;
    }
  }
  TE_FL_RETURN_IF_ERROR(ops::fused_attn_fwd(args, call));
  return fp8 ? merged : record.o;
}

Result<DotProductAttention::Gradients> DotProductAttention::Impl::run_backward(
    AttentionRecord& record, const Tensor& d_o, const Gradients* into) {
  const bool fp8 = record.mode.fp8;
  Gradients grads;
  Tensor grad_out = d_o;
  Tensor dp_quant;
  auto gradient_like = [&](const Tensor& x, DType dtype,
                           Tensor Gradients::*member) -> Result<Tensor> {
    if (into != nullptr && (into->*member).quantized() == fp8) return into->*member;
    if (!fp8) return detail::empty_like(x, dtype);
    return quantized(record.mode, detail::Role::kGradient, x.shape(), kDqkvSlot);
  };
  if (fp8) {
    TE_FL_RETURN_IF_ERROR(detail::begin_delayed_backward(record.mode, backward_state));
    if (!d_o.quantized()) {
      TE_FL_ASSIGN_OR_RETURN(grad_out,
                             quantize(record.mode, d_o, detail::Role::kGradient, kDoSlot));
    }
    const Shape one = {1};
    TE_FL_ASSIGN_OR_RETURN(dp_quant, quantized(record.mode, detail::Role::kGradient, one, kDpSlot));
  }
  TE_FL_ASSIGN_OR_RETURN(grads.dq, gradient_like(record.q, record.q_dtype, &Gradients::dq));
  TE_FL_ASSIGN_OR_RETURN(grads.dk, gradient_like(record.k, record.k_dtype, &Gradients::dk));
  TE_FL_ASSIGN_OR_RETURN(grads.dv, gradient_like(record.v, record.v_dtype, &Gradients::dv));
  for (const Tensor* grad : {&grads.dq, &grads.dk, &grads.dv}) {
    TE_FL_RETURN_IF_ERROR(clear_gaps(options.attention.layout, *grad));
  }
  if (record.inputs.bias.defined()) {
    TE_FL_ASSIGN_OR_RETURN(grads.dbias,
                           detail::empty_like(record.inputs.bias, record.inputs.bias.dtype()));
  }
  TE_FL_ASSIGN_OR_RETURN(auto dsink, detail::GradTarget::open(sink.get()));
  te_fl_fused_attn_bwd_args args{};
  set_common(args, record);
  args.d_o = grad_out;
  args.dq = grads.dq;
  args.dk = grads.dk;
  args.dv = grads.dv;
  args.dbias = grads.dbias;
  args.dsink = dsink.tensor();
  args.dp_quant = dp_quant;
  if (record.saved_storage.defined()) record.saved.storage = record.saved_storage;  // of a copy
  args.saved = &record.saved;
  args.dropout_p = options.attention.attention_dropout;
  CallOptions call = detail::call_options(options.device);
  call.rng = record.rng;
  TE_FL_RETURN_IF_ERROR(ops::fused_attn_bwd(args, call));
  TE_FL_RETURN_IF_ERROR(dsink.commit());
  if (fp8) {
    const std::pair<Tensor Gradients::*, DType> each[] = {{&Gradients::dq, record.q_dtype},
                                                          {&Gradients::dk, record.k_dtype},
                                                          {&Gradients::dv, record.v_dtype}};
    for (const auto& [grad, dtype] : each) {
      if (into != nullptr && (into->*grad).quantized()) continue;
      TE_FL_ASSIGN_OR_RETURN(Tensor high, dequantize(grads.*grad, dtype));
      if (into != nullptr) TE_FL_RETURN_IF_ERROR(detail::copy(high, into->*grad));
      grads.*grad = into != nullptr ? into->*grad : std::move(high);
    }
  }
  return grads;
}

DotProductAttention::DotProductAttention(const DotProductAttentionOptions& options)
    : impl_(std::make_unique<Impl>(options)) {}
DotProductAttention::~DotProductAttention() = default;

Result<std::unique_ptr<DotProductAttention>> DotProductAttention::create(
    const DotProductAttentionOptions& options) {
  constexpr const char* kName = "DotProductAttention";
  const int64_t heads = options.num_attention_heads;
  TE_FL_RETURN_IF_ERROR(detail::check_size(kName, "num_attention_heads", heads));
  TE_FL_RETURN_IF_ERROR(detail::check_size(kName, "head_dim", options.head_dim));
  TE_FL_RETURN_IF_ERROR(
      detail::check_dropout(kName, "attention_dropout", options.attention.attention_dropout));
  const int64_t groups = options.num_gqa_groups == 0 ? heads : options.num_gqa_groups;
  if (groups < 1 || heads % groups != 0) {
    return invalid_argument("DotProductAttention: num_gqa_groups is " + std::to_string(groups) +
                            "; it must divide num_attention_heads, which is " +
                            std::to_string(heads));
  }
  if (options.value_head_dim != 0) {
    TE_FL_RETURN_IF_ERROR(detail::check_size(kName, "value_head_dim", options.value_head_dim));
  }
  TE_FL_RETURN_IF_ERROR(
      detail::check_window(kName, options.attention.window_left, options.attention.window_right));
  TE_FL_RETURN_IF_ERROR(check_softcap(options.attention.softcap));
  std::unique_ptr<DotProductAttention> module(new DotProductAttention(options));
  Impl& impl = *module->impl_;
  impl.groups = groups;
  impl.value_dim = options.value_head_dim == 0 ? options.head_dim : options.value_head_dim;
  impl.scale = options.attention.softmax_scale != 0
                   ? options.attention.softmax_scale
                   : static_cast<float>(1 / std::sqrt(static_cast<double>(options.head_dim)));
  if (options.attention.softmax_type == SoftmaxType::kLearnable) {
    TE_FL_ASSIGN_OR_RETURN(impl.sink, init::constant(Shape{heads}, 0, DType::kF32, options.device));
    module->register_parameter("softmax_offset", impl.sink);
  }
  module->register_fp8("fp8", impl.forward_state, impl.backward_state);
  return module;
}

Result<detail::Fp8Mode> DotProductAttention::begin(bool training) { return impl_->begin(training); }

Result<Tensor> DotProductAttention::codes(const detail::Fp8Mode& mode, Codes what,
                                          std::span<const int64_t> shape) {
  if (what == Codes::kQkv) {
    return impl_->quantized(mode, detail::Role::kInput, shape, kQkvSlot);
  }
  const bool qkv = what == Codes::kQkvGrad;  // two GEMMs read it, row-wise and column-wise
  return impl_->quantized(mode, detail::Role::kGradient, shape, qkv ? kDqkvSlot : kDoSlot, qkv);
}

Result<Tensor> DotProductAttention::forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                            Ctx* ctx, const AttentionInputs& inputs) {
  TE_FL_ASSIGN_OR_RETURN(Tensor o, forward_codes(q, k, v, ctx, inputs, false));
  if (!o.quantized()) return o;
  TE_FL_ASSIGN_OR_RETURN(Tensor heads, o.view(impl_->output_shape(q)));
  return impl_->dequantize(heads, impl_->options.activation_dtype);
}

Result<Tensor> DotProductAttention::forward_codes(const Tensor& q, const Tensor& k, const Tensor& v,
                                                  Ctx* ctx, const AttentionInputs& inputs,
                                                  bool columns) {
  const bool training = ctx != nullptr;
  TE_FL_ASSIGN_OR_RETURN(auto record,
                         detail::new_record<AttentionRecord>(ctx, "DotProductAttention"));
  if (impl_->options.attention.layout == Layout::kTHD && inputs.padding_mask_q.defined()) {
    return invalid_argument(
        "DotProductAttention: padding_mask_q is given with the thd layout, whose sequences have no "
        "padding that a mask could name; give cu_seqlens_q and cu_seqlens_q_padded");
  }
  AttentionInputs& in = record->inputs;
  in = inputs;
  in.window_left = inputs.window_left.value_or(impl_->options.attention.window_left);
  in.window_right = inputs.window_right.value_or(impl_->options.attention.window_right);
  TE_FL_RETURN_IF_ERROR(
      detail::check_window("DotProductAttention", *in.window_left, *in.window_right));
  TE_FL_RETURN_IF_ERROR(check_mask(in, in.mask_type.value_or(impl_->options.attention.mask_type)));
  TE_FL_ASSIGN_OR_RETURN(in, resolve_padding_masks(in, impl_->options.attention.mask_type));
  TE_FL_RETURN_IF_ERROR(check_softcap(in.softcap.value_or(0)));
  if (!in.cu_seqlens_kv.defined()) {
    in.cu_seqlens_kv = in.cu_seqlens_q;
    in.cu_seqlens_kv_padded = in.cu_seqlens_q_padded;
    if (in.max_seqlen_kv == 0) in.max_seqlen_kv = in.max_seqlen_q;
  }
  if (impl_->options.attention.layout == Layout::kTHD && !inputs.cu_seqlens_q.defined()) {
    return invalid_argument(
        "DotProductAttention: the thd layout needs cu_seqlens_q, I32 [sequences + 1]");
  }
  TE_FL_ASSIGN_OR_RETURN(Extents extents, impl_->check(q, k, v, in));
  TE_FL_ASSIGN_OR_RETURN(in.attn_mask,
                         detail::expand_mask(in.attn_mask, extents.length_q, extents.length_kv));
  TE_FL_ASSIGN_OR_RETURN(record->mode, impl_->begin(training));
  const auto gradient_dtype = [&](const Tensor& x) {
    return x.quantized() ? impl_->options.activation_dtype : x.dtype();
  };
  record->q_dtype = gradient_dtype(q);
  record->k_dtype = gradient_dtype(k);
  record->v_dtype = gradient_dtype(v);
  if (record->mode.fp8) {
    const auto input = [&](const Tensor& x) -> Result<Tensor> {
      if (x.quantized()) return x;
      return impl_->quantize(record->mode, x, detail::Role::kInput, kQkvSlot);
    };
    TE_FL_ASSIGN_OR_RETURN(record->q, input(q));
    TE_FL_ASSIGN_OR_RETURN(record->k, input(k));
    TE_FL_ASSIGN_OR_RETURN(record->v, input(v));
    if (!training && !impl_->forward_state->calibrated() && impl_->forward_state->looks_on()) {
      for (const Tensor& x : {record->q, record->k, record->v}) {
        TE_FL_RETURN_IF_ERROR(detail::warn_if_saturated(*impl_->forward_state, kQkvSlot, x,
                                                        "queries, keys and values", "attention"));
      }
    }
  } else {
    record->q = q;
    record->k = k;
    record->v = v;
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor o, impl_->run_forward(*record, extents, training, columns));
  if (training) TE_FL_RETURN_IF_ERROR(ctx->store(this, std::move(record)));
  return o;
}

Result<DotProductAttention::Gradients> DotProductAttention::backward(const Tensor& d_o, Ctx& ctx,
                                                                     const Gradients* into) {
  TE_FL_ASSIGN_OR_RETURN(auto taken, ctx.take(this, "DotProductAttention"));
  auto& record = static_cast<AttentionRecord&>(*taken);
  if (!d_o.defined() || !std::ranges::equal(d_o.shape(), record.o.shape())) {
    return shape_error("d_o", d_o, "of the output's shape, that of " + record.o.describe());
  }
  return impl_->run_backward(record, d_o, into);
}

}  // namespace te_fl::nn
