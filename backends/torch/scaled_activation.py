"""Gated activations with bounded halves or a factor of each row, and their gradients, by PyTorch's operations in FP32."""

from __future__ import annotations

from typing import Callable, Optional, Tuple

import torch

from te_fl.reference_torch.activation import ACTIVATIONS, dsilu
from te_fl.reference_torch.values import values

Pair = Tuple[torch.Tensor, torch.Tensor]


def _halves(x: torch.Tensor, interleave: int) -> Pair:
    """a and b of [a, b], or of alternating blocks of `interleave` columns."""
    if interleave == 0:
        a, b = x.chunk(2, -1)
        return a, b
    blocks = x.unflatten(-1, (-1, 2, interleave))
    return blocks[..., 0, :].flatten(-2), blocks[..., 1, :].flatten(-2)


def _factors(act_scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return values(act_scales).reshape(*x.shape[:-1], 1)


def _joined(a: torch.Tensor, b: torch.Tensor, interleave: int) -> torch.Tensor:
    if interleave == 0:
        return torch.cat((a, b), -1)
    return torch.stack((a.unflatten(-1, (-1, interleave)), b.unflatten(-1, (-1, interleave))), -2).flatten(-3)


# Each function returns the gate's value and its derivatives by a and b.

def _swiglu(a: torch.Tensor, b: torch.Tensor) -> Tuple[torch.Tensor, Pair]:
    act, slope = ACTIVATIONS["silu"]
    return act(a) * b, (slope(a) * b, act(a))


def _clamped(a: torch.Tensor, b: torch.Tensor, limit: float, alpha: float, offset: float) -> Tuple[torch.Tensor, Pair]:
    first, second = a.clamp_max(limit), b.clamp(-limit, limit)
    s, slope = torch.sigmoid(alpha * first), dsilu(first, alpha)
    return first * s * (second + offset), (torch.where(a > limit, 0.0, slope * (second + offset)), torch.where(b.abs() > limit, 0.0, first * s))


def _situglu(a: torch.Tensor, b: torch.Tensor, beta1: float, beta2: float) -> Tuple[torch.Tensor, Pair]:
    ta, tb, s = torch.tanh(a / beta1), torch.tanh(b / beta2), torch.sigmoid(a)
    first, second = beta1 * ta * s, beta2 * tb
    return first * second, (((1 - ta * ta) * s + beta1 * ta * s * (1 - s)) * second, first * (1 - tb * tb))


def situglu(input: torch.Tensor, output: torch.Tensor, beta1: float, beta2: float) -> None:
    output.copy_(_situglu(*_halves(values(input), 0), beta1, beta2)[0])


def dsituglu(grad: torch.Tensor, input: torch.Tensor, output: torch.Tensor, beta1: float, beta2: float) -> None:
    da, db = _situglu(*_halves(values(input), 0), beta1, beta2)[1]
    output.copy_(_joined(values(grad) * da, values(grad) * db, 0))


def _forward(gate: Callable, input: torch.Tensor, act_scales: torch.Tensor, output: torch.Tensor, interleave: int, *settings: float) -> None:
    y, _ = gate(*_halves(values(input), interleave), *settings)
    output.copy_(_factors(act_scales, input) * y)


def _backward(gate: Callable, grad: torch.Tensor, input: torch.Tensor, act_scales: torch.Tensor, output: torch.Tensor,
              grad_scales: Optional[torch.Tensor], interleave: int, *settings: float) -> None:
    y, (da, db) = gate(*_halves(values(input), interleave), *settings)
    dy = values(grad)
    if grad_scales is not None:
        grad_scales.copy_((dy * y).sum(-1).reshape(grad_scales.shape))
    scaled = _factors(act_scales, input) * dy
    output.copy_(_joined(scaled * da, scaled * db, interleave))


def scaled_swiglu(input, act_scales, output, glu_interleave_size) -> None:
    _forward(_swiglu, input, act_scales, output, glu_interleave_size)


def scaled_dswiglu(grad, input, act_scales, output, grad_scales, glu_interleave_size) -> None:
    _backward(_swiglu, grad, input, act_scales, output, grad_scales, glu_interleave_size)


def scaled_clamped_swiglu(input, act_scales, output, limit, alpha, glu_linear_offset, glu_interleave_size) -> None:
    _forward(_clamped, input, act_scales, output, glu_interleave_size, limit, alpha, glu_linear_offset)


def scaled_clamped_dswiglu(grad, input, act_scales, output, grad_scales, limit, alpha, glu_linear_offset, glu_interleave_size) -> None:
    _backward(_clamped, grad, input, act_scales, output, grad_scales, glu_interleave_size, limit, alpha, glu_linear_offset)


def scaled_situglu(input, act_scales, output, beta1, beta2, glu_interleave_size) -> None:
    _forward(_situglu, input, act_scales, output, glu_interleave_size, beta1, beta2)


def scaled_dsituglu(grad, input, act_scales, output, grad_scales, beta1, beta2, glu_interleave_size) -> None:
    _backward(_situglu, grad, input, act_scales, output, grad_scales, glu_interleave_size, beta1, beta2)


def scaled_srelu(input, act_scales, output) -> None:
    output.copy_(_factors(act_scales, input) * ACTIVATIONS["srelu"][0](values(input)))


def scaled_dsrelu(grad, input, act_scales, output, grad_scales) -> None:
    act, slope = ACTIVATIONS["srelu"]
    dy, x = values(grad), values(input)
    if grad_scales is not None:
        grad_scales.copy_((dy * act(x)).sum(-1).reshape(grad_scales.shape))
    output.copy_(_factors(act_scales, input) * dy * slope(x))


OPS = {f.__name__: f for f in (situglu, dsituglu, scaled_swiglu, scaled_dswiglu, scaled_clamped_swiglu, scaled_clamped_dswiglu, scaled_situglu,
                               scaled_dsituglu, scaled_srelu, scaled_dsrelu)}
