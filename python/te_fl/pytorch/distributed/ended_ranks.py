"""Finds ranks whose processes have ended, for the error message of a failed collective. torch.distributed reports a closed connection, but not the
rank.

Each rank writes a mark that identifies its process to torch.distributed's store, once. After a failed collective, the other ranks check whether the
marked processes still exist. Processes on other machines cannot be checked.
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from typing import Any, Dict, List, Sequence, Tuple

import torch.distributed as dist

_PATIENCE = 1.0  # seconds to wait for the store's answer, and for a process that has closed its connections to disappear
_LOST = re.compile("connect|clos|reset|broken pipe|remote|abort|unreachable|time", re.IGNORECASE)  # error messages of ranks that do not answer

_announced: "weakref.WeakSet[Any]" = weakref.WeakSet()  # default groups whose store has this process's mark
# The mark of rank 0, whose process usually hosts the store, by default group.
_first: "weakref.WeakKeyDictionary[Any, str]" = weakref.WeakKeyDictionary()


def _machine() -> str:
    """The boot id and the PID namespace. Two processes with equal values share process ids."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def _start_of(process: int) -> str:
    """The start time of a process in ticks since boot; empty if the process does not exist or is a zombie."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if state in (b"Z", b"X") else fields[18].decode()


def _ended(mark: str) -> int:
    """The process id in the mark if that process ran on this machine and has ended; else 0."""
    machine, process, start = mark.rsplit(" ", 2)
    return int(process) if machine == _machine() and _start_of(int(process)) != start else 0


def _key(rank: int) -> str:
    return f"te_fl/process/{rank}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def tell() -> None:
    """Writes this process's mark to the store, once per default group, before this rank's first collective. Errors are ignored."""
    try:
        world = dist.group.WORLD
        if world not in _announced:
            _announced.add(world)
            _store().set(_key(dist.get_rank()), f"{_machine()} {os.getpid()} {_start_of(os.getpid())}")
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError):
        pass


def know_first() -> None:
    """Reads rank 0's mark, once per default group, after a collective. It cannot be read later if rank 0's process has ended together with the store
    that it hosts.
    """
    try:
        world = dist.group.WORLD
        if world not in _first and dist.get_rank() != 0:
            store = _store()
            _first[world] = store.get(_key(0)).decode() if store.check([_key(0)]) else ""
    except (AttributeError, RuntimeError, TypeError, ValueError):
        pass


def _look(store: Any, ranks: Sequence[int], marks: Dict[int, str], ended: List[Tuple[int, int]], until: float) -> None:
    """Polls until a rank's process has ended or the time is up. Appends (rank, process id) of ended ranks to `ended`."""
    while True:
        try:
            for rank in ranks:
                if rank not in marks and store.check([_key(rank)]):
                    marks[rank] = store.get(_key(rank)).decode()
        except RuntimeError:
            pass  # the process that hosts the store has ended
        ended += [(rank, process) for rank in ranks if marks.get(rank) and (process := _ended(marks[rank]))]
        if ended or time.monotonic() > until:
            return
        time.sleep(0.02)


def described(group: Any, error: BaseException) -> str:
    """The text "; rank 1 has ended (its process 4711 is gone)" after a collective of the group failed with `error`; empty if no rank is known to have
    ended. Takes at most _PATIENCE seconds, and returns almost at once if the error is unrelated to ranks that do not answer.
    """
    if not isinstance(error, RuntimeError):
        return ""
    try:
        ranks, own, marks = dist.get_process_group_ranks(group), dist.get_rank(), {}
        if dist.group.WORLD in _first:
            marks[0] = _first[dist.group.WORLD]
        ended: List[Tuple[int, int]] = []
        until = time.monotonic() + (0.8 * _PATIENCE if _LOST.search(str(error)) else 0.0)
        # A request to a store whose machine is down may block for long, so a thread makes it.
        look = threading.Thread(target=_look, args=(_store(), [r for r in ranks if r != own], marks, ended, until), daemon=True)
        look.start()
        look.join(_PATIENCE)
        return "".join(f"; rank {_number(ranks, rank)} has ended (its process {process} is gone)" for rank, process in tuple(ended))
    except (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError):
        return ""  # a group class that is not torch.distributed's, or a destroyed group


def _number(ranks: Sequence[int], rank: int) -> str:
    """The rank's number in the group, followed by its number in the default group if that differs."""
    place = ranks.index(rank)
    return str(place) if place == rank else f"{place} ({rank} of the default group)"
