"""Shards of master weights with NVFP4's square blocks of 16 x 16: the shard's contribution to the block amaxes, the block scales computed from
reduced amaxes, and the shard's codes. A shard is a vector: elements of the weight [h, w], from start_offset on.

As in NVIDIA's kernels, these scales are rounded in another order than in nvfp4.py, which quantises whole tensors: a block's amax is divided by 6
first.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch

from te_fl.errors import InvalidArgument, Unsupported
from te_fl.transformer_engine_torch.nvfp4 import encode_codes, encode, nvfp4_2d_scale_transpose, nvfp4_data_transpose, packed
from te_fl.transformer_engine_torch.partial_casts import Part, over_width

__all__ = ["nvfp4_2d_compute_partial_amax", "nvfp4_2d_multi_tensor_transpose", "nvfp4_2d_partial_cast", "nvfp4_compute_global_scale",
           "nvfp4_compute_per_block_scale", "nvfp4_expand_scale_to_fp8", "nvfp4_fused_scale", "nvfp4_multi_tensor_2d_partial_cast",
           "nvfp4_multi_tensor_compute_partial_amax", "nvfp4_multi_tensor_fused_scale"]

_BLOCK, _LARGEST_CODE, _LARGEST_FACTOR = 16, 6.0, 448.0
_FINITE = torch.finfo(torch.float32).max


def _check_length(name: str, block_len: int) -> None:
    if block_len != _BLOCK:
        raise Unsupported(f"{name}: block_len is {block_len}; it is {_BLOCK}")


def _check(name: str, what: str, tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        raise InvalidArgument(f"{name}: {what} is {tensor.dtype} {tuple(tensor.shape)}; it is {dtype} {tuple(shape)}")


def _blocks(h: int, w: int) -> tuple:
    return -(-h // _BLOCK), -(-w // _BLOCK)


def _each(name: str, call: Any, lists: Sequence[Sequence[Any]], *rest: Any) -> None:
    if len({len(each) for each in lists}) > 1:
        raise InvalidArgument(f"{name}: the lists have {', '.join(str(len(each)) for each in lists)} entries; give one for each weight")
    for arguments in zip(*lists):
        call(*arguments, *rest)


@torch.no_grad()
def nvfp4_2d_compute_partial_amax(tensor: torch.Tensor, amax: torch.Tensor, h: int, w: int, start_offset: int, block_len: int = 16) -> None:
    """Writes to amax, FP32 [blocks down, blocks across], the shard's amax in each block; 0 if the shard has no element there."""
    name = "nvfp4_2d_compute_partial_amax"
    _check_length(name, block_len)
    _check(name, "amax", amax, _blocks(h, w))
    part = Part(name, tensor, h, w, start_offset, _BLOCK)
    amax.zero_()
    if tensor.numel():
        amax[part.first:part.last] = over_width(part.absolute(), _BLOCK).amax((1, 3))


@torch.no_grad()
def _amaxes(weight: torch.Tensor, amax: torch.Tensor, whole: torch.Tensor, h: int, w: int, start_offset: int, block_len: int) -> None:
    nvfp4_2d_compute_partial_amax(weight, amax, h, w, start_offset, block_len)
    whole.copy_(amax.max().view(whole.shape) if amax.numel() else torch.zeros_like(whole))


def nvfp4_multi_tensor_compute_partial_amax(master_weight_list: Sequence[torch.Tensor], partial_amax_list: Sequence[torch.Tensor],
                                            global_amax_list: Sequence[torch.Tensor], h_list: Sequence[int], w_list: Sequence[int],
                                            start_offset_list: Sequence[int], block_len: int = 16) -> None:
    """As nvfp4_2d_compute_partial_amax for several shards; also writes each shard's overall amax, FP32 [1]."""
    _each("nvfp4_multi_tensor_compute_partial_amax", _amaxes,
          (master_weight_list, partial_amax_list, global_amax_list, h_list, w_list, start_offset_list), block_len)


