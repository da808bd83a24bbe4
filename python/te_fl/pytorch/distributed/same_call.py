"""TE_FL_VALIDATE=1: before each collective, the ranks check through the group's store that all of them are calling the same collective."""

from __future__ import annotations

import datetime
import time
from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist

from te_fl import _native
from te_fl.errors import CommFailed

_OF_ROWS = ("all_to_all_v", "moe_dispatch", "moe_combine")
TRANSFERS = ("send", "recv")  # point-to-point ops, which are not compared
_FINGERPRINT = ", with te-fl's fingerprint "
_MOST_LINES, _MOST_RANKS = 12, 3  # differences of a rank, and ranks, that an error names
_PLAIN = "plain/{}"  # store key by which a rank says that it does not compare


def time_limit() -> datetime.timedelta:
    """TE_FL_COMM_TIMEOUT_MS: the time for which ranks wait for each other on the host."""
    return datetime.timedelta(milliseconds=_native.setting("TE_FL_COMM_TIMEOUT_MS"))


def described(op: str, arguments: Dict[str, Any]) -> str:
    """A text such as "all_reduce of float32[4, 3], reduction sum", with the properties that must be equal on all ranks."""
    tensor = arguments.get("data", arguments.get("input"))
    words = op
    if tensor is not None:
        shape = str(list(tensor.shape))
        if op in _OF_ROWS:  # the number of rows differs between ranks
            shape = "" if op == "all_to_all_v" else f", rows of {tensor.shape[1]}"
        words += f" of {str(tensor.dtype).removeprefix('torch.')}{shape}"
    return words + "".join(f", {name} {arguments[name]}" for name in ("reduction", "root") if name in arguments)


def _own_part(store: Any, device: torch.device) -> Any:
    return dist.PrefixStore(f"te_fl/{device.type}", store)


class SameCall:
    """The calls of one communicator, numbered from 1. Before each collective, every rank waits for the other ranks' descriptions and compares them.
    Sends and receives are not compared.
    """

    def __init__(self, group: Any, store: Any, device: torch.device):
        self._group, self._device = group.group_name, device
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._store = _own_part(store, device)
        self._limit = time_limit()
        self._number = 0

    @classmethod
    def wanted(cls, group: Any, device: torch.device) -> Optional["SameCall"]:
        """Returns None without TE_FL_VALIDATE, for a group of one rank, and for a group without a store."""
        _, store = dist.distributed_c10d._world.pg_map.get(group, (None, None))
        if store is None or dist.get_world_size(group) == 1:
            return None
        if _native.setting("TE_FL_VALIDATE"):
            return cls(group, store, device)
        try:  # tells ranks that do compare not to wait for this rank
            _own_part(store, device).set(_PLAIN.format(dist.get_rank(group)), "")
        except (dist.DistError, RuntimeError):
            pass  # If the store is gone, either the collective fails anyway, or no rank reads the key.
        return None

    def compare(self, op: str, arguments: Dict[str, Any]) -> None:
        """Compares this call with the other ranks' calls. Raises CommFailed on every rank if ranks call different ops or pass different kinds of
        tensors, or if a rank does not arrive within TE_FL_COMM_TIMEOUT_MS.
        """
        if op in TRANSFERS:
            return
        self._number += 1
        mine = self._words(op, arguments)
        self._store.set(self._key(self._rank), mine)
        others = [(rank, self._describe_rank(rank, mine)) for rank in range(self._ranks) if rank != self._rank]
        if self._number > 1:  # all ranks have read the previous entry, since all have reached this call
            self._store.delete_key(self._key(self._rank, self._number - 1))
        unlike = "; ".join(f"rank {rank}: {words}" for rank, words in others if words != mine)
        if unlike:
            raise CommFailed(f"group {self._group!r}: rank {self._rank} calls {mine}, and the others do not (TE_FL_VALIDATE): {unlike}"
                             + self._settings_unlike(mine, others))

    def _settings_unlike(self, mine: str, others: List[Tuple[int, str]]) -> str:
        """The lines in which the fingerprints of other ranks differ from this rank's. Each rank whose fingerprint differs from another's gets here, and
        writes its own lines for the others. Names the differences of the first ranks only, as a rank that differs in much fills the message.
        """
        of = lambda words: words.partition(_FINGERPRINT)[2]  # noqa: E731
        unlike = [rank for rank, words in others if of(words) != of(mine)]
        if not unlike:
            return ""
        own = _native.fingerprint_table()
        self._store.set(f"table/{self._rank}", own)
        text = ""
        for rank in unlike[:_MOST_RANKS]:
            try:
                self._store.wait([f"table/{rank}"], self._limit)
                lines = _native.fingerprint_difference(own, self._store.get(f"table/{rank}").decode())
            except (dist.DistError, RuntimeError) as error:
                text += f"\n  rank {rank} did not say in what its fingerprint differs: {error}"
                continue
            for line in lines[:_MOST_LINES]:
                text += "\n  " + f"on rank {rank}".join(line.replace("in the first", f"on rank {self._rank}").rsplit("in the second", 1))
            if len(lines) > _MOST_LINES:
                text += f"\n  and {len(lines) - _MOST_LINES} more on rank {rank}"
        return text + (f"\n  and on {len(unlike) - _MOST_RANKS} more ranks" if len(unlike) > _MOST_RANKS else "")

    def _meet(self, rank: int) -> None:
        """Waits until the rank has reached its first call. Raises CommFailed at once if that rank does not compare, since it will never describe its
        calls.
        """
        until, pause = time.monotonic() + self._limit.total_seconds(), 0.001
        while not self._store.check([self._key(rank)]) and time.monotonic() < until:
            if self._store.check([_PLAIN.format(rank)]):
                raise CommFailed(f"group {self._group!r}: rank {self._rank} compares its calls with the other ranks' (TE_FL_VALIDATE), and rank "
                                 f"{rank} does not; set TE_FL_VALIDATE on all ranks, or on none")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _key(self, rank: int, number: Optional[int] = None) -> str:
        return f"{self._number if number is None else number}/{rank}"

    def _words(self, op: str, arguments: Dict[str, Any]) -> str:
        words = f"number {self._number}, {described(op, arguments)}"
        return words + (f"{_FINGERPRINT}{_native.fingerprint()}" if self._number == 1 else "")

    def _describe_rank(self, rank: int, mine: str) -> str:
        try:
            if self._number == 1:
                self._meet(rank)
            self._store.wait([self._key(rank)], self._limit)
            return self._store.get(self._key(rank)).decode()
        except (dist.DistError, RuntimeError) as error:
            raise CommFailed(f"group {self._group!r}: rank {rank} did not reach {mine} of rank {self._rank} (TE_FL_VALIDATE) within "
                             f"{int(self._limit.total_seconds() * 1000)} ms (TE_FL_COMM_TIMEOUT_MS): {error}") from error
