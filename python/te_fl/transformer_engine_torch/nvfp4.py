"""NVFP4 features for which te-fl has no op, implemented with PyTorch's ops. Transformer Engine's recipe uses these by default (arXiv 2509.25149):
square blocks of weights, the random Hadamard transform of column-wise copies, and stochastic rounding of gradients. Optional ones are an amax for
each row, and 4over6: each block's largest value is mapped to the code 4 or 6, whichever gives the smaller error.

A code's value is c s d. c is 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with a sign, s is the block's E4M3 scale, and d = amax / (6 * 448) of the tensor or the
row. Under 4over6, 256 may replace 448, to leave headroom for the scales of blocks that use the code 4.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from te_fl.errors import InvalidArgument, Unsupported
from te_fl.transformer_engine_torch import matrix_ops as ops
from te_fl.transformer_engine_torch.swizzle import plain_scales

__all__ = ["nvfp4_2d_scale_transpose", "nvfp4_data_transpose"]

_BLOCK, _LARGEST_CODE, _LARGEST_FACTOR = 16, 6.0, 448.0
_FINITE = torch.finfo(torch.float32).max
_MIDPOINTS_TO_LOWER, _MIDPOINTS_TO_UPPER = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)  # ties go to the code whose last bit is 0


def by_rows(quantizer: Any) -> bool:
    return getattr(quantizer, "row_scaled_nvfp4", False)  # exists since version 2.17, as does the attribute that _four_over_six() reads


def _four_over_six(quantizer: Any) -> bool:
    return getattr(quantizer, "nvfp4_use_4over6", False)


def needs_missing_feature(quantizer: Any) -> bool:
    """True if a quantizer needs a feature that no te-fl op has."""
    return (quantizer.with_rht or quantizer.with_2d_quantization or quantizer.stochastic_rounding or by_rows(quantizer)
            or _four_over_six(quantizer))


def settings(quantizer: Any) -> dict:
    """The quantizer's settings that its tensors store, by constructor argument; empty for the plain format."""
    if not by_rows(quantizer) and not _four_over_six(quantizer):
        return {}
    return {"row_scaled_nvfp4": quantizer.row_scaled_nvfp4, "nvfp4_use_4over6": quantizer.nvfp4_use_4over6, "nvfp4_e4m3_max": quantizer.nvfp4_e4m3_max}


def is_plain(tensor: Any) -> bool:
    """True for a tensor that te-fl's ops can read: one amax, block scales up to 448."""
    return not getattr(tensor, "_row_scaled_nvfp4", False) and getattr(tensor, "_nvfp4_e4m3_max", _LARGEST_FACTOR) == _LARGEST_FACTOR


def check(quantizer: Any) -> None:
    for asked, name, excluded in ((by_rows, "row_scaled_nvfp4", "with_rht with_2d_quantization stochastic_rounding with_amax_reduction"),
                                  (_four_over_six, "nvfp4_use_4over6", "with_rht stochastic_rounding")):
        for other in excluded.split() if asked(quantizer) else ():
            if getattr(quantizer, other):
                raise InvalidArgument(f"NVFP4Quantizer.{name} and {other}: the format does not define both; set one of them")
    if by_rows(quantizer) and not quantizer.rowwise_usage:
        raise InvalidArgument("NVFP4Quantizer.row_scaled_nvfp4 without row-wise usage, which it is of; set_usage(rowwise=True)")
    if not quantizer.with_rht:
        return
    if not quantizer.with_post_rht_amax:
        raise Unsupported("NVFP4Quantizer.with_rht without with_post_rht_amax: the amax of a transformed copy is that of what was transformed; set both")
    if quantizer.with_2d_quantization:
        raise Unsupported("NVFP4Quantizer.with_rht and with_2d_quantization: a transformed copy is no transpose, as square blocks are; set one of them")


def _sizes(x: torch.Tensor) -> torch.Tensor:
    return x.abs().nan_to_num(nan=0.0, posinf=float("inf"))


