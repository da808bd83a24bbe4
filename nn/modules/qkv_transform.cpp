#include "nn/modules/qkv_transform.hpp"

#include <cmath>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "nn/base/tensor_ops.hpp"
#include "te_fl/ops.hpp"

namespace te_fl::nn::detail {
namespace {

Shape with_tail(const Shape& lead, std::initializer_list<int64_t> tail) {
  Shape shape = lead;
  shape.insert(shape.end(), tail);
  return shape;
}

Result<std::unique_ptr<Norm>> make_norm(const MultiheadAttentionOptions& options, int64_t dim) {
  NormOptions norm{.hidden_size = dim,
                   .epsilon = options.qk_norm_epsilon,
                   .param_dtype = options.param_dtype,
                   .activation_dtype = options.activation_dtype,
                   .device = options.device};
  std::unique_ptr<Norm> made;
  if (options.qk_norm == QkNorm::kLayerNorm) {
    TE_FL_ASSIGN_OR_RETURN(made, LayerNorm::create(norm));
    return made;
  }
  if (options.qk_norm == QkNorm::kRMSNorm) {
    TE_FL_ASSIGN_OR_RETURN(made, RMSNorm::create(norm));
    return made;
  }
  // The L2 norm x / sqrt(sum x^2 + eps) equals (x / sqrt(mean x^2 + eps / D)) / sqrt(D), which is
  // an RMSNorm with a constant weight.
  norm.epsilon = options.qk_norm_epsilon / static_cast<float>(dim);
  norm.param_dtype = DType::kF32;
  TE_FL_ASSIGN_OR_RETURN(made, RMSNorm::create(norm));
  Parameter& weight = *made->parameters().front().parameter;
  const std::vector<float> values(static_cast<size_t>(dim),
                                  static_cast<float>(1 / std::sqrt(static_cast<double>(dim))));
  TE_FL_ASSIGN_OR_RETURN(weight.value, Tensor::from_values({dim}, values));
  if (!options.device.is_host()) {
    TE_FL_ASSIGN_OR_RETURN(weight.value, weight.value.to(options.device));
  }
  weight.set_requires_grad(false);
  return made;
}

}  // namespace

Status QkvTransform::init(const MultiheadAttentionOptions& options, int64_t heads, int64_t groups,
                          int64_t dim) {
  options_ = options;
  heads_ = heads;
  groups_ = groups;
  dim_ = dim;
  interleaved_ = options.fuse_qkv_params && options.qkv_weight_interleaved;
  if (options.qk_norm == QkNorm::kNone) return {};
  TE_FL_ASSIGN_OR_RETURN(q_norm_, make_norm(options, dim));
  TE_FL_ASSIGN_OR_RETURN(k_norm_, make_norm(options, dim));
  return {};
}

Result<Rotation> QkvTransform::rotation(const AttentionInputs& inputs, int64_t length_q,
                                        int64_t length_kv) const {
  Rotation result;
  if (!inputs.rotary_angles.defined()) {
    if (inputs.rotary_start_positions.defined()) {
      return invalid_argument(
          "MultiheadAttention: rotary_start_positions is given without rotary_angles, so nothing "
          "is rotated; give both, or neither");
    }
    if (!inputs.rotary_angles_kv.defined()) return result;
    return invalid_argument(
        "MultiheadAttention: rotary_angles_kv is given without rotary_angles; give both, or "
        "rotary_angles alone for queries and keys");
  }
  if (cross() && inputs.rotary_start_positions.defined()) {
    return invalid_argument(
        "MultiheadAttention: rotary_start_positions are those of self-attention; give "
        "cross-attention angles that begin where its sequences do");
  }
  const bool whole = thd() || inputs.rotary_start_positions.defined();
  const auto rows = [&](const char* name, const Tensor& table, int64_t length) -> Result<Tensor> {
    const bool fits = table.rank() == 4 && table.size(0) >= length && table.size(1) == 1 &&
                      table.size(2) == 1 && table.size(3) <= dim_ && table.size(3) % 2 == 0;
    if (!fits) {
      return invalid_argument(std::string("MultiheadAttention: ") + name + " is " +
                              table.describe() +
                              "; it must be f32[positions >= " + std::to_string(length) +
                              ", 1, 1, even and at most " + std::to_string(dim_) + "]");
    }
    if (whole) return table;
    return table.slice(0, 0, length);
  };
  TE_FL_ASSIGN_OR_RETURN(result.q, rows("rotary_angles", inputs.rotary_angles, length_q));
  const bool own = inputs.rotary_angles_kv.defined();
  TE_FL_ASSIGN_OR_RETURN(result.k,
                         rows(own ? "rotary_angles_kv" : "rotary_angles",
                              own ? inputs.rotary_angles_kv : inputs.rotary_angles, length_kv));
  result.start_positions = inputs.rotary_start_positions;
  const auto starts = [](const Tensor& padded, const Tensor& plain) {
    return padded.defined() ? padded : plain;
  };
  result.cu_seqlens_q = starts(inputs.cu_seqlens_q_padded, inputs.cu_seqlens_q);
  result.cu_seqlens_kv = inputs.cu_seqlens_kv.defined()
                             ? starts(inputs.cu_seqlens_kv_padded, inputs.cu_seqlens_kv)
                             : result.cu_seqlens_q;
  return result;
}

Result<Heads> QkvTransform::kv_views(const Tensor& kv, const Shape& lead) const {
  Heads parts;
  if (interleaved_) {
    TE_FL_ASSIGN_OR_RETURN(const Tensor wide, kv.view(with_tail(lead, {groups_, 2 * dim_})));
    const int last = wide.rank() - 1;
    TE_FL_ASSIGN_OR_RETURN(parts.k, wide.slice(last, 0, dim_));
    TE_FL_ASSIGN_OR_RETURN(parts.v, wide.slice(last, dim_, 2 * dim_));
    return parts;
  }
  TE_FL_ASSIGN_OR_RETURN(const Tensor wide, kv.view(with_tail(lead, {2 * groups_, dim_})));
  const int row = wide.rank() - 2;
  TE_FL_ASSIGN_OR_RETURN(parts.k, wide.slice(row, 0, groups_));
  TE_FL_ASSIGN_OR_RETURN(parts.v, wide.slice(row, groups_, 2 * groups_));
  return parts;
}

// Views q, k and v. If not direct() and with interleaved groups, q has the shape [.., G, (H/G) D].
Result<Heads> QkvTransform::views(const PackedHeads& packed, const Record& record) const {
  const Shape& lead = record.q_lead;
  if (cross()) {
    TE_FL_ASSIGN_OR_RETURN(Heads parts, kv_views(packed.kv, record.kv_lead));
    TE_FL_ASSIGN_OR_RETURN(parts.q, packed.q.view(with_tail(lead, {heads_, dim_})));
    return parts;
  }
  Heads parts;
  if (interleaved_) {
    const int64_t qw = heads_ / groups_ * dim_;
    TE_FL_ASSIGN_OR_RETURN(const Tensor wide,
                           packed.qkv.view(with_tail(lead, {groups_, qw + 2 * dim_})));
    const int last = wide.rank() - 1;
    TE_FL_ASSIGN_OR_RETURN(parts.q, wide.slice(last, 0, qw));
    TE_FL_ASSIGN_OR_RETURN(parts.k, wide.slice(last, qw, qw + dim_));
    TE_FL_ASSIGN_OR_RETURN(parts.v, wide.slice(last, qw + dim_, qw + 2 * dim_));
    return parts;
  }
  TE_FL_ASSIGN_OR_RETURN(const Tensor wide,
                         packed.qkv.view(with_tail(lead, {heads_ + 2 * groups_, dim_})));
  const int row = wide.rank() - 2;
  const int64_t keys = heads_ + groups_;
  TE_FL_ASSIGN_OR_RETURN(parts.q, wide.slice(row, 0, heads_));
  TE_FL_ASSIGN_OR_RETURN(parts.k, wide.slice(row, heads_, keys));
  TE_FL_ASSIGN_OR_RETURN(parts.v, wide.slice(row, keys, keys + groups_));
  return parts;
}

Result<PackedHeads> QkvTransform::empty(const Record& record, DType dtype) const {
  PackedHeads packed;
  if (cross()) {
    TE_FL_ASSIGN_OR_RETURN(
        packed.q, Tensor::empty(with_tail(record.q_lead, {heads_ * dim_}), dtype, options_.device));
    TE_FL_ASSIGN_OR_RETURN(packed.kv, Tensor::empty(with_tail(record.kv_lead, {2 * groups_ * dim_}),
                                                    dtype, options_.device));
    return packed;
  }
  TE_FL_ASSIGN_OR_RETURN(
      packed.qkv, Tensor::empty(with_tail(record.q_lead, {qkv_width()}), dtype, options_.device));
  return packed;
}

Result<Heads> QkvTransform::split(const PackedHeads& packed, const Record& record,
                                  bool kept) const {
  TE_FL_ASSIGN_OR_RETURN(Heads parts, views(packed, record));
  const bool norm_first = q_norm_ != nullptr && options_.qk_norm_before_rope;
  const bool rotate_first = record.rotation.any() && !norm_first;  // in place, so in own memory
  const bool own_q = !views_fit();
  if (rotate_first || own_q) {
    TE_FL_ASSIGN_OR_RETURN(parts.q, compact(parts.q));
    TE_FL_ASSIGN_OR_RETURN(parts.q, parts.q.view(with_tail(record.q_lead, {heads_, dim_})));
  }
  // Copies the heads, since a view would keep the complete packed tensor alive.
  const bool leaves = kept && !direct(record.rotation);
  if (rotate_first || (leaves && q_norm_ == nullptr)) {
    TE_FL_ASSIGN_OR_RETURN(parts.k, compact(parts.k));
  }
  if (leaves) {
    TE_FL_ASSIGN_OR_RETURN(parts.v, compact(parts.v));
  }
  return parts;
}

Result<Heads> QkvTransform::split_rotated(const Tensor& packed, const Rotation& rotation) const {
  const int64_t a = packed.size(0), b = packed.size(1);
  const int64_t qw = heads_ / groups_ * dim_;
  Heads parts;
  const DType dtype = packed.dtype();
  TE_FL_ASSIGN_OR_RETURN(parts.q, Tensor::empty({a, b, heads_, dim_}, dtype, options_.device));
  TE_FL_ASSIGN_OR_RETURN(parts.k, Tensor::empty({a, b, groups_, dim_}, dtype, options_.device));
  TE_FL_ASSIGN_OR_RETURN(parts.v, Tensor::empty({a, b, groups_, dim_}, dtype, options_.device));
  TE_FL_ASSIGN_OR_RETURN(const Tensor wide, packed.view({a, b, groups_, qw + 2 * dim_}));
  te_fl_fused_qkv_rope_forward_args args{};
  args.qkv_input = wide;
  args.q_freqs = rotation.q;
  args.k_freqs = rotation.k;
  args.q_out = parts.q;
  args.k_out = parts.k;
  args.v_out = parts.v;
  args.start_positions = rotation.start_positions;
  args.q_dim = qw;
  args.k_dim = dim_;
  args.v_dim = dim_;
  args.layout = static_cast<int32_t>(options_.attention.layout);
  args.interleaved = options_.rotary_interleaved;
  TE_FL_RETURN_IF_ERROR(ops::fused_qkv_rope_forward(args, call_options(options_.device)));
  return parts;
}

Result<Tensor> QkvTransform::merge_rotated(const Heads& grads, const Record& record) const {
  const int64_t qw = heads_ / groups_ * dim_;
  TE_FL_ASSIGN_OR_RETURN(Tensor packed,
                         Tensor::empty(with_tail(record.q_lead, {groups_, qw + 2 * dim_}),
                                       grads.q.dtype(), options_.device));
  te_fl_fused_qkv_rope_backward_args args{};
  args.q_grad = grads.q;
  args.k_grad = grads.k;
  args.v_grad = grads.v;
  args.q_freqs = record.rotation.q;
  args.k_freqs = record.rotation.k;
  args.qkv_grad = packed;
  args.start_positions = record.rotation.start_positions;
  args.q_dim = qw;
  args.k_dim = dim_;
  args.v_dim = dim_;
  args.layout = static_cast<int32_t>(options_.attention.layout);
  args.interleaved = options_.rotary_interleaved;
  TE_FL_RETURN_IF_ERROR(ops::fused_qkv_rope_backward(args, call_options(options_.device)));
  return packed.view(with_tail(record.q_lead, {qkv_width()}));
}

Result<PackedHeads> QkvTransform::merge(const Heads& grads, const Record& record) const {
  TE_FL_ASSIGN_OR_RETURN(PackedHeads packed, empty(record, grads.q.dtype()));
  TE_FL_ASSIGN_OR_RETURN(const Heads to, views(packed, record));
  TE_FL_ASSIGN_OR_RETURN(const Tensor q, grads.q.view(to.q.shape()));
  TE_FL_RETURN_IF_ERROR(copy(q, to.q));
  TE_FL_RETURN_IF_ERROR(copy(grads.k, to.k));
  TE_FL_RETURN_IF_ERROR(copy(grads.v, to.v));
  return packed;
}

Status QkvTransform::rotate(const Tensor& x, const Tensor& angles, const Tensor& cu_seqlens,
                            const Tensor& start_positions, bool backward) const {
  te_fl_rope_rope_args args{};
  args.input = x;
  args.freqs = angles;
  args.output = x;
  args.start_positions = start_positions;
  if (thd()) args.cu_seqlens = cu_seqlens;
  args.layout = static_cast<int32_t>(options_.attention.layout);
  args.interleaved = options_.rotary_interleaved;
  return backward ? ops::fused_rope_backward(args, call_options(options_.device))
                  : ops::fused_rope_forward(args, call_options(options_.device));
}

Status QkvTransform::rotate(const Heads& heads, const Rotation& rotation, bool backward) const {
  TE_FL_RETURN_IF_ERROR(
      rotate(heads.q, rotation.q, rotation.cu_seqlens_q, rotation.start_positions, backward));
  return rotate(heads.k, rotation.k, rotation.cu_seqlens_kv, rotation.start_positions, backward);
}

Status QkvTransform::norm_heads(Heads& heads, Record& record, bool kept) {
  TE_FL_ASSIGN_OR_RETURN(heads.q, q_norm_->forward(heads.q, kept ? &record.q_norm : nullptr));
  TE_FL_ASSIGN_OR_RETURN(heads.k, k_norm_->forward(heads.k, kept ? &record.k_norm : nullptr));
  return {};
}

Status QkvTransform::norm_backward(Heads& grads, Record& record) {
  TE_FL_ASSIGN_OR_RETURN(grads.q, q_norm_->backward(grads.q, record.q_norm));
  TE_FL_ASSIGN_OR_RETURN(grads.k, k_norm_->backward(grads.k, record.k_norm));
  return {};
}

Result<Heads> QkvTransform::forward(const PackedHeads& packed, Record& record, bool kept) {
  const bool norms = q_norm_ != nullptr, before = options_.qk_norm_before_rope;
  Heads heads;
  if (fused(record.rotation)) {
    TE_FL_ASSIGN_OR_RETURN(heads, split_rotated(packed.qkv, record.rotation));
  } else {
    TE_FL_ASSIGN_OR_RETURN(heads, split(packed, record, kept));
    if (norms && before) TE_FL_RETURN_IF_ERROR(norm_heads(heads, record, kept));
    if (record.rotation.any()) TE_FL_RETURN_IF_ERROR(rotate(heads, record.rotation, false));
  }
  if (norms && !before) TE_FL_RETURN_IF_ERROR(norm_heads(heads, record, kept));
  return heads;
}

Result<PackedHeads> QkvTransform::backward(Heads grads, Record& record) {
  const bool norms = q_norm_ != nullptr, before = options_.qk_norm_before_rope;
  if (norms && !before) TE_FL_RETURN_IF_ERROR(norm_backward(grads, record));
  if (fused(record.rotation)) {
    PackedHeads packed;
    TE_FL_ASSIGN_OR_RETURN(packed.qkv, merge_rotated(grads, record));
    return packed;
  }
  if (record.rotation.any()) TE_FL_RETURN_IF_ERROR(rotate(grads, record.rotation, true));
  if (norms && before) TE_FL_RETURN_IF_ERROR(norm_backward(grads, record));
  return merge(grads, record);
}

}  // namespace te_fl::nn::detail
