"""torch.utils.checkpoint around te-fl's modules in FP8: the runs in the backward, which are outside of the autocast, repeat the first one.

PyTorch says nowhere which of its checkpoints a forward runs in. With use_reentrant=False it is read from what PyTorch keeps for both runs, the
frame behind the hooks of saved tensors; with use_reentrant=True the two methods that make the runs are followed. A checkpoint of another library,
as DeepSpeed's, is a function of autograd's too, whose two methods get the same node: that is looked for among the callers. Where none is found, as
in another version of PyTorch, quantization.notice() refuses the second run.

A checkpoint inside of another one is made anew when the outer one's function runs again: that run is the outer one's second and the inner one's
first, and the inner one's second is the third. All repeat the record of the first.
"""

from __future__ import annotations

import collections
import functools
import itertools
import sys
import threading
import weakref
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import torch
import torch.utils.checkpoint

from te_fl import _native
from te_fl.errors import FailedPrecondition
from te_fl.pytorch.autograd.call import TRAINING, LayerCall, run
from te_fl.pytorch.fp8 import quantization

_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_pop, _push = torch._C._autograd._pop_saved_tensors_default_hooks, torch._C._autograd._push_saved_tensors_default_hooks
_task = torch._C._current_graph_task_id
_FIRST, _SECOND = "_checkpoint_hook.__init__.<locals>.pack_hook", "_recomputation_hook.__init__.<locals>.pack_hook"


class _Threads(threading.local):
    def __init__(self):
        self.scopes = []


followed_runs = _Threads()  # the runs of checkpoint() that a thread is in, which piece() follows
own_runs = _Threads()  # the runs of te_fl.pytorch.recompute_contexts() that a thread is in, which keep a record themselves
_reentrant = _Threads()  # the Reentrant that a thread is in, the innermost last
_numbers = itertools.count()


class Noted(_native.Scope):
    """A scope that does nothing but stand in a thread's list."""

    _open, _arguments, _close = object, (), id

    def __init__(self) -> None:
        self._entered: list = []


class Reentrant(Noted):
    """A run of a checkpoint with use_reentrant=True; without an owner, one of a checkpoint that te-fl does not know, which a program declares. Then
    the second run of a module follows the earliest first one that has had none yet."""

    _thread = _reentrant

    def __init__(self, owner: Any, second: bool):
        super().__init__()
        self.owner, self.second, self.number = owner, second, next(_numbers)  # the owner is its node of autograd


def declared() -> Optional[bool]:
    """None outside of a run that a program declares, else whether it is the second."""
    run = _reentrant.scopes[-1] if _reentrant.scopes else None
    return None if run is None or run.owner is not None else run.second


def _followed(method: Callable, second: bool) -> Callable:
    @functools.wraps(method)
    def follow(ctx: Any, *arguments: Any) -> Any:
        return Reentrant(ctx, second).within(method, ctx, *arguments)
    return follow


def _follow(node: Any) -> None:
    node.forward, node.backward = staticmethod(_followed(node.forward, False)), staticmethod(_followed(node.backward, True))


_follow(torch.utils.checkpoint.CheckpointFunction)


def repeated() -> bool:
    """True if a checkpoint with use_reentrant=True runs on this thread: without gradients then, though they are wanted."""
    return not torch.compiler.is_compiling() and bool(_reentrant.scopes)


class _Forward(NamedTuple):
    module: Any
    record: Any  # of _native.recompute_record()
    updates: int  # as LayerCall.updates


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


class Recomputed(_native.Scope):
    """The first or second run that a record of _native.recompute_record() is of."""

    _open, _close, _thread = _native.begin_recompute, _native.end_recompute, None

    def __init__(self, record: Any, second: bool):
        self._arguments, self._entered = (record, second, quantization._state), []


class Piece:
    """A module's forward in one of the two runs."""

    def __init__(self, forward: _Forward, second: bool, keeps: bool):
        self.updates, self._record, self._second, self._keeps = forward.updates, forward.record, second, keeps

    def run(self, call: LayerCall, caching: int, *tensors: torch.Tensor) -> torch.Tensor:
        return Recomputed(self._record, self._second).within(run if self._keeps else _without_gradients, call, caching, *tensors)


def _without_gradients(call: LayerCall, caching: int, *tensors: torch.Tensor) -> torch.Tensor:
    """As PyTorch has the first run of use_reentrant=True; the layer computes as the second will."""
    n = call.inputs
    return _native.layer_forward(call.layer, call.activation, TRAINING, call.first, tensors[:n], tensors[n + call.extras:], call.attention, call.random)[0]


def _cell(hook: Any, name: str) -> Any:
    code = hook.__code__
    return hook.__closure__[code.co_freevars.index(name)].cell_contents if name in code.co_freevars else None


def _all_hooks() -> list:
    """The hooks of saved tensors that are in force on this thread, the innermost first."""
    return _native.hooks_in_force(_hooks, _pop, _push)


_NOT_OTHERS = ("torch.", "te_fl.")


def _callers() -> Tuple[list, Any]:
    """The nodes of other libraries' functions of autograd whose forward calls here, the innermost first, and the one whose backward does: what is
    outside of a backward is not of this run."""
    firsts: list = []
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("forward", "backward") and code.co_argcount > 0 and code.co_varnames[0] != "self":
            node = frame.f_locals.get(code.co_varnames[0])
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                other = not frame.f_globals.get("__name__", "").startswith(_NOT_OTHERS)
                if code.co_name == "backward":
                    return firsts, node if other else None
                if other:
                    firsts.append(node)
        frame = frame.f_back
    return firsts, None


