"""torch.distributed when another device takes CUDA's place: NCCL process groups become Gloo groups on the host, and the vendor's on another device.
Features that Gloo lacks are emulated where possible.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any, Callable, List, Optional

import torch

from te_fl.errors import Unsupported

__all__ = ["install", "install_for"]


def _replace(name: str, wrap: Callable[[Callable], Callable]) -> None:
    """Replaces the function in every module of torch.distributed that has the name."""
    replaced = wrap(getattr(torch.distributed, name))
    for module in (torch.distributed, torch.distributed.distributed_c10d):
        setattr(module, name, replaced)


def _backend_on_host(backend: Any) -> Optional[str]:
    """Maps a backend name, or a list such as "cpu:gloo,cuda:nccl", to the host's backend."""
    if backend is None:
        return None
    places = dict(part.split(":") if ":" in part else ("", part) for part in str(backend).lower().split(","))
    found = places.get("cpu") or places.get("cuda") or places.get("") or str(backend)
    return "gloo" if found == "nccl" else found


def _is_of_nccl(options: Any) -> bool:
    kind = getattr(torch.distributed, "ProcessGroupNCCL", None)
    return kind is not None and isinstance(options, kind.Options)


def _backend_of(device: str, backend: Any) -> Any:
    """Maps a backend name, or a list such as "cpu:gloo,cuda:nccl", to the backend that PyTorch has for a vendor's device."""
    if backend is None:
        return None
    own = torch.distributed.Backend.default_device_backend_map.get(device)
    parts = []
    for part in str(backend).lower().split(","):
        place, colon, name = part.rpartition(":")
        if name == "nccl":
            if own is None:
                raise Unsupported(f"torch.distributed: the backend nccl for the device {device}, for which PyTorch has no backend; import the package of its "
                                  "vendor that registers one, or name a backend that takes its tensors")
            name = own
        parts.append(f"{device if place == 'cuda' else place}{colon}{name}")
    return ",".join(parts)


def _group(backend_of: Callable[[Any], Any], keeps_device: bool) -> Callable[[Callable], Callable]:
    """Returns a function that wraps a function that creates groups. The wrapped function drops NCCL's options, and its device argument unless
    keeps_device.
    """
    def wrap(make: Callable) -> Callable:
        signature = inspect.signature(make)

        @functools.wraps(make)
        def call(*arguments: Any, **options: Any) -> Any:
            bound = signature.bind(*arguments, **options)
            if not keeps_device:
                bound.arguments.pop("device_id", None)
            if _is_of_nccl(bound.arguments.get("pg_options")):
                del bound.arguments["pg_options"]
            if "backend" in bound.arguments:
                bound.arguments["backend"] = backend_of(bound.arguments["backend"])
            return make(*bound.args, **bound.kwargs)

        return call

    return wrap


def _barrier_on_host(barrier: Callable) -> Callable:
    @functools.wraps(barrier)
    def call(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group, async_op)

    return call


def _replicas_on_host() -> None:
    """Wraps DistributedDataParallel, which accepts device_ids only for modules on a GPU."""
    kind = torch.nn.parallel.DistributedDataParallel
    init = kind.__init__

    @functools.wraps(init)
    def without_numbers(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *arguments: Any, **options: Any) -> None:
        several = device_ids is not None and len(device_ids) > 1  # PyTorch refuses several device_ids
        init(self, module, device_ids if several else None, None, *arguments, **options)

    kind.__init__ = without_numbers


def _mean_on_host(source: str) -> Callable:
    """Emulates the reduction "avg", which Gloo lacks, by a sum of inputs divided by the number of ranks. source: the name of the input argument."""
    def wrap(collective: Callable) -> Callable:
        signature = inspect.signature(collective)

        @functools.wraps(collective)
        def call(*arguments: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling():  # torch.compile has rules of its own for these functions
                return collective(*arguments, **options)
            bound = signature.bind(*arguments, **options)
            group = bound.arguments.get("group")
            if bound.arguments.get("op") == torch.distributed.ReduceOp.AVG and torch.distributed.get_backend(group) == "gloo":
                values, count = bound.arguments[source], torch.distributed.get_world_size(group)
                shares = [v / count for v in values] if isinstance(values, (list, tuple)) else values / count
                if source == "tensor":  # the collective works in place
                    values.copy_(shares)
                else:
                    bound.arguments[source] = shares
                bound.arguments["op"] = torch.distributed.ReduceOp.SUM
            return collective(*bound.args, **bound.kwargs)

        return call

    return wrap


class _Message:
    """A point-to-point message handle whose wait() may be called repeatedly, as NCCL's; Gloo's second wait() would hang."""

    def __init__(self, work: Any):
        self._work, self._done = work, False

    def wait(self, *arguments: Any) -> bool:
        if not self._done:
            self._work.wait(*arguments)
            self._done = True
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Joined:
    """The handle of collectives and messages that were started together."""

    def __init__(self) -> None:
        self.works: list = []

    def append(self, work: Any) -> None:
        if work is not None:
            self.works.append(work)

    def wait(self) -> None:
        for work in self.works:
            work.wait()


_open: List[_Joined] = []  # the coalescing managers that the program is in, the innermost last


def _message_on_host(begin: Callable) -> Callable:
    @functools.wraps(begin)
    def call(*arguments: Any, **options: Any) -> Any:
        work = begin(*arguments, **options)
        if work is None:
            return None
        work = _Message(work)
        if _open:
            _open[-1].append(work)
        return work

    return call


@contextlib.contextmanager
def _one_by_one(group: Any = None, device: Any = None, async_ops: bool = False) -> Any:
    """Replaces torch.distributed._coalescing_manager. Gloo either lacks coalescing or is wrong for mixed dtypes. As for NCCL, PyTorch's functions
    record the collectives; this manager runs them one after the other when it exits.
    """
    group = group or torch.distributed.distributed_c10d._get_default_group()
    noted = torch.distributed.distributed_c10d._world.pg_coalesce_state
    if noted.setdefault(group, []):
        raise ValueError("torch.distributed._coalescing_manager: the group is in one already")
    _open.append(_Joined())
    try:
        yield _open[-1]
    finally:
        joined, begun = _open.pop(), noted.pop(group)
    for one in begun:
        tensors = (one.tensor,) if one.dst_tensor is None else (one.dst_tensor, one.tensor)
        one.op(*tensors, group=group, **({} if one.redop is None else {"op": one.redop}))
    if not async_ops:
        joined.wait()


def install() -> None:
    for name in ("isend", "irecv"):
        _replace(name, _message_on_host)
    _replace("_coalescing_manager", lambda manager: _one_by_one)
    for name in ("init_process_group", "new_group"):
        _replace(name, _group(_backend_on_host, False))
    _replace("barrier", _barrier_on_host)
    _replicas_on_host()
    for name, source in (("all_reduce", "tensor"), ("reduce", "tensor"), ("reduce_scatter_tensor", "input"), ("reduce_scatter", "input_list")):
        _replace(name, _mean_on_host(source))


def install_for(device: str) -> None:
    """Makes NCCL groups groups of the backend that PyTorch has for another vendor's device."""
    for name in ("init_process_group", "new_group"):
        _replace(name, _group(functools.partial(_backend_of, device), True))
