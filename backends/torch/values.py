"""Reads op arguments as FP32 tensors, and writes FP32 results to outputs of any dtype and scaling mode, as docs/numerics.md defines them."""

from __future__ import annotations

import math
from typing import Any, Optional, Tuple

import torch

from te_fl.tensors import Quantized

COMPUTE_SCALE, POW2_SCALE = 1, 2  # te_fl_quant.flags
FLT_MAX = torch.finfo(torch.float32).max
# Extents of a block of the row-wise copy, by scaling mode. The column-wise copy is laid out as the row-wise copy of the transposed matrix.
_BLOCKS = {"block_1x128": (1, 128), "block_128x128": (128, 128)}
SCALINGS = ("none", "tensor", *_BLOCKS)


def matrix(x: torch.Tensor) -> torch.Tensor:
    """The tensor as a matrix of rows of its last dimension."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) if x.dim() else x.reshape(1, 1)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _expanded(factors: torch.Tensor, scaling: str, rows: int, columns: int) -> torch.Tensor:
    """The factor of each element of a matrix [rows, columns], from scale_inv in the row-wise layout."""
    if scaling == "block_1x128":
        return factors.t()[:rows].repeat_interleave(128, 1)[:, :columns]
    return factors.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


def values(t: Any) -> torch.Tensor:
    """The values of an argument in FP32."""
    if not isinstance(t, Quantized):
        return t.float()
    rowwise = t.data is not None
    codes = t.data if rowwise else t.columnwise_data
    scale_inv = t.scale_inv if rowwise or t.scaling == "tensor" else t.columnwise_scale_inv
    if t.scaling == "tensor":
        x = codes.float() * scale_inv
    else:
        flat = matrix(codes).float()
        x = flat * _expanded(scale_inv, t.scaling, *flat.shape)
    return x.reshape(t.shape) if rowwise else x.reshape(t.shape[-1], -1).t().reshape(t.shape)


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """The largest absolute value, FP32 []; NaN is ignored, and 0 is that of a tensor without elements."""
    if not x.numel():
        return x.new_zeros(())
    # By rows first: torch.compile makes one block of threads of a reduction whose size it does not know.
    return matrix(x.abs().nan_to_num_(0.0, float("inf"))).amax(-1).amax()


def quotient(numerator: float, x: torch.Tensor) -> torch.Tensor:
    """numerator / x, rounded once. PyTorch divides a number by a tensor as a product with the reciprocal."""
    if torch.compiler.is_compiling():  # compiled FP32 divisions are approximations; FP64 ones have more than twice the bits
        return (numerator / x.double()).float()
    return torch.full_like(x, numerator) / x


def inverted(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, rounded once. A compiled reciprocal() is an approximation."""
    return quotient(1.0, scale)


def scale_from_amax(amax: torch.Tensor, largest: float, epsilon: float, pow2: bool, infinite: float) -> torch.Tensor:
    """docs/numerics.md, Scale from amax. infinite: the value that takes the place of an infinite scale."""
    amax = amax.clamp_min(epsilon)
    scale = quotient(largest, amax)
    scale = torch.where(scale.isinf(), infinite, scale)
    scale = torch.where((amax == 0) | ~amax.isfinite(), 1.0, scale)
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32) if pow2 else scale


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """FP8 codes of FP32 values: rounded to nearest even, saturated; NaN becomes 0x7F."""
    largest = torch.finfo(dtype).max
    return torch.where(x.isnan(), torch.nan, x.clamp(-largest, largest)).to(dtype)  # the code of a negative NaN would be 0xFF


def write(out: torch.Tensor, codes: torch.Tensor) -> None:
    out.view(torch.uint8).copy_(codes.view(torch.uint8).reshape(out.shape))


def _store_tensor(out: Quantized, x: torch.Tensor, dtype: torch.dtype) -> None:
    amax = amax_of(x)
    if out._flags & COMPUTE_SCALE:
        scale = scale_from_amax(amax, torch.finfo(dtype).max, out.amax_epsilon, bool(out._flags & POW2_SCALE), FLT_MAX)
        if out.scale is not None:
            out.scale.fill_(scale)
        if out.amax is not None:
            out.amax.fill_(amax)
    else:
        scale = out.scale.reshape(())
        if out.amax is not None:
            out.amax.copy_(torch.fmax(out.amax, amax))
        if torch.compiler.is_compiling():
            # amax is no NaN, which the compiler does not know. So it computes codes after amax: in one kernel with a reduction of rows, it would write the
            # column-wise copy with a stride between threads.
            scale = torch.where(amax.isnan(), amax, scale)
    codes = cast(x * scale, dtype)
    if out.data is not None:
        write(out.data, codes)
    if out.columnwise_data is not None:
        write(out.columnwise_data, matrix(codes.view(torch.uint8)).t().contiguous())
    for inverse in (out.scale_inv, out.columnwise_scale_inv):
        if inverse is not None:
            inverse.fill_(inverted(scale))


def _block_codes(x: torch.Tensor, out: Quantized, dtype: torch.dtype, infinite: float) -> Tuple[torch.Tensor, torch.Tensor]:
    """Codes of a matrix and scale_inv [blocks of rows, blocks of columns]."""
    high, wide = _BLOCKS[out.scaling]
    rows, columns = x.shape
    padded = torch.zeros(_up(rows, high), _up(columns, wide), dtype=torch.float32, device=x.device)
    padded[:rows, :columns] = x
    blocks = padded.view(-1, high, padded.shape[1] // wide, wide)
    amax = blocks.abs().nan_to_num_(0.0, float("inf")).amax((1, 3))
    scale = scale_from_amax(amax, torch.finfo(dtype).max, out.amax_epsilon, bool(out._flags & POW2_SCALE), infinite)
    codes = cast((blocks * scale[:, None, :, None]).view_as(padded)[:rows, :columns], dtype)
    return codes, inverted(scale)


def _store_blocks(out: Quantized, x: torch.Tensor, dtype: torch.dtype, infinite: float) -> None:
    x = matrix(x)
    if out.amax is not None:
        out.amax.fill_(amax_of(x))
    for data, scales, values_ in ((out.data, out.scale_inv, x), (out.columnwise_data, out.columnwise_scale_inv, x.t())):
        if data is None:
            continue
        codes, factors = _block_codes(values_, out, dtype, infinite)
        write(data, codes)
        factors = factors.t() if out.scaling == "block_1x128" else factors
        scales.zero_()
        scales[:factors.shape[0], :factors.shape[1]] = factors


def store(out: Any, x: torch.Tensor, infinite: Optional[torch.dtype] = None) -> None:
    """Writes FP32 values. infinite: the input's dtype, whose largest value takes the place of an infinite scale of a block."""
    if not isinstance(out, Quantized):
        out.copy_(x)
        return
    dtype = (out.data if out.data is not None else out.columnwise_data).dtype
    if out.scaling == "tensor":
        _store_tensor(out, x, dtype)
    else:
        _store_blocks(out, x, dtype, torch.finfo(infinite or torch.float32).max)
