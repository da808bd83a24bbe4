"""torch.utils.checkpoint with te-fl's modules in FP8. The second run happens in the backward, outside of the autocast, and must repeat the first run.

PyTorch has no API that tells which checkpoint a forward belongs to. With use_reentrant=False, this module reads the frame object behind the
saved-tensor hooks, which both runs share. With use_reentrant=True, it wraps the two methods that make the runs. Checkpoints of other libraries, such
as DeepSpeed's, are autograd functions whose forward and backward share a node; this module searches the call stack for such a node. If nothing is
found, for example in another version of PyTorch, quantization.notice() refuses the second run.

A checkpoint nested in another is created anew when the outer function runs again. That run is the outer checkpoint's second and the inner one's
first; the inner second run is the third run overall. All runs repeat the record of the first.
"""

from __future__ import annotations

import collections
import functools
import itertools
import sys
import weakref
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import torch
import torch.utils.checkpoint

from te_fl import _native
from te_fl.errors import FailedPrecondition
from te_fl.pytorch.autograd import saved_hooks
from te_fl.pytorch.autograd.call import LayerCall, ThreadScopes, reentrant_runs, run
from te_fl.pytorch.fp8 import quantization

_task = torch._C._current_graph_task_id
_FIRST, _SECOND = "_checkpoint_hook.__init__.<locals>.pack_hook", "_recomputation_hook.__init__.<locals>.pack_hook"


followed_runs = ThreadScopes()  # on each thread, the runs of te_fl.pytorch.checkpoint() inside of a run of torch.utils.checkpoint
own_runs = ThreadScopes()  # the runs of te_fl.pytorch.recompute_contexts() on each thread, which keep their own record
_numbers = itertools.count()


class ThreadMark(_native.Scope):
    """A scope whose only effect is its entry in a thread's list."""

    _open, _arguments, _close = object, (), id

    def __init__(self) -> None:
        self._entered: list = []


class Reentrant(ThreadMark):
    """A run of a checkpoint with use_reentrant=True. owner=None: a run that the program declares itself, of a checkpoint unknown to te-fl; then a
    module's second run matches its earliest pending first run.
    """

    _thread = reentrant_runs

    def __init__(self, owner: Any, second: bool):
        super().__init__()
        self.owner, self.second, self.number = owner, second, next(_numbers)  # the owner is the checkpoint's autograd node


def declared() -> Optional[bool]:
    """True in a declared second run, False in a declared first run, None outside of runs that the program declares."""
    run = reentrant_runs.scopes[-1] if reentrant_runs.scopes else None
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
    """True in a run of a checkpoint with use_reentrant=True on this thread. Gradients are then needed although gradient mode is off."""
    return not torch.compiler.is_compiling() and bool(reentrant_runs.scopes)


class _Forward(NamedTuple):
    module: Any
    record: Any  # a record from _native.recompute_record()


class _Forwards:
    """The forwards of a checkpoint's first run in order, and the position of each second run."""

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
    """The first or second run of one module's forward under a checkpoint, with a record of _native.recompute_record()."""

    _open, _close, _thread = _native.begin_recompute, _native.end_recompute, None

    def __init__(self, record: Any, second: bool):
        self._arguments, self._entered = (record, second, quantization._state), []


class Segment:
    """A module's forward in one of a checkpoint's two runs."""

    def __init__(self, forward: _Forward, second: bool, keeps: bool):
        self._record, self._second, self._keeps = forward.record, second, keeps

    def run(self, call: LayerCall, *tensors: torch.Tensor) -> torch.Tensor:
        return Recomputed(self._record, self._second).within(run if self._keeps else _without_gradients, call, *tensors)


def _without_gradients(call: LayerCall, *tensors: torch.Tensor) -> torch.Tensor:
    """The first run with use_reentrant=True, which PyTorch runs without gradients. The layer computes exactly as in the second run."""
    return _native.layer_forward(call, True, *tensors)[0]


def _cell(hook: Any, name: str) -> Any:
    hook = getattr(hook, "__wrapped__", hook)  # PyTorch 2.15 wraps the hook of the second run by torch._dynamo.disable()
    code = hook.__code__
    return hook.__closure__[code.co_freevars.index(name)].cell_contents if name in code.co_freevars else None


def _all_hooks() -> list:
    """The saved-tensor hooks that are active on this thread, the innermost first."""
    return _native.hooks_in_force(saved_hooks.top, saved_hooks.pop, saved_hooks.push)


_NOT_OTHERS = ("torch.", "te_fl.")


def _callers() -> Tuple[list, Any]:
    """Searches the call stack for autograd functions of other libraries. Returns the nodes whose forward is running, the innermost first, and the
    node whose backward is running. Frames outside of the innermost backward belong to another run and are ignored.
    """
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
    """True if this may be a run of another library's checkpoint: a backward is running (second run), or gradients are off in training (first run).
    eval() without gradients is usually inference, so the slow search is skipped there.
    """
    return _task() >= 0 or (module.training and not torch.is_grad_enabled() and not torch.is_inference_mode_enabled())


