"""Agreement of the ranks of a job on quarantines of TE_FL_VERIFY_ACTION=quarantine, so that all of them bar an implementation before the same call.

At the end of a step (an optimizer of te_fl.pytorch, te_fl.step_boundary()) every rank tells what it found, by the store of the default process group,
and waits for the others. Without such ends the ends of backward passes count. There a rank must not wait for the same pass of the others, which in a
pipeline may need this rank's next one: what was told at one pass takes effect some passes later.
"""

from __future__ import annotations

import datetime
import json
import warnings
from typing import List, Optional

import torch
from torch import distributed

from te_fl import _native

_TIMEOUT = datetime.timedelta(seconds=60)
_MOST_LATER = 128  # passes; a pipeline has fewer stages


class _Meetings:
    """Meetings of all ranks, numbered from 0. Each rank calls tell() and then, then or later, hear() for the same number."""

    def __init__(self, store, rank: int, size: int, name: str, later: int):
        self._store, self.rank, self.size, self._later = store, rank, size, later
        self._name, self.count = name, 0

    def _key(self, meeting: int, word: str) -> str:
        return f"te_fl/{self._name}/{meeting}/{word}"

    def tell(self, text: str) -> None:
        """The last rank that tells writes the texts of all for the others to read."""
        meeting, store = self.count, self._store
        self.count += 1
        if text:
            number = store.add(self._key(meeting, "held"), 1)
            store.set(self._key(meeting, f"held{number}"), text)
        if store.add(self._key(meeting, "told"), 1) < self.size:
            return
        held = store.add(self._key(meeting, "held"), 0)
        texts = sorted(store.get(self._key(meeting, f"held{i + 1}")).decode() for i in range(held))
        store.set(self._key(meeting, "all"), json.dumps(texts))
        done = meeting - self._later - 1  # every rank has heard it, or it would not be here
        if done >= 0:
            for word in ("held", "told", "all"):
                store.delete_key(self._key(done, word))

    def hear(self, meeting: int) -> List[str]:
        key = self._key(meeting, "all")
        self._store.wait([key], _TIMEOUT)
        return json.loads(self._store.get(key).decode())


class _Agreement:
    """The meetings of this process's ranks at ends of steps and of backward passes."""

    def __init__(self) -> None:
        self._group, self._failed = None, False
        self._steps: Optional[_Meetings] = None
        self._passes: Optional[_Meetings] = None
        self._stepped = False  # since the last backward pass
        self._queued = -1  # the backward pass at whose end a meeting is due

    def _ready(self) -> bool:
        if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
            return False
        group = distributed.group.WORLD
        if group is not self._group:
            self._group, self._failed = group, False
            store, rank, size = distributed.distributed_c10d._get_default_store(), distributed.get_rank(), distributed.get_world_size()
            later = min(size, _MOST_LATER)
            self._steps, self._passes = _Meetings(store, rank, size, "steps", 0), _Meetings(store, rank, size, "passes", later)
            self._later = later
        return not self._failed

    def _gives_up(self, error: BaseException) -> None:
        self._failed = True
        warnings.warn(f"rank {distributed.get_rank()}: the ranks do not agree on quarantines of TE_FL_VERIFY any more, which therefore begin in the runs "
                      f"after this one: {' '.join(str(error).split())}. All ranks must end their steps equally often "
                      "(te_fl.step_boundary(), or the step of an optimizer of te_fl.pytorch)", stacklevel=2)

    def at_step(self, text: str) -> Optional[List[str]]:
        """For te-fl's step_boundary(): the texts of all ranks, or None if they cannot be had."""
        if not self._ready():
            return None
        self._stepped = True
        try:
            self._steps.tell(text)
            return self._steps.hear(self._steps.count - 1)
        except (RuntimeError, ValueError) as error:  # a store's errors
            self._gives_up(error)
            return None

    def in_backward(self) -> None:
        """Called in each backward of a layer: has at_pass() called at the end of the pass."""
        task = torch._C._current_graph_task_id()
        if task == self._queued or not self._ready():
            return
        self._queued = task
        torch.autograd.Variable._execution_engine.queue_callback(self.at_pass)

    def at_pass(self) -> None:
        if self._stepped:  # the program's steps have ends of their own
            self._stepped = False
            return
        if not self._ready():
            return
        try:
            self._passes.tell(_native.held_quarantines())
            if self._passes.count > self._later:
                _native.take_quarantines(self._passes.hear(self._passes.count - 1 - self._later))
        except (RuntimeError, ValueError) as error:
            self._gives_up(error)


_agreement = _Agreement()
_native.set_rank_exchange(_agreement.at_step)
_native.set_backward_boundary(_agreement.in_backward)
