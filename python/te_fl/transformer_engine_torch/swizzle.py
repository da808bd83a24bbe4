"""Conversion of MXFP8 and NVFP4 block scales between plain order and the swizzled order of cuBLAS's tensor cores.

A tile of 128 rows by 4 scales takes 512 bytes: row r, scale c is at (r % 32) * 16 + (r // 32) * 4 + c; tiles are stored row by row (cuBLAS, "1D block
scaling factors layout"). te-fl's ops read plain order, so swizzled scales are converted back first.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

import torch

from te_fl.errors import InvalidArgument

__all__ = ["grouped_swizzle_for_gemm", "multi_tensor_swizzle_scales_for_gemm_", "multi_tensor_swizzle_scales_for_gemm_unchecked_", "plain_scales",
           "swizzle_scales_for_gemm_"]


def _swizzled(scales: torch.Tensor) -> torch.Tensor:
    rows, columns = scales.shape
    return scales.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).reshape(rows, columns)


def _plain(scales: torch.Tensor) -> torch.Tensor:
    rows, columns = scales.shape
    return scales.view(rows // 128, columns // 4, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(rows, columns)


def _turned(scales: Optional[torch.Tensor], by_columns: bool, turn: Any) -> Optional[torch.Tensor]:
    """Converts an array of scales. by_columns: the scales of MXFP8's column-wise data, [scales, columns], whose tiles are those of the transposed
    array.
    """
    if scales is None or scales.numel() == 0:
        return scales
    if not by_columns:
        return turn(scales)
    rows, columns = scales.shape
    if turn is _swizzled:
        return turn(scales.t().contiguous()).view(rows, columns)
    return turn(scales.view(columns, rows)).t().contiguous()


def _sides(tensor: Any) -> Sequence[Tuple[str, bool]]:
    return (("_rowwise_scale_inv", False), ("_columnwise_scale_inv", hasattr(tensor, "_fp8_dtype")))


def plain_scales(tensor: Any) -> list:
    """The row-wise and column-wise scales in plain order."""
    if not tensor._with_gemm_swizzled_scales:
        return [getattr(tensor, name) for name, _ in _sides(tensor)]
    return [_turned(getattr(tensor, name), by_columns, _plain) for name, by_columns in _sides(tensor)]


def swizzle_scales_for_gemm_(tensor: Any) -> None:
    """Swizzles the block scales of one MXFP8 or NVFP4 tensor for tensor cores; no effect on other tensors."""
    if getattr(tensor, "_with_gemm_swizzled_scales", True):
        return
    for name, by_columns in _sides(tensor):
        setattr(tensor, name, _turned(getattr(tensor, name), by_columns, _swizzled))
    tensor._with_gemm_swizzled_scales = True


def multi_tensor_swizzle_scales_for_gemm_(tensors: Sequence[Any], rowwise_usage: bool, columnwise_usage: bool) -> None:
    """As swizzle_scales_for_gemm_ for several tensors, each of which must have the copies that the usages select."""
    for tensor in tensors:
        missing = [side for side, used in (("row-wise", rowwise_usage and tensor._rowwise_scale_inv is None),
                                           ("column-wise", columnwise_usage and tensor._columnwise_scale_inv is None)) if used]
        if missing:
            raise InvalidArgument(f"multi_tensor_swizzle_scales_for_gemm_: a tensor has no {' and no '.join(missing)} factors")
        swizzle_scales_for_gemm_(tensor)


multi_tensor_swizzle_scales_for_gemm_unchecked_ = multi_tensor_swizzle_scales_for_gemm_


def grouped_swizzle_for_gemm(tensor: Any, rowwise: bool, columnwise: bool) -> None:
    """As swizzle_scales_for_gemm_ for the members of a group, in its buffer. Scales that are not requested are
    dropped, because one flag says for both arrays whether they are swizzled."""
    if tensor._with_gemm_swizzled_scales:
        return
    for member in tensor.split_into_quantized_tensors():
        for (name, by_columns), wanted in zip(_sides(member), (rowwise, columnwise)):
            scales = getattr(member, name)
            if wanted and scales is not None and scales.numel():
                scales.copy_(_turned(scales, by_columns, _swizzled))
    if not rowwise:
        tensor.scale_inv = None
    if not columnwise:
        tensor.columnwise_scale_inv = None
    tensor._with_gemm_swizzled_scales = True
