"""Mappings between PyTorch's and te-fl's dtypes."""

from __future__ import annotations

import torch

from te_fl.torch_tensors import BY_CODE, DTYPE_CODES

__all__ = ["BY_CODE", "DTYPE_CODES", "DTYPE_NAMES", "LIKE"]

DTYPE_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}  # the dtypes that layers compute in
LIKE = torch.empty(0, dtype=torch.float32, device="cpu")  # passed to _native to request PyTorch tensors
