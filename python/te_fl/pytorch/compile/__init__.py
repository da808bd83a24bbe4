"""te-fl's layers in graphs of torch.compile and in CUDA graphs.

The module with torch.compile's ops is imported when a graph first needs one of them.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from te_fl.pytorch.runtime import traced

_HOMES = {"forward": "compiled", "recomputed": "compiled", "draw": "compiled", "cumulative_lengths": "compiled", "check_device": "compiled",
          "begin_autocast": "compiled_scopes", "end_autocast": "compiled_scopes"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


traced.enter(sys.modules[__name__])
