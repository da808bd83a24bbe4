"""Conversion of the extension module's dtype numbers to PyTorch's dtypes."""

from __future__ import annotations

import torch

from te_fl.errors import InvalidArgument
from te_fl.transformer_engine_torch.enums import DType

TO_TORCH = {0: torch.uint8, 1: torch.int16, 2: torch.int32, 3: torch.int64, 4: torch.float32, 5: torch.float16, 6: torch.bfloat16,
            7: torch.float8_e4m3fn, 8: torch.float8_e5m2}
LARGEST = {7: 448.0, 8: 57344.0}
FP8 = {int(DType.kFloat8E4M3): torch.float8_e4m3fn, int(DType.kFloat8E5M2): torch.float8_e5m2}


def torch_dtype(dtype) -> torch.dtype:
    """dtype: a DType of this module or of Transformer Engine, or its number."""
    found = TO_TORCH.get(int(dtype))
    if found is None:
        raise InvalidArgument(f"dtype {int(dtype)} is none of transformer_engine_torch.DType that PyTorch has")
    return found


def fp8_dtype(dtype) -> torch.dtype:
    found = FP8.get(int(dtype))
    if found is None:
        raise InvalidArgument(f"dtype {int(dtype)} is not an FP8 one: kFloat8E4M3 ({int(DType.kFloat8E4M3)}) or kFloat8E5M2 ({int(DType.kFloat8E5M2)})")
    return found
