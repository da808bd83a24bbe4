"""Optimizer states in dtypes other than FP32: 16 bits, and FP8 with a scale for each tensor."""

from __future__ import annotations

from typing import Any, Dict

import torch

from te_fl import ops
from te_fl.errors import InvalidArgument
from te_fl.pytorch.fp8.float8_tensor import Float8Tensor
from te_fl.remainders import divide, joined
from te_fl.tensors import Quantized

MOMENTS = ("exp_avg", "exp_avg_sq")
_CODES = torch.uint8  # FP8 E4M3 codes; Transformer Engine uses uint8 as their dtype
_RANGES = {torch.float16: torch.finfo(torch.float16).max / 2, _CODES: 448.0}  # the largest magnitude after scaling


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; other tensors are returned unchanged."""
    return tensor if type(tensor) in _PLAIN else getattr(tensor, "_local_tensor", tensor)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_own_master(param: torch.Tensor) -> bool:
    """True if the parameter holds FP32 values, so it needs no separate master weight."""
    return param.dtype is torch.float32 and not isinstance(local(param), Float8Tensor)


class States:
    """Reads and writes the states exp_avg, exp_avg_sq and master_param.

    FP32 and BF16 states hold the values. FP16 and FP8 states hold values divided by a scale, F32 [1]: the tensor's largest magnitude divided by the
    largest value used of the dtype. remainders: the master_param of a BF16 parameter holds the INT16 remainders of its FP32 weight.
    """

    def __init__(self, master_param: torch.dtype, exp_avg: torch.dtype, exp_avg_sq: torch.dtype, remainders: bool):
        self.dtypes = {"master_param": master_param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        self.remainders = remainders
        self._scales: Dict[Any, Dict[str, torch.Tensor]] = {}

    @property
    def plain(self) -> bool:
        """True if all states are plain FP32 values."""
        return not self.remainders and set(self.dtypes.values()) == {torch.float32}

    def has_remainders(self, param: torch.Tensor, name: str) -> bool:
        return self.remainders and name == "master_param" and param.dtype == torch.bfloat16

    def dtype_of(self, param: torch.Tensor, name: str) -> torch.dtype:
        if name == "master_param" and is_own_master(param):
            return torch.float32
        return torch.int16 if self.has_remainders(param, name) else self.dtypes[name]

    def empty(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """Zeros in the parameter's shape. A DTensor gives a DTensor."""
        dtype = self.dtype_of(param, name)
        if dtype in _RANGES:
            self._scales.setdefault(param, {})[name] = torch.ones(1, dtype=torch.float32, device=param.device)
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format)

    def read(self, param: torch.Tensor, name: str, state: torch.Tensor) -> torch.Tensor:
        """FP32 values of this rank's shard; an FP32 state's own memory. For remainders, the reconstructed FP32 weights."""
        state = local(state).detach()
        dtype = self.dtype_of(param, name)
        if dtype == torch.int16:
            return joined(local(param.detach()), state)
        if dtype == torch.float16:
            return state.float().mul_(self._scales[param][name])
        if dtype == _CODES:
            values = torch.empty(state.shape, dtype=torch.float32, device=state.device)
            if state.numel():
                ops.dequantize(input=Quantized(state.view(torch.float8_e4m3fn), scale_inv=self._scales[param][name]), output=values)
            return values
        return state.float()

    def write(self, param: torch.Tensor, name: str, state: torch.Tensor, values: torch.Tensor) -> None:
        """Stores F32 values in the state's dtype. With remainders the parameter is written too."""
        state, values = local(state).detach(), local(values)
        dtype = self.dtype_of(param, name)
        if values.dtype != torch.float32 or values.shape != state.shape:
            raise InvalidArgument(f"FusedAdam: {name} of a parameter {tuple(state.shape)} is {values.dtype} {tuple(values.shape)}; give float32 "
                                  f"{tuple(state.shape)}")
        if dtype == torch.int16:
            divide(values, local(param.detach()), state)
        elif dtype not in _RANGES:
            state.copy_(values)
        elif state.numel():
            scale = self._scales[param][name]
            torch.div(values.abs().amax().view(1), _RANGES[dtype], out=scale)
            scale.masked_fill_(scale == 0, 1.0)  # all values are zero
            if dtype == torch.float16:
                state.copy_(values / scale)
            else:
                ops.quantize(input=values.contiguous(), output=Quantized(state.view(torch.float8_e4m3fn), scale=scale.reciprocal(), scale_inv=scale,
                                                                         amax=torch.zeros_like(scale)))
