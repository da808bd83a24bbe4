"""The saved-tensor hooks that are in force on the calling thread: top(False) gives the innermost (pack, unpack) or None; pop() and push() change them.

PyTorch 2.7 has no top(). There, this module replaces PyTorch's pop() and push() by functions that also keep a list. It does not see hooks that were
pushed before its import, or in C++.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, List, Optional, Tuple

import torch

_autograd: Any = torch._C._autograd
pop, push = _autograd._pop_saved_tensors_default_hooks, _autograd._push_saved_tensors_default_hooks


class _Thread(threading.local):
    def __init__(self) -> None:
        self.hooks: List[Tuple[Callable, Callable]] = []


if hasattr(_autograd, "_top_saved_tensors_default_hooks"):
    top = _autograd._top_saved_tensors_default_hooks
else:
    _thread, _pop, _push = _Thread(), pop, push

    def top(ignore_is_tracing: bool) -> Optional[Tuple[Callable, Callable]]:
        return _thread.hooks[-1] if _thread.hooks else None

    # PyTorch's stack and the list change in one line, so that no KeyboardInterrupt comes between them.
    def push(pack: Callable, unpack: Callable) -> None:
        hooks = _thread.hooks
        hooks.append((pack, unpack)), _push(pack, unpack)

    def pop() -> None:
        hooks = _thread.hooks
        _pop(), hooks and hooks.pop()

    _autograd._push_saved_tensors_default_hooks, _autograd._pop_saved_tensors_default_hooks = push, pop
