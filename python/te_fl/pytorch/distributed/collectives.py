"""The collectives of te_fl.pytorch: torch.distributed's, over whatever backend a process group has, and a count of them.

All tensors that te_fl.pytorch sends to other ranks go through these functions. Tensors are dense and contiguous; what is received into has its
memory already. A group is a torch.distributed.ProcessGroup, which nothing here keeps; None is the default group. Each function returns when the
work is queued on the current stream (on the CPU: done), or with wait=False at once, with a Work whose wait() is that. Errors are
torch.distributed's own, but for groups that were destroyed, that are others', or a parent's before a fork.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from te_fl.errors import FailedPrecondition, InvalidArgument


class Count(NamedTuple):
    """The collectives of one kind that this process began: how many, and the bytes of the larger of what each took and gave."""

    calls: int
    bytes: int


_counts: Dict[Tuple[str, str], Count] = {}  # by collective and backend
_lock = threading.Lock()  # backwards run on threads of PyTorch's


def counts() -> Dict[Tuple[str, str], Count]:
    """The counts so far, by (collective, backend): {("all_reduce", "gloo"): Count(calls=3, bytes=96)}."""
    with _lock:
        return dict(_counts)


def reset_counts() -> None:
    with _lock:
        _counts.clear()


def summary() -> str:
    """A line for each collective that this process began: who served it, how often, and how many bytes; empty if there was none."""
    return "\n".join(f"  {name} by torch.distributed:{backend}: {count.calls} calls, {count.bytes} bytes"
                     for (name, backend), count in sorted(counts().items()))


def available() -> bool:
    """True if torch.distributed is there and its default group has been made."""
    return dist.is_available() and dist.is_initialized()


def size_of(group: Optional[Any]) -> int:
    """The number of the group's ranks; 1 without torch.distributed."""
    if group is not None:
        return _member(group).size()
    return dist.get_world_size() if available() else 1


def rank_in(group: Optional[Any]) -> int:
    """This process's place in the group, from 0; 0 without torch.distributed."""
    if group is not None:
        return _member(group).rank()
    return dist.get_rank() if available() else 0


def backend_of(group: Optional[Any], device: torch.device) -> str:
    """The name of the backend that serves the group's tensors of such a device: 'gloo', 'nccl', or whatever registered itself."""
    group = dist.group.WORLD if group is None else group
    try:
        return group._get_backend(device).name().lower()
    except (AttributeError, RuntimeError):  # a group that is not of PyTorch's own making, as those of tests
        return str(dist.get_backend(group)).lower()


def _say_at_exit(rank: int) -> None:
    text = summary()
    if text:
        sys.stderr.write(f"te-fl collectives of rank {rank}:\n{text}\n")  # one write, so that the lines of other ranks do not come between


if os.environ.get("TE_FL_USAGE", "0").lower() in ("1", "true", "on", "yes"):
    atexit.register(lambda: _say_at_exit(_rank))
_rank: Optional[int] = None  # in the default group, which may be gone at the end


