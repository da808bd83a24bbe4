"""Shards of master weights: a shard's contribution to the block amaxes, and its codes with scales common to all ranks.

A shard is a vector: elements of the weight [h, w], from start_offset on.
"""

from __future__ import annotations

from typing import Any, Tuple

import torch

from te_fl import ops
from te_fl.errors import InvalidArgument, Unsupported
from te_fl.transformer_engine_torch.dtypes import fp8_dtype

__all__ = ["fp8_block_scaling_compute_partial_amax", "fp8_block_scaling_partial_cast", "mxfp8_scaling_compute_partial_amax",
           "mxfp8_scaling_partial_cast"]


class Part:
    """The range of block rows that contains the shard."""

    def __init__(self, name: str, values: torch.Tensor, h: int, w: int, start: int, block: int):
        if start < 0 or start + values.numel() > h * w:
            raise InvalidArgument(f"{name}: {values.numel()} elements from start_offset {start} on do not lie within {h} x {w}")
        if values.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise InvalidArgument(f"{name}: the part is {values.dtype}; it is float32, bfloat16 or float16")
        self.values, self.width, self.block = values.reshape(-1), w, block
        self.first = start // w // block
        self.last = max(-(-(start + values.numel()) // (w * block)), self.first)
        self.begin = start - self.first * block * w

    def absolute(self) -> torch.Tensor:
        """Magnitudes as FP32 [block rows, block, w]; 0 for elements of other ranks and for NaN."""
        rows = self.last - self.first
        placed = torch.zeros(rows * self.block * self.width, dtype=torch.float32, device=self.values.device)
        placed[self.begin:self.begin + self.values.numel()] = self.values.float().abs().nan_to_num(nan=0.0, posinf=float("inf"))
        return placed.view(rows, self.block, self.width)

    def factors(self, rows: torch.Tensor) -> torch.Tensor:
        """Selects the shard's elements from per-element scales [rows, w] of the block rows."""
        return rows.reshape(-1)[self.begin:self.begin + self.values.numel()]

    def cast(self, factors: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
        if self.values.numel():
            ops.cast_to_fp8(input=self.values.float() * factors, output=out.view(-1).view(dtype),
                            scale=torch.ones(1, dtype=torch.float32, device=out.device))


def over_width(absolute: torch.Tensor, block: int) -> torch.Tensor:
    """Reshapes the last dimension to [blocks, block], zero-padded."""
    padded = torch.nn.functional.pad(absolute, (0, -absolute.shape[-1] % block))
    return padded.view(*padded.shape[:-1], -1, block)


def _check_block(name: str, tensor: torch.Tensor, what: str, h: int, w: int, block_len: int) -> Tuple[int, int]:
    """Checks a tensor of block values; returns the numbers of blocks down and across."""
    if block_len != 128:
        raise Unsupported(f"{name}: block_len is {block_len}; it is 128")
    down, across = -(-h // 128), -(-w // 128)
    if tensor.dim() != 2 or tensor.dtype != torch.float32 or tensor.shape[0] < down or tensor.shape[1] < across:
        raise InvalidArgument(f"{name}: {what} is {tensor.dtype} {tuple(tensor.shape)}; a weight of {h} x {w} has float32 ({down}, {across}) or more")
    return down, across


def fp8_block_scaling_compute_partial_amax(tensor: torch.Tensor, amax: torch.Tensor, h: int, w: int, start_offset: int, block_len: int = 128) -> None:
    """Writes to amax, FP32 [blocks down, blocks across or more], the shard's amax in each 128 x 128 block; 0 if the shard has no element there."""
    name = "fp8_block_scaling_compute_partial_amax"
    down, across = _check_block(name, amax, "amax", h, w, block_len)
    part = Part(name, tensor, h, w, start_offset, 128)
    amax[:down, :across] = 0
    if tensor.numel():
        amax[part.first:part.last, :across] = over_width(part.absolute(), 128).amax((1, 3))


def fp8_block_scaling_partial_cast(inp: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, h: int, w: int, start_offset: int, block_len: int,
                                   out_dtype: Any) -> None:
    """Writes the shard's codes to out, one byte per element, with the given block scales."""
    name = "fp8_block_scaling_partial_cast"
    _, across = _check_block(name, scale, "scale", h, w, block_len)
    part = Part(name, inp, h, w, start_offset, 128)
    _check_out(name, "out", out, inp)
    rows = scale[part.first:part.last, :across].repeat_interleave(128, 1)[:, :w].repeat_interleave(128, 0)
    part.cast(part.factors(rows), out, fp8_dtype(out_dtype))


def _check_out(name: str, what: str, out: torch.Tensor, inp: torch.Tensor) -> None:
    if out.numel() != inp.numel() or out.dtype.itemsize != 1 or not out.is_contiguous():
        raise InvalidArgument(f"{name}: {what} has {out.numel()} elements of {out.dtype}{'' if out.is_contiguous() else ', not contiguous'}; "
                              f"the part has {inp.numel()}, and its codes are as many bytes")


def _check_mxfp8(name: str, rows: int, cols: int, row_wise: torch.Tensor, column_wise: torch.Tensor, *dtypes: torch.dtype) -> None:
    if rows % 32 or cols % 32:
        raise InvalidArgument(f"{name}: the weight is {rows} x {cols}; MXFP8 takes multiples of 32")
    for what, tensor, least in (("row-wise", row_wise, (rows, cols // 32)), ("column-wise", column_wise, (rows // 32, cols))):
        if tensor.dim() != 2 or tensor.shape[0] < least[0] or tensor.shape[1] < least[1] or tensor.dtype not in dtypes:
            raise InvalidArgument(f"{name}: the {what} factors or amaxes are {tensor.dtype} {tuple(tensor.shape)}; a weight of {rows} x {cols} has "
                                  f"{dtypes[0]} {least} or more")


def mxfp8_scaling_compute_partial_amax(input: torch.Tensor, amax_rowwise: torch.Tensor, amax_colwise: torch.Tensor, rows: int, cols: int,
                                       start_offset: int) -> None:
    """Writes the shard's amaxes for blocks of 1 x 32 and of 32 x 1, in the shard's dtype and in the layout of the scales; 0 if the shard has no
    element there.
    """
    name = "mxfp8_scaling_compute_partial_amax"
    _check_mxfp8(name, rows, cols, amax_rowwise, amax_colwise, input.dtype)
    part = Part(name, input, rows, cols, start_offset, 32)
    amax_rowwise.zero_()
    amax_colwise.zero_()
    if input.numel():
        absolute = part.absolute()
        amax_rowwise[part.first * 32:part.last * 32, :cols // 32] = over_width(absolute, 32).amax(-1).view(-1, cols // 32)
        amax_colwise[part.first:part.last, :cols] = absolute.amax(1)


def _power_of_two(bits: torch.Tensor) -> torch.Tensor:
    """The FP32 multiplier for an E8M0 scale with these bits: the scale's inverse."""
    exponent = 254 - bits.to(torch.int32)
    inverse = torch.where(exponent == 0, 0x400000, exponent << 23)  # the inverse of 2^127 is subnormal
    return torch.where(exponent < 0, 0x7FC00000, inverse).view(torch.float32)


def mxfp8_scaling_partial_cast(input: torch.Tensor, output_rowwise: torch.Tensor, output_colwise: torch.Tensor, scale_inv_rowwise: torch.Tensor,
                               scale_inv_colwise: torch.Tensor, rows: int, cols: int, start_offset: int) -> None:
    """Writes the shard's E4M3 codes, row-wise and column-wise, one byte per element, with the scales of the unsharded weight."""
    name = "mxfp8_scaling_partial_cast"
    _check_mxfp8(name, rows, cols, scale_inv_rowwise, scale_inv_colwise, torch.uint8, torch.float8_e8m0fnu)
    part = Part(name, input, rows, cols, start_offset, 32)
    for what, out in (("output_rowwise", output_rowwise), ("output_colwise", output_colwise)):
        _check_out(name, what, out, input)
    row_wise = scale_inv_rowwise.view(torch.uint8)[part.first * 32:part.last * 32, :cols // 32].repeat_interleave(32, 1)
    column_wise = scale_inv_colwise.view(torch.uint8)[part.first:part.last, :cols].repeat_interleave(32, 0)
    part.cast(_power_of_two(part.factors(row_wise)), output_rowwise, torch.float8_e4m3fn)
    part.cast(_power_of_two(part.factors(column_wise)), output_colwise, torch.float8_e4m3fn)
