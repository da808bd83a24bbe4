"""Process groups as communicators of te-fl's collective ops. torch.distributed executes the collectives; te-fl's explain, usage counts, traces and
policies cover them.

`of(group, device)` returns a value for the argument `comm`: te_fl.ops.all_reduce(input=x, output=y, comm=of(group, x.device)). The process group runs
the collective on PyTorch's current stream (on the CPU the op returns when it is complete), and its errors and time limit apply.
"""

from __future__ import annotations

import os
import re
import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist

from te_fl import _native, frameworks, torch_device
from te_fl.errors import FailedPrecondition, add_note
from te_fl.pytorch.distributed import ended_ranks
from te_fl.pytorch.distributed.same_call import TRANSFERS, SameCall, described
from te_fl.pytorch.runtime.refuse import check_group

_from_parent: set = set()  # groups of the parent process, whose connections a forked child cannot use


def _note_fork() -> None:
    if dist.is_available() and dist.is_initialized():
        _from_parent.update(dist.distributed_c10d._world.pg_map)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def member(group: Optional[Any], where: str = "te_fl.pytorch", argument: str = "the process group") -> Any:
    """Returns the group, or the default group for None. Raises an error that names the argument if `group` is not a process group that contains this
    rank.
    """
    if group is None:
        return dist.group.WORLD
    check_group(where, argument, group)
    return group


def check(name: str, group: Any) -> None:
    """Refuses groups on which a collective would hang, and groups that were destroyed on this rank."""
    if group in _from_parent:
        raise FailedPrecondition(f"{name}: this process was forked after torch.distributed.init_process_group(), and has none of "
                                 "its connections; start processes first, and call init_process_group() in each")
    if isinstance(group, dist.ProcessGroup) and group not in dist.distributed_c10d._world.pg_map:
        raise FailedPrecondition(f"{name}: its process group was destroyed; make a new group, and give it to the layers and "
                                 "autocasts that hold this one")


def find_backend(group: Any, device: torch.device) -> str:
    """The name of the group's backend for tensors of the device: 'gloo', 'nccl', or a name that a plugin registered."""
    try:
        return group._get_backend(device).name().lower()
    except (AttributeError, RuntimeError):  # a group class that is not PyTorch's, as in tests
        return str(dist.get_backend(group)).lower()


# ---- one function per te-fl op: takes the op's arguments, returns torch.distributed's Work, or None if the call has waited already

_REDUCTIONS = {"sum": "SUM", "max": "MAX", "avg": "AVG", 0: "SUM", 1: "MAX", 2: "AVG"}


_GLOO_AVERAGES = frameworks.numbers(torch.__version__) >= (2, 9)


def _summed(group: Any, tensor: torch.Tensor, arguments: Dict[str, Any]) -> Tuple[torch.Tensor, Any]:
    """Returns the tensor to reduce, and torch.distributed's reduction. Where Gloo has no averages, an average is the sum of the ranks' shares."""
    reduction = getattr(dist.ReduceOp, _REDUCTIONS[arguments.get("reduction", 0)])
    if reduction != dist.ReduceOp.AVG or _GLOO_AVERAGES or find_backend(group, tensor.device) != "gloo":
        return tensor, reduction
    return tensor / dist.get_world_size(group), dist.ReduceOp.SUM


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.from_dlpack(value)