class _Second(NamedTuple):
    """A second run, inside of a backward."""

    forwards: _Forwards  # the forwards of the first run
    run: tuple


def _second_by_hooks(hook: Any) -> Optional[_Second]:
    reference = _cell(hook, "target_frame_ref")
    owner = None if reference is None else reference()
    forwards = None if owner is None else owner.__dict__.get("_te_fl_forwards")
    return None if forwards is None else _Second(forwards, (_task(), _cell(hook, "gid")))


def _runs() -> Tuple[list, Optional[_Second]]:
    """Returns the owners of the checkpoints that are in their first run here, and the innermost second run that has met te-fl's modules, if any."""
    firsts: list = []
    keeps = torch.is_grad_enabled()
    others, other = ([], None) if keeps and _task() < 0 else _callers()
    inner = [r.owner for r in _inner_firsts()] + ([] if keeps else others)
    for pack, *_ in _all_hooks():
        kind = getattr(pack, "__qualname__", "")
        if kind == _SECOND:  # no backward pass runs inside of a second run, so this second run is the innermost
            return firsts + inner, _second_by_hooks(pack)
        if kind == _FIRST:
            firsts.append(_cell(pack, "frame"))
    seconds = [(r.owner, r.number) for r in reentrant_runs.scopes if r.second and r.owner is not None]
    owner, number = (other, id(other)) if other is not None else seconds[-1] if seconds else (None, 0)
    forwards = None if owner is None else owner.__dict__.get("_te_fl_forwards")
    return firsts + inner, None if forwards is None else _Second(forwards, (_task(), number))


_waiting: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # for each module: the declared first runs that await their second run


def _declared_segment(module: Any, second: bool) -> Optional[Segment]:
    waiting = _waiting.setdefault(module, collections.deque())
    if not second:
        quantization.notice(module)
        forward = _Forward(None, _native.recompute_record())
        if module.training:  # otherwise there is no second run
            waiting.append(forward)
        return Segment(forward, False, torch.is_grad_enabled())
    if not waiting:
        raise FailedPrecondition(f"{type(module).__name__}: activation_recompute_forward(recompute_phase=True) has no forward of this "
                                 "module to repeat; run it under activation_recompute_forward(activation_recompute=True) in training first, once for "
                                 "each second run")
    return Segment(waiting.popleft(), True, torch.is_grad_enabled())


def _inner_firsts() -> List[Reentrant]:
    runs = [r for r in reentrant_runs.scopes if r.owner is not None]
    last = max((i for i, r in enumerate(runs) if r.second), default=-1)
    return runs[last + 1:]


def followed() -> bool:
    """True in either run of a checkpoint that segment() tracks. A checkpoint that begins inside of it does not record its own runs."""
    if torch.compiler.is_compiling() or own_runs.scopes:
        return False
    if not reentrant_runs.scopes and saved_hooks.top(False) is None and torch.is_grad_enabled() and _task() < 0:
        return False
    firsts, second = _runs()
    return second is not None or bool(firsts)


def _add(owners: list, forward: _Forward) -> None:
    for owner in owners:
        if owner is not None:
            owner.__dict__.setdefault("_te_fl_forwards", _Forwards()).all.append(forward)


def _inner_segment(module: Any) -> Optional[Segment]:
    """Returns a Segment for a forward in the first run of torch.utils.checkpoints nested in recompute_contexts() (own_runs), or None. The nested
    checkpoints need records of their own, because their second runs happen outside of that run. The outermost hooks, one per entry of own_runs,
    belong to recompute_contexts().
    """
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
    quantization.notice(module)
    forward = _Forward(module, _native.recompute_record())
    _add(owners, forward)
    return Segment(forward, False, torch.is_grad_enabled())


def segment(module: Any) -> Optional[Segment]:
    """Called when a module's forward begins. In an FP8 checkpoint's run, returns a Segment, which replaces quantization.notice(module) and
    te_fl.pytorch.autograd.call.run(); otherwise None.
    """
    scopes = quantization._state.scopes
    if (scopes and not scopes[-1].enabled) or (not scopes and _task() < 0):
        return None
    if own_runs.scopes:
        return _inner_segment(module)
    if not reentrant_runs.scopes and saved_hooks.top(False) is None and not _may_be_others(module):
        return None
    if (again := declared()) is not None:
        return _declared_segment(module, again) if scopes else None
    firsts, second = _runs()
    keeps = torch.is_grad_enabled()
    if second is not None and any(f.module is module for f in second.forwards.all):
        forward = second.forwards.next(second.run, module)
        if forward is None:
            raise FailedPrecondition(f"{type(module).__name__}: a checkpoint runs it in the backward "
                                     "where the first run had another module; a function that is checkpointed must do the same both times")
        _add(firsts, forward)
        return Segment(forward, True, keeps)
    if not scopes or not firsts:
        return None
    quantization.notice(module)
    forward = _Forward(module, _native.recompute_record())
    _add(firsts, forward)
    return Segment(forward, False, keeps)
