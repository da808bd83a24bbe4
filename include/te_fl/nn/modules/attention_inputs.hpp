#pragma once

#include <cstdint>
#include <optional>

#include "te_fl/export.hpp"
#include "te_fl/nn/modules/attention_options.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn {

// Inputs of one attention call. Undefined tensors are absent. The tensors' storage is shared and
// kept until the backward.
struct AttentionInputs {
  Tensor attn_mask = {};     // U8 or bool [1|B, 1|H, 1|Sq, 1|Sk]; not 0: masked out; for kArbitrary
  Tensor bias = {};          // [1|B, 1|H, Sq, Sk], added to the scaled scores
  Tensor alibi_slopes = {};  // F32 [H] or [B, H]
  Tensor cu_seqlens_q = {};  // I32 [B+1]; for thd and the padding masks
  Tensor cu_seqlens_kv = {};        // I32 [B+1]; if undefined, self-attention uses cu_seqlens_q
  Tensor cu_seqlens_q_padded = {};  // I32 [B+1]; for thd with gaps between sequences
  Tensor cu_seqlens_kv_padded = {};
  // For thd: at least the length of the longest sequence. Required with dropout; otherwise 0 lets
  // the op determine the length.
  int64_t max_seqlen_q = 0;
  int64_t max_seqlen_kv = 0;
  // The members below are used by MultiheadAttention and TransformerLayer.
  Tensor rotary_angles = {};  // F32 [>= S, 1, 1, R], see init::rotary_angles; undefined: no RoPE
  Tensor rotary_start_positions = {};  // I32 [B], position of each sequence's first token
  Tensor rotary_angles_kv = {};        // angles for the keys, if different from rotary_angles
  // Source of keys and values in cross-attention: [Skv, B, hidden], [B, Skv, hidden] or [Tkv,
  // hidden].
  Tensor encoder_output = {};
  // If set, replace the module's options in this call and its backward.
  std::optional<MaskType> mask_type = {};
  std::optional<int64_t> window_left = {};
  std::optional<int64_t> window_right = {};
  // With the padding mask types, an alternative to cu_seqlens: U8 or bool [B, 1, 1, S] or [B, S];
  // not 0: padding, at any position. Without padding_mask_kv, the mask of the queries also applies
  // to the keys. See resolve_padding_masks().
  Tensor padding_mask_q = {};
  Tensor padding_mask_kv = {};
  std::optional<float> softcap = {};  // if set, replaces the module's softcap
};

// Returns `inputs` with padding masks converted to what the attention ops accept: cu_seqlens if all
// padding is at the ends of the sequences; otherwise mask_type kArbitrary with an attn_mask that
// includes the causal bound and the window of `inputs`. (A window in the module's options still
// applies, as with any arbitrary mask.) `mask_type` is the module's; a mask type in `inputs` takes
// precedence. Reads the masks on the host, so it waits for the device and is FAILED_PRECONDITION in
// a capture. A forward calls it automatically; call it once beforehand if several layers use the
// same masks.
TE_FL_API Result<AttentionInputs> resolve_padding_masks(const AttentionInputs& inputs,
                                                        MaskType mask_type);

}  // namespace te_fl::nn
