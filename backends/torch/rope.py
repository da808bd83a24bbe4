"""Rotary position embedding by PyTorch's operations, computed in FP32, for dense layouts without start positions."""

from __future__ import annotations

from typing import Any, List, Union

import torch

from te_fl.reference_torch.values import values


def _rotated(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """(-b, a) for each pair (a, b)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _turned(x: torch.Tensor, freqs: torch.Tensor, layout: str, interleaved: bool, backward: bool) -> torch.Tensor:
    """The rotation of x, FP32 [S, B, H, D] or [B, S, H, D], or its transpose."""
    length, width = x.shape[0 if layout == "sbhd" else 1], freqs.shape[-1]
    angles = freqs[:length].reshape(length, 1, 1, width)
    angles = angles if layout == "sbhd" else angles.transpose(0, 1)
    cos, sin, part = angles.cos(), angles.sin(), x[..., :width]
    turned = part * cos - _rotated(part * sin, interleaved) if backward else part * cos + _rotated(part, interleaved) * sin
    return torch.cat((turned, x[..., width:]), -1) if width < x.shape[-1] else turned


def fused_rope_forward(input, freqs, output, start_positions, cu_seqlens, layout, interleaved, cp_size, cp_rank) -> None:
    output.copy_(_turned(values(input), freqs, layout, interleaved, False))


def fused_rope_backward(input, freqs, output, start_positions, cu_seqlens, layout, interleaved, cp_size, cp_rank) -> None:
    output.copy_(_turned(values(input), freqs, layout, interleaved, True))


def fused_qkv_rope_forward(qkv_input, q_freqs, k_freqs, q_out, k_out, v_out, start_positions, q_dim, k_dim, v_dim, layout, interleaved, cp_size,
                           cp_rank) -> None:
    q, k, v = values(qkv_input).split((q_dim, k_dim, v_dim), -1)
    q_out.copy_(_turned(q.reshape(q_out.shape), q_freqs, layout, interleaved, False))
    k_out.copy_(_turned(k, k_freqs, layout, interleaved, False))
    v_out.copy_(v)


def fused_qkv_rope_backward(q_grad, k_grad, v_grad, q_freqs, k_freqs, qkv_grad, start_positions, q_dim, k_dim, v_dim, layout, interleaved, cp_size,
                            cp_rank) -> None:
    groups = k_grad.shape[:3]
    dq = _turned(values(q_grad), q_freqs, layout, interleaved, True).reshape(*groups, q_dim)
    parts: List[torch.Tensor] = [dq, _turned(values(k_grad), k_freqs, layout, interleaved, True), values(v_grad)]
    qkv_grad.copy_(torch.cat(parts, -1))


def supports(start_positions: Any, layout: str, cp_size: int, freqs: Any = None, q_freqs: Any = None, k_freqs: Any = None, input: Any = None,
             qkv_input: Any = None, q_grad: Any = None) -> Union[bool, str]:
    if layout == "thd" or start_positions is not None or cp_size != 1:
        return "thd, start positions and context parallelism are not implemented"
    x = next(t for t in (input, qkv_input, q_grad) if t is not None)
    length = x.shape[0 if layout == "sbhd" else 1]
    if any(f is not None and (f.shape[0] < length or f.shape[-1] > x.shape[-1]) for f in (freqs, q_freqs, k_freqs)):
        return "angles for fewer positions or more columns than the input has are refused by reference.host"
    return True


OPS = {f.__name__: f for f in (fused_rope_forward, fused_rope_backward, fused_qkv_rope_forward, fused_qkv_rope_backward)}
