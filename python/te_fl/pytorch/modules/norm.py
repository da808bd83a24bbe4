"""Normalisation over the last dimensions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Optional, Tuple, Union

import torch

from te_fl.errors import InvalidArgument
from te_fl.pytorch.modules.base import TransformerEngineBaseModule
from te_fl.pytorch.modules.parameters import parameter_dtype
from te_fl.pytorch.runtime import refuse as rules
from te_fl.pytorch.runtime.device import device_of
from te_fl.pytorch.runtime.dtypes import DTYPE_CODES, DTYPE_NAMES
from te_fl.pytorch.runtime.refuse import checks_keywords, refuse


class _Norm(TransformerEngineBaseModule):
    _remade = frozenset(("eps", "zero_centered_gamma"))

    def _set_up(self, normalized_shape, eps, sequence_parallel, params_dtype, zero_centered_gamma, hidden_size, kwargs, biased) -> None:
        where = type(self).__name__
        if (normalized_shape is None) == (hidden_size is None):
            raise InvalidArgument(f"{where}: give normalized_shape, or hidden_size, which is its older name")
        shape = hidden_size if normalized_shape is None else normalized_shape
        extents = tuple(shape) if isinstance(shape, Iterable) and not isinstance(shape, str) else (shape,)
        for extent in extents:
            rules.size(where, "normalized_shape", extent)
        rules.epsilon(where, "eps", eps)
        self.normalized_shape: Tuple[int, ...] = tuple(int(n) for n in extents)
        self.sequence_parallel = sequence_parallel
        device, dtype, margin = kwargs.pop("device", None), kwargs.pop("dtype", None), kwargs.pop("sm_margin", 0)
        if margin not in (0, None) and margin != {}:
            raise refuse(where, "sm_margin", margin, "te-fl's kernels take the whole device; leave it out")
        if params_dtype is not None and dtype is not None and params_dtype != dtype:
            raise InvalidArgument(f"{where}: params_dtype is {params_dtype} and dtype, its other name, {dtype}")
        dtype = parameter_dtype(params_dtype or dtype, where)
        self.eps, self.zero_centered_gamma = eps, bool(zero_centered_gamma)
        device = device_of(device)
        start = torch.nn.init.zeros_ if self.zero_centered_gamma else torch.nn.init.ones_
        self._add_parameter("weight", torch.empty(self.normalized_shape, device=device, dtype=dtype), start)
        if biased:
            self._add_parameter("bias", torch.empty(self.normalized_shape, device=device, dtype=dtype), torch.nn.init.zeros_)
        self._read_names = tuple(self._parameters) if len(extents) == 1 else ()  # the layer takes parameters of one dimension
        self.reset_parameters(defer_init=device.type == "meta")

    def reset_parameters(self, defer_init: Optional[bool] = None) -> None:
        super().reset_parameters(bool(defer_init))
        if self.sequence_parallel is not None:  # Megatron sums the gradients of marked parameters over its ranks
            for parameter in self.parameters(recurse=False):
                parameter.sequence_parallel = self.sequence_parallel

    def _options(self) -> dict:
        return {"hidden_size": self.weight.numel(), "epsilon": self.eps, "zero_centered_gamma": self.zero_centered_gamma,
                "param_dtype": DTYPE_NAMES[self.weight.dtype]}

    def _own(self) -> Tuple[torch.Tensor, ...]:
        return super()._own() if self._read_names else tuple(p.view(-1) for p in ((self.weight, self.bias) if self._kind == "layernorm" else (self.weight,)))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps input [..., *normalized_shape] to the same shape."""
        self._check_tensor(input)
        shape, last = input.shape, len(self.normalized_shape)
        if shape[len(shape) - last:] != self.normalized_shape:
            raise InvalidArgument(f"{type(self).__name__}: the input is {tuple(shape)}; it must end with {self.normalized_shape}")
        if input.dtype not in DTYPE_NAMES and input.is_floating_point():
            input = input.float()  # Transformer Engine casts every input
        flat = input if last == 1 else input.reshape(*shape[:len(shape) - last], self.weight.numel())
        return self._forward(flat, activation=self._output_dtype()).view(shape)

    def _output_dtype(self) -> int:
        """The weight's dtype, as in Transformer Engine."""
        return DTYPE_CODES[self.weight.dtype]

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LayerNorm(_Norm):
    """(x - mean) / sqrt(variance + eps) * weight + bias.

    normalized_shape: the sizes of the last dimensions, which are normalised together; hidden_size is an older name of this argument.
    zero_centered_gamma: the weight is stored minus 1. sequence_parallel: unless None, becomes the attribute sequence_parallel of each
    parameter, which frameworks read. Keywords: device (None: cuda if available, else cpu) and dtype (another name of params_dtype).
    """

    _kind = "layernorm"

    @checks_keywords("device", "dtype", "sm_margin")
    def __init__(self, normalized_shape: Union[Iterable[int], int, None] = None, eps: float = 1e-5,
                 sequence_parallel: Optional[bool] = None, params_dtype: Optional[torch.dtype] = None, zero_centered_gamma: bool = False,
                 hidden_size: Optional[int] = None, **kwargs: Any) -> None:
        super().__init__()
        self._set_up(normalized_shape, eps, sequence_parallel, params_dtype, zero_centered_gamma, hidden_size, kwargs, True)

    def reset_layer_norm_parameters(self) -> None:
        self.reset_parameters()


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * weight. Arguments as LayerNorm's."""

    _kind = "rmsnorm"

    @checks_keywords("device", "dtype", "sm_margin")
    def __init__(self, normalized_shape: Union[Iterable[int], int, None] = None, eps: float = 1e-5,
                 sequence_parallel: Optional[bool] = None, params_dtype: Optional[torch.dtype] = None, zero_centered_gamma: bool = False,
                 hidden_size: Optional[int] = None, **kwargs: Any) -> None:
        super().__init__()
        self._set_up(normalized_shape, eps, sequence_parallel, params_dtype, zero_centered_gamma, hidden_size, kwargs, False)

    def reset_rms_norm_parameters(self) -> None:
        self.reset_parameters()
