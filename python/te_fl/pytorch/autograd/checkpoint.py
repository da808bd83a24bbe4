"""Activation recomputation: a function keeps its inputs alone and runs again in the backward."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Optional, Tuple

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from te_fl import _native
from te_fl.pytorch.autograd.saved_parts import saved_in_parts
from te_fl.pytorch.autograd.torch_checkpoint import Noted, Recomputed, Reentrant, declared, followed, followed_runs, own_runs
from te_fl.pytorch.fp8 import quantization
from te_fl.pytorch.runtime import traced
from te_fl.pytorch.runtime.refuse import refuse


class _Run(Recomputed):
    """One of the two runs: the second reads the scales and draws the numbers of the first, and collects nothing."""

    _thread = own_runs

    def __init__(self, record: Any, second: bool):
        super().__init__(record, second)
        self.is_second = second


class _FollowedRun(Noted):
    """One of the runs inside of a run of PyTorch's own checkpoint, which follows each module itself."""

    _thread = followed_runs

    def __init__(self, second: bool):
        super().__init__()
        self.is_second = second


class _TrackedRun:
    """A run whose second time begins with the tracker's random states of the first."""

    def __init__(self, run: Any, second: bool, first_states: list, tracker: Callable):
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
    runs: Tuple[Any, Any]
    if followed():
        runs = _FollowedRun(False), _FollowedRun(True)
    else:
        record = _native.recompute_record()
        runs = _Run(record, False), _Run(record, True)
    if get_rng_state_tracker is None:
        return runs
    states: list = []
    return tuple(_TrackedRun(run, second, states, get_rng_state_tracker) for run, second in zip(runs, (False, True)))


def get_activation_recompute_contexts() -> Tuple[Any, Any]:
    """recompute_contexts() by Transformer Engine's name: a pair for each call of a function that is checkpointed."""
    return recompute_contexts()


class activation_recompute_forward(Reentrant, contextlib.ContextDecorator):
    """The two runs of a checkpoint that a program has itself, in FP8: with activation_recompute_forward(activation_recompute=True,
    recompute_phase=False) around the first, which keeps no activations, and recompute_phase=True around the second in the backward, inside of the
    same autocast. The second reads the scales of the first and collects nothing. Several first runs of a module in training may wait; they are repeated
    in their order. Without activation_recompute it has no effect.
    """

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False):
        super().__init__(None, bool(recompute_phase))
        if not activation_recompute:
            self._thread = None
        self.activation_recompute, self.recompute_phase = bool(activation_recompute), bool(recompute_phase)


def _runs() -> list:
    return own_runs.scopes or followed_runs.scopes


def is_fp8_activation_recompute_enabled() -> bool:
    """True in either run of a function under checkpoint(), recompute_contexts() or activation_recompute_forward(), inside of an FP8 autocast."""
    return (bool(_runs()) or declared() is not None) and quantization.enabled()


def in_fp8_activation_recompute_phase() -> bool:
    """True in the second run of a function under checkpoint(), recompute_contexts() or activation_recompute_forward()."""
    return _runs()[-1].is_second if _runs() else bool(declared())


def use_reentrant_activation_recompute() -> bool:
    """False: te-fl's checkpoint() is never re-entrant."""
    return False


class _Both:
    """A run within a context manager of the program's."""

    def __init__(self, theirs: Any, run: Any):
        self._theirs, self._run, self._entered = theirs, run, []

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._theirs)
            stack.enter_context(self._run)
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> Optional[bool]:
        return self._entered.pop().__exit__(*error)


def _with(contexts: Optional[Callable], runs: Tuple[Any, Any]) -> Tuple[Any, Any]:
    return runs if contexts is None else tuple(_Both(theirs, run) for theirs, run in zip(contexts(), runs, strict=True))


_OF_PYTORCH = ("preserve_rng_state", "determinism_check", "early_stop")  # of the keywords; the others are the function's


def checkpoint(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs), whose activations are computed again in the backward; results and gradients are bit for bit the same.

    Of the keywords these are its own: get_rng_state_tracker, whose streams are set back for the second run; use_reentrant, for
    compatibility: te-fl always takes PyTorch's way that is not re-entrant, which gives the same gradients; distribute_saved_activations:
    of the first argument, which all ranks of tp_group (None: the default group) have alike, each rank keeps its part, and the backward
    gathers it; context_fn, whose two context managers are around the two runs too; debug, without effect as in Transformer Engine: PyTorch
    joins it with no context managers, and te-fl has its own.
    """
    kwargs.pop("debug", None)
    tracker = kwargs.pop("get_rng_state_tracker", None)
    kwargs.pop("use_reentrant", None)
    distributes, group = kwargs.pop("distribute_saved_activations", False), kwargs.pop("tp_group", None)
    contexts = kwargs.pop("context_fn", None)
    if torch.compiler.is_compiling():
        if contexts is not None:
            raise refuse("checkpoint", "context_fn", contexts, "a graph of torch.compile repeats its own operations; leave it out there")
        if distributes:
            raise refuse("checkpoint", "distribute_saved_activations", True, "graphs of torch.compile keep whole inputs; leave it out there")
        return traced.graph.recomputed(function, args, {k: v for k, v in kwargs.items() if k not in _OF_PYTORCH})
    keeping = saved_in_parts(args[0] if args else None, group) if distributes else contextlib.nullcontext()
    with keeping:
        return torch_checkpoint(function, *args, use_reentrant=False, context_fn=lambda: _with(contexts, recompute_contexts(tracker)), **kwargs)
