"""Quantised weights that are kept from one forward to the next."""

from __future__ import annotations

import itertools
import operator
import threading

from te_fl import _native

UNCACHED = 1


class _Thread(threading.local):
    def __init__(self):
        self.scopes = []


_thread = _Thread()
_numbers = itertools.count(UNCACHED + 1)


class cache_quantized_weights(_native.Scope):
    """A scope for serving: with torch.no_grad(), te.cache_quantized_weights(): ...

    Forwards without gradients on this thread quantise each weight once (and without FP8 cast it once, where it has another dtype than the
    activations) and use that again until the scope ends. Inside, weights stay as they are: a write that PyTorch counts, and a parameter
    that moved, are noticed, but not one through `data`, a storage, NumPy or DLPack. Outside of a scope each forward quantises. One object
    may be entered by several threads, which then share what is kept.
    """

    _open, _close, _thread = next, operator.index, _thread  # functions in C, which no interrupt divides

    def __init__(self):
        self._arguments, self._entered = (_numbers,), []


def number() -> int:
    """The number of the outermost scope that this thread is in, as _native.layer_forward() takes it; UNCACHED outside of all."""
    scopes = _thread.scopes
    return scopes[0]._entered[0][0] if scopes else UNCACHED
