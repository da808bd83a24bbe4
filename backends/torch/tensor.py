"""Residual additions and copies by PyTorch's operations."""

from __future__ import annotations

from typing import Optional, Union

import torch

from te_fl._native import LentTensor
from te_fl.reference_torch.random import dropped, kept, packed, state
from te_fl.reference_torch.values import cast, values, write


def add(a: torch.Tensor, b: torch.Tensor, output: torch.Tensor, mask: Optional[torch.Tensor], p: float, seed: int, offset: int,
        seed_tensor: Optional[torch.Tensor], offset_tensor: Optional[torch.Tensor]) -> None:
    branch = values(b)
    if mask is not None:
        keeps = kept(b.numel(), p, *state(seed, offset, seed_tensor, offset_tensor, b.device), b.device)
        mask.copy_(packed(keeps))
        branch = dropped(branch, keeps, p)
    output.copy_(values(a) + branch)


def strided_copy(input: torch.Tensor, output: torch.Tensor) -> None:
    if output.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and input.dtype != output.dtype:
        write(output, cast(input.float(), output.dtype))
    else:
        output.copy_(input)


def fill(output: torch.Tensor, value: float) -> None:
    output.fill_(value if output.dtype.is_floating_point else int(value))


def supports_fill(output: LentTensor) -> Union[bool, str]:
    return True if output.dtype in ("f64", "f32", "i8", "i16", "i32", "i64", "u8", "bool") else f"dtype {output.dtype} is not implemented"


OPS = {"add": add, "strided_copy": strided_copy, "fill": fill}