@torch.no_grad()
def nvfp4_compute_global_scale(global_amax: torch.Tensor, global_scale: torch.Tensor) -> None:
    """global_scale = 2688 / global_amax, FP32; 1 where the amax is 0."""
    name = "nvfp4_compute_global_scale"
    _check(name, "global_amax", global_amax, global_scale.shape)
    _check(name, "global_scale", global_scale, global_amax.shape)
    global_scale.copy_(_global_scale(global_amax).view(global_scale.shape))


def _global_scale(amax: torch.Tensor) -> torch.Tensor:
    """[n, 1] for n amaxes."""
    return torch.where(amax.view(-1, 1) > 0, encode(amax.clamp(min=torch.finfo(torch.float32).tiny), _LARGEST_FACTOR), 1.0)


@torch.no_grad()
def nvfp4_compute_per_block_scale(block_amax: torch.Tensor, scale: torch.Tensor, global_amax: torch.Tensor) -> None:
    """scale = block_amax / 6 * the weight's global scale, FP32."""
    name = "nvfp4_compute_per_block_scale"
    for what, tensor, shape in (("scale", scale, block_amax.shape), ("block_amax", block_amax, scale.shape), ("global_amax", global_amax, (1,))):
        _check(name, what, tensor, shape)
    sixth = block_amax / torch.full_like(block_amax, _LARGEST_CODE)
    scale.copy_((sixth * _global_scale(global_amax).view(())).clamp(max=_FINITE))


def _factors(scale: torch.Tensor) -> torch.Tensor:
    return scale.clamp(max=_LARGEST_FACTOR).to(torch.float8_e4m3fn)


@torch.no_grad()
def nvfp4_expand_scale_to_fp8(input: torch.Tensor, output: torch.Tensor, tile_rows: int, tile_cols: int, rows_padded: int, block_len: int) -> None:
    """Writes to output, UINT8 [rows_padded, tile_cols or more], each block's E4M3 scale for each of the block's rows; 0 after the last row."""
    name = "nvfp4_expand_scale_to_fp8"
    _check_length(name, block_len)
    _check(name, "the scales", input, (tile_rows, tile_cols))
    if output.dtype != torch.uint8 or output.dim() != 2 or output.shape[0] != rows_padded or output.shape[1] < tile_cols:
        raise InvalidArgument(f"{name}: the target is {output.dtype} {tuple(output.shape)}; it is uint8 [{rows_padded}, {tile_cols} or more]")
    output.zero_()
    rows = _factors(input).view(torch.uint8).repeat_interleave(_BLOCK, 0)[:rows_padded]
    output[:rows.shape[0], :tile_cols] = rows


@torch.no_grad()
def nvfp4_fused_scale(block_amax: torch.Tensor, global_amax: torch.Tensor, per_block_scale: torch.Tensor, target_scale: torch.Tensor,
                      target_amax: torch.Tensor, tile_rows: int, tile_cols: int, rows_padded: int, block_len: int) -> None:
    """nvfp4_compute_per_block_scale and nvfp4_expand_scale_to_fp8 in one call; also writes the weight's amax."""
    name = "nvfp4_fused_scale"
    _check(name, "block_amax", block_amax, (tile_rows, tile_cols))
    _check(name, "target_amax", target_amax, (1,))
    nvfp4_compute_per_block_scale(block_amax, per_block_scale, global_amax)
    nvfp4_expand_scale_to_fp8(per_block_scale, target_scale, tile_rows, tile_cols, rows_padded, block_len)
    target_amax.copy_(global_amax)


