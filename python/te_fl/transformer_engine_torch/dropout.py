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
    if not x.numel():
        return [x.clone() if out is None else out, x.new_empty(0, dtype=torch.uint8)]
    made = ops.dropout_fwd(input=x, output=out, p=dropout_probability, seed=draw(x.device))
    return list(made) if out is None else [out, made]


def dropout_bwd(grad_output: torch.Tensor, mask: torch.Tensor, dropout_probability: float, grad_input: Optional[torch.Tensor] = None) -> torch.Tensor:
    made = ops.dropout_bwd(grad_output=grad_output.contiguous(), mask=mask, grad_input=grad_input, p=dropout_probability)
    return made if grad_input is None else grad_input
