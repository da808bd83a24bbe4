"""Backwards that cannot be differentiated themselves, and that say so."""

from __future__ import annotations

from functools import wraps
from typing import Callable

import torch

_MESSAGE = (b"te_fl.pytorch's layers and functions have no second derivative: a gradient of theirs that was computed with create_graph=True (a gradient "
            b"penalty, a Hessian) was differentiated again. Compute that part with torch.nn's layers, which have the same parameters")


def once_differentiable(backward: Callable) -> Callable:
    """backward(ctx, *grads) without a graph. Under create_graph=True its results raise when they are differentiated, whatever the incoming
    gradients need: PyTorch's function of this name lets gradients of constants drop out of a sum in silence."""

    @wraps(backward)
    def guarded(ctx, *grads):
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        results = list(found) if isinstance(found, tuple) else [found]
        at = [i for i, g in enumerate(results) if isinstance(g, torch.Tensor) and g.is_floating_point()]
        refused = torch._C._functions.DelayedError(_MESSAGE, len(at))(*[results[i].detach().requires_grad_() for i in at])
        for i, g in zip(at, refused if isinstance(refused, tuple) else (refused,)):
            results[i] = g
        return tuple(results) if isinstance(found, tuple) else results[0]

    return guarded
