"""Communication between ranks. This package also exports the names of Transformer Engine's te.pytorch.distributed, whose functions are spread over
several packages of te-fl.
"""

from __future__ import annotations

from te_fl.compat import same_modules


def __getattr__(name: str):
    value = globals()[name] = same_modules.find(__name__, name)
    return value
