"""The collectives of te_fl.pytorch: te-fl's collective ops, executed by torch.distributed with any backend, and call counters.

All communication of te_fl.pytorch goes through these functions. Tensors are dense and contiguous, and outputs are preallocated. A group is a
torch.distributed.ProcessGroup, of which no reference is kept; None is the default group. Each function returns when the work is enqueued on the
current stream (on the CPU: completed). With wait=False it returns at once with a Work, whose wait() does the same. Errors are torch.distributed's,
with these exceptions: InvalidArgument for arguments that the op refuses, Unsupported if the policy denies the backend, and errors for groups that
were destroyed, that do not contain this rank, or that belong to the parent process of a fork.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from te_fl import _native, ops
from te_fl.errors import InvalidArgument
from te_fl.pytorch.distributed import communicator


class Count(NamedTuple):
    """Successful calls of one collective in this process: their number, and the sum of bytes (for each call the larger of input and output)."""

    calls: int
    bytes: int


_counts: Dict[Tuple[str, str], List[int]] = {}  # calls and bytes by collective and backend
_lock = threading.Lock()  # guards _counts, because autograd runs backward passes on several threads


def _forget_lock() -> None:
    """Replaces the lock in a forked child: another thread of the parent may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


def counts() -> Dict[Tuple[str, str], Count]:
    """The counts so far, by (collective, backend), for example {("all_reduce", "gloo"): Count(calls=3, bytes=96)}."""
    with _lock:
        return {key: Count(*count) for key, count in _counts.items()}


def reset_counts() -> None:
    with _lock:
        _counts.clear()


def summary() -> str:
    """One line of text for each collective that was called: backend, number of calls, bytes. Empty if there were no calls."""
    return "\n".join(f"  {name} by torch.distributed:{backend}: {count.calls} calls, {count.bytes} bytes"
                     for (name, backend), count in sorted(counts().items()))


def available() -> bool:
    """True if torch.distributed is available and its default group is initialised."""
    return dist.is_available() and dist.is_initialized()


def size_of(group: Optional[Any]) -> int:
    """The group's number of ranks; 1 without torch.distributed."""
    if group is not None:
        return communicator.member(group).size()
    return dist.get_world_size() if available() else 1


def rank_in(group: Optional[Any]) -> int:
    """This process's rank in the group; 0 without torch.distributed."""
    if group is not None:
        return communicator.member(group).rank()
    return dist.get_rank() if available() else 0


def find_backend(group: Optional[Any], device: torch.device) -> str:
    """The name of the group's backend for tensors of the device: 'gloo', 'nccl', or a name that a plugin registered."""
    return communicator.find_backend(communicator.member(group), device)


def _say_at_exit(rank: int) -> None:
    text = summary()
    if text:
        sys.stderr.write(f"te-fl collectives of rank {rank}:\n{text}\n")  # a single write, so that other ranks' output does not interleave


_rank: Optional[int] = None  # rank in the default group; saved because the group may be destroyed before the report at exit


def _run(op: str, group: Optional[Any], tensor: Optional[torch.Tensor], wait: bool, begin: Optional[Callable[[], Any]] = None,
         **arguments: Any) -> Optional[Any]:
    """Runs te-fl's op over the group. `tensor`: the tensor whose bytes are counted; None for a barrier. begin: a function that creates the Work
    instead of torch.distributed.
    """
    group = communicator.member(group)
    communicator.check(op, group)
    device = _find_device(group) if tensor is None else tensor.device
    ranks = communicator.of(group, device)
    call = communicator.Begun(ranks, group, not wait, begin)
    getattr(ops, op)(comm=call, **arguments)
    if tensor is not None:
        count(_NAMES.get(op, op), ranks.backend, tensor)
    return call.work


_NAMES = {"all_to_all_v": "all_to_all", "recv": "receive"}  # op names that differ from the names of the functions below


def _find_device(group: Any) -> torch.device:
    """A device that the group supports, preferably the CPU."""
    devices = getattr(group, "_device_types", None) or [torch.device("cpu")]
    found = min(devices, key=lambda device: device.type != "cpu")
    return found if found.type == "cpu" or found.index is not None else torch.device(found.type, torch.get_device_module(found).current_device())


def count(name: str, backend: str, tensor: torch.Tensor) -> None:
    """Adds one call to the counts. `tensor`: the tensor whose bytes are counted."""
    global _rank
    with _lock:
        if _rank is None:
            _rank = rank_in(None)
            if _native.setting("TE_FL_USAGE"):
                atexit.register(_say_at_exit, _rank)
        known = _counts.get((name, backend))
        if known is None:
            known = _counts[name, backend] = [0, 0]
        known[0] += 1
        known[1] += tensor.nbytes


_REDUCTIONS = ("sum", "max", "avg")
# Dtypes that every backend can transfer; _moved() checks the others.
_SENT_AS_THEY_ARE = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.uint8))


def _reduction(op: str) -> str:
    if op not in _REDUCTIONS:
        raise InvalidArgument(f"a reduction is one of {', '.join(_REDUCTIONS)}; it is {op!r}")
    return op


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """Prepares a tensor for a collective that only moves data. FP8 tensors become uint8 views, because some backends know no FP8 dtype."""
    return tensor if tensor.dtype in _SENT_AS_THEY_ARE or tensor.element_size() != 1 else tensor.view(torch.uint8)


