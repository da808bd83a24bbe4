"""Residual additions and copies by PyTorch's operations."""

from __future__ import annotations

from typing import Optional, Union

import torch

from te_fl._native import LentTensor
from te_fl.reference_torch.random import dropped, kept, packed, signed, state
from te_fl.reference_torch.values import bits, cast, values, write


def add(a: torch.Tensor, b: torch.Tensor, output: torch.Tensor, mask: Optional[torch.Tensor], p: float, seed: int, offset: int,
        seed_tensor: Optional[torch.Tensor], offset_tensor: Optional[torch.Tensor]) -> None:
    branch = values(b)
    if mask is not None:
        keeps = kept(b.numel(), p, *state(seed, offset, seed_tensor, offset_tensor, b.device), b.device)
        mask.copy_(packed(keeps))
        branch = dropped(branch, keeps, p)
    output.copy_(values(a) + branch)


_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _to_odd(x: torch.Tensor) -> torch.Tensor:
    """FP64 rounded to FP32 so that a second rounding to a narrower type gives what one rounding would: truncated, with the last bit set if inexact."""
    y = x.float()
    y = (y.view(torch.int32) - (y.double().abs() > x.abs()).int()).view(torch.float32)
    return (y.view(torch.int32) | (y.double() != x).int()).view(torch.float32)


def strided_copy(input: torch.Tensor, output: torch.Tensor) -> None:
    if input.dtype == output.dtype:
        bits(output).copy_(bits(input))
    elif output.dtype in _FP8 or (input.dtype == torch.float64 and output.dtype != torch.float32):
        x = _to_odd(input) if input.dtype == torch.float64 else input.float()
        if output.dtype in _FP8:
            write(output, cast(x, output.dtype))
        else:
            output.copy_(x)
    else:
        output.copy_(input)


def supports_copy(input: LentTensor, output: LentTensor) -> Union[bool, str]:
    if input.dtype == output.dtype:
        return "strided FP4 codes are not implemented" if input.dtype == "f4e2m1" and not (input.contiguous and output.contiguous) else True
    floats = ("f64", "f32", "f16", "bf16", "f8e4m3", "f8e5m2")
    return True if input.dtype in floats and output.dtype in floats else f"conversion from {input.dtype} to {output.dtype} is not implemented"


def fill(output: torch.Tensor, value: float) -> None:
    if output.dtype.is_floating_point:  # rounded once, and a number beyond the dtype becomes infinite
        one = torch.empty((), dtype=output.dtype, device=output.device)
        strided_copy(torch.full((), value, dtype=torch.float64, device=output.device), one)
        bits(output).copy_(bits(one).expand(output.shape))
    elif output.dtype == torch.uint64:
        output.view(torch.int64).fill_(signed(int(value)))
    else:
        output.fill_(int(value))


def supports_fill(output: LentTensor) -> Union[bool, str]:
    return f"dtype {output.dtype} is not implemented" if output.dtype in ("f4e2m1", "f8e8m0") else True


OPS = {"add": add, "strided_copy": strided_copy, "fill": fill}
