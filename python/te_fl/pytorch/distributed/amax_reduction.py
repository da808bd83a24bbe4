"""Reduction of amaxes over the ranks of a process group, for delayed scaling with reduce_amax."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, List, Optional, Tuple

import torch
import torch.distributed as dist

from te_fl import _native
from te_fl.errors import FailedPrecondition
from te_fl.pytorch.distributed import collectives, communicator
from te_fl.pytorch.runtime.dtypes import LIKE
from te_fl.torch_streams import on_stream

# Maps a group to the result of _native.amax_reduction(), or to None for a group of one rank. The references to groups are weak: a Gloo group's
# threads end with the group, and must end before the interpreter does.
_reductions: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


def find_reduction(group: Optional[Any]) -> Optional[Any]:
    """Returns the amax reduction of an autocast; None if no reduction is needed. group: None is the default group."""
    if not collectives.available():
        return None
    group = communicator.member(group, "autocast", "amax_reduction_group")
    try:
        return _reductions[group]
    except KeyError:
        several = collectives.size_of(group) > 1
        made = _reductions[group] = _native.amax_reduction(_largest_in(group), LIKE, global_ranks(group)) if several else None
        return made


def global_ranks(group: Optional[Any]) -> Tuple[int, ...]:
    """The group's rank numbers in the default group; empty if torch.distributed does not know the group."""
    try:
        return tuple(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))
    except (KeyError, ValueError):
        return ()


def _largest_in(group: Any):
    held = weakref.ref(group)

    def reduce(rows: List[torch.Tensor], stream: Optional[int]) -> None:
        group = held()
        if group is None:
            raise FailedPrecondition("the process group whose ranks share the amaxes of an autocast is gone; run the backwards of "
                                     "its forwards before torch.distributed.destroy_process_group()")
        with contextlib.nullcontext() if stream is None else on_stream(rows[0].device, stream):
            largest = torch.cat(rows)
            collectives.all_reduce(largest, group, "max")
            torch._foreach_copy_(rows, largest.split([row.shape[0] for row in rows]))

    return reduce
