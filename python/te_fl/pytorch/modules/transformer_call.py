"""The arguments of one TransformerLayer forward, for its two implementations."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch


class TransformerCall(NamedTuple):
    """The arguments of TransformerLayer.forward(), by name. Omitted arguments have the layer's defaults."""

    hidden_states: torch.Tensor  # in the dtype that the layer computes in
    attention_mask: Any
    self_attn_mask_type: str
    window_size: Optional[Tuple[int, int]]
    bottom_right_diagonal: Optional[bool]
    encoder_output: Optional[torch.Tensor]
    enc_dec_attn_mask: Any
    enc_dec_attn_mask_type: str
    enc_dec_window_size: Optional[Tuple[int, int]]
    enc_dec_bottom_right_diagonal: Optional[bool]
    is_first_microbatch: Optional[bool]
    checkpoint_core_attention: bool
    rotary_pos_emb: Any
    core_attention_bias_type: str
    core_attention_bias: Optional[torch.Tensor]
    alibi_slopes: Optional[torch.Tensor]
    cu_seqlens_q: Optional[torch.Tensor]
    cu_seqlens_kv: Optional[torch.Tensor]
    cu_seqlens_q_padded: Optional[torch.Tensor]
    cu_seqlens_kv_padded: Optional[torch.Tensor]
    max_seqlen_q: Optional[int]
    max_seqlen_kv: Optional[int]
    fast_zero_fill: bool
    pad_between_seqs: Optional[bool]
    thd_attention_policies: Optional[List[Dict[str, Any]]]
    thd_attention_policy_dispatch: str
    softcap: float
    inference_params: Any  # an InferenceParams, or None
