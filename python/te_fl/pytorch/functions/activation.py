"""Activations that PyTorch differentiates. Gated ones take [.., 2H], the half that is activated first, and give [.., H]."""

from __future__ import annotations

from typing import Callable, Sequence

import torch

from te_fl import ops
from te_fl.pytorch.functions.function import Op, differentiable

__all__ = ["clamped_swiglu", "geglu", "gelu", "glu", "qgeglu", "qgelu", "reglu", "relu", "silu", "sreglu", "srelu", "swiglu"]


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
