"""FP8 weights in files of plain tensors such as safetensors: the codes under the weight's name, the scales under derived names."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Dict, Iterator

import torch

from te_fl import ops
from te_fl.errors import DataLoss, Unsupported
from te_fl.pytorch.fp8.codes import Codes, MXFP8Codes, Rules
from te_fl.pytorch.fp8.float8_tensor import Float8Tensor

_CODES = torch.float8_e4m3fn
_SCALE, _AMAX = "_scale_inv", "_amax"  # suffixes of the weight's name


class _Saving(threading.local):
    depth = 0


_saving = _Saving()


@contextlib.contextmanager
def saving_codes() -> Iterator[None]:
    """While active on this thread, state_dict() returns FP8 weights as plain tensors, which every file format stores bit for bit.

    A weight becomes its codes, float8_e4m3fn, with <name>_scale_inv and <name>_amax next to it. load_state_dict() accepts these anywhere: a module
    with FP8 weights takes the codes unchanged, and a high-precision module takes the values. Outside of this scope, state_dict() contains
    Float8Tensors; a file of plain tensors then stores dequantised values, whose scale is recomputed on loading.
    """
    _saving.depth += 1
    try:
        yield
    finally:
        _saving.depth -= 1


def divide(state: Dict[str, Any], prefix: str, parameters: Dict[str, Any]) -> None:
    """Inside of saving_codes(): replaces the FP8 weights in a module's state by codes and scales."""
    if _saving.depth == 0:
        return
    for name, parameter in parameters.items():
        key = prefix + name
        if not isinstance(parameter, Float8Tensor) or key not in state:
            continue
        codes = parameter._codes
        if isinstance(codes, MXFP8Codes):
            raise Unsupported(f"saving_codes: {key} is a weight of MXFP8 codes, whose file format te-fl does not have; save outside of it, with "
                              "torch.save() for the codes, or values by dequantize()")
        state[key], state[key + _SCALE] = codes.data, codes.scale_inv
        if codes.amax is not None:
            state[key + _AMAX] = codes.amax


def join(state: Dict[str, Any], prefix: str, parameters: Dict[str, Any]) -> None:
    """Replaces the codes and scales that divide() has made for these parameters by Float8Tensors."""
    for name, parameter in parameters.items():
        key = prefix + name
        data = state.get(key)
        if parameter is None or not isinstance(data, torch.Tensor) or data.dtype is not _CODES or key + _SCALE not in state:
            continue
        scale_inv, amax = state.pop(key + _SCALE), state.pop(key + _AMAX, None)
        rules = parameter._codes.rules if isinstance(parameter, Float8Tensor) else None
        scaling = "tensor" if scale_inv.numel() == 1 else "block_128x128"
        expected = Codes.empty(Rules(scaling), data.shape, torch.device("meta")).scale_inv.shape if data.dim() == 2 else None
        if expected is None or scale_inv.dtype is not torch.float32 or scale_inv.shape != expected:
            raise DataLoss(f"{key}: its {key + _SCALE} is {scale_inv.dtype} {tuple(scale_inv.shape)} for codes {tuple(data.shape)}; it is "
                           f"torch.float32 {'' if expected is None else tuple(expected)}, of codes [rows, columns]")
        codes = Codes(rules if rules is not None and rules.scaling == scaling else Rules(scaling), data, scale_inv, amax)
        if amax is None and scaling == "tensor":
            codes.amax = torch.empty_like(scale_inv)
            ops.compute_amax(input=codes.read(torch.float32), amax=codes.amax)
        state[key] = Float8Tensor(codes, parameter.dtype)
