"""Rotary position embedding of one tensor, and of packed QKV tensors."""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence, Tuple

import torch

from te_fl import ops
from te_fl.errors import InvalidArgument
from te_fl.transformer_engine_torch.enums import NVTE_QKV_Format

__all__ = ["fused_qkv_rope_backward", "fused_qkv_rope_forward", "fused_rope_backward", "fused_rope_forward"]

_LAYOUTS = {int(NVTE_QKV_Format.NVTE_SBHD): "sbhd", int(NVTE_QKV_Format.NVTE_BSHD): "bshd", int(NVTE_QKV_Format.NVTE_THD): "thd"}


def _layout(qkv_format: Any, function: str, supported: Sequence[str]) -> str:
    found = _LAYOUTS.get(int(qkv_format))
    if found not in supported:
        raise InvalidArgument(f"{function}: qkv_format is {NVTE_QKV_Format(int(qkv_format)).name}; it is one of {', '.join(supported)}")
    return found


def _check_angles(function: str, layout: str, x: torch.Tensor, freqs: torch.Tensor, cp_size: int) -> None:
    """Refuses angles that cover too few positions. With thd the lengths are in device memory, and the op checks them."""
    if freqs.dim() != 4 or freqs.shape[1] != 1 or freqs.shape[2] != 1 or freqs.dtype != torch.float32:
        raise InvalidArgument(f"{function}: freqs is {freqs.dtype} {tuple(freqs.shape)}; it is float32 [positions, 1, 1, angles]")
    if layout == "thd" or x.dim() != 4:
        return
    needed = x.shape[0 if layout == "sbhd" else 1] * cp_size
    if needed > freqs.shape[0]:
        raise InvalidArgument(f"{function}: freqs has {freqs.shape[0]} positions; a sequence has {needed} on all ranks of context parallelism")


def _starts(start_positions: Optional[torch.Tensor], layout: str, x: torch.Tensor, cu_seqlens: Optional[torch.Tensor] = None) -> Optional[torch.Tensor]:
    """The start positions, one per sequence. Callers may pass more, for example one per boundary in cu_seqlens; NVIDIA's extension ignores the rest.
    """
    if start_positions is None or start_positions.dim() != 1 or (layout == "thd" and cu_seqlens is None):
        return start_positions
    return start_positions[:cu_seqlens.numel() - 1 if layout == "thd" else x.shape[layout.index("b")]]


def _rope(op: Callable, function: str) -> Callable:
    def rope(input: torch.Tensor, freqs: torch.Tensor, start_positions: Optional[torch.Tensor], qkv_format: Any, interleaved: bool,
             cu_seqlens: Optional[torch.Tensor], cp_size: int, cp_rank: int) -> torch.Tensor:
        layout = _layout(qkv_format, function, ("sbhd", "bshd", "thd"))
        _check_angles(function, layout, input, freqs, cp_size)
        # The op accepts any strides, but a strided last dimension would be read element by element, so it is copied.
        return op(input=input if input.stride(-1) == 1 else input.contiguous(), freqs=freqs,
                  start_positions=_starts(start_positions, layout, input, cu_seqlens), cu_seqlens=cu_seqlens if layout == "thd" else None,
                  layout=layout, interleaved=interleaved, cp_size=cp_size, cp_rank=cp_rank)

    rope.__name__ = rope.__qualname__ = function
    return rope


fused_rope_forward = _rope(ops.fused_rope_forward, "fused_rope_forward")
fused_rope_backward = _rope(ops.fused_rope_backward, "fused_rope_backward")


def _dims(function: str, sizes: Sequence[int]) -> dict:
    if len(sizes) != 3:
        raise InvalidArgument(f"{function}: qkv_split_arg_list is {list(sizes)}; it has the elements of the queries, the key and the value of a group")
    return dict(zip(("q_dim", "k_dim", "v_dim"), map(int, sizes)))


def fused_qkv_rope_forward(qkv_input: torch.Tensor, q_freqs: torch.Tensor, k_freqs: torch.Tensor, start_positions: Optional[torch.Tensor],
                           qkv_split_arg_list: Sequence[int], qkv_format: Any, interleaved: bool, cp_size: int,
                           cp_rank: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv_input: [S, B, G, E] or [B, S, G, E]. Each group consists of qkv_split_arg_list[0] query elements, then the key's and the value's elements.
    """
    name = "fused_qkv_rope_forward"
    layout, dims = _layout(qkv_format, name, ("sbhd", "bshd")), _dims(name, qkv_split_arg_list)
    for freqs in (q_freqs, k_freqs):
        _check_angles(name, layout, qkv_input, freqs, cp_size)
    if dims["k_dim"] < 1 or dims["q_dim"] % dims["k_dim"]:
        raise InvalidArgument(f"{name}: qkv_split_arg_list is {list(qkv_split_arg_list)}; the queries are a multiple of the key")
    *places, groups = qkv_input.shape[:3]
    heads = ((groups * dims["q_dim"] // dims["k_dim"], dims["k_dim"]), (groups, dims["k_dim"]), (groups, dims["v_dim"]))
    q, k, v = (torch.empty((*places, *of), dtype=qkv_input.dtype, device=qkv_input.device) for of in heads)
    if qkv_input.numel():
        ops.fused_qkv_rope_forward(qkv_input=qkv_input, q_freqs=q_freqs, k_freqs=k_freqs, q_out=q, k_out=k, v_out=v,
                                   start_positions=_starts(start_positions, layout, qkv_input), layout=layout, interleaved=interleaved, cp_size=cp_size,
                                   cp_rank=cp_rank, **dims)
    return q, k, v


def fused_qkv_rope_backward(q_grad_out: torch.Tensor, k_grad_out: torch.Tensor, v_grad_out: torch.Tensor, q_freqs: torch.Tensor,
                            k_freqs: torch.Tensor, qkv_split_arg_list: Sequence[int], qkv_format: Any, interleaved: bool, cp_size: int,
                            cp_rank: int) -> torch.Tensor:
    """Returns the gradient of qkv_input. Start positions are 0, because Transformer Engine does not pass them, neither here nor to NVIDIA's
    extension.
    """
    name = "fused_qkv_rope_backward"
    layout, dims = _layout(qkv_format, name, ("sbhd", "bshd")), _dims(name, qkv_split_arg_list)
    for freqs in (q_freqs, k_freqs):
        _check_angles(name, layout, q_grad_out, freqs, cp_size)
    out = torch.empty((*k_grad_out.shape[:3], sum(dims.values())), dtype=q_grad_out.dtype, device=q_grad_out.device)
    if out.numel():
        ops.fused_qkv_rope_backward(q_grad=q_grad_out, k_grad=k_grad_out, v_grad=v_grad_out, q_freqs=q_freqs, k_freqs=k_freqs, qkv_grad=out,
                                    layout=layout, interleaved=interleaved, cp_size=cp_size, cp_rank=cp_rank, **dims)
    return out