def _stacked(a: Dict[str, Any]) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns output and input with compatible shapes: PyTorch requires that one consists of rows of the other, while te-fl's ops accept any shape
    with the right number of elements.
    """
    output, tensor = _tensor(a["output"]), _tensor(a["input"])
    rows = output.ndim == tensor.ndim > 0 and output.shape[1:] == tensor.shape[1:]
    return (output, tensor) if rows else (output.view(-1), tensor.view(-1))


def _all_reduce(group: Any, a: Dict[str, Any], async_op: bool) -> Optional[Any]:
    tensor, output = _tensor(a["input"]), _tensor(a["output"])
    if output is not tensor and output.data_ptr() != tensor.data_ptr():
        output.copy_(tensor)
    divided, reduction = _summed(group, output, a)
    if divided is not output:
        output.copy_(divided)
    return dist.all_reduce(output, reduction, group, async_op=async_op)


def _all_gather(group: Any, a: Dict[str, Any], async_op: bool) -> Optional[Any]:
    output, tensor = _stacked(a)
    return dist.all_gather_into_tensor(output, tensor, group, async_op=async_op)


def _reduce_scatter(group: Any, a: Dict[str, Any], async_op: bool) -> Optional[Any]:
    output, tensor = _stacked(a)
    return dist.reduce_scatter_tensor(output, *_summed(group, tensor, a), group, async_op=async_op)


def _all_to_all(group: Any, a: Dict[str, Any], async_op: bool) -> Optional[Any]:
    return dist.all_to_all_single(_tensor(a["output"]).view(-1), _tensor(a["input"]).view(-1), group=group, async_op=async_op)


def _all_to_all_v(group: Any, a: Dict[str, Any], async_op: bool) -> Optional[Any]:
    rows = [list(a[name]) for name in ("output_rows", "input_rows")]
    return dist.all_to_all_single(_tensor(a["output"]), _tensor(a["input"]), *rows, group=group, async_op=async_op)


class _LaterRows:
    """The transfers of moe_dispatch or moe_combine that have begun, as a Work."""

    def __init__(self, works: List[Any], arrange: Callable[[], None]):
        self._works, self._arrange = works, arrange

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._arrange()


def _move_rows(group: Any, a: Dict[str, Any], async_op: bool, dispatches: bool) -> Optional[Any]:
    """Transfers one part for each rank. Rows that are ordered by expert are rearranged on this rank: by moe_dispatch after they have arrived, by
    moe_combine before they are sent.
    """
    ranks, sent, received = dist.get_world_size(group), list(a["input_rows"]), list(a["output_rows"])
    experts = len(sent) // ranks
    pairs = [(_tensor(a[to]), _tensor(a[name])) for name, to in (("input", "output"), ("probs", "output_probs"), ("scales", "output_scales"))
             if a.get(name) is not None]
    if ranks == 1:
        for output, tensor in pairs:
            output.copy_(tensor)
        return _LaterRows([], lambda: None) if async_op else None

    def by_rank(rows: List[int]) -> List[int]:
        return [sum(rows[i:i + experts]) for i in range(0, len(rows), experts)]

    arrived = []
    works = []
    for output, tensor in pairs:
        if not dispatches and experts > 1:  # from the order (expert, rank) to (rank, expert)
            parts = tensor.split([sent[r * experts + e] for e in range(experts) for r in range(ranks)])
            tensor = torch.cat([parts[e * ranks + r] for r in range(ranks) for e in range(experts)])
        into = torch.empty_like(output) if dispatches and experts > 1 else output
        arrived.append((output, into))
        works.append(dist.all_to_all_single(into, tensor, by_rank(received), by_rank(sent), group=group, async_op=async_op))

    def arrange() -> None:
        for output, into in arrived:
            if into is not output:  # from the order (rank, expert) to (expert, rank)
                parts = into.split(received)
                torch.cat([parts[r * experts + e] for e in range(experts) for r in range(ranks)], out=output)

    if async_op:
        return _LaterRows(works, arrange)
    arrange()
    return None


def _moe_dispatch(group: Any, a: Dict[str, Any], async_op: bool) -> Optional[Any]:
    return _move_rows(group, a, async_op, True)


def _moe_combine(group: Any, a: Dict[str, Any], async_op: bool) -> Optional[Any]:
    return _move_rows(group, a, async_op, False)


def _broadcast(group: Any, a: Dict[str, Any], async_op: bool) -> Optional[Any]:
    return dist.broadcast(_tensor(a["data"]), group=group, async_op=async_op, group_src=a.get("root", 0))


def _send(group: Any, a: Dict[str, Any], async_op: bool) -> Optional[Any]:
    return (dist.isend if async_op else dist.send)(_tensor(a["input"]), group=group, group_dst=a.get("peer", 0))


def _recv(group: Any, a: Dict[str, Any], async_op: bool) -> Optional[Any]:
    received = (dist.irecv if async_op else dist.recv)(_tensor(a["output"]), group=group, group_src=a.get("peer", 0))
    return received if async_op else None  # a synchronous recv() returns the sender's rank


def _barrier(group: Any, a: Dict[str, Any], async_op: bool) -> Optional[Any]:
    return dist.barrier(group, async_op=async_op)


_CALLS: Dict[str, Callable[[Any, Dict[str, Any], bool], Optional[Any]]] = {
    "all_reduce": _all_reduce, "all_gather": _all_gather, "reduce_scatter": _reduce_scatter, "all_to_all": _all_to_all, "all_to_all_v": _all_to_all_v,
    "moe_dispatch": _moe_dispatch, "moe_combine": _moe_combine,
    "broadcast": _broadcast, "send": _send, "recv": _recv, "barrier": _barrier,
}


class Communicator:
    """The ranks of a process group, for tensors of one device. Keeps no reference to the group."""

    __slots__ = ("_communicator", "_group", "device", "backend", "same_call", "collectives", "transfers")

    def __init__(self, group: Any, device: torch.device):
        self.device, self.backend = device, find_backend(group, device)
        word = re.sub("[^a-z0-9_.]", "_", self.backend)
        self._communicator = _native.communicator(word, torch_device.native_name(device), dist.get_rank(group), dist.get_world_size(group), word != "gloo")
        self._group = weakref.ref(group)
        self.collectives = self.transfers = 0  # numbers of calls so far; `transfers` counts sends and receives, `collectives` all other ops
        self.same_call = SameCall.wanted(group, device)
        ended_ranks.tell()

    def begin(self, op: str, group: Any, arguments: Dict[str, Any], async_op: bool, how: Optional[Callable[[], Any]] = None) -> Optional[Any]:
        """Starts the op on this rank and returns its Work. With async_op=False returns None, after the op is enqueued on the current stream (on the
        CPU: completed). how: a function that creates the Work instead of torch.distributed.
        """
        if op in TRANSFERS:
            self.transfers += 1
        else:
            self.collectives += 1
            if self.collectives == 2:  # by the second collective, most ranks have reached the first one
                ended_ranks.know_first()
        try:
            if self.same_call is not None:
                self.same_call.compare(op, arguments)
            return _CALLS[op](group, arguments, async_op) if how is None else how()
        except Exception as error:
            add_note(error, self.note(error, op, group, arguments, self.transfers if op in TRANSFERS else self.collectives))
            raise

    def note(self, error: BaseException, op: str, group: Any, arguments: Dict[str, Any], number: int) -> str:
        """A note for an error of torch.distributed: the op, its number on this communicator, this rank, and ranks whose processes have ended."""
        return (f"te-fl: in number {number}, {described(op, arguments)} over {self.backend}, as rank {dist.get_rank(group)} of "
                f"{dist.get_world_size(group)} in group {getattr(group, 'group_name', '?')!r}{ended_ranks.described(group, error)}")

    def serve(self, op: str, arguments: Dict[str, Any]) -> None:
        """Executes te_fl.ops.OP(..., comm=self) on this rank."""
        group = self._group()
        if group is None:
            raise FailedPrecondition(f"{op}: the process group of its communicator is gone; keep the group while it is used")
        check(op, group)
        self.begin(op, group, arguments, False)


class Begun:
    """One asynchronous call of an op. Passed as the call's argument `comm`; holds the Work in `work` afterwards."""

    __slots__ = ("_communicator", "_ranks", "_group", "_async_op", "_how", "work")

    def __init__(self, ranks: Communicator, group: Any, async_op: bool, how: Optional[Callable[[], Any]] = None):
        self._communicator, self._ranks, self._group, self._async_op, self._how = ranks._communicator, ranks, group, async_op, how

    def serve(self, op: str, arguments: Dict[str, Any]) -> None:
        self.work = self._ranks.begin(op, self._group, arguments, self._async_op, self._how)


_known: "weakref.WeakKeyDictionary[Any, Dict[torch.device, Communicator]]" = weakref.WeakKeyDictionary()


def of(group: Optional[Any], device: torch.device) -> Communicator:
    """Returns the communicator of the group (None: the default group) for tensors of the device. Created on first use, without communication."""
    group = member(group)
    devices = _known.get(group)
    if devices is None:
        devices = _known[group] = {}
    ranks = devices.get(device)
    if ranks is None:
        ranks = devices[device] = Communicator(group, device)
    return ranks
