"""FP32 weights split into two tensors: BF16 parameters, and INT16 remainders with the lower 16 bits."""

from __future__ import annotations

import torch


def joined(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Reconstructs FP32 values, in new memory, from BF16 values (rounded to nearest, ties away from zero) and their remainders."""
    bits = low.to(torch.int32)
    upper = high.view(torch.int16).to(torch.int32) - (bits < 0).to(torch.int32)
    return ((upper << 16) | (bits & 0xFFFF)).view(torch.float32)


def divide(values: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Splits FP32 values into the two tensors that joined() takes."""
    bits = values.view(torch.int32)
    low.copy_(bits.to(torch.int16))
    high.view(torch.int16).copy_((bits >> 16) + (low < 0).to(torch.int32))
