"""Scaled dot-product attention by PyTorch's operations: by its flash attention where that computes the same, else with the scores as one matrix in
FP32. FP8 operands are dequantised, and the probabilities and their gradients rounded to FP8 as docs/numerics.md says.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Tuple, Union

import torch

from te_fl.attention_shapes import fit
from te_fl.tensors import Quantized

from te_fl.reference_torch.random import dropped, kept, kept_at, state
from te_fl.reference_torch.values import amax_of, cast, quotient, store, values


class _Rows(NamedTuple):
    """For each row of a [batch, length] tensor: its sequence, its position there, and the sequence's length. All [B, S]."""

    sequence: torch.Tensor
    position: torch.Tensor
    length: torch.Tensor


def _heads(t: torch.Tensor, layout: str) -> torch.Tensor:
    """An operand as FP32 [B, heads, S, D]; thd: one batch of all tokens."""
    x = values(t)
    return x.permute(1, 2, 0, 3) if layout == "sbhd" else x.transpose(1, 2) if layout == "bshd" else x.transpose(0, 1).unsqueeze(0)


def _store_heads(out: Any, x: torch.Tensor, layout: str) -> None:
    x = x.permute(2, 0, 1, 3) if layout == "sbhd" else x.transpose(1, 2) if layout == "bshd" else x[0].transpose(0, 1)
    if isinstance(out, torch.Tensor) and x.dtype == out.dtype and _by_fours(out) and _by_fours(x):  # PyTorch copies strided tensors element by element
        out.view(torch.int64).copy_(x.view(torch.int64))
    else:
        store(out, x)


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
                 layout, mask_type, softmax_type, scale, window_left, window_right, softcap, max_seqlen_q, max_seqlen_kv):
        self.layout, self.longest = layout, (max_seqlen_q, max_seqlen_kv)
        self.q, self.k, self.v = (_heads(t, self.layout) for t in (q, k, v))
        self.groups = self.q.shape[1] // max(1, self.k.shape[1])
        self.scale, self.softcap, self.bias, device = scale, softcap, bias, self.q.device
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
        self.hidden, self.rows, self.keys = hidden[:, None], rows, keys
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
        seed = state(*random, self.q.device)
        if self.layout != "thd":
            return kept(batch * heads * rows * self.k.shape[2], dropout_p, *seed, self.q.device)
        longest = (part.length.amax() if most == 0 and part.length.numel() else most for part, most in zip((self.rows, self.keys), self.longest))
        most_q, most_kv = longest
        head = self.rows.sequence[0] * heads + torch.arange(heads, device=self.q.device)[:, None]
        row = (head * most_q + self.rows.position[0])[..., None]
        return kept_at((row * most_kv + self.keys.position[0]).reshape(-1), dropout_p, *seed)

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


class _Fp8Rounding:
    """Rounds probabilities or their gradients to FP8 and back with the scale of s_quant or dp_quant; None: not at all. largest: a bound of the values'
    magnitude, 0 if there is none; the scale is limited so that it does not map this bound beyond FP8's largest number.
    """

    def __init__(self, quant: Optional[Quantized], largest: float = 0.0):
        self.quant = quant
        if quant is not None:
            self.dtype, self.from_call = quant.data.dtype, quant.scale.reshape(())
            self.scale = self.from_call.clamp_max(torch.finfo(self.dtype).max / largest) if largest else self.from_call

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.quant is None else cast(x * self.scale, self.dtype).float() / self.scale

    def write_back(self, x: torch.Tensor) -> None:
        """Writes scale_inv, and the amax of x as a running maximum."""
        if self.quant is None:
            return
        if self.quant.scale_inv is not None:
            self.quant.scale_inv.fill_(quotient(1.0, self.from_call))
        if self.quant.amax is not None:
            self.quant.amax.copy_(torch.fmax(self.quant.amax, amax_of(x)))


