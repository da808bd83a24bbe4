"""Dropout with a bit mask, one bit per element."""

from __future__ import annotations

from typing import Any, Optional

import torch

from te_fl import ops
from te_fl.transformer_engine_torch import schemes

__all__ = ["dropout_bwd", "dropout_fwd"]


def draw(device: torch.device, generator: Optional[torch.Generator] = None) -> torch.Tensor:
    """Seed and offset for one call, int64 [2] on the device, drawn from the given generator or the device's default one.

    The values stay on the device. Therefore each replay of a captured graph draws new ones, and a recomputed forward, whose generator state is
    restored, draws the same ones again.
    """
    return torch.randint(0, 2 ** 62, (2,), dtype=torch.int64, device=device, generator=generator)


def dropout_fwd(input: Any, dropout_probability: float, out: Optional[torch.Tensor] = None) -> list:
    """Returns [the result, the mask]. The mask is uint8: bit i mod 8 of byte i / 8 is 1 if element i is kept."""
    x = (input.dequantize() if schemes.is_quantised(input) else input).contiguous()
    out = torch.empty_like(x) if out is None else out
    mask = torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device)
    if x.numel():
        ops.dropout_fwd(input=x, output=out, mask=mask, p=dropout_probability, seed=draw(x.device))
    return [out, mask]


def dropout_bwd(grad_output: torch.Tensor, mask: torch.Tensor, dropout_probability: float, grad_input: Optional[torch.Tensor] = None) -> torch.Tensor:
    grad = grad_output.contiguous()
    grad_input = torch.empty_like(grad) if grad_input is None else grad_input
    if grad.numel():
        ops.dropout_bwd(grad_output=grad, mask=mask, grad_input=grad_input, p=dropout_probability)
    return grad_input
