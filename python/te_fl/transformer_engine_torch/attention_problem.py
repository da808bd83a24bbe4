"""Converts the arguments of Transformer Engine's attention (layouts, masks, windows, biases) to those of te-fl's op."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Optional, Sequence, Tuple

import torch

from te_fl.errors import InvalidArgument, Unsupported
from te_fl.transformer_engine_torch.enums import NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Format, NVTE_QKV_Layout, NVTE_Softmax_Type

__all__ = ["FORMATS", "LAYOUTS", "LENGTH_DIMS", "Layout", "Mask", "Problem", "alibi_slopes", "parse_mask", "operands", "packed", "problem", "seen_as", "shape_as"]

FORMATS = {int(NVTE_QKV_Format[f"NVTE_{name.upper()}"]): name for name in ("sbhd", "bshd", "thd", "bhsd")}


class Layout(NamedTuple):
    """q, kv: the order of dimensions of the queries, and of keys and values. together: which of q, k and v are packed in one tensor. op: the layout
    passed to the op.
    """

    name: str
    q: str
    kv: str
    together: str
    op: str
    paged: bool


def _layout(name: str) -> Layout:
    text = name.removeprefix("NVTE_").removeprefix("Paged_KV_").lower()
    parts = text.split("_")
    q, kv = ("".join(c for c in part if c.isalpha()) for part in (parts[0], parts[-1]))
    together = next((group for group in ("3hd", "h3d", "2hd", "h2d") if parts[-1].endswith(group)), "")
    op = q if q == kv and q != "bhsd" else "thd" if q == "thd" else "bshd"
    return Layout(text, q, kv, together, op, "Paged" in name)


LAYOUTS = {int(each): _layout(each.name) for each in NVTE_QKV_Layout if each is not NVTE_QKV_Layout.NVTE_QKV_Layout_NOT_SET}

LENGTH_DIMS = {"bshd": 1, "sbhd": 0, "bhsd": 2, "thd": 0}

# Permutations of dimensions between layouts.
_MOVES = {("sbhd", "bshd"): (1, 0, 2, 3), ("bshd", "sbhd"): (1, 0, 2, 3), ("bhsd", "bshd"): (0, 2, 1, 3), ("bhsd", "sbhd"): (2, 0, 1, 3),
          ("bshd", "bhsd"): (0, 2, 1, 3), ("sbhd", "bhsd"): (1, 2, 0, 3)}


def seen_as(tensor: torch.Tensor, have: str, want: str) -> torch.Tensor:
    """A view with another order of dimensions."""
    if have == want:
        return tensor
    move = _MOVES.get((have, want))
    if move is None:
        raise InvalidArgument(f"attention: a tensor of format {have} cannot be seen as {want}")
    return tensor.permute(move)


def shape_as(shape: Sequence[int], have: str, want: str) -> Tuple[int, ...]:
    if have == want:
        return tuple(shape)
    move = _MOVES.get((have, want))
    if move is None:
        raise InvalidArgument(f"attention: a tensor of format {have} cannot be given the format {want}")
    return tuple(shape[i] for i in move)


@functools.lru_cache(maxsize=64)
def _starts(batch: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


def operands(layout: Layout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple:
    """Returns (q, k, v in the op's layout, the start offset of each sequence of keys if keys were not in thd before)."""
    if layout.q == layout.kv == layout.op:
        return q, k, v, None
    if layout.op != "thd":
        return seen_as(q, layout.q, layout.op), seen_as(k, layout.kv, layout.op), seen_as(v, layout.kv, layout.op), None
    # Sequences of equal length become thd sequences with padding between them.
    k, v = seen_as(k, layout.kv, "bshd"), seen_as(v, layout.kv, "bshd")
    return q, k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:]), _starts(k.shape[0], k.shape[1], k.device)


def packed(layout: Layout, q_shape: Sequence[int], k_shape: Sequence[int], v_shape: Sequence[int], dtype: torch.dtype, device: Any) -> tuple:
    """New tensors for the gradients of q, k and v in a layout; views of one tensor if the layout packs them."""
    if layout.together == "3hd":
        return torch.empty((*q_shape[:-2], 3, *q_shape[-2:]), dtype=dtype, device=device).unbind(-3)
    if layout.together == "h3d":
        return torch.empty((*q_shape[:-1], 3, q_shape[-1]), dtype=dtype, device=device).unbind(-2)
    dq = torch.empty(q_shape, dtype=dtype, device=device)
    if layout.together == "2hd":
        return (dq, *torch.empty((*k_shape[:-2], 2, *k_shape[-2:]), dtype=dtype, device=device).unbind(-3))
    if layout.together == "h2d":
        return (dq, *torch.empty((*k_shape[:-1], 2, k_shape[-1]), dtype=dtype, device=device).unbind(-2))
    return dq, torch.empty(k_shape, dtype=dtype, device=device), torch.empty(v_shape, dtype=dtype, device=device)


