"""Backward functions that raise an error if their results are differentiated again."""

from __future__ import annotations

from functools import wraps
from typing import Any, Callable, Iterable, List

import torch

MESSAGE = (b"te_fl.pytorch's layers and functions have no second derivative: a gradient of theirs that was computed with create_graph=True (a gradient "
           b"penalty, a Hessian) was differentiated again. Compute that part with torch.nn's layers, which have the same parameters")


class _Unpacked:
    """Wraps a function's ctx whose saved tensors may be read only once, as under torch.utils.checkpoint."""

    def __init__(self, ctx: Any):
        self.__dict__.update(ctx=ctx, saved_tensors=ctx.saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["ctx"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.ctx, name, value)


def _trained(tensors: Iterable[Any]) -> List[torch.Tensor]:
    return [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]


def once_differentiable(backward: Callable) -> Callable:
    """Runs backward(ctx, *grads) without building a graph. Under create_graph=True, differentiating its results raises an error, even if the incoming
    gradients require no gradient. PyTorch's function of this name instead drops such gradients silently: its results then depend on nothing, so sums
    and torch.autograd.grad() ignore them.
    """

    @wraps(backward)
    def guarded(ctx, *grads):
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            ctx = _Unpacked(ctx)
            found = backward(ctx, *grads)
        results = list(found) if isinstance(found, tuple) else [found]
        at = [i for i, g in enumerate(results) if isinstance(g, torch.Tensor) and g.is_floating_point()]
        sources = _trained(grads) + _trained(ctx.saved_tensors)
        refused = torch._C._functions.DelayedError(MESSAGE, len(at) + len(sources))(*[results[i].detach().requires_grad_() for i in at], *sources)
        for i, g in zip(at, refused if isinstance(refused, tuple) else (refused,)):
            results[i] = g
        return tuple(results) if isinstance(found, tuple) else results[0]

    return guarded