def _may_be_others(module: Any) -> bool:
    """True where a run of another library's checkpoint may be: the first is without gradients, and the second in a backward. Most forwards without
    gradients in eval() are inferences, for which to look would take time."""
    return _task() >= 0 or (module.training and not torch.is_grad_enabled() and not torch.is_inference_mode_enabled())


class _Second(NamedTuple):
    """A run in a backward."""

    forwards: _Forwards  # of the first run
    run: tuple


def _second_by_hooks(hook: Any) -> Optional[_Second]:
    reference = _cell(hook, "target_frame_ref")
    owner = None if reference is None else reference()
    forwards = None if owner is None else owner.__dict__.get("_te_fl_forwards")
    return None if forwards is None else _Second(forwards, (_task(), _cell(hook, "gid")))


def _runs() -> Tuple[list, Optional[_Second]]:
    """The owners of the checkpoints whose first run this is, and the innermost that runs again, if one does and has met te-fl's modules."""
    firsts: list = []
    keeps = torch.is_grad_enabled()
    others, other = ([], None) if keeps and _task() < 0 else _callers()
    inner = [r.owner for r in _inner_firsts()] + ([] if keeps else others)
    for pack, *_ in _all_hooks():
        kind = getattr(pack, "__qualname__", "")
        if kind == _SECOND:  # inside of it no backward runs, so it is the innermost
            return firsts + inner, _second_by_hooks(pack)
        if kind == _FIRST:
            firsts.append(_cell(pack, "frame"))
    seconds = [(r.owner, r.number) for r in _reentrant.scopes if r.second and r.owner is not None]
    owner, number = (other, id(other)) if other is not None else seconds[-1] if seconds else (None, 0)
    forwards = None if owner is None else owner.__dict__.get("_te_fl_forwards")
    return firsts + inner, None if forwards is None else _Second(forwards, (_task(), number))


_waiting: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of each module the first runs that a program declared, without a second one yet


def _declared_piece(module: Any, second: bool) -> Optional[Piece]:
    waiting = _waiting.setdefault(module, collections.deque())
    if not second:
        forward = _Forward(None, _native.recompute_record(), module._notice())
        if module.training:  # else no second run follows
            waiting.append(forward)
        return Piece(forward, False, torch.is_grad_enabled())
    if not waiting:
        raise FailedPrecondition(f"FAILED_PRECONDITION: {type(module).__name__}: activation_recompute_forward(recompute_phase=True) has no forward of this "
                                 "module to repeat; run it under activation_recompute_forward(activation_recompute=True) in training first, once for "
                                 "each second run")
    return Piece(waiting.popleft(), True, torch.is_grad_enabled())


def _inner_firsts() -> List[Reentrant]:
    runs = [r for r in _reentrant.scopes if r.owner is not None]
    last = max((i for i, r in enumerate(runs) if r.second), default=-1)
    return runs[last + 1:]


def followed() -> bool:
    """True in a run of a checkpoint that piece() follows, whichever of its runs it is. A checkpoint that begins there leaves its runs to it."""
    if torch.compiler.is_compiling() or own_runs.scopes:
        return False
    if not _reentrant.scopes and _hooks(False) is None and torch.is_grad_enabled() and _task() < 0:
        return False
    firsts, second = _runs()
    return second is not None or bool(firsts)


def _add(owners: list, forward: _Forward) -> None:
    for owner in owners:
        if owner is not None:
            owner.__dict__.setdefault("_te_fl_forwards", _Forwards()).all.append(forward)


def _inner_piece(module: Any) -> Optional[Piece]:
    """The first run of other checkpoints inside of a run that keeps a record itself: theirs is kept beside it, for their second runs, which are
    outside of it. Of the hooks in force the outermost are those of own_runs, one for each."""
    frames, known = [], len(own_runs.scopes)
    for pack, *_ in _all_hooks():
        kind = getattr(pack, "__qualname__", "")
        if kind == _SECOND:
            known -= 1
            break
        if kind == _FIRST:
            frames.append(_cell(pack, "frame"))
    owners = frames[:max(len(frames) - known, 0)] + [r.owner for r in _inner_firsts()] + ([] if torch.is_grad_enabled() else _callers()[0])
    if not owners:
        return None
    forward = _Forward(module, _native.recompute_record(), module._notice())
    _add(owners, forward)
    return Piece(forward, False, torch.is_grad_enabled())


def piece(module: Any) -> Optional[Piece]:
    """For a module whose forward begins: not None in a run of a checkpoint that computes in FP8. It takes the place of
    module._notice() and of te_fl.pytorch.autograd.call.run()."""
    scopes = quantization._state.scopes
    if (scopes and not scopes[-1].enabled) or (not scopes and _task() < 0):
        return None
    if own_runs.scopes:
        return _inner_piece(module)
    if not _reentrant.scopes and _hooks(False) is None and not _may_be_others(module):
        return None
    if (again := declared()) is not None:
        return _declared_piece(module, again) if scopes else None
    firsts, second = _runs()
    keeps = torch.is_grad_enabled()
    if second is not None and any(f.module is module for f in second.forwards.all):
        forward = second.forwards.next(second.run, module)
        if forward is None:
            raise FailedPrecondition(f"FAILED_PRECONDITION: {type(module).__name__}: a checkpoint runs it in the backward "
                                     "where the first run had another module; a function that is checkpointed must do the same both times")
        _add(firsts, forward)
        return Piece(forward, True, keeps)
    if not scopes or not firsts:
        return None
    forward = _Forward(module, _native.recompute_record(), module._notice())
    _add(firsts, forward)
    return Piece(forward, False, keeps)
