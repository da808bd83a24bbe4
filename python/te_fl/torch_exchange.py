"""Exchanges tensors of the native module with a PyTorch older than 2.11, which has no C functions for it. Imported with such a PyTorch only."""

from __future__ import annotations

from typing import Dict

import torch

from te_fl import torch_streams

_BITS = {"float64": (2, 64), "float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16), "float8_e4m3fn": (10, 8), "float8_e4m3fnuz": (11, 8),
         "float8_e5m2": (12, 8), "float8_e5m2fnuz": (13, 8), "float8_e8m0fnu": (14, 8), "int8": (0, 8), "int16": (0, 16), "int32": (0, 32),
         "int64": (0, 64), "uint8": (1, 8), "uint16": (1, 16), "uint32": (1, 32), "uint64": (1, 64), "bool": (6, 8), "complex32": (5, 32),
         "complex64": (5, 64), "complex128": (5, 128), "float4_e2m1fn_x2": (17, 4)}
_DEVICE_TYPES = {"cpu": 1, "cuda": 10 if torch.version.hip else 2, "xpu": 14}
_EXTENSION = 12


class _Dtypes(dict):
    """A dict that names a dtype that it does not have in its error."""

    def __missing__(self, key: torch.dtype) -> int:
        raise RuntimeError(f"DLPack has no {key}")


class _Devices(dict):
    def __missing__(self, device: torch.device) -> int:
        kind = _EXTENSION if device.type == torch_streams.private_name() else _DEVICE_TYPES.get(device.type)
        if kind is None:
            raise RuntimeError(f"Cannot pack tensors on {device}")
        self[device] = kind << 32 | (device.index or 0)
        return self[device]


# DLPack's dtype: code | bits << 8 | lanes << 16.
DTYPES: Dict[torch.dtype, int] = _Dtypes({getattr(torch, name): code | bits << 8 | (2 if name.endswith("_x2") else 1) << 16
                                          for name, (code, bits) in _BITS.items() if hasattr(torch, name)})
DEVICES: Dict[torch.device, int] = _Devices()  # DLPack's device: type << 32 | index
CODES = {code: getattr(torch, name) for name, (code, bits) in _BITS.items() if code >= 7 and bits == 8 and hasattr(torch, name)}  # by DLPack's code


def current_stream(device_type: int, index: int) -> int:
    """The handle of the current stream of the device with these numbers of DLPack."""
    name = next((name for name, number in _DEVICE_TYPES.items() if number == device_type), None) or torch_streams.private_name()
    if name == "cuda":
        return torch._C._cuda_getCurrentRawStream(index)
    return torch_streams.current_stream(torch.device(name, index))
