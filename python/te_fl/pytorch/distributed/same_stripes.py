"""Ranks compare what they have of TE_FL_STRIPES_FILE before they compute a product that it may cut: each stripe has a collective of its own."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

from te_fl import _native
from te_fl.errors import CommFailed, FailedPrecondition
from te_fl.pytorch.distributed import communicator
from te_fl.pytorch.distributed.same_call import time_limit

_agreed: "weakref.WeakKeyDictionary[Any, list]" = weakref.WeakKeyDictionary()  # by group: the words of each comparison


def _words(store: Any, rank: int, key: str, mine: str) -> str:
    limit = time_limit()
    try:
        store.wait([key], limit)
        return store.get(key).decode()
    except (dist.DistError, RuntimeError) as error:
        raise CommFailed(f"COMM_FAILED: rank {rank} did not come within {int(limit.total_seconds() * 1000)} ms (TE_FL_COMM_TIMEOUT_MS) to compare "
                         f"TE_FL_STRIPES_FILE, of which this rank has {mine}: {error}") from error


def agree(group: Any) -> None:
    """FailedPrecondition on every rank of the group if their files differ, and the file's own error on those whose file has one. On the host, over
    the group's store, once for each file that is read; all ranks come. Groups that torch.distributed keeps no store of, and its fake ones, are left
    out."""
    group = communicator.member(group)
    _, store = dist.distributed_c10d._world.pg_map.get(group, (None, None))
    ranks = dist.get_world_size(group)
    if store is None or ranks == 1 or "fake" in str(dist.get_backend(group)):
        return
    failure = None
    try:
        mine = _native.stripes()
    except Exception as error:
        failure, mine = error, f"a file that cannot be used: {error}"
    before = _agreed.setdefault(group, [])
    if before and before[-1] == mine:
        return
    store, rank, number = dist.PrefixStore("te_fl/stripes", store), dist.get_rank(group), len(before)
    store.set(f"{number}/{rank}", mine)
    words = [mine if other == rank else _words(store, other, f"{number}/{other}", mine) for other in range(ranks)]
    before.append(mine if failure is None and all(word == mine for word in words) else "")
    if failure is not None:
        raise failure
    if before[-1] == "":
        told = "; ".join(f"rank {other}: {word}" for other, word in enumerate(words))
        raise FailedPrecondition(f"FAILED_PRECONDITION: group {group.group_name!r}: the ranks have different files TE_FL_STRIPES_FILE, by which they "
                                 f"would call different collectives; give all of them the same contents, or none a file: {told}")