_MASKS = {int(NVTE_Mask_Type.NVTE_NO_MASK): "none", int(NVTE_Mask_Type.NVTE_PADDING_MASK): "padding", int(NVTE_Mask_Type.NVTE_CAUSAL_MASK): "causal",
          int(NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK): "padding_causal",
          int(NVTE_Mask_Type.NVTE_CAUSAL_BOTTOM_RIGHT_MASK): "causal_bottom_right",
          int(NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK): "padding_causal_bottom_right"}


class Mask(NamedTuple):
    type: str
    left: int
    right: int

    @property
    def padding(self) -> bool:
        return self.type.startswith("padding")


def parse_mask(attn_mask_type: Any, window: Optional[Sequence[int]], bottom_right_diagonal: bool, square: bool) -> Mask:
    """Converts the mask type. square: the numbers of keys and queries are equal, so without padding the top-left and bottom-right diagonals coincide.
    """
    name = _MASKS.get(int(attn_mask_type))
    if name is None:
        raise InvalidArgument(f"attention: attn_mask_type is {int(attn_mask_type)}; it is one of NVTE_Mask_Type")
    one_diagonal = square and not name.startswith("padding")
    left, right = (-1, -1) if window is None else (int(window[0]), int(window[1]))
    if "causal" in name:
        right = -1  # a causal mask already bounds the right side
        if left >= 0 and not one_diagonal and bottom_right_diagonal != name.endswith("bottom_right"):
            raise Unsupported(f"attention: a window from the {'bottom-right' if bottom_right_diagonal else 'top-left'} diagonal under a {name} mask; "
                              "te-fl counts it from the mask's own")
    elif (left >= 0 or right >= 0) and not bottom_right_diagonal and not one_diagonal:
        if right != 0:
            raise Unsupported(f"attention: a window ({left}, {right}) from the top-left diagonal under a {name} mask; te-fl counts it from the "
                              "bottom-right one, except under causal masks")
        name, right = ("padding_causal" if name == "padding" else "causal"), -1
    return Mask(name, left, right)


def _check_bias(bias_type: Any, layout: Layout, mask: Mask, softmax: str) -> None:
    """Refuses biases that the op does not support."""
    if int(bias_type) == NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS:
        raise Unsupported("attention: a bias that is added before the scale; te-fl adds it behind (post_scale_bias)")
    if int(bias_type) == NVTE_Bias_Type.NVTE_POST_SCALE_BIAS and layout.op == "thd":
        raise Unsupported("attention: a bias with layout thd")
    if int(bias_type) == NVTE_Bias_Type.NVTE_ALIBI:
        if "causal" not in mask.type:
            raise Unsupported("attention: ALiBi without a causal mask; te-fl's grows with the key's position, the package's shrinks on both sides")
        if softmax != "vanilla":
            raise Unsupported("attention: ALiBi with a softmax that has a sink")


class Problem(NamedTuple):
    layout: Layout
    mask: Mask
    softmax: str
    bias: bool
    alibi: bool
    variable: bool  # true if cu_seqlens give the lengths


@functools.lru_cache(maxsize=1024)
def problem(qkv_layout: int, bias_type: int, attn_mask_type: int, softmax_type: int, window: Optional[Tuple[int, int]], bottom_right_diagonal: bool,
            square: bool) -> Problem:
    """The settings of a call; cached, since a model uses few distinct settings. square: see parse_mask()."""
    layout = LAYOUTS.get(int(qkv_layout))
    if layout is None:
        raise InvalidArgument(f"attention: qkv_layout is {int(qkv_layout)}; it is one of NVTE_QKV_Layout, and set")
    softmax = ("vanilla", "off_by_one", "learnable")[int(NVTE_Softmax_Type(int(softmax_type)))]
    mask = parse_mask(attn_mask_type, window, bottom_right_diagonal, square and layout.op != "thd")
    _check_bias(bias_type, layout, mask, softmax)
    return Problem(layout, mask, softmax, int(bias_type) == NVTE_Bias_Type.NVTE_POST_SCALE_BIAS, int(bias_type) == NVTE_Bias_Type.NVTE_ALIBI,
                   layout.op == "thd" or mask.padding)


@functools.lru_cache(maxsize=16)
def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """The ALiBi slopes (arXiv 2108.12409) for n heads: the slopes for p heads, p the largest power of two up to n, then every other slope for 2 p
    heads.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)
