"""torch.utils.checkpoint around te-fl's modules in FP8: the run in the backward, which is outside of the autocast, repeats the first one.

PyTorch says nowhere which of its checkpoints a forward runs in. It is read from what PyTorch's two kinds keep for both runs: the frame behind
the hooks of saved tensors (use_reentrant=False), and the node of autograd whose methods make the runs (use_reentrant=True). Where they are
not found, as in another version of PyTorch, quantization.notice() refuses the second run.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, List, NamedTuple, Optional, Tuple

import torch
import torch.utils.checkpoint

from te_fl import _native
from te_fl.errors import FailedPrecondition
from te_fl.pytorch.autograd.call import TRAINING, Call, run
from te_fl.pytorch.fp8 import quantization

_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_task = torch._C._current_graph_task_id
_node = torch.utils.checkpoint.CheckpointFunction
_FIRST, _SECOND = "_checkpoint_hook.__init__.<locals>.pack_hook", "_recomputation_hook.__init__.<locals>.pack_hook"


class _Threads(threading.local):
    def __init__(self):
        self.scopes = []


own_runs = _Threads()  # the runs of te_fl.pytorch.recompute_contexts() that a thread is in, which keep a record themselves


class _Forward(NamedTuple):
    module: Any
    record: Any  # of _native.recompute_record()
    updates: int  # as Call.updates


class _Forwards:
    """Those of one checkpoint's first run, in their order, and how far each second run is."""

    def __init__(self):
        self.all: List[_Forward] = []
        self._run: Any = None
        self._next = 0

    def next(self, run: Any, module: Any) -> Optional[_Forward]:
        if run != self._run:
            self._run, self._next = run, 0
        self._next += 1
        if self._next > len(self.all):
            return None
        found = self.all[self._next - 1]
        return found if found.module is module else None


class Piece:
    """A module's forward in one of the two runs."""

    def __init__(self, forward: _Forward, second: bool, keeps: bool):
        self.updates, self._record, self._second, self._keeps = forward.updates, forward.record, second, keeps

    def run(self, call: Call, caching: int, *tensors: torch.Tensor) -> torch.Tensor:
        scope = _native.begin_recompute(self._record, self._second, quantization._state)
        try:
            if self._keeps:
                return run(call, caching, *tensors)
            # Without gradients, as PyTorch has the first run of use_reentrant=True; the layer computes as the second will.
            n = call.inputs
            return _native.layer_forward(call.layer, call.activation, TRAINING, call.first, tensors[:n], tensors[n + call.extras:],
                                         call.attention, call.random)[0]
        finally:
            _native.end_recompute(scope)


def _cell(hook: Any, name: str) -> Any:
    code = hook.__code__
    return hook.__closure__[code.co_freevars.index(name)].cell_contents if name in code.co_freevars else None


def _context(method: Any) -> Tuple[Any, int]:
    """The node whose `method` runs on this thread, the innermost, and a number of this run of it; None: none does."""
    code, frame = method.__code__, sys._getframe(2)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return (None, 0) if frame is None else (frame.f_locals.get("ctx"), id(frame))


def _first(module: Any) -> Optional[Piece]:
    hooks, keeps = _hooks(False), torch.is_grad_enabled()
    if keeps:
        owner = _cell(hooks[0], "frame") if hooks is not None and getattr(hooks[0], "__qualname__", "") == _FIRST else None
    else:
        owner = _context(_node.forward)[0] if module.training else None
    if owner is None:
        return None
    forwards = owner.__dict__.setdefault("_te_fl_forwards", _Forwards())
    forwards.all.append(_Forward(module, _native.recompute_record(), quantization.notice(module)))
    return Piece(forwards.all[-1], False, keeps)


def _second(module: Any) -> Optional[Piece]:
    if not torch.is_grad_enabled():
        return None  # the first run of a checkpoint inside, whose second would be the third
    hooks = _hooks(False)
    kind = "" if hooks is None else getattr(hooks[0], "__qualname__", "")
    if kind == _SECOND:
        reference, number = _cell(hooks[0], "target_frame_ref"), _cell(hooks[0], "gid")
        owner = None if reference is None else reference()
    elif kind == _FIRST:
        return None
    else:
        owner, number = _context(_node.backward)
    forwards = None if owner is None else owner.__dict__.get("_te_fl_forwards")
    if forwards is None:
        return None
    forward = forwards.next((_task(), number), module)
    if forward is None:
        raise FailedPrecondition(f"FAILED_PRECONDITION: {type(module).__name__}: torch.utils.checkpoint.checkpoint() runs it in the backward where "
                                 "the first run had another module; a function that is checkpointed must do the same both times")
    return Piece(forward, True, True)


def piece(module: Any) -> Optional[Piece]:
    """For a module whose forward begins: not None in a run of PyTorch's checkpoint that computes in FP8. It takes the place of
    quantization.notice() and of te_fl.pytorch.autograd.call.run()."""
    scopes = quantization._state.scopes
    if scopes:
        if not scopes[-1].enabled or (torch.is_grad_enabled() and _hooks(False) is None) or own_runs.scopes:
            return None
        return _first(module)
    if module._in_fp8 and _task() >= 0:
        return _second(module)
    return None
