"""Mappings between PyTorch's and te-fl's dtypes."""

from __future__ import annotations

import torch

from te_fl.tensors import DTYPES

# Indices in te_fl.tensors.DTYPES, which calls into C++ use for a result's dtype.
DTYPE_CODES = {dtype: DTYPES.index(name) for dtype, name in
               ((torch.float32, "f32"), (torch.bfloat16, "bf16"), (torch.float16, "f16"), (torch.float64, "f64"))}
BY_CODE = {code: dtype for dtype, code in DTYPE_CODES.items()}
DTYPE_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}  # the dtypes that layers compute in
LIKE = torch.empty(0, dtype=torch.float32, device="cpu")  # passed to _native to request PyTorch tensors
