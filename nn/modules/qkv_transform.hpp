#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "te_fl/nn/modules/attention_inputs.hpp"
#include "te_fl/nn/modules/norm.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn::detail {

// Heads of queries, keys and values, [.., H, D] and [.., G, D], or their gradients.
struct Heads {
  Tensor q, k, v;
};

// Holds what the products before attention make, or its gradient: self-attention has q, k and v in
// one tensor, cross-attention q alone and k and v together.
struct PackedHeads {
  Tensor qkv;
  Tensor q, kv;
};

// The angles of a call, undefined without RoPE, and what says which token has which.
struct Rotation {
  Tensor q, k;
  Tensor start_positions;
  Tensor cu_seqlens_q, cu_seqlens_kv;
  bool any() const noexcept { return q.defined(); }
};

// The way from the products before attention to its heads and back: splitting, the norm of q and k,
// and RoPE, in the order that the options ask for.
class QkvTransform {
 public:
  struct Record {
    Rotation rotation;
    Ctx q_norm, k_norm;
    Shape q_lead, kv_lead;  // the dimensions of x and of the encoder output before the last
  };

  Status init(const MultiheadAttentionOptions& options, int64_t heads, int64_t groups, int64_t dim);
  // Null without a norm or with kL2, which has no parameters to register.
  Norm* q_norm() const noexcept { return registered(q_norm_.get()); }
  Norm* k_norm() const noexcept { return registered(k_norm_.get()); }
  int64_t qkv_width() const noexcept { return (heads_ + 2 * groups_) * dim_; }

  // INVALID_ARGUMENT if the angles do not fit sequences of these lengths.
  Result<Rotation> rotation(const AttentionInputs& inputs, int64_t length_q,
                            int64_t length_kv) const;
  // True if q, k and v are strided views of what the products make, as it is. Then their gradients
  // can be written where they belong.
  bool direct(const Rotation& rotation) const noexcept {
    return views_fit() && !rotation.any() && q_norm_ == nullptr;
  }
  // Those views of a packed tensor, of codes too; needs direct().
  Result<Heads> views(const PackedHeads& packed, const Record& record) const;
  // New memory for gradients, packed; needs direct().
  Result<PackedHeads> empty(const Record& record, DType dtype) const;

  // `record.rotation` and the leads are filled in before. `kept`: a backward will read the heads,
  // so they must not hold memory that it does not read.
  Result<Heads> forward(const PackedHeads& packed, Record& record, bool kept);
  // Takes compact gradients.
  Result<PackedHeads> backward(Heads grads, Record& record);

 private:
  Norm* registered(Norm* norm) const noexcept {
    return options_.qk_norm == QkNorm::kL2 ? nullptr : norm;
  }
  bool cross() const noexcept { return options_.attention_type == AttentionType::kCross; }
  bool thd() const noexcept { return options_.attention.layout == Layout::kTHD; }
  // Heads of one group lie closer together than those of two: only with one head per group, or
  // where all query heads lie together, is q a strided view.
  bool views_fit() const noexcept { return cross() || !interleaved_ || heads_ == groups_; }
  // True if one op splits and rotates.
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
  // In place.
  Status rotate(const Heads& heads, const Rotation& rotation, bool backward) const;
  Status rotate(const Tensor& x, const Tensor& angles, const Tensor& cu_seqlens,
                const Tensor& start_positions, bool backward) const;

  MultiheadAttentionOptions options_;
  int64_t heads_ = 0, groups_ = 0, dim_ = 0;
  bool interleaved_ = true;
  std::unique_ptr<Norm> q_norm_, k_norm_;
};

}  // namespace te_fl::nn::detail
