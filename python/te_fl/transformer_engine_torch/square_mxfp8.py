"""MXFP8 with one E8M0 scale per 32 x 32 block, as MXFP8BlockScaling(enable_2d_quantization=True) uses it for weights, by te_fl.torch_mxfp8."""

from __future__ import annotations

from typing import Any, Optional

import torch

from te_fl.torch_mxfp8 import padded, square
from te_fl.transformer_engine_torch.dtypes import fp8_dtype
from te_fl.transformer_engine_torch.nvfp4 import overwrite

__all__ = ["write"]


def write(values: torch.Tensor, quantizer: Any, tensor: Any, noop: Optional[torch.Tensor]) -> None:
    """Writes the row-wise and column-wise data of an MXFP8Tensor that the quantizer's usages select; their codes are equal. values: a matrix of any
    dtype.
    """
    if not values.numel():
        return
    codes, by_row, by_column = square(values.contiguous().view(-1, values.shape[-1]), fp8_dtype(quantizer.dtype))
    if quantizer.rowwise_usage:
        overwrite(tensor._rowwise_data, codes, noop)
        overwrite(tensor._rowwise_scale_inv, padded(by_row, tensor._rowwise_scale_inv), noop)
    if quantizer.columnwise_usage:
        overwrite(tensor._columnwise_data, codes, noop)
        overwrite(tensor._columnwise_scale_inv, padded(by_column, tensor._columnwise_scale_inv), noop)
