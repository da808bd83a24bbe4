"""Scaled dot-product attention by PyTorch's operations, without FP8: by its flash attention where that computes the same, else with the scores as one
matrix in FP32.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Tuple, Union

import torch

from te_fl._native import LentTensor

from te_fl.reference_torch.random import dropped, kept, state
from te_fl.reference_torch.values import values


class _Rows(NamedTuple):
    """For each row of a [batch, length] tensor: its sequence, its position there, and the sequence's length. All [B, S]."""

    sequence: torch.Tensor
    position: torch.Tensor
    length: torch.Tensor


def _heads(t: torch.Tensor, layout: str) -> torch.Tensor:
    """An operand as FP32 [B, heads, S, D]; thd: one batch of all tokens."""
    x = values(t)
    return x.permute(1, 2, 0, 3) if layout == "sbhd" else x.transpose(1, 2) if layout == "bshd" else x.transpose(0, 1).unsqueeze(0)


def _store_heads(out: torch.Tensor, x: torch.Tensor, layout: str) -> None:
    x = x.permute(2, 0, 1, 3) if layout == "sbhd" else x.transpose(1, 2) if layout == "bshd" else x[0].transpose(0, 1)
    if _by_fours(out) and _by_fours(x) and x.dtype == out.dtype:  # PyTorch copies strided tensors element by element
        out, x = out.view(torch.int64), x.view(torch.int64)
    out.copy_(x)


def _by_fours(t: torch.Tensor) -> bool:
    """True if rows of a tensor in half precision can be read as elements of 8 bytes."""
    return t.element_size() == 2 and t.stride(-1) == 1 and not any(n % 4 for n in (t.shape[-1], t.storage_offset(), *t.stride()[:-1]))


def _rows(batch: int, size: int, lengths: Optional[torch.Tensor], starts: Optional[torch.Tensor], layout: str, device: torch.device) -> _Rows:
    """lengths: prefix sums of the true lengths; starts: where sequences begin if there is padding between them (thd)."""
    at = torch.arange(size, device=device)
    if layout == "thd":
        starts = lengths if starts is None else starts
        sequence = (torch.searchsorted(starts.contiguous(), at.to(starts.dtype), right=True) - 1).clamp(0, lengths.numel() - 2)
        return _Rows(sequence[None], (at - starts[sequence])[None], lengths.diff()[sequence][None].long())
    sequence = torch.arange(batch, device=device)[:, None].expand(batch, size)
    length = torch.full_like(sequence, size) if lengths is None else lengths.diff().long()[:, None].expand(batch, size)
    return _Rows(sequence, at.expand(batch, size), length)


