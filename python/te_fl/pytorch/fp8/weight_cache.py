"""Caching of quantised weights between forwards."""

from __future__ import annotations

import itertools
import operator
import threading

from te_fl import _native

class _Thread(threading.local):
    def __init__(self):
        self.scopes = []


_thread = _Thread()
_native.set_weight_caches(_thread)
_numbers = itertools.count(2)  # 1 stands for a forward outside of all scopes


class cache_quantized_weights(_native.Scope):
    """A scope for inference: with torch.no_grad(), te.cache_quantized_weights(): ...

    Forwards without gradients on this thread quantise each weight once (without FP8: cast it once, if its dtype differs from the activations') and
    reuse the result until the scope ends. Weights must not change inside. Writes that PyTorch's version counter records and parameters that moved are
    detected, but writes through `data`, a storage, NumPy or DLPack are not. Outside of a scope each forward quantises. Several threads may enter one
    object; they share the cached weights.
    """

    _open, _close, _thread = next, operator.index, _thread  # C functions, which KeyboardInterrupt cannot interrupt

    def __init__(self):
        self._arguments, self._entered = (_numbers,), []
