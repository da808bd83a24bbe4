"""Softmax of scaled scores over the last dimension, with and without masks. Computed in FP32 for every dtype."""

from __future__ import annotations

from typing import Callable, Optional

import torch

from te_fl import ops
from te_fl.errors import InvalidArgument, Unsupported
from te_fl.pytorch.functions.function import Op, differentiable
from te_fl.pytorch.runtime.refuse import checks_keywords

__all__ = ["FusedScaleMaskSoftmax", "attention_mask_func", "scaled_aligned_causal_masked_softmax_forward", "scaled_masked_softmax_forward",
           "scaled_softmax_forward", "scaled_upper_triang_masked_softmax_forward"]


def _make(name: str, masked: bool = False):
    forward_op, backward_op = getattr(ops, f"{name}_forward"), getattr(ops, f"{name}_backward")

    def forward(inputs, *rest):
        inputs = inputs.contiguous()
        output = torch.empty_like(inputs)
        if masked:
            forward_op(input=inputs, mask=rest[0].contiguous(), output=output, scale=rest[1])
        else:
            forward_op(input=inputs, output=output, scale=rest[0])
        return output

    def backward(output_grads, softmax_results, scale):
        output_grads = output_grads.contiguous()
        grads = torch.empty_like(output_grads)
        backward_op(output_grad=output_grads, softmax_results=softmax_results, input_grad=grads, scale=scale)
        return grads

    def save(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.scale = inputs[-1]

    def gradient(op, ctx, grad):
        return (op(grad, ctx.saved_tensors[0], ctx.scale), None, None) if masked else (op(grad, ctx.saved_tensors[0], ctx.scale), None)

    def like_first(first, *rest):
        return torch.empty_like(first, memory_format=torch.contiguous_format)

    mask = "Tensor mask, " if masked else ""
    back = Op(f"{name}_backward(Tensor output_grads, Tensor softmax_results, float scale) -> Tensor", backward, like_first)
    front = Op(f"{name}_forward(Tensor inputs, {mask}float scale) -> Tensor", forward, like_first)
    return differentiable(front, back, save, gradient), back


_plain, scaled_softmax_backward = _make("scaled_softmax")
_masked, scaled_masked_softmax_backward = _make("scaled_masked_softmax", masked=True)
_upper, scaled_upper_triang_masked_softmax_backward = _make("scaled_upper_triang_masked_softmax")
_aligned, scaled_aligned_causal_masked_softmax_backward = _make("scaled_aligned_causal_masked_softmax")


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
            raise Unsupported("FusedScaleMaskSoftmax: softmax_in_fp32=False is not served: te-fl computes softmax in FP32; leave it out")
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
