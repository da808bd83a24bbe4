"""The ways into and out of the part of a model that a tensor-parallel group divides: collectives that autograd follows.

group: a torch.distributed.ProcessGroup of n > 1 ranks, or None for the default group. Each rank of it comes to the same calls in the same order,
in forward and in backward. Sequence-parallel tensors are the ranks' parts along the first dimension, in the ranks' order. What is summed is
summed in the tensor's own dtype by the group's backend, in an order that it fixes.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from te_fl.pytorch.autograd.once import once_differentiable
from te_fl.pytorch.distributed import collectives


def _sum(t: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of the ranks' tensors, in place where t is contiguous."""
    t = t.contiguous()
    collectives.all_reduce(t, group)
    return t


def _gather(t: torch.Tensor, group: Any) -> torch.Tensor:
    """The ranks' parts [rows, ..] one after the other."""
    whole = t.new_empty((t.shape[0] * collectives.size_of(group), *t.shape[1:]))
    collectives.all_gather_into(whole, t.contiguous(), group)
    return whole


def _scatter(t: torch.Tensor, group: Any) -> torch.Tensor:
    """This rank's part of the rows of the sum of the ranks' tensors."""
    part = t.new_empty((t.shape[0] // collectives.size_of(group), *t.shape[1:]))
    collectives.reduce_scatter_into(part, t.contiguous(), group)
    return part


def _backward_of(function: Callable[[torch.Tensor, Any], torch.Tensor]) -> Callable:
    """The backward of a region's end: `function` of the gradient. Most backwards build no graph and need no guard against a second derivative."""

    def backward(ctx, grad: torch.Tensor):
        return function(grad, ctx.group), None

    guarded = once_differentiable(backward)
    return staticmethod(lambda ctx, grad: guarded(ctx, grad) if torch.is_grad_enabled() else backward(ctx, grad))


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.detach()

    backward = _backward_of(_sum)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _gather(x, group)

    backward = _backward_of(_scatter)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Any) -> torch.Tensor:
        return _sum(x.detach(), group)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _scatter(x, group)

    backward = _backward_of(_gather)


def copied(x: torch.Tensor, group: Any) -> torch.Tensor:
    """x, which all ranks have; its gradient is the sum of theirs. The result may have one consumer alone, whose gradient is written over."""
    return _Copied.apply(x, group)


def gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    """[rows, ..] of each rank -> [n * rows, ..] on all; each rank gets its part of the sum of the gradients."""
    return _Gathered.apply(x, group)


def summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of the ranks' tensors, on all of them, in x's memory, which nobody else may read; the gradient, which all ranks have, passes."""
    return _Summed.apply(x, group)


def scattered(x: torch.Tensor, group: Any) -> torch.Tensor:
    """[n * rows, ..] of each rank -> the rows of their sum that are this rank's; gradients are gathered."""
    return _Scattered.apply(x, group)
