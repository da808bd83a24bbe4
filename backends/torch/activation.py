"""Activations and their gradients by PyTorch's operations, computed in FP32."""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Dict, Tuple

import torch

from te_fl.reference_torch.values import matrix, store, values

_C = math.sqrt(2 / math.pi)
_FAR = 1e4  # from here on the derivatives are 0 or 1; their terms must not become infinity times 0


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _dgelu(x: torch.Tensor) -> torch.Tensor:
    x = x.clamp(-_FAR, _FAR)
    t = torch.tanh(_C * (x + 0.044715 * x * x * x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _C * (1 + 3 * 0.044715 * x * x)


def dsilu(x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """The derivative of x sigmoid(factor x)."""
    t = (factor * x).clamp(-_FAR, _FAR)
    s = torch.sigmoid(t)
    return s + t * s * (1 - s)


def _dsigmoid(x: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s)


# Each activation with its derivative.
ACTIVATIONS: Dict[str, Tuple[Callable, Callable]] = {
    "gelu": (_gelu, _dgelu),
    "qgelu": (lambda x: x * torch.sigmoid(1.702 * x), lambda x: dsilu(x, 1.702)),
    "relu": (lambda x: torch.where(x < 0, 0.0, x), lambda x: torch.where(x > 0, 1.0, torch.where(x.isnan(), x, 0.0))),
    "srelu": (lambda x: torch.where(x < 0, 0.0, x).square(), lambda x: 2 * torch.where(x < 0, 0.0, x)),
    "silu": (lambda x: x * torch.sigmoid(x), dsilu),
    "sigmoid": (torch.sigmoid, _dsigmoid),
}
_GATES = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu", "glu": "sigmoid"}


# PyTorch's own functions, which compute in FP32 and round once: the activation, and its gradient from (grad, input). Both take their output.
_OWN: Dict[str, Tuple[Callable, Callable]] = {
    "gelu": (lambda x, out: torch.ops.aten.gelu.out(x, approximate="tanh", out=out),
             lambda dy, x, out: torch.ops.aten.gelu_backward.grad_input(dy, x.clamp(-_FAR, _FAR), approximate="tanh", grad_input=out)),
    "silu": (lambda x, out: torch.ops.aten.silu.out(x, out=out), lambda dy, x, out: torch.ops.aten.silu_backward.grad_input(dy, x, grad_input=out)),
}


def _is_own(name: str, *tensors: Any) -> bool:
    """True if PyTorch's operation computes this activation of these tensors, or its gradient."""
    return name in _OWN and all(isinstance(t, torch.Tensor) and t.dtype == tensors[0].dtype for t in tensors)


def _slope_times(name: str, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of x in FP32."""
    return _OWN[name][1](dy, x, torch.empty_like(x)) if name in _OWN else dy * ACTIVATIONS[name][1](x)


def _forward(name: str, input: torch.Tensor, output: Any) -> None:
    if _is_own(name, input, output):
        _OWN[name][0](input, output)
        return
    store(output, ACTIVATIONS[name][0](values(input)), input.dtype)


def _backward(name: str, grad: torch.Tensor, input: torch.Tensor, output: Any) -> None:
    if _is_own(name, input, grad, output):
        _OWN[name][1](grad, input, output)
        return
    store(output, _slope_times(name, values(grad), values(input)), grad.dtype)


def _bias_backward(name: str, grad: torch.Tensor, input: torch.Tensor, output: Any, dbias: torch.Tensor) -> None:
    dx = _slope_times(name, values(grad), values(input))
    dbias.copy_(matrix(dx).sum(0))
    store(output, dx, grad.dtype)


def _gated_forward(name: str, input: torch.Tensor, output: Any) -> None:
    a, b = values(input).chunk(2, -1)
    store(output, ACTIVATIONS[name][0](a) * b, input.dtype)


def _gated_backward(name: str, grad: torch.Tensor, input: torch.Tensor, output: Any) -> None:
    act, slope = ACTIVATIONS[name]
    dy, (a, b) = values(grad), values(input).chunk(2, -1)
    store(output, torch.cat((dy * slope(a) * b, dy * act(a)), -1), grad.dtype)


def clamped_swiglu(input: torch.Tensor, output: Any, limit: float, alpha: float, glu_linear_offset: float = 1.0) -> None:
    a, b = values(input).chunk(2, -1)
    a, b = a.clamp_max(limit), b.clamp(-limit, limit)
    store(output, a * torch.sigmoid(alpha * a) * (b + glu_linear_offset), input.dtype)


def clamped_dswiglu(grad: torch.Tensor, input: torch.Tensor, output: Any, limit: float, alpha: float, glu_linear_offset: float = 1.0) -> None:
    dy, (a, b) = values(grad), values(input).chunk(2, -1)
    first, second = a.clamp_max(limit), b.clamp(-limit, limit)
    da = dy * dsilu(first, alpha) * (second + glu_linear_offset)
    db = dy * first * torch.sigmoid(alpha * first)
    store(output, torch.cat((torch.where(a > limit, 0.0, da), torch.where(b.abs() > limit, 0.0, db)), -1), grad.dtype)


def is_one_operation(function: Callable, input: torch.Tensor, output: Any, **_: Any) -> bool:
    """True if a function of OPS runs this call as one operation of PyTorch."""
    return getattr(function, "func", None) is _forward and _is_own(function.args[0], input, output)


def _ops() -> Dict[str, Callable]:
    found: Dict[str, Callable] = {"clamped_swiglu": clamped_swiglu, "clamped_dswiglu": clamped_dswiglu}
    for name in ("gelu", "qgelu", "relu", "srelu", "silu"):
        found[name] = functools.partial(_forward, name)
        found["d" + name] = functools.partial(_backward, name)
        found["dbias_d" + name] = functools.partial(_bias_backward, name)
    for name, gate in _GATES.items():
        found[name] = functools.partial(_gated_forward, gate)
        found["d" + name] = functools.partial(_gated_backward, gate)
    return found


OPS = _ops()
