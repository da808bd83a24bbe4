"""The caller of a method: PyTorch's and other packages' code reads tensors in a way of its own."""

from __future__ import annotations

import sys

_BETWEEN = ("te_fl.", "torch._tensor", "torch.functional")  # modules between the caller and __torch_dispatch__()


def called_from(*modules: str) -> bool:
    """True if the operation that is dispatched now was called by a module of these beginnings."""
    frame = sys._getframe(1)
    while frame is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(modules)
