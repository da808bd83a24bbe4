"""NVFP4 features of Transformer Engine's quantizers for which te-fl has no op, by te_fl.torch_nvfp4."""

from __future__ import annotations

from typing import Any, Optional

import torch

from te_fl.errors import InvalidArgument, Unsupported
from te_fl.common.recipe import NVFP4Rules
from te_fl.torch_nvfp4 import BLOCK, LARGEST_FACTOR, encode as encode, encode_codes as encode_codes, packed, quantised, sizes, transformed, unpacked
from te_fl.torch_nvfp4 import values as decoded_values
from te_fl.transformer_engine_torch import matrix_ops as ops
from te_fl.transformer_engine_torch.swizzle import plain_scales

__all__ = ["nvfp4_2d_scale_transpose", "nvfp4_data_transpose"]


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
    return not getattr(tensor, "_row_scaled_nvfp4", False) and getattr(tensor, "_nvfp4_e4m3_max", LARGEST_FACTOR) == LARGEST_FACTOR


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


def rules_of(quantizer: Any) -> NVFP4Rules:
    adaptive = _four_over_six(quantizer)
    return NVFP4Rules(quantizer.with_rht, quantizer.stochastic_rounding, quantizer.with_2d_quantization, by_rows(quantizer), adaptive,
                      quantizer.nvfp4_e4m3_max if adaptive else LARGEST_FACTOR, adaptive and quantizer.nvfp4_4over6_err_mode == "MSE")


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
    codes, new = quantised(x, largest, rules_of(quantizer))
    overwrite(data, packed(codes), noop)
    padded = torch.zeros_like(factors)
    padded[:rows, :columns // BLOCK] = new.view(torch.uint8)
    overwrite(factors, padded, noop)
    overwrite(amax, largest, noop)


def _transformed(x: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """x times the Hadamard matrix with random signs, in groups of 16 columns, rounded to BF16."""
    if x.dtype != torch.bfloat16:
        raise InvalidArgument(f"NVFP4Quantizer.with_rht: the tensor is {x.dtype}; the random Hadamard transform is defined of bfloat16 (of the recipe: "
                              "disable_rht=True)")
    return transformed(x, quantizer.rht_matrix.to(device=x.device, dtype=torch.float32))


def _largest(x: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """Returns the amax, FP32 [1], or with row scaling the amax of each row, FP32 [rows]. If the quantizer has a group, the amax is reduced over its
    ranks, and every rank must call this function.
    """
    if by_rows(quantizer):
        return sizes(x.float()).amax(1) if x.numel() else torch.zeros(x.shape[0], dtype=torch.float32, device=x.device)
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
    codes = unpacked(data.reshape(-1, data.shape[-1]))
    rows, blocks = codes.shape[0], codes.shape[1] // BLOCK
    factors = plain_scales(tensor)[columnwise].view(torch.float8_e4m3fn)[:rows, :blocks]
    found = decoded_values(codes, factors, amax, tensor._nvfp4_e4m3_max)
    return found.t().contiguous() if columnwise else found


def nvfp4_data_transpose(input: torch.Tensor, *, out: Optional[torch.Tensor]) -> torch.Tensor:
    """Transposes codes of [M, K] to [K, M]; both are UINT8 with two codes per byte along the last dimension."""
    if input.dtype != torch.uint8 or input.dim() != 2 or input.shape[0] % 2:
        raise InvalidArgument(f"nvfp4_data_transpose: input is {input.dtype} {tuple(input.shape)}; it is uint8 [M, K / 2] with an even M")
    codes = packed(unpacked(input).t())
    if out is None:
        return codes
    if out.shape != codes.shape or out.dtype != codes.dtype:
        raise InvalidArgument(f"nvfp4_data_transpose: out is {out.dtype} {tuple(out.shape)}; the result is {codes.dtype} {tuple(codes.shape)}")
    return out.copy_(codes)


def nvfp4_2d_scale_transpose(input: torch.Tensor, output: torch.Tensor, M_tiles: int, K_tiles: int) -> None:
    """Transposes the scales of square blocks of [M, K], stored for each row and 16 columns, to those of [K, M]; both are padded E4M3 as UINT8."""
    rows, columns = M_tiles * BLOCK, K_tiles * BLOCK
    if not input.dtype == output.dtype == torch.uint8:
        raise InvalidArgument(f"nvfp4_2d_scale_transpose: input and output are {input.dtype} and {output.dtype}; they are uint8, the bits of E4M3")
    if input.shape[0] < rows or input.shape[1] < K_tiles or output.shape[0] < columns or output.shape[1] < M_tiles:
        raise InvalidArgument(f"nvfp4_2d_scale_transpose: input {tuple(input.shape)}, output {tuple(output.shape)}; {M_tiles} by {K_tiles} blocks need "
                              f"{(rows, K_tiles)} and {(columns, M_tiles)}")
    turned = input[:rows:BLOCK, :K_tiles].t().repeat_interleave(BLOCK, 0)  # a copy, since output may be input
    output.zero_()
    output[:columns, :M_tiles] = turned
