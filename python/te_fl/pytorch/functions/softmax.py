"""Softmax of scaled scores over the last dimension, with and without masks. Computed in FP32 for every dtype."""

from __future__ import annotations

from typing import Callable, Optional

import torch

from te_fl.errors import InvalidArgument, Unsupported
from te_fl.pytorch.functions.function import differentiable_op
from te_fl.pytorch.runtime.refuse import checks_keywords

__all__ = ["FusedScaleMaskSoftmax", "attention_mask_func", "scaled_aligned_causal_masked_softmax_forward", "scaled_masked_softmax_forward",
           "scaled_softmax_forward", "scaled_upper_triang_masked_softmax_forward"]


_plain, _masked, _upper, _aligned = (differentiable_op(f"{kind}_forward", f"{kind}_forward", f"{kind}_backward") for kind in (
    "scaled_softmax", "scaled_masked_softmax", "scaled_upper_triang_masked_softmax", "scaled_aligned_causal_masked_softmax"))


def _backward(function: Callable) -> Callable:
    def gradient(output_grads: torch.Tensor, softmax_results: torch.Tensor, scale: float) -> torch.Tensor:
        return function.backward(output_grads, softmax_results, scale)

    gradient.__name__ = gradient.__qualname__ = function.backward.name
    return gradient


scaled_softmax_backward, scaled_masked_softmax_backward = _backward(_plain), _backward(_masked)
scaled_upper_triang_masked_softmax_backward, scaled_aligned_causal_masked_softmax_backward = _backward(_upper), _backward(_aligned)


def scaled_softmax_forward(inputs: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(scale * inputs) for scores [b, h, sq, sk]."""
    return _plain(inputs, scale)


def scaled_masked_softmax_forward(inputs: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(scale * inputs), excluding scores whose mask, [1|b, 1|h, sq, sk], is nonzero; a fully masked row gives zeros."""
    return _masked(inputs, mask, scale)


def scaled_upper_triang_masked_softmax_forward(inputs: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(scale * inputs) for scores [b, s, s] with a causal mask."""
    return _upper(inputs, scale)


def scaled_aligned_causal_masked_softmax_forward(inputs: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(scale * inputs) for scores [b, h, sq, sk] with a causal mask aligned to the bottom-right corner."""
    return _aligned(inputs, scale)


def attention_mask_func(attention_scores: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The default mask function: sets masked scores to -10000, in place. FusedScaleMaskSoftmax recognises it and masks in the op instead."""
    return attention_scores.masked_fill_(attention_mask, -10000.0)


class FusedScaleMaskSoftmax(torch.nn.Module):
    """Scales, masks and applies softmax in one op.

    mask_func: with attention_mask_func, the op itself gives masked scores the weight 0. Another function is called with the scaled scores and the
    mask.
    """

    @checks_keywords()
    def __init__(self, mask_func: Callable, softmax_in_fp32: bool = True) -> None:
        super().__init__()
        if not softmax_in_fp32:
            raise Unsupported("FusedScaleMaskSoftmax: softmax_in_fp32=False is not supported: te-fl computes softmax in FP32; leave it out")
        self.mask_func, self.softmax_in_fp32 = mask_func, softmax_in_fp32

    def forward(self, inp: torch.Tensor, mask: Optional[torch.Tensor], attn_mask_type: str, scale: Optional[float] = None) -> torch.Tensor:
        if inp.dim() != 4:
            raise InvalidArgument(f"FusedScaleMaskSoftmax: inp has shape {tuple(inp.shape)}; scores are [b, h, sq, sk]")
        scale = 1.0 if scale is None else float(scale)
        if attn_mask_type in ("causal", "causal_bottom_right"):
            sq, sk = inp.shape[2:]
            if mask is None and (sq == sk or attn_mask_type == "causal_bottom_right"):
                return _aligned(inp, scale)
            shift = sk - sq if attn_mask_type == "causal_bottom_right" else 0
            causal = torch.ones(sq, sk, dtype=torch.bool, device=inp.device).triu(1 + shift)
            mask = causal[None, None] if mask is None else torch.logical_or(mask, causal)
        if mask is None or attn_mask_type == "no_mask":
            return _plain(inp, scale)
        if self.mask_func is attention_mask_func:
            b, h = mask.shape[:2]
            return _masked(inp, mask.expand(b, h, *inp.shape[2:]), scale)
        return _plain(self.mask_func(inp * scale, mask), 1.0)