def _member(group: Any) -> Any:
    """The group itself; InvalidArgument for what new_group() gives ranks that are not in it."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgument("this rank is not in the process group that it was to use: new_group() gave it a group of others; call on the group's "
                              "ranks only")
    return group


_from_parent: set = set()  # the groups of the process that this one was forked from, whose connections it has not


def _note_fork() -> None:
    if available():
        _from_parent.update(dist.distributed_c10d._world.pg_map)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def _check(name: str, group: Optional[Any]) -> None:
    """Refuses groups over which a collective would wait for ever, or would go on among ranks that have given the group up."""
    used = dist.group.WORLD if group is None else _member(group)
    if used in _from_parent:
        raise FailedPrecondition(f"FAILED_PRECONDITION: {name}: this process was forked after torch.distributed.init_process_group(), and has none of "
                                 "its connections; start processes first, and call init_process_group() in each")
    if isinstance(used, dist.ProcessGroup) and used not in dist.distributed_c10d._world.pg_map:
        raise FailedPrecondition(f"FAILED_PRECONDITION: {name}: its process group was destroyed; make a new group, and give it to the layers and "
                                 "autocasts that hold this one")


def _count(name: str, group: Optional[Any], tensor: torch.Tensor) -> None:
    _check(name, group)
    key = (name, backend_of(group, tensor.device))
    global _rank
    if _rank is None:
        _rank = rank_in(None)
    with _lock:
        calls, size = _counts.get(key, (0, 0))
        _counts[key] = Count(calls + 1, size + tensor.numel() * tensor.element_size())


_REDUCTIONS = {"sum": "SUM", "max": "MAX", "min": "MIN", "avg": "AVG"}


def _reduction(op: str):
    if op not in _REDUCTIONS:
        raise ValueError(f"a reduction is one of {', '.join(_REDUCTIONS)}; it is {op!r}")
    return getattr(dist.ReduceOp, _REDUCTIONS[op])


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor for a collective that moves values and computes none: backends that know no FP8 type move its bytes."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 and tensor.dtype is not torch.uint8 else tensor


def all_reduce(tensor: torch.Tensor, group: Optional[Any] = None, op: str = "sum", wait: bool = True) -> Optional[Any]:
    """In place: the sum, max, min or avg of all ranks' tensors."""
    _count("all_reduce", group, tensor)
    return dist.all_reduce(tensor, _reduction(op), group, async_op=not wait)


def all_gather_into(output: torch.Tensor, tensor: torch.Tensor, group: Optional[Any] = None, wait: bool = True) -> Optional[Any]:
    """output [ranks * n, ..] <- the ranks' tensors [n, ..], one after the other."""
    _count("all_gather", group, output)
    return dist.all_gather_into_tensor(_moved(output), _moved(tensor), group, async_op=not wait)


def reduce_scatter_into(output: torch.Tensor, tensor: torch.Tensor, group: Optional[Any] = None, op: str = "sum",
                        wait: bool = True) -> Optional[Any]:
    """output [n, ..] <- this rank's part of the reduction of all ranks' tensors [ranks * n, ..]."""
    _count("reduce_scatter", group, tensor)
    return dist.reduce_scatter_tensor(output, tensor, _reduction(op), group, async_op=not wait)


def all_to_all(output: torch.Tensor, tensor: torch.Tensor, group: Optional[Any] = None, output_sizes: Optional[Sequence[int]] = None,
               input_sizes: Optional[Sequence[int]] = None, wait: bool = True) -> Optional[Any]:
    """output's part i <- rank i's part for this rank. The sizes are those of the parts along the first dimension; None: all are equal."""
    _count("all_to_all", group, output if output.numel() > tensor.numel() else tensor)
    sizes = [None if s is None else list(s) for s in (output_sizes, input_sizes)]
    return dist.all_to_all_single(_moved(output), _moved(tensor), *sizes, group=group, async_op=not wait)


def broadcast(tensor: torch.Tensor, source: int, group: Optional[Any] = None, wait: bool = True) -> Optional[Any]:
    """In place: the tensor of the rank whose place in the group is `source`."""
    _count("broadcast", group, tensor)
    return dist.broadcast(_moved(tensor), group=group, async_op=not wait, group_src=source)


def send(tensor: torch.Tensor, to: int, group: Optional[Any] = None, wait: bool = True) -> Optional[Any]:
    """To the rank whose place in the group is `to`, which calls receive()."""
    _count("send", group, tensor)
    if wait:
        dist.send(_moved(tensor), group=group, group_dst=to)
        return None
    return dist.isend(_moved(tensor), group=group, group_dst=to)


def receive(tensor: torch.Tensor, source: int, group: Optional[Any] = None, wait: bool = True) -> Optional[Any]:
    """In place: what the rank whose place in the group is `source` sends."""
    _count("receive", group, tensor)
    if wait:
        dist.recv(_moved(tensor), group=group, group_src=source)
        return None
    return dist.irecv(_moved(tensor), group=group, group_src=source)


def barrier(group: Optional[Any] = None) -> None:
    """Returns when all ranks of the group have come here."""
    _check("barrier", group)
    dist.barrier(group)
