"""PyTorch tensors without memory, for supports() of implementations whose functions get PyTorch tensors."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from te_fl._native import LentTensor
from te_fl.errors import Unsupported
from te_fl.torch_tensors import BY_CODE
from te_fl.tensors import DTYPES

_MODE = FakeTensorMode(allow_non_fake_inputs=True)
_DEVICES = {"rocm": "cuda", "oneapi": "xpu", "cuda_host": "cpu", "rocm_host": "cpu"}


def tensor(lent: LentTensor) -> torch.Tensor:
    """A tensor with the shape, strides, dtype and device of `lent`. Its elements cannot be read."""
    dtype = BY_CODE.get(DTYPES.index(lent.dtype))
    if dtype is None:
        raise Unsupported(f"PyTorch takes no tensor of {lent.dtype}")
    kind, _, index = lent.device.removeprefix("ext:").partition(":")
    with _MODE:
        return torch.empty_strided(lent.shape, lent.strides, dtype=dtype, device=_DEVICES.get(kind, kind) + (f":{index}" if index else ""))
