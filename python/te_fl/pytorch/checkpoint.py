"""Activation recomputation: a function keeps its inputs alone and runs again in the backward."""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from te_fl import _native
from te_fl.pytorch import quantization
from te_fl.pytorch.refuse import refuse


class _Run:
    """One of the two runs: the second reads the scales and draws the numbers of the first, and collects nothing."""

    def __init__(self, record: Any, second: bool, shared: dict, tracker: Optional[Callable]):
        self._record, self._second, self._shared, self._tracker = record, second, shared, tracker
        self._entered = []

    def __enter__(self) -> "_Run":
        outside = None
        if self._second:
            outside = list(quantization._state.scopes)
            quantization._state.scopes[:] = self._shared["scopes"]
        else:
            self._shared["scopes"] = list(quantization._state.scopes)
        streams = None
        if self._tracker is not None:
            if self._second:
                streams = self._tracker().get_states()
                self._tracker().set_states(self._shared["streams"])
            else:
                self._shared["streams"] = self._tracker().get_states()
        self._entered.append((outside, streams, _native.begin_recompute(self._record, self._second)))
        return self

    def __exit__(self, *error: Any) -> None:
        outside, streams, scope = self._entered.pop()
        _native.end_recompute(scope)
        if outside is not None:
            quantization._state.scopes[:] = outside
        if streams is not None:
            self._tracker().set_states(streams)


def recompute_contexts(get_rng_state_tracker: Optional[Callable] = None) -> Tuple[_Run, _Run]:
    """The context_fn of torch.utils.checkpoint.checkpoint(use_reentrant=False) for functions that call te-fl's modules in FP8."""
    record, shared = _native.recompute_record(), {}
    return _Run(record, False, shared, get_rng_state_tracker), _Run(record, True, shared, get_rng_state_tracker)


_OF_PYTORCH = ("preserve_rng_state", "determinism_check", "debug", "early_stop")  # of the keywords; the others are the function's


def checkpoint(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs), whose activations are computed again in the backward; results and gradients are bit for bit the same.

    Of the keywords these are its own: get_rng_state_tracker, whose streams are set back for the second run; use_reentrant, for
    compatibility: te-fl always takes PyTorch's way that is not re-entrant, which gives the same gradients; distribute_saved_activations
    and tp_group are refused until there are several ranks.
    """
    tracker = kwargs.pop("get_rng_state_tracker", None)
    kwargs.pop("use_reentrant", None)
    for name in ("distribute_saved_activations", "tp_group"):
        if kwargs.pop(name, None):
            raise refuse("checkpoint", name, True, "te_fl.pytorch runs on one rank so far; leave it out")
    if torch.compiler.is_compiling():
        from te_fl.pytorch import compiled
        return compiled.recomputed(function, args, {k: v for k, v in kwargs.items() if k not in _OF_PYTORCH})
    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=lambda: recompute_contexts(tracker), **kwargs)
