"""Activation operations. Gated ones take [.., 2H], whose first half is activated, and return [.., H]."""

from __future__ import annotations

import math
from typing import Any, Callable, Optional

import torch

from te_fl.errors import InvalidArgument
from te_fl.pytorch.autograd.once import once_differentiable
from te_fl.pytorch.fp8.quantizers import Float8CurrentScalingQuantizer
from te_fl.pytorch.functions import activation
from te_fl.pytorch.ops.operation import BasicOperation, Result
from te_fl.pytorch.runtime import refuse as rules
from te_fl.pytorch.runtime.constants import DType
from te_fl.pytorch.runtime.dtypes import DTYPE_NAMES
from te_fl.pytorch.runtime.refuse import checks_keywords, only, refuse


def _cast(where: str, x: torch.Tensor) -> torch.Tensor:
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if x.dtype not in DTYPE_NAMES:
        raise refuse(where, "input", f"a tensor of {x.dtype}", "give torch.float32, torch.bfloat16 or torch.float16")
    return x


def _check_halves(where: str, x: torch.Tensor, size: Optional[int]) -> None:
    if x.dim() == 0 or x.shape[-1] % 2:
        raise InvalidArgument(f"{where}: the input has shape {tuple(x.shape)}; its last dimension is two halves")
    if size and x.shape[-1] % (2 * size):
        raise InvalidArgument(f"{where}: glu_interleave_size is {size}; it divides the {x.shape[-1] // 2} columns of a half")


def _check_turns(where: str, size: Optional[int]) -> None:
    if size is not None:
        rules.size(where, "glu_interleave_size", size, least=0)  # 0: not interleaved


def _halves_in_order(where: str, x: torch.Tensor, size: Optional[int]) -> torch.Tensor:
    """Returns the input with contiguous halves, given an input whose halves alternate in blocks of `size` columns."""
    _check_halves(where, x, size)
    if not size:
        return x
    return x.unflatten(-1, (-1, 2, size)).transpose(-3, -2).flatten(-3)


class _OfCodes(torch.autograd.Function):
    """A function that saves its input as E4M3 codes. The backward recomputes the function from the dequantised input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Callable) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(Float8CurrentScalingQuantizer(DType.kFloat8E4M3, columnwise=False)(x))
        return function(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].dequantize().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        return torch.autograd.grad(y, x, grad)[0], None


class _Activation(BasicOperation):
    """cache_quantized_input: saves the input for the backward as E4M3 codes, one byte per element. The gradient is then evaluated at the rounded
    input.
    """

    _function: Callable
    _gated = False

    @checks_keywords()
    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = bool(cache_quantized_input)

    def _compute(self, x: torch.Tensor) -> Result:
        where = type(self).__name__
        x = _cast(where, x)
        if not self.cache_quantized_input or not x.numel():
            return self._result(x), ()
        if torch.compiler.is_compiling():
            raise refuse(where, "cache_quantized_input", True, "graphs of torch.compile hold no tensors of codes; leave fullgraph=True out")
        return _OfCodes.apply(x, self._result), ()

    def _result(self, x: torch.Tensor) -> torch.Tensor:
        return type(self)._function(_halves_in_order(type(self).__name__, x, None) if self._gated else x)


class GELU(_Activation):
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""

    _function = staticmethod(activation.gelu)


class QGELU(_Activation):
    """x sigmoid(1.702 x)."""

    _function = staticmethod(activation.qgelu)


class ReLU(_Activation):
    """max(x, 0)."""

    _function = staticmethod(activation.relu)


class SReLU(_Activation):
    """max(x, 0)^2."""

    _function = staticmethod(activation.srelu)


class SiLU(_Activation):
    """x sigmoid(x)."""

    _function = staticmethod(activation.silu)


class GLU(_Activation):
    """sigmoid(a) b."""

    _function, _gated = staticmethod(activation.glu), True


class GEGLU(_Activation):
    """gelu(a) b."""

    _function, _gated = staticmethod(activation.geglu), True


class QGEGLU(_Activation):
    """qgelu(a) b."""

    _function, _gated = staticmethod(activation.qgeglu), True


class ReGLU(_Activation):
    """relu(a) b."""

    _function, _gated = staticmethod(activation.reglu), True


class SReGLU(_Activation):
    """srelu(a) b."""

    _function, _gated = staticmethod(activation.sreglu), True


def _betas(where: str, beta1: float, beta2: float) -> tuple:
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0.0 < beta < math.inf:
            raise InvalidArgument(f"{where}: {name} is {beta}; it is finite and greater than 0")
    return float(beta1), float(beta2)


class SwiGLU(_Activation):
    """silu(a) b. glu_interleave_size: the halves alternate in blocks of this many columns; None: the halves are contiguous."""

    @checks_keywords()
    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: Optional[int] = None) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        _check_turns(type(self).__name__, glu_interleave_size)
        self.glu_interleave_size = glu_interleave_size

    def _result(self, x: torch.Tensor) -> torch.Tensor:
        return self._activated(_halves_in_order(type(self).__name__, x, self.glu_interleave_size))

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        return activation.swiglu(x)


class SiTUGLU(SwiGLU):
    """beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2). Other arguments as for SwiGLU."""

    @checks_keywords()
    def __init__(self, *, beta1: float = 4.0, beta2: float = 25.0, cache_quantized_input: bool = False,
                 glu_interleave_size: Optional[int] = None) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)
        self.beta1, self.beta2 = _betas("SiTUGLU", beta1, beta2)

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        return activation.situglu(x, self.beta1, self.beta2)


class ClampedSwiGLU(SwiGLU):
    """a' sigmoid(alpha a') (b' + glu_linear_offset), a' = min(a, limit), b' = clamp(b, -limit, limit). Other arguments as for SwiGLU."""

    @checks_keywords()
    def __init__(self, *, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0, cache_quantized_input: bool = False,
                 glu_interleave_size: Optional[int] = None) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)
        rules.number("ClampedSwiGLU", "limit", limit, "0 or more", lambda v: v >= 0.0)
        for name, value in (("alpha", alpha), ("glu_linear_offset", glu_linear_offset)):
            rules.number("ClampedSwiGLU", name, value, "finite", math.isfinite)
        self.limit, self.alpha, self.glu_linear_offset = limit, alpha, glu_linear_offset

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        return activation.clamped_swiglu(x, self.limit, self.alpha, self.glu_linear_offset)


