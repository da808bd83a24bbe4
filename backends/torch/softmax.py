"""Scaled softmax with masks by PyTorch's operations, computed in FP32."""

from __future__ import annotations

from typing import Optional

import torch

from te_fl.reference_torch.values import values


def _softmax(input: torch.Tensor, hidden: Optional[torch.Tensor], output: torch.Tensor, scale: float) -> None:
    x = values(input) * scale
    if hidden is not None:
        x = x.masked_fill(hidden, -torch.inf)
    y = torch.softmax(x, -1)
    output.copy_(y if hidden is None else torch.where(hidden, 0.0, y))


def _above(rows: int, columns: int, shift: int, device: torch.device) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=torch.bool, device=device).triu(1 + shift)


def scaled_softmax_forward(input: torch.Tensor, output: torch.Tensor, scale: float) -> None:
    _softmax(input, None, output, scale)


def scaled_masked_softmax_forward(input: torch.Tensor, mask: torch.Tensor, output: torch.Tensor, scale: float) -> None:
    _softmax(input, (mask != 0).expand(input.shape), output, scale)


def scaled_upper_triang_masked_softmax_forward(input: torch.Tensor, output: torch.Tensor, scale: float) -> None:
    _softmax(input, _above(*input.shape[-2:], 0, input.device), output, scale)


def scaled_aligned_causal_masked_softmax_forward(input: torch.Tensor, output: torch.Tensor, scale: float) -> None:
    rows, columns = input.shape[-2:]
    _softmax(input, _above(rows, columns, columns - rows, input.device), output, scale)


def _backward(output_grad: torch.Tensor, softmax_results: torch.Tensor, input_grad: torch.Tensor, scale: float) -> None:
    dy, y = values(output_grad), values(softmax_results)
    input_grad.copy_(scale * y * (dy - (dy * y).sum(-1, keepdim=True)))


_FORWARDS = (scaled_softmax_forward, scaled_masked_softmax_forward, scaled_upper_triang_masked_softmax_forward,
             scaled_aligned_causal_masked_softmax_forward)
OPS = {f.__name__: f for f in _FORWARDS} | {f.__name__.replace("_forward", "_backward"): _backward for f in _FORWARDS}
