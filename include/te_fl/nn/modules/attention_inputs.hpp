#pragma once

#include <cstdint>
#include <optional>

#include "te_fl/export.hpp"
#include "te_fl/nn/modules/attention_options.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn {

// Per-call inputs of attention. Undefined tensors are absent. Shared storage is kept until the
// backward.
struct AttentionInputs {
  Tensor attn_mask = {};  // U8 or bool [1|B, 1|H, 1|Sq, 1|Sk], not 0 = masked out; with kArbitrary
  Tensor bias = {};       // [1|B, 1|H, Sq, Sk], added to the scaled scores
  Tensor alibi_slopes = {};   // F32 [H] or [B, H]
  Tensor cu_seqlens_q = {};   // I32 [B+1]; with thd and the padding masks
  Tensor cu_seqlens_kv = {};  // I32 [B+1]; self-attention takes cu_seqlens_q if this is undefined
  Tensor cu_seqlens_q_padded = {};  // I32 [B+1], thd with gaps between sequences
  Tensor cu_seqlens_kv_padded = {};
  int64_t max_seqlen_q =
      0;  // thd: at least the longest sequence; needed with dropout, else 0 lets the op look
  int64_t max_seqlen_kv = 0;
  // Used by MultiheadAttention and TransformerLayer:
  Tensor rotary_angles = {};  // F32 [>= S, 1, 1, R], see init::rotary_angles; undefined: no RoPE
  Tensor rotary_start_positions = {};  // I32 [B], position of each sequence's first token
  Tensor rotary_angles_kv = {};        // of the keys, if not rotary_angles
  // [Skv, B, hidden], [B, Skv, hidden] or [Tkv, hidden]: what cross-attention takes keys and values
  // from.
  Tensor encoder_output = {};
  // In place of the module's options, for this call and its backward.
  std::optional<MaskType> mask_type = {};
  std::optional<int64_t> window_left = {};
  std::optional<int64_t> window_right = {};
  // With the padding mask types, instead of cu_seqlens: U8 or bool [B, 1, 1, S] or [B, S], not 0 =
  // padding, wherever it lies; that of the queries alone counts for the keys too. See
  // resolve_padding_masks().
  Tensor padding_mask_q = {};
  Tensor padding_mask_kv = {};
  std::optional<float> softcap = {};  // in place of the module's, as mask_type is
};

// `inputs` without padding masks, which become what the attention ops take: cu_seqlens where all
// padding is at the ends of the sequences, else mask_type kArbitrary with an attn_mask that takes
// in the causal bound and the window of `inputs`, if it has one (a module's own window then counts
// as with any arbitrary mask). `mask_type` is the module's, if `inputs` has none of its own. Reads
// the masks on the host, so it waits for the device, and is FAILED_PRECONDITION in a capture. A
// forward does it by itself; call it once where several layers share the masks.
TE_FL_API Result<AttentionInputs> resolve_padding_masks(const AttentionInputs& inputs,
                                                        MaskType mask_type);

}  // namespace te_fl::nn
