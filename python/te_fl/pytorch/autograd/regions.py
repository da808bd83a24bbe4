"""Collectives with autograd at the boundaries of a tensor-parallel region.

group: a torch.distributed.ProcessGroup of n > 1 ranks, or None for the default group. All its ranks make the same calls in the same order, in forward
and backward. Sequence-parallel tensors are sharded along the first dimension, in rank order. The group's backend sums in the tensor's own dtype, in
an order that the backend fixes.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from te_fl.pytorch.autograd.once import once_differentiable
from te_fl.pytorch.distributed import collectives


def _sum(t: torch.Tensor, group: Any) -> torch.Tensor:
    """All-reduce (sum); in place if t is contiguous."""
    t = t.contiguous()
    collectives.all_reduce(t, group)
    return t


def _gather(t: torch.Tensor, group: Any) -> torch.Tensor:
    """All-gather: the ranks' shards [rows, ..], concatenated."""
    whole = t.new_empty((t.shape[0] * collectives.size_of(group), *t.shape[1:]))
    collectives.all_gather_into(whole, t.contiguous(), group)
    return whole


def _scatter(t: torch.Tensor, group: Any) -> torch.Tensor:
    """Reduce-scatter: this rank's shard of the rows of the sum."""
    part = t.new_empty((t.shape[0] // collectives.size_of(group), *t.shape[1:]))
    collectives.reduce_scatter_into(part, t.contiguous(), group)
    return part


def _make_backward(function: Callable[[torch.Tensor, Any], torch.Tensor]) -> Callable:
    """The backward of a region's boundary: applies `function` to the gradient. Skips the guard against second derivatives when no graph is built,
    which is the common case.
    """

    def backward(ctx, grad: torch.Tensor):
        return function(grad, ctx.group), None

    guarded = once_differentiable(backward)
    return staticmethod(lambda ctx, grad: guarded(ctx, grad) if torch.is_grad_enabled() else backward(ctx, grad))


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.detach()

    backward = _make_backward(_sum)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _gather(x, group)

    backward = _make_backward(_scatter)


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

    backward = _make_backward(_gather)


def copied(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Returns x, which is equal on all ranks. The backward all-reduces the gradient in place, so the result may have only one consumer."""
    return _Copied.apply(x, group)


def gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    """All-gather: [rows, ..] on each rank -> [n * rows, ..] on all. The backward is a reduce-scatter."""
    return _Gathered.apply(x, group)


def summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    """All-reduce (sum) in x's memory, which must have no other reader. The backward passes the gradient, equal on all ranks, through."""
    return _Summed.apply(x, group)


def scattered(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Reduce-scatter: [n * rows, ..] on each rank -> this rank's rows of the sum. The backward is an all-gather."""
    return _Scattered.apply(x, group)
