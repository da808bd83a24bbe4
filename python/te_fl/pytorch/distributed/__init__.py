"""Communication between ranks. This package also exports the names of Transformer Engine's te.pytorch.distributed, whose functions are spread over
several packages of te-fl.
"""

from __future__ import annotations

import importlib

from te_fl.compat import table

_THEIRS = "transformer_engine.pytorch.distributed"


def __getattr__(name: str):
    home = None if name.startswith("_") else table.home(_THEIRS, name)
    if home is None:
        raise AttributeError(f"te_fl.pytorch.distributed has no {name!r}; {table.way_out(_THEIRS, name)}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value
