"""Reads op arguments as FP32 tensors, and writes FP32 results to outputs of any dtype and scaling mode, as docs/numerics.md defines them."""

from __future__ import annotations

import math
from typing import Any, Optional, Tuple

import torch

from te_fl.tensors import Quantized

COMPUTE_SCALE, POW2_SCALE = 1, 2  # te_fl_quant.flags
FLT_MAX = torch.finfo(torch.float32).max
# Extents of a block of the row-wise copy, by scaling mode. The column-wise copy is laid out as the row-wise copy of the transposed matrix, which MXFP8
# stores transposed.
_BLOCKS = {"block_1x128": (1, 128), "block_128x128": (128, 128), "mxfp8": (1, 32), "nvfp4": (1, 16)}
SCALINGS = ("none", "tensor", *_BLOCKS)
_NVFP4_MAX = 6.0 * 448.0  # the largest code times the largest scale of a block


def matrix(x: torch.Tensor) -> torch.Tensor:
    """The tensor as a matrix of rows of its last dimension."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) if x.dim() else x.reshape(1, 1)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Views one-byte elements as integers, for operations that PyTorch lacks for FP8. Other tensors are returned unchanged."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _laid_out(part: torch.Tensor, scaling: str, columnwise: bool) -> torch.Tensor:
    """The scales of a copy as [blocks of rows, blocks of columns] of the matrix whose rows the copy holds; the padding follows."""
    return part.t() if scaling == "block_1x128" or (scaling == "mxfp8" and columnwise) else part


def _factor(scales: torch.Tensor) -> torch.Tensor:
    """Scales in FP32. An E8M0 scale is an exponent of 2."""
    if scales.element_size() != 1 or scales.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return scales.float()
    return _power(scales.view(torch.uint8))


def _power(exponents: torch.Tensor) -> torch.Tensor:
    """2^(exponent - 127) in FP32; NaN for 255."""
    e = exponents.int()
    return torch.where(e == 255, 0x7FC00000, torch.where(e == 0, 0x00400000, e << 23)).view(torch.float32)


def _decoded(codes: torch.Tensor) -> torch.Tensor:
    """The values of codes in FP32. FP4 codes are in pairs in a byte, the first in the lower half."""
    if codes.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return codes.float()
    pairs = codes.view(torch.uint8)
    c = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).int()
    absolute = torch.where((c & 7) < 2, (c & 7) * 0.5, (((c & 7) << 22) + 0x3F000000).view(torch.float32))
    return torch.where(c >= 8, -absolute, absolute)


def values(t: Any, columnwise: bool = False) -> torch.Tensor:
    """The values of an argument in FP32. columnwise: of a quantised tensor's column-wise copy, if it has one; else of the row-wise copy if it has that."""
    if not isinstance(t, Quantized):
        return t.float()
    columnwise = t.columnwise_data is not None and (columnwise or t.data is None)
    codes = _decoded(t.columnwise_data if columnwise else t.data)
    if t.scaling == "tensor":
        x = codes * (t.columnwise_scale_inv if t.scale_inv is None else t.scale_inv)
    elif codes.numel() == 0:
        return codes.reshape(t.shape)
    else:
        codes = matrix(codes)
        codes = codes.t() if columnwise and t.scaling == "mxfp8" else codes
        high, wide = _BLOCKS[t.scaling]
        scales = _factor(_laid_out(t.columnwise_scale_inv if columnwise else t.scale_inv, t.scaling, columnwise))
        x = codes * scales.repeat_interleave(high, 0)[:codes.shape[0]].repeat_interleave(wide, 1)[:, :codes.shape[1]]
        x = _second_level(t, x, columnwise) if t.scaling == "nvfp4" else x
    return x.t().reshape(t.shape) if columnwise else x.reshape(t.shape)


def _second_level(t: Quantized, x: torch.Tensor, columnwise: bool) -> torch.Tensor:
    """x times the tensor's amax / (6 * 448), rounded once."""
    amax = t.columnwise_amax if columnwise and t.columnwise_amax is not None else t.amax
    return torch.where((amax > 0) & amax.isfinite(), (x.double() * amax.double() / _NVFP4_MAX).float(), x)


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
    out.view(torch.uint8).copy_(bits(codes).reshape(out.shape))


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
        write(out.columnwise_data, matrix(bits(codes)).t())
    for inverse in (out.scale_inv, out.columnwise_scale_inv):
        if inverse is not None:
            inverse.fill_(quotient(1.0, scale))


