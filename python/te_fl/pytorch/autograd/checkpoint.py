"""Activation recomputation: a checkpointed function saves only its inputs and runs again in the backward."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Optional, Tuple

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from te_fl import _native
from te_fl.pytorch.autograd.saved_parts import saved_in_parts
from te_fl.pytorch.autograd.torch_checkpoint import Recomputed, Reentrant, ThreadMark, declared, followed, followed_runs, own_runs
from te_fl.pytorch.fp8 import quantization
from te_fl.pytorch.runtime import traced
from te_fl.pytorch.runtime.refuse import refuse


class _Run(Recomputed):
    """One of a checkpoint's two runs. The second run uses the first run's scales and random numbers, and records no amaxes."""

    _thread = own_runs

    def __init__(self, record: Any, second: bool):
        super().__init__(record, second)
        self.is_second = second


class _FollowedRun(ThreadMark):
    """A run nested in a run of torch.utils.checkpoint. te-fl records the modules for the outer checkpoint, so this scope only marks the thread."""

    _thread = followed_runs

    def __init__(self, second: bool):
        super().__init__()
        self.is_second = second


class _TrackedRun:
    """A run with the random states of a RNG tracker: the second run starts from the states of the first."""

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
    """The context_fn for torch.utils.checkpoint.checkpoint(use_reentrant=False), for functions that call te-fl's modules in FP8."""
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
    """Transformer Engine's name of recompute_contexts(): returns a pair of context managers for one call of a checkpointed function."""
    return recompute_contexts()


class activation_recompute_forward(Reentrant, contextlib.ContextDecorator):
    """Marks the two runs of a program's own FP8 checkpoint. Use activation_recompute_forward(activation_recompute=True, recompute_phase=False) around
    the first run, which saves no activations, and recompute_phase=True around the second run in the backward, inside of the same autocast. The second
    run uses the first run's scales and records no amaxes. Several first runs of a training module may be pending; second runs match them in order.
    Without activation_recompute this has no effect.
    """

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False):
        super().__init__(None, bool(recompute_phase))
        if not activation_recompute:
            self._thread = None
        self.activation_recompute, self.recompute_phase = bool(activation_recompute), bool(recompute_phase)


def _runs() -> list:
    return own_runs.scopes or followed_runs.scopes


def is_fp8_activation_recompute_enabled() -> bool:
    """True inside of an FP8 autocast, in either run of a function under checkpoint(), recompute_contexts() or activation_recompute_forward()."""
    return (bool(_runs()) or declared() is not None) and quantization.enabled()


def in_fp8_activation_recompute_phase() -> bool:
    """True in the second run of a function under checkpoint(), recompute_contexts() or activation_recompute_forward()."""
    return _runs()[-1].is_second if _runs() else bool(declared())


def use_reentrant_activation_recompute() -> bool:
    """False: te-fl's checkpoint() is never re-entrant."""
    return False


class _Both:
    """Enters a context manager of the program, and inside of it the context manager of a checkpoint's run."""

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


# Keyword arguments for torch.utils.checkpoint; all others are passed to the function.
_OF_PYTORCH = ("preserve_rng_state", "determinism_check", "early_stop")


def checkpoint(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls function(*args, **kwargs) and recomputes its activations in the backward. Results and gradients are bitwise the same as without a
    checkpoint.

    These keywords are not passed to the function:
    get_rng_state_tracker: a tracker whose random states are restored for the second run.
    use_reentrant: accepted for compatibility. te-fl always uses PyTorch's non-reentrant checkpoint, which gives the same gradients.
    distribute_saved_activations: the first argument is equal on all ranks of tp_group (None: the default group). Each rank saves only its shard, and
    the backward gathers the shards.
    context_fn: returns two context managers, which are entered around the two runs as well.
    debug: no effect, as in Transformer Engine. PyTorch's debug mode cannot be combined with context managers, which te-fl uses.
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
