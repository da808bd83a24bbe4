"""MXFP8 with one E8M0 scale per 32 x 32 block, as MXFP8BlockScaling(enable_2d_quantization=True) uses it for weights.

te-fl has no op for such blocks. The scales come from the existing op, applied to the 32 column maxima of each square block, so the rounding rules are
the op's. The codes are computed with PyTorch's ops.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from te_fl.tensors import Quantized
from te_fl.transformer_engine_torch import matrix_ops as ops
from te_fl.transformer_engine_torch.dtypes import LARGEST, fp8_dtype
from te_fl.transformer_engine_torch.nvfp4 import overwrite

__all__ = ["write"]

_BLOCK = 32


def _factors(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """UINT8 [ceil(rows / 32), ceil(columns / 32)]: the E8M0 scales as bits."""
    rows, columns = x.shape
    largest = torch.nn.functional.pad(x.abs(), (0, 0, 0, -rows % _BLOCK)).view(-1, _BLOCK, columns).amax(1)
    count = largest.shape[0]
    scales = torch.empty((count + -count % 128, (columns + 127) // 128 * 4), dtype=torch.uint8, device=x.device)
    codes = torch.empty(largest.shape, dtype=kind, device=x.device)
    ops.quantize(input=largest, output=Quantized(codes, scale_inv=scales.view(torch.float8_e8m0fnu), shape=tuple(largest.shape), scaling="mxfp8"))
    return scales[:count, :-(-columns // _BLOCK)]


def _padded(factors: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros_like(like)
    whole[:factors.shape[0], :factors.shape[1]] = factors
    return whole


def write(values: torch.Tensor, quantizer: Any, tensor: Any, noop: Optional[torch.Tensor]) -> None:
    """Writes the row-wise and column-wise data of an MXFP8Tensor that the quantizer's usages select; their codes are equal. values: a matrix of any
    dtype.
    """
    if not values.numel():
        return
    x = values.contiguous().view(-1, values.shape[-1])
    (rows, columns), kind, bound = x.shape, fp8_dtype(quantizer.dtype), LARGEST[int(quantizer.dtype)]
    factors = _factors(x, kind)
    by_row, by_column = factors.repeat_interleave(_BLOCK, 0)[:rows], factors.repeat_interleave(_BLOCK, 1)[:, :columns]
    each = torch.exp2(127.0 - by_row.float()).repeat_interleave(_BLOCK, 1)[:, :columns]
    codes = (x.float() * each).clamp(-bound, bound).to(kind)
    if quantizer.rowwise_usage:
        overwrite(tensor._rowwise_data, codes, noop)
        overwrite(tensor._rowwise_scale_inv, _padded(by_row, tensor._rowwise_scale_inv), noop)
    if quantizer.columnwise_usage:
        overwrite(tensor._columnwise_data, codes, noop)
        overwrite(tensor._columnwise_scale_inv, _padded(by_column, tensor._columnwise_scale_inv), noop)
