"""Ranks compare TE_FL_TP_OVERLAP before a sharded GEMM: with the overlap, each chunk of the GEMM has its own transfer, so all ranks must agree.
"""

from __future__ import annotations

import weakref
from typing import Any, List, Optional

import torch.distributed as dist

from te_fl import _native
from te_fl.errors import CommFailed, FailedPrecondition
from te_fl.pytorch.distributed import communicator
from te_fl.pytorch.distributed.same_call import time_limit

_agreed: "weakref.WeakKeyDictionary[Any, list]" = weakref.WeakKeyDictionary()  # by group: the setting's text for each comparison made


def _words(store: Any, rank: int, key: str, mine: str) -> str:
    limit = time_limit()
    try:
        store.wait([key], limit)
        return store.get(key).decode()
    except (dist.DistError, RuntimeError) as error:
        raise CommFailed(f"rank {rank} did not arrive within {int(limit.total_seconds() * 1000)} ms (TE_FL_COMM_TIMEOUT_MS) to compare "
                         f"TE_FL_TP_OVERLAP; this rank has {mine}: {error}") from error


def exchanged(group: Any, name: str, mine: str) -> Optional[List[str]]:
    """Exchanges one text per rank over the group's store; returns all ranks' texts in rank order. Use each name only once per group. Returns None for
    a group of one rank, for a group without a store, and for torch.distributed's fake groups.
    """
    _, store = dist.distributed_c10d._world.pg_map.get(group, (None, None))
    ranks = dist.get_world_size(group)
    if store is None or ranks == 1 or "fake" in str(dist.get_backend(group)):
        return None
    store, rank = dist.PrefixStore(f"te_fl/{name}", store), dist.get_rank(group)
    store.set(str(rank), mine)
    return [mine if other == rank else _words(store, other, str(other), mine) for other in range(ranks)]


def agree(group: Any) -> None:
    """Compares the ranks' settings over the group's store, once for each value; all ranks must call it. Raises FailedPrecondition on every rank if
    the settings differ, and InvalidArgument on a rank whose setting is neither on nor off. Groups without a store and fake groups are not compared.
    """
    group = communicator.member(group)
    failure = None
    try:
        mine = f"TE_FL_TP_OVERLAP={int(_native.setting('TE_FL_TP_OVERLAP'))}"
    except Exception as error:
        failure, mine = error, f"a value that cannot be used: {error}"
    before = _agreed.setdefault(group, [])
    if before and before[-1] == mine:
        return
    words = exchanged(group, f"same_overlap/{len(before)}", mine)
    if words is None:
        return
    before.append(mine if failure is None and all(word == mine for word in words) else "")
    if failure is not None:
        raise failure
    if before[-1] == "":
        told = "; ".join(f"rank {other}: {word}" for other, word in enumerate(words))
        raise FailedPrecondition(f"group {group.group_name!r}: the ranks have different values of TE_FL_TP_OVERLAP, so they would "
                                 f"call different collectives; give all of them the same: {told}")
