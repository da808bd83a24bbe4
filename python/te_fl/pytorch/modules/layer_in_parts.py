"""A Transformer layer as consecutive calls of its parts, and the arguments of a layer's forward."""

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


def _branch(output: Any, normed: bool, residual: Any) -> Tuple[torch.Tensor, Any]:
    """Returns a part's output and the residual to which it is added. A user's replacement of a part may return its bias for the layer to add, as
    Transformer Engine's parts do.
    """
    if not isinstance(output, tuple):
        return output, residual
    if normed:
        *output, residual = output
    branch, *bias = output
    return (branch + bias[0] if bias and bias[0] is not None and bias[0].numel() > 0 else branch), residual


def _add(owner: torch.nn.Module, branch: torch.Tensor, residual: torch.Tensor, drops_path: bool = True) -> torch.Tensor:
    branch = torch.nn.functional.dropout(branch, p=owner.hidden_dropout, training=owner.training)
    return residual + (owner.drop_path(branch) if drops_path and owner.drop_path is not None else branch)


def run_in_parts(owner: torch.nn.Module, call: TransformerCall) -> torch.Tensor:
    """The unfused implementation of a TransformerLayer: calls each part, which the user may have replaced."""
    x, post = call.hidden_states, owner.apply_residual_connection_post_layernorm
    attended = _attend(owner, call)
    if owner.parallel_attention_mlp:
        branch, _ = _branch(attended, False, None)
        other, _ = _branch(owner.layernorm_mlp(x, is_first_microbatch=call.is_first_microbatch), False, None)
        return _add(owner, branch + other, x)
    attended, residual = _branch(attended, post and not owner.output_layernorm, x)
    hidden = _add(owner, attended, residual)
    if owner.layer_type == "decoder":
        attended, residual = _branch(_attend_to_encoder(owner, call, hidden), post, hidden)
        hidden = _add(owner, attended, residual, drops_path=False)
    out, residual = _branch(owner.layernorm_mlp(hidden, is_first_microbatch=call.is_first_microbatch), post, hidden)
    out = _add(owner, out, residual)
    return owner.layernorm(out) if owner.output_layernorm else out


def _attend(owner: torch.nn.Module, call: TransformerCall) -> Any:
    return owner.self_attention(call.hidden_states, attention_mask=call.attention_mask, attn_mask_type=call.self_attn_mask_type,
                                window_size=call.window_size, bottom_right_diagonal=call.bottom_right_diagonal,
                                cu_seqlens_kv=call.cu_seqlens_q, cu_seqlens_kv_padded=call.cu_seqlens_q_padded,
                                max_seqlen_kv=call.max_seqlen_q, **_common(call))


def _attend_to_encoder(owner: torch.nn.Module, call: TransformerCall, hidden: torch.Tensor) -> Any:
    return owner.inter_attention(hidden, attention_mask=call.enc_dec_attn_mask, attn_mask_type=call.enc_dec_attn_mask_type,
                                 window_size=call.enc_dec_window_size, bottom_right_diagonal=call.enc_dec_bottom_right_diagonal,
                                 encoder_output=call.encoder_output, cu_seqlens_kv=call.cu_seqlens_kv,
                                 cu_seqlens_kv_padded=call.cu_seqlens_kv_padded, max_seqlen_kv=call.max_seqlen_kv, **_common(call))


def _common(call: TransformerCall) -> dict:
    """The arguments common to both attentions of a decoder layer."""
    return dict(is_first_microbatch=call.is_first_microbatch, checkpoint_core_attention=call.checkpoint_core_attention,
                rotary_pos_emb=call.rotary_pos_emb, core_attention_bias_type=call.core_attention_bias_type,
                core_attention_bias=call.core_attention_bias, alibi_slopes=call.alibi_slopes, cu_seqlens_q=call.cu_seqlens_q,
                cu_seqlens_q_padded=call.cu_seqlens_q_padded, max_seqlen_q=call.max_seqlen_q, fast_zero_fill=call.fast_zero_fill,
                pad_between_seqs=call.pad_between_seqs, thd_attention_policies=call.thd_attention_policies,
                thd_attention_policy_dispatch=call.thd_attention_policy_dispatch, softcap=call.softcap,
                **({} if call.inference_params is None else {"inference_params": call.inference_params}))