def nvfp4_multi_tensor_fused_scale(block_amax_list: Sequence[torch.Tensor], global_amax_list: Sequence[torch.Tensor],
                                   per_block_scale_list: Sequence[torch.Tensor], target_scale_list: Sequence[torch.Tensor],
                                   target_amax_list: Sequence[torch.Tensor], tile_rows_list: Sequence[int], tile_cols_list: Sequence[int],
                                   rows_padded_list: Sequence[int], block_len: int) -> None:
    _each("nvfp4_multi_tensor_fused_scale", nvfp4_fused_scale,
          (block_amax_list, global_amax_list, per_block_scale_list, target_scale_list, target_amax_list, tile_rows_list, tile_cols_list,
           rows_padded_list), block_len)


@torch.no_grad()
def nvfp4_2d_partial_cast(inp: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, h: int, w: int, start_offset: int,
                          block_len: int = 16) -> None:
    """Writes the shard's codes to out, UINT8: the bytes of the weight that contain them, two codes per byte. Codes of neighbouring shards in the
    first and last byte are kept.

    scale, FP32 [blocks down, blocks across], and global_scale, FP32 [1], belong to the unsharded weight.
    """
    name = "nvfp4_2d_partial_cast"
    _check_length(name, block_len)
    _check(name, "scale", scale, _blocks(h, w))
    _check(name, "global_scale", global_scale, (1,))
    part = Part(name, inp, h, w, start_offset, _BLOCK)
    end = start_offset + inp.numel()
    count = (end + 1) // 2 - start_offset // 2
    if out.dtype != torch.uint8 or out.numel() != count or not out.is_contiguous():
        raise InvalidArgument(f"{name}: out has {out.numel()} elements of {out.dtype}{'' if out.is_contiguous() else ', not contiguous'}; the codes of "
                              f"{inp.numel()} elements from {start_offset} on lie in {count} bytes")
    if not inp.numel():
        return
    whole = torch.where(global_scale > 0, global_scale, 1.0)
    each = (_factors(scale[part.first:part.last]).float() * whole.reciprocal()).reciprocal().clamp(max=_FINITE)
    rows = each.repeat_interleave(_BLOCK, 1)[:, :w].repeat_interleave(_BLOCK, 0)
    codes = encode_codes((part.values.float() * part.factors(rows)).clamp(-_LARGEST_CODE, _LARGEST_CODE), False)
    held = out.view(-1)
    before, after = held[:start_offset % 2] & 15, held[count - end % 2:] >> 4
    held.copy_(packed(torch.cat((before, codes, after)).view(1, -1)).view(-1))


def nvfp4_multi_tensor_2d_partial_cast(inp_list: Sequence[torch.Tensor], out_list: Sequence[torch.Tensor], scale_list: Sequence[torch.Tensor],
                                       global_scale_list: Sequence[torch.Tensor], h_list: Sequence[int], w_list: Sequence[int],
                                       start_offset_list: Sequence[int], block_len: int = 16) -> None:
    _each("nvfp4_multi_tensor_2d_partial_cast", nvfp4_2d_partial_cast,
          (inp_list, out_list, scale_list, global_scale_list, h_list, w_list, start_offset_list), block_len)


def _transpose(data: torch.Tensor, other: torch.Tensor, scales: torch.Tensor, other_scales: torch.Tensor, m: int, k: int) -> None:
    nvfp4_data_transpose(data.view(m, k // 2), out=other)
    nvfp4_2d_scale_transpose(scales, other_scales, *_blocks(m, k))


def nvfp4_2d_multi_tensor_transpose(rowwise_data_list: Sequence[torch.Tensor], columnwise_data_list: Sequence[torch.Tensor],
                                    rowwise_scale_inv_list: Sequence[torch.Tensor], columnwise_scale_inv_list: Sequence[torch.Tensor],
                                    M_list: Sequence[int], K_list: Sequence[int]) -> None:
    """Writes the column-wise copies of weights [M, K] with square blocks, from the row-wise copies."""
    _each("nvfp4_2d_multi_tensor_transpose", _transpose,
          (rowwise_data_list, columnwise_data_list, rowwise_scale_inv_list, columnwise_scale_inv_list, M_list, K_list))
