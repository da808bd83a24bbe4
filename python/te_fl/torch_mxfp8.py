"""MXFP8 of PyTorch's tensors: blocks of 1 x 32 by te-fl's op, and square blocks of 32 x 32, which te-fl has no op for.

The scales of square blocks come from the op, applied to the 32 column maxima of each block, so the rounding rules are the op's. Their codes are computed
with PyTorch's operations.
"""

from __future__ import annotations

from typing import Tuple

import torch

from te_fl import ops
from te_fl.tensors import Quantized

BLOCK = 32


def row_scales(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Uninitialised E8M0 scales, as UINT8, of blocks along rows."""
    return torch.empty(rows + -rows % 128, (columns + 127) // 128 * 4, dtype=torch.uint8, device=device)


def column_scales(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Uninitialised E8M0 scales, as UINT8, of blocks along columns."""
    return torch.empty((rows + 127) // 128 * 4, columns + -columns % 128, dtype=torch.uint8, device=device)


def rowwise(data: torch.Tensor, scales: torch.Tensor) -> Quantized:
    return Quantized(data, scale_inv=scales.view(torch.float8_e8m0fnu), scaling="mxfp8")


def columnwise(data: torch.Tensor, scales: torch.Tensor) -> Quantized:
    return Quantized(columnwise_data=data, columnwise_scale_inv=scales.view(torch.float8_e8m0fnu), shape=tuple(data.shape), scaling="mxfp8")


def square_factors(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """UINT8 [ceil(rows / 32), ceil(columns / 32)]: the E8M0 scales of square blocks as bits. kind: the dtype of the codes."""
    rows, columns = x.shape
    largest = torch.nn.functional.pad(x.abs(), (0, 0, 0, -rows % BLOCK)).view(-1, BLOCK, columns).amax(1)
    count = largest.shape[0]
    scales = row_scales(count, columns, x.device)
    ops.quantize(input=largest, output=rowwise(torch.empty(largest.shape, dtype=kind, device=x.device), scales))
    return scales[:count, :-(-columns // BLOCK)]


def padded(factors: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros_like(like)
    whole[:factors.shape[0], :factors.shape[1]] = factors
    return whole


def square(x: torch.Tensor, kind: torch.dtype) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the codes of x [rows, columns], and the UINT8 scales of its blocks repeated for each row, and for each column, without padding."""
    rows, columns = x.shape
    factors, bound = square_factors(x, kind), torch.finfo(kind).max
    by_row, by_column = factors.repeat_interleave(BLOCK, 0)[:rows], factors.repeat_interleave(BLOCK, 1)[:, :columns]
    each = torch.exp2(127.0 - by_row.float()).repeat_interleave(BLOCK, 1)[:, :columns]
    return (x.float() * each).clamp(-bound, bound).to(kind), by_row, by_column
