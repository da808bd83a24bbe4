"""Inspects the caller of a tensor operation: code of PyTorch and of some packages needs different results."""

from __future__ import annotations

import sys

_BETWEEN = ("te_fl.", "torch._tensor", "torch.functional")  # modules that may lie between the caller and __torch_dispatch__()


def called_from(*modules: str) -> bool:
    """True if the operation being dispatched was called by a module whose name starts with one of these prefixes."""
    frame = sys._getframe(1)
    while frame is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(modules)
