"""Rotary position embedding by PyTorch's operations, computed in FP32."""

from __future__ import annotations

from typing import Callable, Dict, Optional

import torch

from te_fl.reference_torch.checks import require
from te_fl.reference_torch.values import values


def _place(at: torch.Tensor, length, cp_size: int, cp_rank: int) -> torch.Tensor:
    """The position in the whole sequence of token `at` of this rank's `length` tokens: chunks cp_rank and 2 cp_size - 1 - cp_rank."""
    if cp_size == 1:
        return at
    chunk = length // 2
    return torch.where(at < chunk, cp_rank * chunk + at, (2 * cp_size - 1 - cp_rank) * chunk + at - chunk)


def _checked_starts(starts: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    if starts is not None:
        require(starts >= 0, lambda b: f"start_positions[{b}] is {int(starts[b])}, expected 0 or more", "an element of start_positions is negative")
    return starts


def _dense(x: torch.Tensor, starts: Optional[torch.Tensor], layout: str, cp_size: int, cp_rank: int) -> Optional[torch.Tensor]:
    """The positions of tokens [S, B, ..] or [B, S, ..], in a shape that broadcasts to the first two extents; None if they count from 0 on."""
    if starts is None and cp_size == 1:
        return None
    length, starts = x.shape[0 if layout == "sbhd" else 1], _checked_starts(starts)
    places = _place(torch.arange(length, device=x.device), length, cp_size, cp_rank)
    places = places[:, None] if layout == "sbhd" else places[None]
    return places if starts is None else places + (starts if layout == "sbhd" else starts[:, None])


def _packed(x: torch.Tensor, cu_seqlens: torch.Tensor, starts: Optional[torch.Tensor], cp_size: int, cp_rank: int) -> torch.Tensor:
    """The positions of tokens [T, ..]; -1 outside of the sequences. cu_seqlens counts whole sequences, of which a rank holds 1 / cp_size."""
    tokens, starts, cu = x.shape[0], _checked_starts(starts), cu_seqlens.long()
    first, end = cu[:-1], cu[1:]

    def span(b: int) -> str:
        return f"sequence {b} of cu_seqlens spans tokens {int(cu[b])} to {int(cu[b + 1])}, expected "
    limit = f"non-decreasing values from 0 to {tokens * cp_size} (the input's tokens times cp_size)"
    require((first >= 0) & (end >= first) & (end <= tokens * cp_size), lambda b: span(b) + limit, f"cu_seqlens is wrong; expected {limit}")
    if cp_size > 1:
        require((first % cp_size == 0) & (end % cp_size == 0), lambda b: span(b) + f"multiples of cp_size, {cp_size}", "cu_seqlens has other than "
                f"multiples of cp_size, {cp_size}")
        require((end - first) // cp_size % 2 == 0, lambda b: f"sequence {b} of cu_seqlens has {int(cu[b + 1] - cu[b]) // cp_size} tokens on this rank, "
                "expected an even number: with cp_size > 1 a rank holds two chunks of equal length", "a sequence of cu_seqlens has an odd number of "
                "tokens on this rank")
    at, bounds, batch = torch.arange(tokens, device=x.device), cu // cp_size, cu.shape[0] - 1
    if batch < 1:
        return torch.full_like(at, -1)
    found = torch.searchsorted(bounds, at, right=True) - 1
    sequence = found.clamp(0, batch - 1)
    places = _place(at - bounds[sequence], bounds.diff()[sequence], cp_size, cp_rank)
    places = places if starts is None else places + starts[sequence]
    return torch.where((found >= 0) & (found < batch), places, -1)


def _check(positions: Optional[torch.Tensor], freqs: torch.Tensor, name: str) -> None:
    """Checks that freqs has all positions. te-fl has checked that for those that count from 0 on."""
    if positions is not None:
        rows = freqs.shape[0]
        require(positions < rows, lambda _: f"{name} has {rows} positions, but position {int(positions.max())} is needed", f"{name} has too few positions for "
                "start_positions or cu_seqlens")


def _rotated(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """(-b, a) for each pair (a, b)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _turned(x: torch.Tensor, freqs: torch.Tensor, positions: Optional[torch.Tensor], sbhd: bool, interleaved: bool, backward: bool) -> torch.Tensor:
    """The rotation of x, FP32 [S, B, H, D], [B, S, H, D] or [T, H, D], or its transpose. positions: None for those from 0 on of a dense layout."""
    rows, width = freqs.shape[0], freqs.shape[-1]
    if x.numel() == 0 or rows == 0:
        return torch.zeros_like(x) if rows == 0 else x
    angles = freqs.reshape(rows, width)
    if positions is not None:
        angles = angles[positions.clamp(0, rows - 1)].unsqueeze(-2)
    else:
        angles = angles[:x.shape[0], None, None] if sbhd else angles[:x.shape[1], None]
    cos, sin, part = angles.cos(), angles.sin(), x[..., :width]
    turned = part * cos - _rotated(part * sin, interleaved) if backward else part * cos + _rotated(part, interleaved) * sin
    turned = torch.cat((turned, x[..., width:]), -1) if width < x.shape[-1] else turned
    if positions is None:
        return turned
    turned = torch.where((positions < rows)[..., None, None], turned, float("nan"))
    return torch.where(positions[..., None, None] >= 0, turned, 0.0)


def turn(input: torch.Tensor, freqs: torch.Tensor, output: torch.Tensor, positions: Optional[torch.Tensor], sbhd: bool, interleaved: bool,
         backward: bool) -> None:
    output.copy_(_turned(values(input), freqs, positions, sbhd, interleaved, backward))


def turn_packed(qkv_input, q_freqs, k_freqs, q_out, k_out, v_out, positions, sbhd, interleaved, q_dim, k_dim, v_dim) -> None:
    q, k, v = values(qkv_input).split((q_dim, k_dim, v_dim), -1)
    q = _turned(q.reshape(q_out.shape), q_freqs, positions, sbhd, interleaved, False)
    k_out.copy_(_turned(k, k_freqs, positions, sbhd, interleaved, False))
    q_out.copy_(q)
    v_out.copy_(v)


def turn_packed_back(q_grad, k_grad, v_grad, q_freqs, k_freqs, qkv_grad, positions, sbhd, interleaved, q_dim) -> None:
    dq = _turned(values(q_grad), q_freqs, positions, sbhd, interleaved, True).reshape(*k_grad.shape[:3], q_dim)
    dk = _turned(values(k_grad), k_freqs, positions, sbhd, interleaved, True)
    qkv_grad.copy_(torch.cat((dq, dk, values(v_grad)), -1))


def ops(turn: Callable[..., None], turn_packed: Callable[..., None], turn_packed_back: Callable[..., None]) -> Dict[str, Callable[..., None]]:
    """The ops by functions that compute what this module's of these names do. The checks of positions run before them."""
    def rope(backward, input, freqs, output, start_positions, cu_seqlens, layout, interleaved, cp_size, cp_rank) -> None:
        if layout == "thd":
            positions = _packed(input, cu_seqlens, start_positions, cp_size, cp_rank)
        else:
            positions = _dense(input, start_positions, layout, cp_size, cp_rank)
        _check(positions, freqs, "freqs")
        turn(input=input, freqs=freqs, output=output, positions=positions, sbhd=layout == "sbhd", interleaved=interleaved, backward=backward)

    def fused_rope_forward(input, freqs, output, start_positions, cu_seqlens, layout, interleaved, cp_size, cp_rank) -> None:
        rope(False, input, freqs, output, start_positions, cu_seqlens, layout, interleaved, cp_size, cp_rank)

    def fused_rope_backward(input, freqs, output, start_positions, cu_seqlens, layout, interleaved, cp_size, cp_rank) -> None:
        rope(True, input, freqs, output, start_positions, cu_seqlens, layout, interleaved, cp_size, cp_rank)

    def fused_qkv_rope_forward(qkv_input, q_freqs, k_freqs, q_out, k_out, v_out, start_positions, q_dim, k_dim, v_dim, layout, interleaved, cp_size,
                               cp_rank) -> None:
        positions = _dense(qkv_input, start_positions, layout, cp_size, cp_rank)
        _check(positions, q_freqs, "q_freqs")
        _check(positions, k_freqs, "k_freqs")
        turn_packed(qkv_input=qkv_input, q_freqs=q_freqs, k_freqs=k_freqs, q_out=q_out, k_out=k_out, v_out=v_out, positions=positions,
                    sbhd=layout == "sbhd", interleaved=interleaved, q_dim=q_dim, k_dim=k_dim, v_dim=v_dim)

    def fused_qkv_rope_backward(q_grad, k_grad, v_grad, q_freqs, k_freqs, qkv_grad, start_positions, q_dim, k_dim, v_dim, layout, interleaved, cp_size,
                                cp_rank) -> None:
        positions = _dense(q_grad, start_positions, layout, cp_size, cp_rank)
        _check(positions, q_freqs, "q_freqs")
        _check(positions, k_freqs, "k_freqs")
        turn_packed_back(q_grad=q_grad, k_grad=k_grad, v_grad=v_grad, q_freqs=q_freqs, k_freqs=k_freqs, qkv_grad=qkv_grad, positions=positions,
                         sbhd=layout == "sbhd", interleaved=interleaved, q_dim=q_dim)

    return {f.__name__: f for f in (fused_rope_forward, fused_rope_backward, fused_qkv_rope_forward, fused_qkv_rope_backward)}


OPS = ops(turn, turn_packed, turn_packed_back)
