"""FP32 weights in two tensors: BF16 parameters, and the 16 bits of each value that rounding it left (INT16)."""

from __future__ import annotations

import torch


def joined(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The FP32 values, in new memory, of BF16 ones that were rounded to the nearest, ties away from zero, and their remainders."""
    bits = low.to(torch.int32)
    upper = high.view(torch.int16).to(torch.int32) - (bits < 0).to(torch.int32)
    return ((upper << 16) | (bits & 0xFFFF)).view(torch.float32)


def divide(values: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Writes what joined() joins."""
    bits = values.view(torch.int32)
    low.copy_(bits.to(torch.int16))
    high.view(torch.int16).copy_((bits >> 16) + (low < 0).to(torch.int32))
