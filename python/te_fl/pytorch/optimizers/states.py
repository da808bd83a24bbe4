"""The dtypes that an optimizer keeps its state in, beside FP32: 16 bits, and FP8 with a scale for each tensor."""

from __future__ import annotations

from typing import Any, Dict

import torch

from te_fl import ops
from te_fl.errors import InvalidArgument
from te_fl.pytorch.fp8.float8_tensor import Float8Tensor
from te_fl.remainders import divide, joined
from te_fl.tensors import Quantized

MOMENTS = ("exp_avg", "exp_avg_sq")
_CODES = torch.uint8  # FP8 codes E4M3, as Transformer Engine names the dtype
_RANGES = {torch.float16: torch.finfo(torch.float16).max / 2, _CODES: 448.0}  # the largest value after scaling


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; another tensor itself."""
    return tensor if type(tensor) in _PLAIN else getattr(tensor, "_local_tensor", tensor)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_own_master(param: torch.Tensor) -> bool:
    """True if the parameter holds FP32 values, so that a step needs no other weight than itself."""
    return param.dtype is torch.float32 and not isinstance(local(param), Float8Tensor)


class States:
    """Reads and writes state tensors by name: exp_avg, exp_avg_sq, master_param.

    FP32 and BF16 hold the values. FP16 and FP8 hold them divided by a scale, F32 [1], the quotient of their largest magnitude and the largest that
    the dtype is used for. remainders: BF16 parameters have as master_param the INT16 remainders of their FP32 weights.
    """

    def __init__(self, master_param: torch.dtype, exp_avg: torch.dtype, exp_avg_sq: torch.dtype, remainders: bool):
        self.dtypes = {"master_param": master_param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        self.remainders = remainders
        self._scales: Dict[Any, Dict[str, torch.Tensor]] = {}

    @property
    def plain(self) -> bool:
        """True if the state is the values themselves, in FP32."""
        return not self.remainders and set(self.dtypes.values()) == {torch.float32}

    def has_remainders(self, param: torch.Tensor, name: str) -> bool:
        return self.remainders and name == "master_param" and param.dtype == torch.bfloat16

    def dtype_of(self, param: torch.Tensor, name: str) -> torch.dtype:
        if name == "master_param" and is_own_master(param):
            return torch.float32
        return torch.int16 if self.has_remainders(param, name) else self.dtypes[name]

    def empty(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """Zeros in the parameter's shape; a DTensor of a DTensor."""
        dtype = self.dtype_of(param, name)
        if dtype in _RANGES:
            self._scales.setdefault(param, {})[name] = torch.ones(1, dtype=torch.float32, device=param.device)
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format)

    def read(self, param: torch.Tensor, name: str, state: torch.Tensor) -> torch.Tensor:
        """FP32 values of this rank's part: the state's own memory where it is FP32. Of remainders the weights."""
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
        """Has the state hold these values, F32, in its dtype. With remainders the parameter is written too."""
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
            scale.masked_fill_(scale == 0, 1.0)  # zeros
            if dtype == torch.float16:
                state.copy_(values / scale)
            else:
                ops.quantize(input=values.contiguous(), output=Quantized(state.view(torch.float8_e4m3fn), scale=scale.reciprocal(), scale_inv=scale,
                                                                         amax=torch.zeros_like(scale)))
