"""Reads from the op specification the shapes and dtypes of outputs, for tensors without memory, and the ops that compute gradients."""

from __future__ import annotations

import functools
import math
from typing import Any, Dict, Mapping, NamedTuple, Optional, Tuple

from te_fl import _native


class Gradient(NamedTuple):
    """The `gradient` entry of an op. Each dict is keyed by arguments of the backward op."""

    op: str  # the backward op
    grads: Dict[str, str]  # -> the op's output whose gradient the argument takes
    saved: Dict[str, str]  # -> the op's argument that the backward op reads
    results: Dict[str, str]  # -> the op's input whose gradient the backward op writes there


@functools.cache
def gradient(op: str) -> Optional[Gradient]:
    """The op's gradient; None: it has none. Numbers of the same name go along."""
    text = _native.schema(op)["gradient"]
    if not text:
        return None
    backward, *pairs = text.split()
    written = {arg["name"] for arg in _native.schema(backward)["args"] if arg["role"] != 0}
    found = Gradient(backward, {}, {}, {})
    for pair in pairs:
        theirs, _, ours = pair.partition("=")
        if ours.startswith("d("):
            (found.results if theirs in written else found.grads)[theirs] = ours[2:-1]
        else:
            found.saved[theirs] = ours or theirs
    return found


@functools.cache
def _choices(op: str) -> frozenset:
    """The bools and enums of an op, on which its shape rules may depend."""
    return frozenset(arg["name"] for arg in _native.schema(op)["args"] if arg["type"] in (2, 7))


@functools.lru_cache(maxsize=1024)
def _form(op: str, tensors: tuple, scalars: tuple, name: str) -> Tuple[Optional[list], Optional[int]]:
    return _native.output(op, dict(tensors), dict(scalars), name)


def _extent(shapes: Mapping[str, tuple], of: Optional[str], first: int, count: int, less: int, divisor: int, factor: int, more: int) -> Any:
    if of is None:
        return more
    product = math.prod(shapes[of][first:first + count])
    return factor * (product if less == 0 and divisor == 1 else -(-(product - less) // divisor)) + more


def output(op: str, name: str, shapes: Mapping[str, tuple], dtypes: Mapping[str, int], scalars: Mapping[str, Any],
           counts: Mapping[str, int] = {}) -> Tuple[Optional[tuple], Optional[int]]:
    """The shape and the dtype of output `name`; None for what does not follow from the inputs.

    shapes, dtypes: those of the call's other tensors; dtypes are indices in te_fl.tensors.DTYPES, and extents may be symbolic. scalars: the call's
    other arguments. counts: the lengths of its lists of tensors.
    """
    tensors = tuple((arg, (len(shape), dtypes[arg])) for arg, shape in shapes.items())
    chosen = tuple((arg, scalars[arg]) for arg in _choices(op) & scalars.keys())
    extents, dtype = _form(op, tensors + tuple(counts.items()), chosen, name)
    return None if extents is None else tuple(_extent(shapes, *extent) for extent in extents), dtype