class _Problem:
    def __init__(self, q, k, v, bias, alibi_slopes, attn_mask, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, softmax_sink,
                 layout, mask_type, softmax_type, scale, window_left, window_right, softcap):
        self.layout = layout
        self.q, self.k, self.v = (_heads(t, self.layout) for t in (q, k, v))
        self.groups = self.q.shape[1] // max(1, self.k.shape[1])
        self.scale, self.softcap, self.bias, device = scale, softcap, bias, q.device
        rows = _rows(self.q.shape[0], self.q.shape[2], cu_seqlens_q, cu_seqlens_q_padded, self.layout, device)
        keys = _rows(self.k.shape[0], self.k.shape[2], cu_seqlens_kv, cu_seqlens_kv_padded, self.layout, device)
        i, j, rows_length, keys_length = rows.position[..., None], keys.position[:, None], rows.length[..., None], keys.length[:, None]
        hidden = (i >= rows_length) | (j >= keys_length) | (rows.sequence[..., None] != keys.sequence[:, None])
        hidden = hidden | (i < 0) | (j < 0)
        shift = keys_length - rows_length
        diagonal = i if mask_type in ("causal", "padding_causal") else i + shift
        right = 0 if "causal" in mask_type and (window_right < 0 or window_right > 0) else window_right
        if right >= 0:
            hidden = hidden | (j > diagonal + right)
        if window_left >= 0:
            hidden = hidden | (j < diagonal - window_left)
        self.hidden = hidden[:, None]
        if attn_mask is not None:
            self.hidden = self.hidden | (attn_mask != 0)
        self.alibi: Optional[torch.Tensor] = None
        if alibi_slopes is not None:
            slopes = alibi_slopes if alibi_slopes.dim() == 2 else alibi_slopes[None]
            if self.layout == "thd" and slopes.shape[0] > 1:
                slopes = slopes[rows.sequence[0]].t()[None, :, :, None]
            else:
                slopes = slopes[:, :, None, None]
            self.alibi = slopes * (j - i - shift)[:, None].float()
        self.sink: Union[None, float, torch.Tensor] = {"vanilla": None, "off_by_one": 0.0}.get(softmax_type, softmax_sink)

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or values [B, groups, S, D] for each head of the queries."""
        return x.repeat_interleave(self.groups, 1) if self.groups != 1 else x

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """The gradient of repeated()."""
        return x.unflatten(1, (-1, self.groups)).sum(2) if self.groups != 1 else x

    def sinks(self) -> torch.Tensor:
        """The sink's logit of each head, [H, 1]."""
        return self.sink[:, None] if isinstance(self.sink, torch.Tensor) else self.q.new_full((self.q.shape[1], 1), self.sink)

    def kept(self, dropout_p: float, *random: Any) -> Optional[torch.Tensor]:
        """The probabilities that dropout keeps, as bool; None without dropout."""
        if dropout_p == 0:
            return None
        batch, heads, rows, _ = self.q.shape
        count = batch * heads * rows * self.k.shape[2]
        return kept(count, dropout_p, *state(*random, self.q.device), self.q.device)

    def scores(self) -> Tuple[torch.Tensor, Union[float, torch.Tensor]]:
        """Returns the scores, -inf where hidden, and their derivative by scale * Q K^T."""
        x, slope = self.q @ self.repeated(self.k).transpose(-1, -2) * self.scale, 1.0
        if self.softcap > 0:
            part = torch.tanh(x / self.softcap)
            x, slope = self.softcap * part, 1 - part * part
        if self.bias is not None:
            x = x + values(self.bias)
        if self.alibi is not None:
            x = x + self.alibi
        return x.masked_fill(self.hidden, -torch.inf), slope


def _flash(q: torch.Tensor, k: torch.Tensor, layout: str, mask_type: str, softmax_type: str, dropout_p: float, window_left: int, window_right: int,
           softcap: float, *others: Any) -> bool:
    """True if PyTorch's flash attention computes this problem with the same saved log-sum-exp."""
    rows = 0 if layout == "sbhd" else 1
    return (q.is_cuda and layout != "thd" and q.dtype in (torch.float16, torch.bfloat16) and softmax_type == "vanilla" and dropout_p == 0
            and window_left < 0 and (window_right < 0 or mask_type != "none") and softcap == 0 and not any(t is not None for t in others)
            and (mask_type == "none" or mask_type in ("causal", "causal_bottom_right") and q.shape[rows] == k.shape[rows])
            and q.shape[2] == k.shape[2] and q.shape[3] % 8 == 0 and q.shape[3] <= 256 and q.numel() > 0 and k.numel() > 0)


def _by_heads(t: torch.Tensor, layout: str) -> torch.Tensor:
    return t.permute(1, 2, 0, 3) if layout == "sbhd" else t.transpose(1, 2)


def _by_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> bool:
    """True if cuDNN computes this problem of _flash()'s, which it does faster on Hopper GPUs."""
    if torch.version.hip or torch.cuda.get_device_capability(q.device) < (9, 0):
        return False
    return torch.backends.cuda.can_use_cudnn_attention(torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, False))


def fused_attn_fwd(q, k, v, o, softmax_lse, bias, alibi_slopes, attn_mask, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded,
                   softmax_sink, layout, mask_type, softmax_type, scale, dropout_p, window_left, window_right, seed, offset, seed_tensor, offset_tensor,
                   softcap=0.0, **_: Any) -> None:
    if v.shape == k.shape and _flash(q, k, layout, mask_type, softmax_type, dropout_p, window_left, window_right, softcap, bias, alibi_slopes, attn_mask,
                                     cu_seqlens_q, cu_seqlens_kv):
        operands, causal = [_by_heads(t, layout) for t in (q, k, v)], mask_type != "none"
        if _by_cudnn(*operands, causal):
            result, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*operands, None, softmax_lse is not None, 0.0, causal, scale=scale)
        else:
            result, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*operands, 0.0, causal, scale=scale)
        _store_heads(o, result, layout)
        if softmax_lse is not None:
            softmax_lse.copy_(lse.reshape(softmax_lse.shape))
        return
    p = _Problem(q, k, v, bias, alibi_slopes, attn_mask, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, softmax_sink, layout,
                 mask_type, softmax_type, scale, window_left, window_right, softcap)
    scores, _ = p.scores()
    lse = scores.logsumexp(-1)
    empty = lse == -torch.inf
    if p.sink is not None:
        lse = torch.where(empty, lse, torch.logaddexp(lse, p.sinks()))
    weights = torch.exp(scores - lse.masked_fill(empty, 0.0)[..., None])
    keeps = p.kept(dropout_p, seed, offset, seed_tensor, offset_tensor)
    _store_heads(o, (weights if keeps is None else dropped(weights, keeps, dropout_p)) @ p.repeated(p.v), p.layout)
    if softmax_lse is not None:
        softmax_lse.copy_(lse[0].t() if p.layout == "thd" else lse)


