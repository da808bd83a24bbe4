"""NVFP4 as the package's recipe asks for it by default: square blocks of weights, the random Hadamard transform of column-wise copies, stochastic
rounding of gradients (arXiv 2509.25149). No op of te-fl does these; they are written with PyTorch's operations.

A code's value is c s d, where c is one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign, s the E4M3 factor of a block, and d = amax / (6 * 448) of the tensor.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from te_fl.errors import InvalidArgument, Unsupported
from te_fl.transformer_engine_torch import matrix_ops as ops

__all__ = ["nvfp4_2d_scale_transpose", "nvfp4_data_transpose"]

_BLOCK, _LARGEST_CODE, _LARGEST_FACTOR = 16, 6.0, 448.0
_FINITE = torch.finfo(torch.float32).max
_MIDPOINTS_TO_LOWER, _MIDPOINTS_TO_UPPER = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)  # a tie is the code whose last bit is 0


def is_asked(quantizer: Any) -> bool:
    """True if a quantizer asks for what no op of te-fl does."""
    return quantizer.with_rht or quantizer.with_2d_quantization or quantizer.stochastic_rounding


def check(quantizer: Any) -> None:
    if not quantizer.with_rht:
        return
    if not quantizer.with_post_rht_amax:
        raise Unsupported("NVFP4Quantizer.with_rht without with_post_rht_amax: the amax of a transformed copy is that of what was transformed; set both")
    if quantizer.with_2d_quantization:
        raise Unsupported("NVFP4Quantizer.with_rht and with_2d_quantization: a transformed copy is no transpose, as square blocks are; set one of them")


def _factors(x: torch.Tensor, amax: torch.Tensor, square: bool) -> Tuple[torch.Tensor, torch.Tensor]:
    """(the blocks' factors E4M3 [rows, columns / 16], what each element is multiplied by FP32, of the same shape). amax: FP32 [1]."""
    rows, columns = x.shape
    largest = x.abs().view(rows, columns // _BLOCK, _BLOCK).amax(-1)
    if square:
        largest = largest.view(rows // _BLOCK, _BLOCK, -1).amax(1).repeat_interleave(_BLOCK, 0)
    encode = (torch.full_like(amax, _LARGEST_FACTOR * _LARGEST_CODE) / amax).clamp(max=_FINITE)  # a number over a tensor is rounded twice
    encode = torch.where(encode == 0, 1.0, encode)
    sixth = torch.full_like(amax, _LARGEST_CODE).reciprocal()
    factors = (largest * (encode * sixth)).clamp(max=_LARGEST_FACTOR).to(torch.float8_e4m3fn)
    return factors, (factors.float() * encode.reciprocal()).reciprocal().clamp(max=_FINITE)


def _nearest(magnitudes: torch.Tensor) -> torch.Tensor:
    """The codes 0 to 7 of values from 0 to 6."""
    codes = torch.zeros(magnitudes.shape, dtype=torch.uint8, device=magnitudes.device)
    for point in _MIDPOINTS_TO_LOWER:
        codes += magnitudes > point
    for point in _MIDPOINTS_TO_UPPER:
        codes += magnitudes >= point
    return codes


def _at_random(magnitudes: torch.Tensor) -> torch.Tensor:
    """As _nearest(), of one of the two neighbours, each as often as the value is near to it."""
    step = torch.where(magnitudes < 2, 0.5, torch.where(magnitudes < 4, 1.0, 2.0))
    lower = (magnitudes / step).floor() * step
    upwards = torch.rand(magnitudes.shape, dtype=torch.float32, device=magnitudes.device) * step < magnitudes - lower
    return _nearest(lower + torch.where(upwards, step, 0.0))


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """Two codes in a byte, the first in its lower half."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def _unpacked(data: torch.Tensor) -> torch.Tensor:
    return torch.stack((data & 15, data >> 4), -1).view(data.shape[0], -1)


def overwrite(held: torch.Tensor, new: torch.Tensor, noop: Optional[torch.Tensor]) -> None:
    """Writes where no noop flag is set, which lies on the device."""
    new = new.view(held.dtype).view(held.shape)
    held.copy_(new if noop is None else torch.where(noop.view(-1)[:1].view([1] * held.dim()) != 0, held, new))


def _write_side(x: torch.Tensor, quantizer: Any, data: torch.Tensor, factors: torch.Tensor, amax: torch.Tensor, largest: torch.Tensor,
                noop: Optional[torch.Tensor]) -> None:
    """Writes one copy. x: FP32 or BF16 [rows, columns], blocks along its rows; largest: its amax, of all ranks where they share it."""
    rows, columns = x.shape
    new, each = _factors(x.float(), largest, quantizer.with_2d_quantization)
    scaled = (x.float().view(rows, -1, _BLOCK) * each.unsqueeze(-1)).clamp(-_LARGEST_CODE, _LARGEST_CODE).view(rows, columns)
    magnitudes = scaled.abs()
    codes = _at_random(magnitudes) if quantizer.stochastic_rounding else _nearest(magnitudes)
    overwrite(data, _packed(codes | scaled.signbit().to(torch.uint8) << 3), noop)
    padded = torch.zeros_like(factors)
    padded[:rows, :columns // _BLOCK] = new.view(torch.uint8)
    overwrite(factors, padded, noop)
    overwrite(amax, largest, noop)


def _transformed(x: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """x times the Hadamard matrix with random signs, 16 columns at a time, rounded to BF16."""
    if x.dtype != torch.bfloat16:
        raise InvalidArgument(f"NVFP4Quantizer.with_rht: the tensor is {x.dtype}; the random Hadamard transform is defined of bfloat16 (of the recipe: "
                              "disable_rht=True)")
    matrix = quantizer.rht_matrix.to(device=x.device, dtype=torch.float32)
    return (x.float().view(-1, _BLOCK) @ matrix).to(x.dtype).view(x.shape)


def _largest(x: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """FP32 [1]: the largest absolute value, among the ranks of the quantizer's group if it has one, every one of which calls it."""
    amax = torch.zeros(1, dtype=torch.float32, device=x.device)
    if x.numel():
        ops.compute_amax(input=x, amax=amax)
    if quantizer.with_amax_reduction:
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=quantizer._canonicalized_amax_reduction_group())
    return amax


def write(values: torch.Tensor, quantizer: Any, tensor: Any, noop: Optional[torch.Tensor]) -> None:
    """Writes the copies of an NVFP4Tensor that the quantizer's usages name. values: any dtype, seen as a matrix over its last dimension.

    Each copy is rounded by random numbers of its own, of PyTorch's generator of the device.
    """
    x = values.contiguous().view(-1, values.shape[-1]) if values.numel() else values.reshape(0, values.shape[-1])
    if quantizer.rowwise_usage:
        largest = _largest(x, quantizer)
        if x.numel():
            _write_side(x, quantizer, tensor._rowwise_data, tensor._rowwise_scale_inv, tensor._amax_rowwise, largest, noop)
    if quantizer.columnwise_usage:
        x = x.t().contiguous()
        x = _transformed(x, quantizer) if quantizer.with_rht else x
        largest = _largest(x, quantizer)
        if x.numel():
            _write_side(x, quantizer, tensor._columnwise_data, tensor._columnwise_scale_inv, tensor._amax_columnwise, largest, noop)


def nvfp4_data_transpose(input: torch.Tensor, *, out: Optional[torch.Tensor]) -> torch.Tensor:
    """The codes of [M, K] as those of [K, M]; both UINT8 with two codes in a byte of the last dimension."""
    if input.dtype != torch.uint8 or input.dim() != 2 or input.shape[0] % 2:
        raise InvalidArgument(f"nvfp4_data_transpose: input is {input.dtype} {tuple(input.shape)}; it is uint8 [M, K / 2] with an even M")
    codes = _packed(_unpacked(input).t())
    if out is None:
        return codes
    if out.shape != codes.shape:
        raise InvalidArgument(f"nvfp4_data_transpose: out has shape {tuple(out.shape)}; the result has {tuple(codes.shape)}")
    return out.copy_(codes)


def nvfp4_2d_scale_transpose(input: torch.Tensor, output: torch.Tensor, M_tiles: int, K_tiles: int) -> None:
    """Writes the factors of square blocks of [M, K], one for each row and 16 columns, as those of [K, M]; both E4M3 as UINT8, padded."""
    rows, columns = M_tiles * _BLOCK, K_tiles * _BLOCK
    if input.shape[0] < rows or input.shape[1] < K_tiles or output.shape[0] < columns or output.shape[1] < M_tiles:
        raise InvalidArgument(f"nvfp4_2d_scale_transpose: input {tuple(input.shape)}, output {tuple(output.shape)}; {M_tiles} by {K_tiles} blocks need "
                              f"{(rows, K_tiles)} and {(columns, M_tiles)}")
    output.zero_()
    output[:columns, :M_tiles] = input[:rows:_BLOCK, :K_tiles].t().repeat_interleave(_BLOCK, 0)
