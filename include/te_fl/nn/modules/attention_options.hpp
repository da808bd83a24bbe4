#pragma once

#include <cstdint>
#include <optional>

#include "te_fl/device.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/nn/modules/norm.hpp"
#include "te_fl/nn/modules/tensor_parallel.hpp"
#include "te_fl/ops/enums.h"

namespace te_fl::nn {

// Order of the dimensions: sbhd [sequence, batch, ...], bshd [batch, sequence, ...], thd [tokens,
// ...] (the sequences are concatenated, with their boundaries in cu_seqlens).
enum class Layout : uint8_t {
  kSBHD = TE_FL_LAYOUT_SBHD,
  kBSHD = TE_FL_LAYOUT_BSHD,
  kTHD = TE_FL_LAYOUT_THD,
};

enum class MaskType : uint8_t {
  kNone = TE_FL_MASK_TYPE_NONE,
  kCausal = TE_FL_MASK_TYPE_CAUSAL,
  kCausalBottomRight = TE_FL_MASK_TYPE_CAUSAL_BOTTOM_RIGHT,
  kPadding = TE_FL_MASK_TYPE_PADDING,
  kPaddingCausal = TE_FL_MASK_TYPE_PADDING_CAUSAL,
  kPaddingCausalBottomRight = TE_FL_MASK_TYPE_PADDING_CAUSAL_BOTTOM_RIGHT,
  kArbitrary = TE_FL_MASK_TYPE_ARBITRARY,
};

enum class SoftmaxType : uint8_t {
  kVanilla = TE_FL_SOFTMAX_TYPE_VANILLA,
  kOffByOne = TE_FL_SOFTMAX_TYPE_OFF_BY_ONE,
  kLearnable = TE_FL_SOFTMAX_TYPE_LEARNABLE,
};

// Source of keys and values: x itself (self-attention) or AttentionInputs::encoder_output
// (cross-attention).
enum class AttentionType : uint8_t { kSelf, kCross };

// Normalisation of each head of q and k over its elements: x / sqrt(sum x^2 + eps) (kL2), or a norm
// with parameters.
enum class QkNorm : uint8_t { kNone, kL2, kRMSNorm, kLayerNorm };

// Options of attention that all attention modules have.
struct AttentionOptions {
  Layout layout = Layout::kSBHD;
  MaskType mask_type = MaskType::kCausal;
  // Sliding window; -1: unbounded. It is relative to the mask type's diagonal: top-left for kCausal
  // and kPaddingCausal, otherwise bottom-right, where the last query is aligned with the last key.
  int64_t window_left = -1;
  int64_t window_right = -1;
  SoftmaxType softmax_type = SoftmaxType::kVanilla;
  float softmax_scale = 0;  // 0: 1/sqrt(head size)
  float attention_dropout = 0;
  float softcap = 0;  // scaled scores x become softcap * tanh(x / softcap); 0: off
};

struct DotProductAttentionOptions {
  int64_t num_attention_heads = 0;
  int64_t head_dim = 0;
  int64_t num_gqa_groups = 0;  // heads of K and V; 0: num_attention_heads
  AttentionOptions attention = {};
  DType activation_dtype = DType::kF32;
  Device device = {};
  int64_t value_head_dim = 0;  // head size Dv of v and o; 0: head_dim
};

struct MultiheadAttentionOptions {
  int64_t hidden_size = 0;
  int64_t num_attention_heads = 0;
  int64_t num_gqa_groups = 0;  // 0: num_attention_heads
  int64_t kv_channels = 0;     // head size; 0: hidden_size / num_attention_heads
  // Normalise the input (submodule layernorm_qkv). False: a plain Linear (submodule qkv).
  bool input_layernorm = true;
  Normalization normalization = Normalization::kLayerNorm;
  float epsilon = 1e-5f;
  bool zero_centered_gamma = false;
  bool bias = true;
  AttentionOptions attention = {};
  bool rotary_interleaved = false;
  DType param_dtype = DType::kF32;
  DType activation_dtype = DType::kF32;
  Device device = {};
  uint64_t seed = 0;
  float init_std = 0.023f;
  float output_init_std = 0.023f;  // standard deviation of proj
  AttentionType attention_type = AttentionType::kSelf;
  // False: the rows for queries, keys and values are separate parameters (query_weight, key_weight,
  // value_weight, query_bias, ...) and are not interleaved.
  bool fuse_qkv_params = true;
  bool qkv_weight_interleaved = true;  // only if fused
  std::optional<bool> qkv_bias = {};   // if set, replaces `bias`
  std::optional<bool> proj_bias = {};
  bool return_bias = false;  // for proj; see LinearOptions
  QkNorm qk_norm = QkNorm::kNone;
  float qk_norm_epsilon = 1e-6f;
  bool qk_norm_before_rope = false;
  // For a shard of an attention layer: groups_whole is the number of groups (key heads) of the full
  // layer (0: not a shard). The shard has the groups [groups_begin, groups_begin + num_gqa_groups)
  // with their query heads. Its initial weights are those of the same heads in the full layer.
  int64_t groups_whole = 0;
  int64_t groups_begin = 0;
  // The ranks among which the heads are sharded. shard_of() sets this member. Masks, lengths and
  // angles are those of the full sequence.
  TensorParallel parallel = {};
};

// This rank's shard of the attention `whole`. INVALID_ARGUMENT if the number of ranks does not
// divide the heads and the groups.
TE_FL_API Result<MultiheadAttentionOptions> shard_of(MultiheadAttentionOptions whole,
                                                     const TensorParallel& parallel);

}  // namespace te_fl::nn
