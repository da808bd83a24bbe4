"""Differentiable activations. Gated activations take [.., 2H], whose first half is activated, and return [.., H]."""

from __future__ import annotations

from typing import Callable, Sequence

import torch

from te_fl import ops
from te_fl.pytorch.functions.function import Op, differentiable

__all__ = ["clamped_swiglu", "geglu", "gelu", "glu", "qgeglu", "qgelu", "reglu", "relu", "silu", "scaled_clamped_swiglu", "scaled_situglu",
           "scaled_srelu", "scaled_swiglu", "situglu", "sreglu", "srelu", "swiglu"]


def _make(name: str, gradient: str, gated: bool, options: Sequence[str] = ()) -> Callable:
    forward_op, backward_op = getattr(ops, name), getattr(ops, gradient)

    def result(input, *values):
        return input.new_empty((*input.shape[:-1], input.shape[-1] // 2) if gated else input.shape)

    def forward(input, *values):
        output = result(input)
        if input.numel():
            forward_op(input=input.contiguous(), output=output, **dict(zip(options, values)))
        return output

    def backward(grad, input, *values):
        output = like_input(grad, input)
        if input.numel():
            backward_op(grad=grad.contiguous(), input=input.contiguous(), output=output, **dict(zip(options, values)))
        return output

    def like_input(grad, input, *values):
        return torch.empty_like(input, memory_format=torch.contiguous_format)

    def save(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.values = inputs[1:]

    def gradients(op, ctx, grad):
        return (op(grad, ctx.saved_tensors[0], *ctx.values),) + (None,) * len(options)

    more = "".join(f", float {option}" for option in options)
    return differentiable(Op(f"activation_{name}(Tensor input{more}) -> Tensor", forward, result),
                          Op(f"activation_{gradient}(Tensor grad, Tensor input{more}) -> Tensor", backward, like_input), save, gradients)


gelu, qgelu, relu, srelu, silu = (_make(name, f"d{name}", False) for name in ("gelu", "qgelu", "relu", "srelu", "silu"))
glu, geglu, qgeglu, reglu, sreglu, swiglu = (_make(name, f"d{name}", True) for name in ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu"))
clamped_swiglu = _make("clamped_swiglu", "clamped_dswiglu", True, ("limit", "alpha", "glu_linear_offset"))
situglu = _make("situglu", "dsituglu", True, ("beta1", "beta2"))


def _make_scaled(name: str, gradient: str, gated: bool, options: Sequence[str] = ()) -> Callable:
    """Returns a function (input, factors, *options) that scales row i of the activation by factors[i]. Gated functions have a last argument
    glu_interleave_size; 0: the two halves are contiguous.
    """
    forward_op, backward_op = getattr(ops, name), getattr(ops, gradient)
    names = (*options, "glu_interleave_size") if gated else tuple(options)

    def result(input, scales, *values):
        return input.new_empty((*input.shape[:-1], input.shape[-1] // 2) if gated else input.shape)

    def forward(input, scales, *values):
        output = result(input, scales)
        forward_op(input=input.contiguous(), act_scales=scales.contiguous(), output=output, **dict(zip(names, values)))
        return output

    def like_inputs(grad, input, scales, *values):
        return input.new_empty(input.shape), scales.new_empty(scales.shape)

    def backward(grad, input, scales, *values):
        grad_input, grad_scales = like_inputs(grad, input, scales)
        backward_op(grad=grad.contiguous(), input=input.contiguous(), act_scales=scales.contiguous(), output=grad_input, grad_scales=grad_scales,
                    **dict(zip(names, values)))
        return grad_input, grad_scales

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])
        ctx.values = inputs[2:]

    def gradients(op, ctx, grad):
        return (*op(grad, *ctx.saved_tensors, *ctx.values), *(None for _ in names))

    more = "".join(f", float {option}" for option in options) + (", int glu_interleave_size" if gated else "")
    return differentiable(Op(f"activation_{name}(Tensor input, Tensor scales{more}) -> Tensor", forward, result),
                          Op(f"activation_{gradient}(Tensor grad, Tensor input, Tensor scales{more}) -> (Tensor, Tensor)", backward, like_inputs),
                          save, gradients)


scaled_srelu = _make_scaled("scaled_srelu", "scaled_dsrelu", False)
scaled_swiglu = _make_scaled("scaled_swiglu", "scaled_dswiglu", True)
scaled_situglu = _make_scaled("scaled_situglu", "scaled_dsituglu", True, ("beta1", "beta2"))
scaled_clamped_swiglu = _make_scaled("scaled_clamped_swiglu", "scaled_clamped_dswiglu", True, ("limit", "alpha", "glu_linear_offset"))
