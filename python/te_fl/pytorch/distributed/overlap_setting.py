"""TE_FL_TP_OVERLAP: turns on the overlap of sequence parallelism's transfers with matrix products."""

from __future__ import annotations

import os

from te_fl.errors import InvalidArgument

_ON, _OFF = ("1", "true", "on", "yes"), ("", "0", "false", "off", "no")


def wanted() -> bool:
    """True if the overlap is on. InvalidArgument for a value that means neither on nor off."""
    value = os.environ.get("TE_FL_TP_OVERLAP", "").lower()
    if value not in _ON + _OFF:
        raise InvalidArgument(f"TE_FL_TP_OVERLAP is {value!r}; it is 1, where transfers of sequence parallelism are to go beside products, or 0")
    return value in _ON


def words() -> str:
    """The setting as text, which ranks compare: it must be equal on all ranks."""
    return f"TE_FL_TP_OVERLAP={int(wanted())}"