def _flash(q: torch.Tensor, k: torch.Tensor, layout: str, mask_type: str, softmax_type: str, dropout_p: float, window_left: int, window_right: int,
           softcap: float, *others: Any) -> bool:
    """True if PyTorch's flash attention computes this problem with the same saved log-sum-exp."""
    rows = 0 if layout == "sbhd" else 1
    return (isinstance(q, torch.Tensor) and q.is_cuda and layout != "thd" and q.dtype in (torch.float16, torch.bfloat16)
            and softmax_type == "vanilla" and dropout_p == 0 and window_left < 0 and (window_right < 0 or mask_type != "none") and softcap == 0 and not any(t is not None for t in others)
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
                   softmax_sink, s_quant, layout, mask_type, softmax_type, scale, dropout_p, window_left, window_right, max_seqlen_q, max_seqlen_kv, seed,
                   offset, seed_tensor, offset_tensor, softcap=0.0) -> None:
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
                 mask_type, softmax_type, scale, window_left, window_right, softcap, max_seqlen_q, max_seqlen_kv)
    scores, _ = p.scores()
    lse = scores.logsumexp(-1)
    empty = lse == -torch.inf
    if p.sink is not None:
        lse = torch.where(empty, lse, torch.logaddexp(lse, p.sinks()))
    keeps = p.kept(dropout_p, seed, offset, seed_tensor, offset_tensor)
    known = lse.masked_fill(empty, 0.0)
    largest = known if s_quant is None or not scores.shape[-1] else scores.amax(-1).masked_fill(empty, 0.0)  # FP8 rounds relative to the row's largest
    weights = torch.exp(scores - largest[..., None])
    weights = weights if keeps is None else dropped(weights, keeps, dropout_p)
    rounding = _Fp8Rounding(s_quant, 1 / (1 - dropout_p))
    result = rounding(weights) @ p.repeated(p.v)
    if s_quant is not None:
        share = torch.exp(largest - known)[..., None]
        result = result * share
        rounding.write_back(weights * share)
    _store_heads(o, result, p.layout)
    if softmax_lse is not None:
        softmax_lse.copy_(lse[0].t() if p.layout == "thd" else lse)


def fused_attn_bwd(d_o, q, k, v, o, softmax_lse, dq, dk, dv, dbias, dsink, bias, alibi_slopes, attn_mask, cu_seqlens_q, cu_seqlens_kv,
                   cu_seqlens_q_padded, cu_seqlens_kv_padded, softmax_sink, s_quant, dp_quant, layout, mask_type, softmax_type, scale, dropout_p,
                   window_left, window_right, max_seqlen_q, max_seqlen_kv, seed, offset, seed_tensor, offset_tensor, deterministic=False, softcap=0.0) -> None:
    # The order in which PyTorch's flash attention adds dq differs between runs.
    if not deterministic and v.shape == k.shape and _flash(q, k, layout, mask_type, softmax_type, dropout_p, window_left, window_right, softcap, bias, alibi_slopes, attn_mask,
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
                 mask_type, softmax_type, scale, window_left, window_right, softcap, max_seqlen_q, max_seqlen_kv)
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
    rounding, dx = _Fp8Rounding(dp_quant), ds * slope
    rounding.write_back(dx)
    dx = rounding(dx) * p.scale
    _store_heads(dq, dx @ p.repeated(p.k), p.layout)
    _store_heads(dk, p.summed(dx.transpose(-1, -2) @ p.q), p.layout)
    _store_heads(dv, p.summed(_Fp8Rounding(s_quant)(weights).transpose(-1, -2) @ dout), p.layout)
    if dbias is not None:
        over = [d for d in (0, 1) if bias.shape[d] == 1 and ds.shape[d] != 1]
        dbias.copy_(ds.sum(over, keepdim=True) if over else ds)
    if dsink is not None:
        share = torch.exp(p.sinks() - lse.masked_fill(empty, 0.0)).masked_fill(empty, 0.0)
        dsink.copy_(-(share * delta).sum((0, 2)))


def get_fused_attn_backend(q, backend, layout, mask_type, **_: Any) -> None:
    possible = not (layout == "thd" and mask_type == "arbitrary")
    backend.fill_(-1 if not possible else 2 if isinstance(q, Quantized) else 1)


supports = fit
OPS = {"fused_attn_fwd": fused_attn_fwd, "fused_attn_bwd": fused_attn_bwd, "get_fused_attn_backend": get_fused_attn_backend}