def _mxfp8_scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """The E8M0 code of amax / largest, rounded up; uint8."""
    quotients = (amax / torch.full_like(amax, largest)).view(torch.int32)
    exponent, rest = quotients >> 23, quotients & 0x7FFFFF
    return (exponent + (rest > torch.where(exponent == 0, 0x400000, 0))).clamp_max(254).to(torch.uint8)


def _cast_fp4(x: torch.Tensor) -> torch.Tensor:
    """E2M1 codes of FP32 values, uint8: rounded to nearest even, saturated; NaN becomes 6."""
    a = x.abs()
    code = sum(((a > limit) if even else (a >= limit)).to(torch.uint8)  # a tie goes to the neighbour with an even code
               for limit, even in ((0.25, True), (0.75, False), (1.25, True), (1.75, False), (2.5, True), (3.5, False), (5.0, True)))
    return torch.where(x.isnan(), 7, code | (x.signbit().to(torch.uint8) << 3)).to(torch.uint8)


def _blocks_quantised(blocks: torch.Tensor, amax: torch.Tensor, out: Quantized, dtype: torch.dtype, infinite: float,
                      second: Optional[torch.Tensor]) -> Tuple[torch.Tensor, torch.Tensor]:
    """Codes of blocks, and their scale_inv. amax: of each block, and with its extents 1. second: NVFP4's scale of the tensor."""
    if out.scaling == "mxfp8":
        code = _mxfp8_scale(amax.clamp_min(out.amax_epsilon), torch.finfo(dtype).max)
        return cast(blocks * _power(254 - code), dtype), code
    if second is not None:
        code = cast((amax * (second * (1 / 6))).clamp_max(448.0), torch.float8_e4m3fn)
        units = code.float()
        factor = quotient(1.0, units * quotient(1.0, second)).clamp_max(FLT_MAX)
        return _cast_fp4(blocks * torch.where(units == 0, 0.0, factor)), code
    scale = scale_from_amax(amax, torch.finfo(dtype).max, out.amax_epsilon, bool(out._flags & POW2_SCALE), infinite)
    return cast(blocks * scale, dtype), quotient(1.0, scale)


def _store_copy(data: torch.Tensor, scales: torch.Tensor, x: torch.Tensor, out: Quantized, columnwise: bool, infinite: float,
                second: Optional[torch.Tensor]) -> None:
    """Writes a copy of the matrix whose rows it holds."""
    (high, wide), (rows, columns) = _BLOCKS[out.scaling], x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % wide, 0, -rows % high))
    blocks = padded.reshape(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    amax = blocks.abs().nan_to_num_(0.0, float("inf")).amax((1, 3), keepdim=True)
    codes, factors = _blocks_quantised(blocks, amax, out, data.dtype, infinite, second)
    codes = bits(codes).reshape(padded.shape)[:rows, :columns]
    if second is not None:
        codes = codes[:, ::2] | (codes[:, 1::2] << 4)
    write(data, codes.t() if columnwise and out.scaling == "mxfp8" else codes)
    place = bits(_laid_out(scales, out.scaling, columnwise))
    place.zero_()
    place[:factors.shape[0], :factors.shape[2]] = bits(factors)[:, 0, :, 0]


def _store_blocks(out: Quantized, x: torch.Tensor, infinite: float) -> None:
    x = matrix(x)
    second = None
    if out.scaling == "nvfp4" or out.amax is not None:
        amax = amax_of(x)
        if out.scaling == "nvfp4":
            amax = amax.clamp_min(out.amax_epsilon)
            second = scale_from_amax(amax, _NVFP4_MAX, 0.0, False, FLT_MAX)
        for kept in (out.amax, out.columnwise_amax):
            if kept is not None:
                kept.fill_(amax)
    if out.data is not None:
        _store_copy(out.data, out.scale_inv, x, out, False, infinite, second)
    if out.columnwise_data is not None:
        _store_copy(out.columnwise_data, out.columnwise_scale_inv, x.t(), out, True, infinite, second)


def store(out: Any, x: torch.Tensor, infinite: Optional[torch.dtype] = None) -> None:
    """Writes FP32 values. infinite: the input's dtype, whose largest value takes the place of an infinite scale of a block."""
    if not isinstance(out, Quantized):
        out.copy_(x)
        return
    if out.scaling == "tensor":
        _store_tensor(out, x, (out.data if out.data is not None else out.columnwise_data).dtype)
    else:
        _store_blocks(out, x, torch.finfo(infinite or torch.float32).max)