def all_reduce(tensor: torch.Tensor, group: Optional[Any] = None, op: str = "sum", wait: bool = True) -> Optional[Any]:
    """In place: the elementwise sum, max or avg over all ranks."""
    return _run("all_reduce", group, tensor, wait, input=tensor, output=tensor, reduction=_reduction(op))


def all_gather_into(output: torch.Tensor, tensor: torch.Tensor, group: Optional[Any] = None, wait: bool = True,
                    begin: Optional[Callable[[], Any]] = None) -> Optional[Any]:
    """output [ranks * n, ..] = the ranks' tensors [n, ..], concatenated. begin: a function that creates the Work instead of torch.distributed."""
    return _run("all_gather", group, output, wait, begin, input=_moved(tensor), output=_moved(output))


def reduce_scatter_into(output: torch.Tensor, tensor: torch.Tensor, group: Optional[Any] = None, op: str = "sum",
                        wait: bool = True, begin: Optional[Callable[[], Any]] = None) -> Optional[Any]:
    """output [n, ..] = this rank's shard of the reduction of all ranks' tensors [ranks * n, ..]. begin: as for all_gather_into()."""
    return _run("reduce_scatter", group, tensor, wait, begin, input=tensor, output=output, reduction=_reduction(op))


def all_to_all(output: torch.Tensor, tensor: torch.Tensor, group: Optional[Any] = None, output_sizes: Optional[Sequence[int]] = None,
               input_sizes: Optional[Sequence[int]] = None, wait: bool = True) -> Optional[Any]:
    """Shard i of output = rank i's shard for this rank. The sizes are extents of the shards along the first dimension; None: all are equal."""
    larger = output if output.numel() > tensor.numel() else tensor
    if output_sizes is None and input_sizes is None:
        return _run("all_to_all", group, larger, wait, input=_moved(tensor), output=_moved(output))

    def rows(sizes: Optional[Sequence[int]], of: torch.Tensor) -> list:
        return [of.shape[0] // size_of(group)] * size_of(group) if sizes is None else list(sizes)
    return _run("all_to_all_v", group, larger, wait, input=_moved(tensor), output=_moved(output), input_rows=rows(input_sizes, tensor),
                output_rows=rows(output_sizes, output))


def _move_rows(op: str, outputs: Sequence[Optional[torch.Tensor]], tensors: Sequence[Optional[torch.Tensor]], input_rows: Sequence[int],
               output_rows: Sequence[int], group: Optional[Any], wait: bool) -> Optional[Any]:
    names = ("input", "probs", "scales")
    arguments = {name: _moved(t) for name, t in zip(names, tensors) if t is not None}
    arguments |= {("output" if name == "input" else f"output_{name}"): _moved(t) for name, t in zip(names, outputs) if t is not None}
    larger = max(arguments["input"], arguments["output"], key=lambda t: t.nbytes)
    return _run(op, group, larger, wait, input_rows=list(input_rows), output_rows=list(output_rows), **arguments)


def moe_dispatch(outputs: Sequence[Optional[torch.Tensor]], tensors: Sequence[Optional[torch.Tensor]], input_rows: Sequence[int],
                 output_rows: Sequence[int], group: Optional[Any] = None, wait: bool = True) -> Optional[Any]:
    """Sends rows, ordered by expert, to the experts' ranks. tensors: [T, H], and if not None [T] and [T, B] with numbers for each row; outputs: those
    of the received rows, ordered by this rank's expert and then by rank. The counts have the bytes of the [T, H] or [R, H] tensor alone.
    """
    return _move_rows("moe_dispatch", outputs, tensors, input_rows, output_rows, group, wait)


def moe_combine(outputs: Sequence[Optional[torch.Tensor]], tensors: Sequence[Optional[torch.Tensor]], input_rows: Sequence[int],
                output_rows: Sequence[int], group: Optional[Any] = None, wait: bool = True) -> Optional[Any]:
    """The inverse of moe_dispatch()."""
    return _move_rows("moe_combine", outputs, tensors, input_rows, output_rows, group, wait)


def broadcast(tensor: torch.Tensor, source: int, group: Optional[Any] = None, wait: bool = True) -> Optional[Any]:
    """In place: the tensor becomes that of group rank `source`."""
    return _run("broadcast", group, tensor, wait, data=_moved(tensor), root=source)


def send(tensor: torch.Tensor, to: int, group: Optional[Any] = None, wait: bool = True) -> Optional[Any]:
    """Sends the tensor to group rank `to`, which must call receive()."""
    return _run("send", group, tensor, wait, input=_moved(tensor), peer=to)


def receive(tensor: torch.Tensor, source: int, group: Optional[Any] = None, wait: bool = True) -> Optional[Any]:
    """In place: receives the tensor that group rank `source` sends."""
    return _run("recv", group, tensor, wait, output=_moved(tensor), peer=source)


def barrier(group: Optional[Any] = None) -> None:
    """Returns when all ranks of the group have called it."""
    _run("barrier", group, None, True)
