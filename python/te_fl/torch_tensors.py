"""Allocates outputs of ops as PyTorch tensors. te_fl imports this module for the first op call on PyTorch tensors that leaves out an output."""

from __future__ import annotations

from typing import Tuple

import torch

from te_fl import _native
from te_fl.tensors import DTYPES

_NAMES = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2",
          "float8_e8m0fnu": "f8e8m0", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "u8", "uint16": "u16", "uint32": "u32",
          "uint64": "u64", "bool": "bool"}
# Indices in te_fl.tensors.DTYPES, by which the native module denotes dtypes.
DTYPE_CODES = {getattr(torch, theirs): DTYPES.index(ours) for theirs, ours in _NAMES.items() if hasattr(torch, theirs)}
BY_CODE = {code: dtype for dtype, code in DTYPE_CODES.items()}

_empty = torch.empty


def empty(like: torch.Tensor, shape: Tuple[int, ...], dtype: int) -> torch.Tensor:
    """A new tensor on the device of `like`. dtype: an index in te_fl.tensors.DTYPES."""
    return _empty(shape, dtype=BY_CODE[dtype], device=like.device)


_native.set_tensors(torch.Tensor, torch.empty_like, DTYPE_CODES)
use_empty = _native.set_empty  # a module that calls it imports this one, so its function is the later one
use_empty(empty)
