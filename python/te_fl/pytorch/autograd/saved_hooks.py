"""The saved-tensor hooks that are in force on the calling thread: top(False) gives the innermost (pack, unpack) or None; pop() and push() change them.

PyTorch 2.7 has no top(). There, this module replaces PyTorch's pop() and push() by functions that also keep a list. It does not see hooks that were
pushed before its import, or in C++.
"""

from __future__ import annotations

from typing import Any

import torch

from te_fl import _native

_autograd: Any = torch._C._autograd
pop, push = _autograd._pop_saved_tensors_default_hooks, _autograd._push_saved_tensors_default_hooks

if hasattr(_autograd, "_top_saved_tensors_default_hooks"):
    top = _autograd._top_saved_tensors_default_hooks
else:
    push, pop, top = _native.track_hooks(push, pop)
    _autograd._push_saved_tensors_default_hooks, _autograd._pop_saved_tensors_default_hooks = push, pop
