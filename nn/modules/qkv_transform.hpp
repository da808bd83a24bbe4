#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "te_fl/nn/modules/attention_inputs.hpp"
#include "te_fl/nn/modules/norm.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn::detail {

// The heads of queries, keys and values, [.., H, D] and [.., G, D], or their gradients.
struct Heads {
  Tensor q, k, v;
};

// The output of the projections before the attention, or its gradient. Self-attention has q, k and
// v in one tensor; cross-attention has q in one tensor, and k and v in another.
struct PackedHeads {
  Tensor qkv;
  Tensor q, kv;
};

// The RoPE angles of a call, undefined without RoPE, and the tensors that give the position of each
// token.
struct Rotation {
  Tensor q, k;
  Tensor start_positions;
  Tensor cu_seqlens_q, cu_seqlens_kv;
  bool any() const noexcept { return q.defined(); }
};

// The steps between the projections and the attention, and their backward: splitting into heads,
// the norm of q and k, and RoPE, in the order that the options give.
class QkvTransform {
 public:
  struct Record {
    Rotation rotation;
    Ctx q_norm, k_norm;
    Shape q_lead, kv_lead;  // extents of x and of the encoder output, without the last
  };

  Status init(const MultiheadAttentionOptions& options, int64_t heads, int64_t groups, int64_t dim);
  // Null without a norm, and for kL2, which has no parameters to register.
  Norm* q_norm() const noexcept { return registered(q_norm_.get()); }
  Norm* k_norm() const noexcept { return registered(k_norm_.get()); }
  int64_t qkv_width() const noexcept { return (heads_ + 2 * groups_) * dim_; }

  // The angles for q and k. INVALID_ARGUMENT if they do not fit sequences of these lengths.
  Result<Rotation> rotation(const AttentionInputs& inputs, int64_t length_q,
                            int64_t length_kv) const;
  // True if q, k and v are strided views of the projections' output. Their gradients can then be
  // written in place.
  bool direct(const Rotation& rotation) const noexcept {
    return views_fit() && !rotation.any() && q_norm_ == nullptr;
  }
  // The views of q, k and v in a packed tensor, quantised or not. Requires direct().
  Result<Heads> views(const PackedHeads& packed, const Record& record) const;
  // Allocates packed gradients. Requires direct().
  Result<PackedHeads> empty(const Record& record, DType dtype) const;

  // Computes the heads. The caller has set `record.rotation`, `q_lead` and `kv_lead`. `kept`: a
  // backward will read the heads, so they must not keep other memory alive.
  Result<Heads> forward(const PackedHeads& packed, Record& record, bool kept);
  // The gradients must be compact.
  Result<PackedHeads> backward(Heads grads, Record& record);

 private:
  Norm* registered(Norm* norm) const noexcept {
    return options_.qk_norm == QkNorm::kL2 ? nullptr : norm;
  }
  bool cross() const noexcept { return options_.attention_type == AttentionType::kCross; }
  bool thd() const noexcept { return options_.attention.layout == Layout::kTHD; }
  // True if q can be a strided view. The distance between heads of one group differs from that
  // between groups, so this needs one head per group, or all query heads adjacent.
  bool views_fit() const noexcept { return cross() || !interleaved_ || heads_ == groups_; }
  // True if fused_qkv_rope_forward, which splits QKV and applies RoPE, can run this forward.
  bool fused(const Rotation& rotation) const noexcept {
    const bool norm_first = q_norm_ != nullptr && options_.qk_norm_before_rope;
    return rotation.any() && !cross() && interleaved_ && !thd() && !norm_first;
  }
  Result<Heads> kv_views(const Tensor& kv, const Shape& lead) const;
  Result<Heads> split(const PackedHeads& packed, const Record& record, bool kept) const;
  Result<Heads> split_rotated(const Tensor& packed, const Rotation& rotation) const;
  Result<Tensor> merge_rotated(const Heads& grads, const Record& record) const;
  Result<PackedHeads> merge(const Heads& grads, const Record& record) const;
  Status norm_heads(Heads& heads, Record& record, bool kept);
  Status norm_backward(Heads& grads, Record& record);
  // Rotates q and k in place.
  Status rotate(const Heads& heads, const Rotation& rotation, bool backward) const;
  Status rotate(const Tensor& x, const Tensor& angles, const Tensor& cu_seqlens,
                const Tensor& start_positions, bool backward) const;

  MultiheadAttentionOptions options_;
  int64_t heads_ = 0, groups_ = 0, dim_ = 0;
  bool interleaved_ = true;
  std::unique_ptr<Norm> q_norm_, k_norm_;
};

}  // namespace te_fl::nn::detail
