"""The products of a group of linear layers as one op in each direction: y_i = x_i W_i^T + b_i, where the rows of x_i follow each other."""

from __future__ import annotations

import itertools
from typing import List, NamedTuple, Optional, Sequence, Tuple

import torch

from te_fl import ops
from te_fl.pytorch.autograd.call import main_grads_of, placeholder
from te_fl.pytorch.autograd.once import once_differentiable


class GroupedCall(NamedTuple):
    """The arguments of a group's forward besides tensors that autograd follows."""

    splits: Tuple[int, ...]  # the rows of each member
    activation: torch.dtype  # of the products' operands and of the result
    accumulates: bool  # true if gradients of weights go to main_grad
    overwrites: bool  # true if they overwrite it
    out: Optional[torch.Tensor]  # memory for the result, and for the gradient of x
    grad_out: Optional[torch.Tensor]


def parts_of(rows: torch.Tensor, splits: Sequence[int]) -> List[torch.Tensor]:
    """The rows of each member."""
    ends = tuple(itertools.accumulate(splits))
    return [rows[end - count:end] for end, count in zip(ends, splits)]


def _like(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> List[torch.Tensor]:
    """The tensors as the products read them, in the dtype of activations."""
    return [t.detach().to(dtype) for t in tensors]


class GroupedProduct(torch.autograd.Function):
    """forward(call, x, weights.., biases..): x [rows, in], as many biases as weights, or none."""

    @staticmethod
    def forward(ctx, call: GroupedCall, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        n = len(call.splits)
        weights, biases = parameters[:n], parameters[n:]
        ctx.dtype, x = x.dtype, x.detach().to(call.activation)
        y = x.new_empty((x.shape[0], weights[0].shape[0])) if call.out is None else call.out.detach()
        if x.shape[0]:
            ops.grouped_gemm(a=parts_of(x, call.splits), b=_like(weights, x.dtype), d=parts_of(y, call.splits),
                             bias=[b.detach() for b in biases] if biases else None, trans_b=True)
        ctx.save_for_backward(x, *parameters)
        ctx.call, ctx.weights = call, weights if call.accumulates else ()
        return y

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return _guarded_backward(ctx, grad) if torch.is_grad_enabled() else _backward(ctx, grad)


def _backward(ctx, grad: torch.Tensor):
    call, (x, *parameters) = ctx.call, ctx.saved_tensors
    n = len(call.splits)
    weights, biases = parameters[:n], parameters[n:]
    needed, grads = ctx.needs_input_grad[2:], [None] * len(parameters)
    grad = grad.contiguous()
    grad_parts, x_parts = parts_of(grad, call.splits), parts_of(x, call.splits)
    grad_x = None
    if ctx.needs_input_grad[1]:
        grad_x = torch.empty_like(x, dtype=ctx.dtype) if call.grad_out is None else call.grad_out.detach()
        if x.shape[0]:
            ops.grouped_gemm(a=grad_parts, b=_like(weights, x.dtype), d=parts_of(grad_x, call.splits))
    members = [i for i in range(n) if needed[i]]
    main = dict(enumerate(main_grads_of(ctx.weights)))
    for added in (False, True):  # those that are written, and those that are added to a main_grad
        some = [i for i in members if added == _is_added(call, main.get(i))]
        if not some:
            continue
        into = [torch.empty_like(weights[i]) if main.get(i) is None else main[i][0] for i in some]
        summed = [i for i in some if biases and needed[n + i]]
        bias_grads = [torch.empty_like(biases[i]) for i in some] if summed else None
        ops.grouped_gemm(a=[grad_parts[i] for i in some], b=[x_parts[i] for i in some], d=into, bias_grad=bias_grads, trans_a=True, accumulate=added)
        for at, i in enumerate(some):
            grads[i] = into[at] if main.get(i) is None else placeholder(ctx.weights[i])
            if i in summed:
                grads[n + i] = bias_grads[at]
    for i, bias in enumerate(biases):
        if needed[n + i] and not needed[i]:
            grads[n + i] = grad_parts[i].sum(0, dtype=torch.float32).to(bias.dtype)
    return (None, grad_x, *grads)


def _is_added(call: GroupedCall, main: Optional[Tuple[torch.Tensor, bool]]) -> bool:
    return main is not None and not main[1] and not call.overwrites


_guarded_backward = once_differentiable(_backward)


class Joined(torch.autograd.Function):
    """The members' results, rows one after the other, in memory that is given or new. forward(out, y..)."""

    @staticmethod
    def forward(ctx, out: Optional[torch.Tensor], *parts: torch.Tensor) -> torch.Tensor:
        ctx.rows = [p.shape[0] for p in parts]
        return torch.cat(parts, out=None if out is None else out.detach())

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return (None, *grad.contiguous().split(ctx.rows))


class GradientInto(torch.autograd.Function):
    """x; its gradient is written to memory that is given. forward(x, memory)."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        ctx.memory = memory.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return ctx.memory.copy_(grad), None
