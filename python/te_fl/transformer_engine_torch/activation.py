"""Activations and their gradients, also fused with the bias gradient."""

from __future__ import annotations

from typing import Any, Callable

import torch

from te_fl.transformer_engine_torch import matrix_ops as ops
from te_fl.transformer_engine_torch import schemes
from te_fl.transformer_engine_torch.quantize import bgrad_quantize, quantize_into

_PLAIN, _GATED = "gelu qgelu relu srelu silu", "geglu qgeglu reglu sreglu swiglu glu"
_WITH_BIAS = "gelu silu relu qgelu srelu"


def apply(op: Callable, inputs: tuple, quantizer: Any, shape: Any, **options: Any) -> Any:
    """Returns the op's result in a new tensor, quantised if a quantizer is given. shape: the result's. Its dtype is that of the last input."""
    if quantizer is None:
        made = op(*inputs, **options)
        return made if made.shape == shape else made.view(shape)
    scheme, dtype, device = schemes.of_quantizer(quantizer), inputs[-1].dtype, inputs[-1].device
    out = scheme.create(quantizer, shape, dtype, device)
    if not scheme.is_fused(quantizer):
        return quantize_into(op(*inputs, **options), quantizer, out)
    if torch.Size(shape).numel():
        op(*inputs, output=scheme.target(quantizer, out), **options)
    return out


def _forward(op: Callable, gated: bool) -> Callable:
    def activation(input: torch.Tensor, quantizer: Any) -> Any:
        return apply(op, (input,), quantizer, (*input.shape[:-1], input.shape[-1] // 2) if gated else input.shape)

    return activation


def _backward(op: Callable) -> Callable:
    def gradient(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> Any:
        return apply(op, (grad, fwd_input), quantizer, fwd_input.shape)

    return gradient


def _backward_with_bias(op: Callable, plain: Callable) -> Callable:
    def gradients(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> list:
        """Returns [bias gradient, gradient]."""
        scheme = None if quantizer is None else schemes.of_quantizer(quantizer)
        if grad.numel() == 0 or scheme is None or not scheme.is_fused(quantizer):
            # Transformer Engine rounds the gradient to its dtype first, and computes the bias gradient from the rounded values.
            return bgrad_quantize(_backward(plain)(grad, fwd_input, None), quantizer)
        out = scheme.create(quantizer, fwd_input.shape, grad.dtype, fwd_input.device)
        return [op(grad, fwd_input, output=scheme.target(quantizer, out)), out]

    return gradients


def _named(name: str, function: Callable) -> str:
    function.__name__ = function.__qualname__ = name
    globals()[name] = function
    return name


__all__ = ["clamped_dswiglu", "clamped_swiglu"]
__all__ += [_named(n, _forward(getattr(ops, n), n in _GATED.split())) for n in f"{_PLAIN} {_GATED}".split()]
__all__ += [_named(f"d{n}", _backward(getattr(ops, f"d{n}"))) for n in f"{_PLAIN} {_GATED}".split()]
__all__ += [_named(f"dbias_d{n}", _backward_with_bias(getattr(ops, f"dbias_d{n}"), getattr(ops, f"d{n}"))) for n in _WITH_BIAS.split()]


def clamped_swiglu(input: torch.Tensor, quantizer: Any, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0) -> Any:
    return apply(ops.clamped_swiglu, (input,), quantizer, (*input.shape[:-1], input.shape[-1] // 2), limit=limit, alpha=alpha,
                 glu_linear_offset=glu_linear_offset)


def clamped_dswiglu(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any, limit: float = 7.0, alpha: float = 1.702,
                    glu_linear_offset: float = 1.0) -> Any:
    return apply(ops.clamped_dswiglu, (grad, fwd_input), quantizer, fwd_input.shape, limit=limit, alpha=alpha, glu_linear_offset=glu_linear_offset)