class _Scaled(BasicOperation):
    """An activation times a factor for each row. The input is [.., columns]; the factors, [..], are an extra input. Computed in FP32 and rounded
    once.
    """

    num_extra_inputs = 1

    def _refuse_recompute(self, activation_recompute_in_mlp: Any) -> None:
        only(type(self).__name__, ("activation_recompute_in_mlp", bool(activation_recompute_in_mlp), False, "the backward reads what the forward kept; "
                                   "compute the model again with te_fl.pytorch.checkpoint()"))
        self.activation_recompute_in_mlp = False

    def _compute(self, x: torch.Tensor, scales: torch.Tensor) -> Result:
        x = _cast(type(self).__name__, x)
        if scales.numel() * x.shape[-1] != x.numel():
            raise InvalidArgument(f"{type(self).__name__}: the extra input has shape {tuple(scales.shape)}; an input {tuple(x.shape)} has "
                                  f"{x.numel() // max(x.shape[-1], 1)} rows")
        return self._scaled(x, scales.to(x.dtype).reshape(-1)), ()

    def _scaled(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Returns the activation of x, scaled. scales: a factor for each row."""
        raise NotImplementedError


class ScaledSReLU(_Scaled):
    """max(x, 0)^2 s."""

    @checks_keywords()
    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__()
        self._refuse_recompute(activation_recompute_in_mlp)

    def _scaled(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return activation.scaled_srelu(x, scales)


class ScaledTanhSReLU(_Scaled):
    """(t tanh(max(x, 0) / t))^2 s, t = tanh_clamp_scale."""

    @checks_keywords()
    def __init__(self, *, tanh_clamp_scale: float, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__()
        self._refuse_recompute(activation_recompute_in_mlp)
        self.tanh_clamp_scale = float(tanh_clamp_scale)
        if not 0.0 < self.tanh_clamp_scale < math.inf:
            raise InvalidArgument(f"ScaledTanhSReLU: tanh_clamp_scale is {tanh_clamp_scale}; it is finite and greater than 0")

    def _scaled(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        values = (self.tanh_clamp_scale * torch.tanh(torch.relu(x.float()) / self.tanh_clamp_scale)).square()
        return (values * scales.float().view(*x.shape[:-1], 1)).to(x.dtype)


class _ScaledGLU(_Scaled):
    def _set_up(self, glu_interleave_size: Optional[int], activation_recompute_in_mlp: Any) -> None:
        self._refuse_recompute(activation_recompute_in_mlp)
        _check_turns(type(self).__name__, glu_interleave_size)
        self.glu_interleave_size = glu_interleave_size

    def _scaled(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        _check_halves(type(self).__name__, x, self.glu_interleave_size)
        return self._gate(x, scales, self.glu_interleave_size or 0)

    def _gate(self, x: torch.Tensor, scales: torch.Tensor, turns: int) -> torch.Tensor:
        raise NotImplementedError


class ScaledSwiGLU(_ScaledGLU):
    """silu(a) b s. glu_interleave_size: as SwiGLU's."""

    @checks_keywords()
    def __init__(self, glu_interleave_size: Optional[int] = None, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__()
        self._set_up(glu_interleave_size, activation_recompute_in_mlp)

    def _gate(self, x: torch.Tensor, scales: torch.Tensor, turns: int) -> torch.Tensor:
        return activation.scaled_swiglu(x, scales, turns)


class ScaledSiTUGLU(_ScaledGLU):
    """SiTUGLU's result times s. glu_interleave_size: as SwiGLU's."""

    @checks_keywords()
    def __init__(self, glu_interleave_size: Optional[int] = None, *, activation_recompute_in_mlp: bool = False, beta1: float = 4.0,
                 beta2: float = 25.0) -> None:
        super().__init__()
        self._set_up(glu_interleave_size, activation_recompute_in_mlp)
        self.beta1, self.beta2 = _betas("ScaledSiTUGLU", beta1, beta2)

    def _gate(self, x: torch.Tensor, scales: torch.Tensor, turns: int) -> torch.Tensor:
        return activation.scaled_situglu(x, scales, self.beta1, self.beta2, turns)


class ScaledClampedQGeGLU(_ScaledGLU):
    """ClampedSwiGLU's result times s. glu_interleave_size: as SwiGLU's."""

    @checks_keywords()
    def __init__(self, glu_interleave_size: Optional[int] = None, *, activation_recompute_in_mlp: bool = False, limit: float = 7.0,
                 alpha: float = 1.702, glu_linear_offset: float = 1.0) -> None:
        super().__init__()
        self._set_up(glu_interleave_size, activation_recompute_in_mlp)
        # Kept as a submodule, because checkpoints contain its state.
        self._clamped = ClampedSwiGLU(limit=limit, alpha=alpha, glu_linear_offset=glu_linear_offset)

    def _gate(self, x: torch.Tensor, scales: torch.Tensor, turns: int) -> torch.Tensor:
        clamped = self._clamped
        return activation.scaled_clamped_swiglu(x, scales, clamped.limit, clamped.alpha, clamped.glu_linear_offset, turns)
