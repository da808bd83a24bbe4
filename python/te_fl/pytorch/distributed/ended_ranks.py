"""Finds which ranks have ended, for the error of a collective that they left: torch.distributed says that a connection was closed, and not whose.

Each rank tells the store of torch.distributed which process it is, once; after a collective has failed the others look whether those processes go on.
Of processes of other machines nothing is known.
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from typing import Any, Dict, List, Sequence, Tuple

import torch.distributed as dist

_PATIENCE = 1.0  # seconds: for the store's answer, and for a process that has closed its connections to be gone
_LOST = re.compile("connect|clos|reset|broken pipe|remote|abort|unreachable|time", re.IGNORECASE)  # errors of ranks that do not answer

_told: "weakref.WeakSet[Any]" = weakref.WeakSet()  # the default groups whose store knows this process
_first: "weakref.WeakKeyDictionary[Any, str]" = weakref.WeakKeyDictionary()  # rank 0's mark, whose process mostly serves the store, by default group


def _machine() -> str:
    """The boot and the PID namespace: where two processes have the same, numbers mean the same."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def _start_of(process: int) -> str:
    """When it was started, in ticks since the boot; empty: there is no such process, or it is dead and waits for its parent to ask."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if state in (b"Z", b"X") else fields[18].decode()


def _ended(mark: str) -> int:
    """The number of the process that the mark names, if that was one of this machine and has ended; else 0."""
    machine, process, start = mark.rsplit(" ", 2)
    return int(process) if machine == _machine() and _start_of(int(process)) != start else 0


def _key(rank: int) -> str:
    return f"te_fl/process/{rank}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def tell() -> None:
    """Once for each default group, before this rank's first collective: tells the store which process this is. Nothing fails without it."""
    try:
        world = dist.group.WORLD
        if world not in _told:
            _told.add(world)
            _store().set(_key(dist.get_rank()), f"{_machine()} {os.getpid()} {_start_of(os.getpid())}")
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError):
        pass


def know_first() -> None:
    """Once for each default group, after a collective: what rank 0 has told, which cannot be asked for when its process has ended with the store."""
    try:
        world = dist.group.WORLD
        if world not in _first and dist.get_rank() != 0:
            store = _store()
            _first[world] = store.get(_key(0)).decode() if store.check([_key(0)]) else ""
    except (AttributeError, RuntimeError, TypeError, ValueError):
        pass


def _look(store: Any, ranks: Sequence[int], marks: Dict[int, str], ended: List[Tuple[int, int]], until: float) -> None:
    """Adds to `ended` those of the ranks whose processes are gone, with their numbers, and returns once there are such or it is late."""
    while True:
        try:
            for rank in ranks:
                if rank not in marks and store.check([_key(rank)]):
                    marks[rank] = store.get(_key(rank)).decode()
        except RuntimeError:
            pass  # the process that serves it is gone
        ended += [(rank, process) for rank in ranks if marks.get(rank) and (process := _ended(marks[rank]))]
        if ended or time.monotonic() > until:
            return
        time.sleep(0.02)


def described(group: Any, error: BaseException) -> str:
    """"; rank 1 has ended (its process 4711 is gone)" after a collective of the group has failed by the error; empty if none is known to have. Takes
    _PATIENCE at most, and next to nothing where the error is not of ranks that do not answer."""
    if not isinstance(error, RuntimeError):
        return ""
    try:
        ranks, own, marks = dist.get_process_group_ranks(group), dist.get_rank(), {}
        if dist.group.WORLD in _first:
            marks[0] = _first[dist.group.WORLD]
        ended: List[Tuple[int, int]] = []
        until = time.monotonic() + (0.8 * _PATIENCE if _LOST.search(str(error)) else 0.0)
        # A store whose machine is gone may let a question wait for long.
        look = threading.Thread(target=_look, args=(_store(), [r for r in ranks if r != own], marks, ended, until), daemon=True)
        look.start()
        look.join(_PATIENCE)
        return "".join(f"; rank {_number(ranks, rank)} has ended (its process {process} is gone)" for rank, process in tuple(ended))
    except (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError):
        return ""  # a group that is not of torch.distributed's own making, or that is gone by now


def _number(ranks: Sequence[int], rank: int) -> str:
    """The rank's place in the group, as the error tells its own, and its number in the default group where that is another one."""
    place = ranks.index(rank)
    return str(place) if place == rank else f"{place} ({rank} of the default group)"
