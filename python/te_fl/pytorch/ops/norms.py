"""Normalisation operations: te-fl's modules with the operations' parameters and checkpoint state."""

from __future__ import annotations

from typing import Any, Iterable, Optional, Union

import torch

from te_fl.pytorch.modules import multihead_attention, norm
from te_fl.pytorch.ops.operation import BasicOperation, Result
from te_fl.pytorch.runtime.refuse import checks_keywords


class _Norm(BasicOperation):
    _module: Any

    def _set_up_norm(self, normalized_shape, eps, device, dtype, zero_centered_gamma, sm_margin) -> None:
        self._module.__init__(self, normalized_shape, eps=eps, device=device, dtype=dtype, zero_centered_gamma=zero_centered_gamma, sm_margin=sm_margin)
        self._open_channels()

    def _materialise(self) -> None:
        if self.weight.device.type == "meta":
            self.reset_parameters()

    def _compute(self, x: torch.Tensor) -> Result:
        return self._module.forward(self, x), ()


class LayerNorm(_Norm, norm.LayerNorm):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions, normalized_shape. zero_centered_gamma: the weight is stored minus 1."""

    _module = norm.LayerNorm

    @checks_keywords()
    def __init__(self, normalized_shape: Union[Iterable[int], int], *, eps: float = 1e-5, device: Union[torch.device, str, None] = None,
                 dtype: Optional[torch.dtype] = None, zero_centered_gamma: bool = False, sm_margin: Any = 0) -> None:
        self._set_up_norm(normalized_shape, eps, device, dtype, zero_centered_gamma, sm_margin)


class RMSNorm(_Norm, norm.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimensions. Arguments as for LayerNorm."""

    _module = norm.RMSNorm

    @checks_keywords()
    def __init__(self, normalized_shape: Union[Iterable[int], int], *, eps: float = 1e-5, device: Union[torch.device, str, None] = None,
                 dtype: Optional[torch.dtype] = None, zero_centered_gamma: bool = False, sm_margin: Any = 0) -> None:
        self._set_up_norm(normalized_shape, eps, device, dtype, zero_centered_gamma, sm_margin)


class L2Normalization(BasicOperation, multihead_attention.L2Normalization):
    """x / sqrt(sum(x^2) + eps) over the last dimension. seq_length, micro_batch_size: no effect; Transformer Engine uses them to warm up a compiler.
    """

    @checks_keywords()
    def __init__(self, *, eps: float = 1e-6, seq_length: Optional[int] = None, micro_batch_size: Optional[int] = None) -> None:
        multihead_attention.L2Normalization.__init__(self, eps=eps, seq_length=seq_length, micro_batch_size=micro_batch_size)
        self._open_channels()

    def _compute(self, x: torch.Tensor) -> Result:
        with torch.autocast(x.device.type, enabled=False):  # torch.autocast would round the input, which Transformer Engine does not do here.
            return multihead_attention.L2Normalization.forward(self, x), ()