def _largest_of_blocks(x: torch.Tensor, square: bool) -> torch.Tensor:
    """The largest magnitude of each block, [rows, columns / 16]; square blocks are repeated for each row. NaNs are ignored."""
    rows, columns = x.shape
    largest = _sizes(x).view(rows, columns // _BLOCK, _BLOCK).amax(-1)
    return largest.view(rows // _BLOCK, _BLOCK, -1).amax(1).repeat_interleave(_BLOCK, 0) if square else largest


def _over(dividend: float, divisor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(divisor, dividend) / divisor  # PyTorch rounds (number / tensor) twice


def encode(amax: torch.Tensor, largest_factor: float) -> torch.Tensor:
    """The multiplier applied to values before block scales are computed; [n, 1] for [n] amaxes, of the tensor or of each row."""
    multiplier = _over(largest_factor * _LARGEST_CODE, amax.view(-1, 1)).clamp(max=_FINITE)
    return torch.where(multiplier == 0, 1.0, multiplier)


def _as_factors(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(max=_LARGEST_FACTOR).to(torch.float8_e4m3fn)


def _scaled(x: torch.Tensor, factors: torch.Tensor, encode: torch.Tensor) -> torch.Tensor:
    """x divided by its blocks' scales, [rows, columns], from -6 to 6."""
    each = (factors.float() * encode.reciprocal()).reciprocal().clamp(max=_FINITE)
    return (x.view(*factors.shape, _BLOCK) * each.unsqueeze(-1)).clamp(-_LARGEST_CODE, _LARGEST_CODE).view(x.shape)


def _nearest(magnitudes: torch.Tensor) -> torch.Tensor:
    """Rounds values from 0 to 6 to the nearest codes 0 to 7."""
    codes = torch.zeros(magnitudes.shape, dtype=torch.uint8, device=magnitudes.device)
    for point in _MIDPOINTS_TO_LOWER:
        codes += magnitudes > point
    for point in _MIDPOINTS_TO_UPPER:
        codes += magnitudes >= point
    return codes


def _at_random(magnitudes: torch.Tensor) -> torch.Tensor:
    """As _nearest(), with stochastic rounding to one of the two neighbouring codes."""
    step = torch.where(magnitudes < 2, 0.5, torch.where(magnitudes < 4, 1.0, 2.0))
    lower = (magnitudes / step).floor() * step
    upwards = torch.rand(magnitudes.shape, dtype=torch.float32, device=magnitudes.device) * step < magnitudes - lower
    return _nearest(lower + torch.where(upwards, step, 0.0))


def encode_codes(scaled: torch.Tensor, at_random: bool) -> torch.Tensor:
    """UINT8 codes of values from -6 to 6; NaN becomes 6."""
    scaled = torch.where(scaled.isnan(), _LARGEST_CODE, scaled)
    magnitudes = scaled.abs()
    return (_at_random(magnitudes) if at_random else _nearest(magnitudes)) | scaled.signbit().to(torch.uint8) << 3


def _decoded(codes: torch.Tensor) -> torch.Tensor:
    number = (codes & 7).float()  # computed, not looked up: copying a table to the device would synchronise, and fail during graph capture
    magnitudes = torch.where(number < 4, number / 2, torch.where(number < 7, number - 2, _LARGEST_CODE))
    return torch.where(codes > 7, -magnitudes, magnitudes)


def _error(x: torch.Tensor, codes: torch.Tensor, factors: torch.Tensor, amax: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """Returns for each block the sum of its absolute or squared errors, [rows, blocks], added in the order of NVIDIA's kernel."""
    value = _decoded(codes).view(*factors.shape, _BLOCK) * factors.float().unsqueeze(-1) * amax.view(-1, 1, 1)
    difference = value / torch.full_like(value, _LARGEST_CODE * quantizer.nvfp4_e4m3_max) - x.view(value.shape)
    errors = difference * difference if quantizer.nvfp4_4over6_err_mode == "MSE" else difference.abs()
    total = torch.zeros_like(errors[..., 0])
    for error in errors.unbind(-1):
        total = total + error
    if not quantizer.with_2d_quantization:
        return total
    total = total.view(-1, _BLOCK, total.shape[1])
    while total.shape[1] > 1:
        lower, upper = total.chunk(2, 1)
        total = lower + upper
    return total.squeeze(1).repeat_interleave(_BLOCK, 0)


def _four_or_six(x: torch.Tensor, largest: torch.Tensor, encode: torch.Tensor, amax: torch.Tensor, quantizer: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns (codes, scales) under 4over6. largest: the largest magnitude of each block."""
    base = largest / torch.full_like(largest, _LARGEST_CODE) * encode
    found = []
    for factors in (_as_factors(base * (_LARGEST_CODE / 4)), _as_factors(base)):
        codes = encode_codes(_scaled(x, factors, encode), False)
        found.append((codes, factors, _error(x, codes, factors, amax, quantizer)))
    (codes4, factors4, error4), (codes6, factors6, error6) = found
    four = error4 < error6
    return torch.where(four.repeat_interleave(_BLOCK, 1), codes4, codes6), torch.where(four, factors4.float(), factors6.float()).to(factors6.dtype)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Packs two codes into a byte, the first in the lower half."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def _unpacked(data: torch.Tensor) -> torch.Tensor:
    return torch.stack((data & 15, data >> 4), -1).view(data.shape[0], -1)


def overwrite(held: torch.Tensor, new: torch.Tensor, noop: Optional[torch.Tensor]) -> None:
    """Overwrites `held`, unless the noop flag, in device memory, is set."""
    new = new.view(held.dtype).view(held.shape)
    held.copy_(new if noop is None else torch.where(noop.view(-1)[:1].view([1] * held.dim()) != 0, held, new))


def _write_side(x: torch.Tensor, quantizer: Any, data: torch.Tensor, factors: torch.Tensor, amax: torch.Tensor, largest: torch.Tensor,
                noop: Optional[torch.Tensor]) -> None:
    """Writes the row-wise or the column-wise data of a tensor. x: any dtype [rows, columns], with blocks along its rows. largest: the amax of x or of
    its rows, reduced over the ranks if they share it.
    """
    (rows, columns), x = x.shape, x.float()
    if x.numel() == 0:  # with a contraction of length 0, Transformer Engine still multiplies by the amax
        return overwrite(amax, largest, noop)
    blocks = _largest_of_blocks(x, quantizer.with_2d_quantization)
    if _four_over_six(quantizer):
        codes, new = _four_or_six(x, blocks, encode(largest, quantizer.nvfp4_e4m3_max), largest, quantizer)
    else:
        multiplier = encode(largest, _LARGEST_FACTOR)
        new = _as_factors(blocks * (multiplier * torch.full_like(multiplier, _LARGEST_CODE).reciprocal()))
        codes = encode_codes(_scaled(x, new, multiplier), quantizer.stochastic_rounding)
    overwrite(data, packed(codes), noop)
    padded = torch.zeros_like(factors)
    padded[:rows, :columns // _BLOCK] = new.view(torch.uint8)
    overwrite(factors, padded, noop)
    overwrite(amax, largest, noop)


def _transformed(x: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """x times the Hadamard matrix with random signs, in groups of 16 columns, rounded to BF16."""
    if x.dtype != torch.bfloat16:
        raise InvalidArgument(f"NVFP4Quantizer.with_rht: the tensor is {x.dtype}; the random Hadamard transform is defined of bfloat16 (of the recipe: "
                              "disable_rht=True)")
    matrix = quantizer.rht_matrix.to(device=x.device, dtype=torch.float32)
    return (x.float().view(-1, _BLOCK) @ matrix).to(x.dtype).view(x.shape)


def _largest(x: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """Returns the amax, FP32 [1], or with row scaling the amax of each row, FP32 [rows]. If the quantizer has a group, the amax is reduced over its
    ranks, and every rank must call this function.
    """
    if by_rows(quantizer):
        return _sizes(x.float()).amax(1) if x.numel() else torch.zeros(x.shape[0], dtype=torch.float32, device=x.device)
    amax = torch.zeros(1, dtype=torch.float32, device=x.device)
    if x.numel():
        ops.compute_amax(input=x, amax=amax)
    if quantizer.with_amax_reduction:
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=quantizer._canonicalized_amax_reduction_group())
    return amax


def write(values: torch.Tensor, quantizer: Any, tensor: Any, noop: Optional[torch.Tensor]) -> None:
    """Writes the row-wise and column-wise data of an NVFP4Tensor that the quantizer's usages select. values: any dtype, as a matrix over its last
    dimension.

    Row-wise and column-wise data are rounded with different random numbers, from PyTorch's generator of the device.
    """
    x = values.contiguous().view(-1, values.shape[-1]) if values.numel() else values.reshape(0, values.shape[-1])
    if quantizer.rowwise_usage:
        _write_side(x, quantizer, tensor._rowwise_data, tensor._rowwise_scale_inv, tensor._amax_rowwise, _largest(x, quantizer), noop)
    if quantizer.columnwise_usage:
        x = x.t().contiguous()
        x = _transformed(x, quantizer) if quantizer.with_rht else x
        _write_side(x, quantizer, tensor._columnwise_data, tensor._columnwise_scale_inv, tensor._amax_columnwise, _largest(x, quantizer), noop)


def values(tensor: Any, columnwise: bool) -> torch.Tensor:
    """Dequantises an NVFP4 tensor of any variant to FP32 [rows, columns]. Reads the column-wise data if `columnwise` and they are present, or if
    there are no row-wise data; otherwise reads the row-wise data.
    """
    columnwise = tensor._rowwise_data is None or (columnwise and tensor._columnwise_data is not None)
    data, amax = (tensor._columnwise_data, tensor._amax_columnwise) if columnwise else (tensor._rowwise_data, tensor._amax_rowwise)
    codes = _unpacked(data.reshape(-1, data.shape[-1]))
    rows, blocks = codes.shape[0], codes.shape[1] // _BLOCK
    factors = plain_scales(tensor)[columnwise].view(torch.float8_e4m3fn)[:rows, :blocks].float()
    amax, unit = amax.view(-1, 1), torch.full_like(amax[:1], _LARGEST_CODE * tensor._nvfp4_e4m3_max).reciprocal()
    each = factors * amax * unit
    # NVIDIA's order of multiplication, unless the product overflows FP32. For an infinite amax, encode() is 1.
    each = torch.where(each.isfinite(), each, factors * torch.where(amax.isfinite(), amax * unit, 1.0))
    found = (_decoded(codes).view(rows, blocks, _BLOCK) * each.unsqueeze(-1)).view(codes.shape)
    return found.t().contiguous() if columnwise else found


def nvfp4_data_transpose(input: torch.Tensor, *, out: Optional[torch.Tensor]) -> torch.Tensor:
    """Transposes codes of [M, K] to [K, M]; both are UINT8 with two codes per byte along the last dimension."""
    if input.dtype != torch.uint8 or input.dim() != 2 or input.shape[0] % 2:
        raise InvalidArgument(f"nvfp4_data_transpose: input is {input.dtype} {tuple(input.shape)}; it is uint8 [M, K / 2] with an even M")
    codes = packed(_unpacked(input).t())
    if out is None:
        return codes
    if out.shape != codes.shape or out.dtype != codes.dtype:
        raise InvalidArgument(f"nvfp4_data_transpose: out is {out.dtype} {tuple(out.shape)}; the result is {codes.dtype} {tuple(codes.shape)}")
    return out.copy_(codes)


def nvfp4_2d_scale_transpose(input: torch.Tensor, output: torch.Tensor, M_tiles: int, K_tiles: int) -> None:
    """Transposes the scales of square blocks of [M, K], stored for each row and 16 columns, to those of [K, M]; both are padded E4M3 as UINT8."""
    rows, columns = M_tiles * _BLOCK, K_tiles * _BLOCK
    if not input.dtype == output.dtype == torch.uint8:
        raise InvalidArgument(f"nvfp4_2d_scale_transpose: input and output are {input.dtype} and {output.dtype}; they are uint8, the bits of E4M3")
    if input.shape[0] < rows or input.shape[1] < K_tiles or output.shape[0] < columns or output.shape[1] < M_tiles:
        raise InvalidArgument(f"nvfp4_2d_scale_transpose: input {tuple(input.shape)}, output {tuple(output.shape)}; {M_tiles} by {K_tiles} blocks need "
                              f"{(rows, K_tiles)} and {(columns, M_tiles)}")
    turned = input[:rows:_BLOCK, :K_tiles].t().repeat_interleave(_BLOCK, 0)  # a copy, since output may be input
    output.zero_()
    output[:columns, :M_tiles] = turned
