"""Activation recomputation: a function keeps its inputs alone and runs again in the backward."""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from te_fl import _native
from te_fl.pytorch.autograd.torch_checkpoint import own_runs
from te_fl.pytorch.fp8 import quantization
from te_fl.pytorch.runtime import traced
from te_fl.pytorch.runtime.refuse import refuse


class _Run(_native.Scope):
    """One of the two runs: the second reads the scales and draws the numbers of the first, and collects nothing."""

    _open, _close, _thread = _native.begin_recompute, _native.end_recompute, own_runs

    def __init__(self, record: Any, second: bool):
        self._arguments, self._entered = (record, second, quantization._state), []


class _TrackedRun:
    """A run whose second time begins with the tracker's random states of the first."""

    def __init__(self, run: _Run, second: bool, first_states: list, tracker: Callable):
        self._run, self._second, self._first_states, self._tracker = run, second, first_states, tracker
        self._outside: list = []

    def __enter__(self) -> "_TrackedRun":
        states = self._tracker().get_states()
        if self._second:
            self._outside.append(states)
            self._tracker().set_states(self._first_states[-1])
        else:
            self._first_states[:] = [states]
        self._run.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._run.__exit__(*error)
        finally:
            if self._second:
                self._tracker().set_states(self._outside.pop())


def recompute_contexts(get_rng_state_tracker: Optional[Callable] = None) -> Tuple[Any, Any]:
    """The context_fn of torch.utils.checkpoint.checkpoint(use_reentrant=False) for functions that call te-fl's modules in FP8."""
    record = _native.recompute_record()
    runs = _Run(record, False), _Run(record, True)
    if get_rng_state_tracker is None:
        return runs
    states: list = []
    return tuple(_TrackedRun(run, second, states, get_rng_state_tracker) for run, second in zip(runs, (False, True)))


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
        return traced.graph.recomputed(function, args, {k: v for k, v in kwargs.items() if k not in _OF_PYTORCH})
    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=lambda: recompute_contexts(tracker), **kwargs)
