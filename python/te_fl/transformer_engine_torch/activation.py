"""Activations and their gradients, also fused with the bias gradient."""

from __future__ import annotations

from typing import Any, Callable

import torch

from te_fl.transformer_engine_torch import matrix_ops as ops
from te_fl.transformer_engine_torch import schemes
from te_fl.transformer_engine_torch.quantize import bgrad_quantize, quantize_into

_PLAIN, _GATED = "gelu qgelu relu srelu silu", "geglu qgeglu reglu sreglu swiglu glu"
_WITH_BIAS = "gelu silu relu qgelu srelu"


def apply(op: Callable, inputs: dict, quantizer: Any, shape: Any, dtype: torch.dtype, device: Any, **options: Any) -> Any:
    """Returns the op's result in a new tensor, quantised if a quantizer is given."""
    if quantizer is None:
        out = torch.empty(shape, dtype=dtype, device=device)
        if out.numel():
            op(**inputs, output=out, **options)
        return out
    scheme = schemes.of_quantizer(quantizer)
    out = scheme.create(quantizer, shape, dtype, device)
    if scheme.is_fused(quantizer) and torch.Size(shape).numel():
        op(**inputs, output=scheme.target(quantizer, out), **options)
        return out
    values = torch.empty(shape, dtype=dtype, device=device)
    if values.numel():
        op(**inputs, output=values, **options)
    return quantize_into(values, quantizer, out)


def _forward(op: Callable, gated: bool) -> Callable:
    def activation(input: torch.Tensor, quantizer: Any) -> Any:
        return apply(op, {"input": input}, quantizer, (*input.shape[:-1], input.shape[-1] // (2 if gated else 1)), input.dtype, input.device)

    return activation


def _backward(op: Callable) -> Callable:
    def gradient(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> Any:
        return apply(op, {"grad": grad, "input": fwd_input}, quantizer, fwd_input.shape, fwd_input.dtype, fwd_input.device)

    return gradient


def _backward_with_bias(op: Callable, plain: Callable) -> Callable:
    def gradients(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> list:
        """Returns [bias gradient, gradient]."""
        scheme = None if quantizer is None else schemes.of_quantizer(quantizer)
        if grad.numel() == 0 or scheme is None or not scheme.is_fused(quantizer):
            # Transformer Engine rounds the gradient to its dtype first, and computes the bias gradient from the rounded values.
            return bgrad_quantize(_backward(plain)(grad, fwd_input, None), quantizer)
        out = scheme.create(quantizer, fwd_input.shape, grad.dtype, fwd_input.device)
        dbias = torch.empty(fwd_input.shape[-1], dtype=grad.dtype, device=fwd_input.device)
        op(grad=grad, input=fwd_input, output=scheme.target(quantizer, out), dbias=dbias)
        return [dbias, out]

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
    return apply(ops.clamped_swiglu, {"input": input}, quantizer, (*input.shape[:-1], input.shape[-1] // 2), input.dtype, input.device,
                 limit=limit, alpha=alpha, glu_linear_offset=glu_linear_offset)


def clamped_dswiglu(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any, limit: float = 7.0, alpha: float = 1.702,
                    glu_linear_offset: float = 1.0) -> Any:
    return apply(ops.clamped_dswiglu, {"grad": grad, "input": fwd_input}, quantizer, fwd_input.shape, fwd_input.dtype,
                 fwd_input.device, limit=limit, alpha=alpha, glu_linear_offset=glu_linear_offset)