def fused_attn_bwd(d_o, q, k, v, o, softmax_lse, dq, dk, dv, dbias, dsink, bias, alibi_slopes, attn_mask, cu_seqlens_q, cu_seqlens_kv,
                   cu_seqlens_q_padded, cu_seqlens_kv_padded, softmax_sink, layout, mask_type, softmax_type, scale, dropout_p, window_left, window_right,
                   seed, offset, seed_tensor, offset_tensor, softcap=0.0, **_: Any) -> None:
    if v.shape == k.shape and _flash(q, k, layout, mask_type, softmax_type, dropout_p, window_left, window_right, softcap, bias, alibi_slopes, attn_mask,
                                     cu_seqlens_q, cu_seqlens_kv):
        rows = 0 if layout == "sbhd" else 1
        grad, *operands, result = (_by_heads(t, layout) for t in (d_o, q, k, v, o))
        lse, causal = softmax_lse.contiguous(), mask_type != "none"
        sizes = None, None, q.shape[rows], k.shape[rows], 0.0, causal
        if _by_cudnn(*operands, causal):
            unused = torch.empty((), dtype=torch.int64, device=q.device)
            found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(grad, *operands, result, lse[..., None], unused, unused, None, *sizes,
                                                                                scale=scale)
        else:
            unused = torch.empty(2, dtype=torch.uint64, device=q.device)
            found = torch.ops.aten._scaled_dot_product_flash_attention_backward(grad, *operands, result, lse, *sizes, unused, unused[0], scale=scale)
        for out, gradient in zip((dq, dk, dv), found):
            _store_heads(out, gradient, layout)
        return
    p = _Problem(q, k, v, bias, alibi_slopes, attn_mask, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, softmax_sink, layout,
                 mask_type, softmax_type, scale, window_left, window_right, softcap)
    lse = softmax_lse.t()[None] if p.layout == "thd" else softmax_lse
    empty = lse == -torch.inf
    scores, slope = p.scores()
    weights = torch.exp(scores - lse.masked_fill(empty, 0.0)[..., None])
    dout = _heads(d_o, p.layout)
    delta = (dout * _heads(o, p.layout)).sum(-1).masked_fill(empty, 0.0)
    keeps = p.kept(dropout_p, seed, offset, seed_tensor, offset_tensor)
    dp = dout @ p.repeated(p.v).transpose(-1, -2)
    ds = weights * ((dp if keeps is None else dropped(dp, keeps, dropout_p)) - delta[..., None])
    if keeps is not None:
        weights = dropped(weights, keeps, dropout_p)
    dx = ds * slope * p.scale
    _store_heads(dq, dx @ p.repeated(p.k), p.layout)
    _store_heads(dk, p.summed(dx.transpose(-1, -2) @ p.q), p.layout)
    _store_heads(dv, p.summed(weights.transpose(-1, -2) @ dout), p.layout)
    if dbias is not None:
        over = [d for d in (0, 1) if bias.shape[d] == 1 and ds.shape[d] != 1]
        dbias.copy_(ds.sum(over, keepdim=True) if over else ds)
    if dsink is not None:
        share = torch.exp(p.sinks() - lse.masked_fill(empty, 0.0)).masked_fill(empty, 0.0)
        dsink.copy_(-(share * delta).sum((0, 2)))


def supports(q: LentTensor, dropout_p: float, layout: str, s_quant: Any) -> Union[bool, str]:
    if dropout_p != 0 and layout == "thd":
        return "dropout is not implemented for thd"
    return "FP8 attention is not implemented" if s_quant is not None or q.dtype.startswith("f8") else True


OPS = {"fused_attn_fwd": fused_attn_fwd, "fused_attn_bwd": fused_attn_bwd}
