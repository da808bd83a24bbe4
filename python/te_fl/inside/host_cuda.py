"""torch.cuda when the host emulates a Hopper GPU, on which all work is complete when a call returns.

Names of torch.cuda that are classes in PyTorch are classes here too, since programs use them in isinstance() and annotations.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any, Dict, Tuple

import torch
import torch.cuda.profiler  # noqa: F401  (PyTorch imports the others of torch.cuda itself)

__all__ = ["CAPABILITY", "Generator", "Properties", "answer", "replace"]

CAPABILITY = (9, 0)


class Stream:
    """The host's only stream; work is complete when its call returns."""

    cuda_stream, stream_id, device_index, device, priority = 0, 0, 0, torch.device("cpu"), 0

    def __init__(self, *arguments: Any, **options: Any):
        pass

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0


class ExternalStream(Stream):
    pass


class Event:
    def __init__(self, *arguments: Any, **options: Any):
        self._seconds: Any = None

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end_event: "Event") -> float:
        """The milliseconds between the two events' record() calls."""
        if self._seconds is None or end_event._seconds is None:
            raise RuntimeError("torch.cuda.Event.elapsed_time: an event was not recorded; call record() of both before")
        return (end_event._seconds - self._seconds) * 1e3

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Device:
    """torch.cuda.device and device_of; there is only one device."""

    def __init__(self, *device: Any, **options: Any):
        self.idx, self.prev_idx = 0, -1

    def __enter__(self) -> None:
        self.prev_idx = 0

    def __exit__(self, *error: Any) -> bool:
        return False


class DeviceOf(Device):
    pass


class StreamContext:
    """torch.cuda.stream() and StreamContext."""

    def __init__(self, stream: Any):
        self.stream = stream

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass


class MemPool:
    """torch.cuda.MemPool; host memory is not allocated from it."""

    def __init__(self, *arguments: Any, **options: Any):
        self.id, self.allocator = (0, 0), None

    def use_count(self) -> int:
        return 1

    def snapshot(self, include_traces: bool = True) -> list:
        return []


class _State:
    """The state of a random number generator while the default generator has another state."""

    def __init__(self) -> None:
        self.own = torch._C.Generator()


class Generator(torch._C.Generator):
    """An element of torch.cuda.default_generators, or a result of its graphsafe_get_state() or clone_state(). Such generators share states and
    exchange them. The default generator's state lives in PyTorch's CPU generator, whose state cannot be shared. PyTorch's functions identify this
    object by its class, and host_device.py passes them the real generator instead.
    """

    def __new__(cls, state: _State) -> "Generator":
        made = super().__new__(cls)
        made._state = state
        return made

    def __init__(self, state: _State):
        pass

    @property
    def real(self) -> torch._C.Generator:
        """The PyTorch generator that currently holds this state."""
        return torch.default_generator if self._state is _DEFAULT._state else self._state.own

    def manual_seed(self, seed: int) -> "Generator":
        self.real.manual_seed(seed)
        return self

    def seed(self) -> int:
        return self.real.seed()

    def initial_seed(self) -> int:
        return self.real.initial_seed()

    def get_state(self) -> torch.Tensor:
        return self.real.get_state()

    def set_state(self, new_state: torch.Tensor) -> "Generator":
        self.real.set_state(new_state)
        return self

    def graphsafe_get_state(self) -> "Generator":
        return Generator(self._state)

    def graphsafe_set_state(self, state: "Generator") -> "Generator":
        """Makes this generator use the other generator's state from now on."""
        if self is _DEFAULT and state._state is not self._state:
            self._state.own.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(state._state.own.get_state())
        self._state = state._state
        return self

    def clone_state(self) -> "Generator":
        clone = Generator(_State())
        clone.set_state(self.get_state())
        return clone


_DEFAULT = Generator(_State())


def _refuse_graphs(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("torch.cuda: the host has no CUDA graphs; te-fl answers for CUDA here (device='cpu')")


def _refused(name: str) -> Any:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError(f"torch.cuda.{name}: the host has neither CUDA's allocator nor its libraries; te-fl answers for CUDA here (device='cpu')")

    return refuse


class CUDAGraph:
    """Programs may refer to this class; constructing an object raises an error."""

    __new__ = _refuse_graphs


class Graph:
    """Replaces torch.cuda.graph; constructing an object raises an error."""

    __new__ = _refuse_graphs


class Properties:
    """The result of torch.cuda.get_device_properties(); a singleton. Sizes are those of Hopper."""

    warp_size, max_threads_per_block, max_threads_per_multi_processor, regs_per_multiprocessor = 32, 1024, 2048, 65536
    shared_memory_per_block, shared_memory_per_block_optin, shared_memory_per_multiprocessor = 49152, 232448, 233472
    L2_cache_size, is_integrated, is_multi_gpu_board, gcnArchName = 50 << 20, 0, 0, ""

    def __init__(self) -> None:
        self.name, (self.major, self.minor) = "the host, by te-fl", CAPABILITY
        self.multi_processor_count, self.total_memory = os.cpu_count() or 1, _memory()[1]


def _memory(device: Any = None) -> Tuple[int, int]:
    """(free, total) bytes of host memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


_PROPERTIES = Properties()  # created here, since torch.compile would otherwise create it in each graph
_ONE_COUNT = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
_POOLED = ("allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes",
           "requested_bytes")


def _memory_stats(device: Any = None) -> Dict[str, Any]:
    """CUDA's statistics, all 0: host memory is not tracked. PyTorch's other memory functions read these."""
    counts = dict.fromkeys(("current", "peak", "allocated", "freed"), 0)
    stats: Dict[str, Any] = {name: {pool: dict(counts) for pool in ("all", "small_pool", "large_pool")} for name in _POOLED}
    stats.update((name, dict(counts)) for name in ("oversize_allocations", "oversize_segments"))
    return {**stats, **dict.fromkeys(_ONE_COUNT, 0), "max_split_size": -1}


def _no_op() -> Any:
    """Returns a new no-op function for each name: torch.compile keys its rules by function object."""
    return lambda *arguments, **options: None


@contextlib.contextmanager
def _use_mem_pool(pool: Any, device: Any = None) -> Any:
    yield


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _answers() -> dict:
    """The replacements, by name in torch.cuda and its submodules."""
    stream = Stream()
    no_ops = """synchronize set_device set_stream init _lazy_init empty_cache reset_peak_memory_stats reset_accumulated_memory_stats
        reset_max_memory_allocated reset_max_memory_cached reset_peak_host_memory_stats reset_accumulated_host_memory_stats
        set_per_process_memory_fraction ipc_collect set_sync_debug_mode profiler.start profiler.stop nvtx.range_push nvtx.range_pop nvtx.range_start
        nvtx.range_end nvtx.mark"""
    return {
        **{name: _no_op() for name in no_ops.split()},
        **{name: _refused(name) for name in ("caching_allocator_alloc", "caching_allocator_delete", "change_current_allocator", "current_blas_handle")},
        **dict.fromkeys(("make_graphed_callables", "graph_pool_handle"), _refuse_graphs),
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "_get_device_index": lambda device, optional=False, allow_cpu=False: 0, "can_device_access_peer": lambda device, peer_device: False,
        "get_device_capability": lambda device=None: CAPABILITY, "get_device_properties": lambda device=None: _PROPERTIES,
        "get_device_name": lambda device=None: _PROPERTIES.name, "is_bf16_supported": lambda including_emulation=True: True,
        "current_stream": lambda device=None: stream, "default_stream": lambda device=None: stream, "stream": lambda stream: StreamContext(stream),
        "get_stream_from_external": lambda data_ptr, device=None: ExternalStream(data_ptr), "StreamContext": StreamContext,
        "Stream": Stream, "ExternalStream": ExternalStream, "Event": Event, "device": Device, "device_of": DeviceOf,
        "CUDAGraph": CUDAGraph, "graph": Graph, "is_current_stream_capturing": lambda: False, "MemPool": MemPool, "use_mem_pool": _use_mem_pool,
        "manual_seed": lambda seed: _seed(seed), "manual_seed_all": lambda seed: _seed(seed), "seed": lambda: torch.seed(), "seed_all": lambda: torch.seed(),
        "initial_seed": lambda: torch.initial_seed(), "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda new_state, device="cuda": torch.set_rng_state(new_state),
        "mem_get_info": _memory, "memory.memory_stats_as_nested_dict": _memory_stats, "host_memory_stats": lambda: {},
        "memory_snapshot": lambda *arguments, **options: [], "get_per_process_memory_fraction": lambda device=None: 1.0,
    }


def _tensor_types() -> dict:
    """torch.cuda.FloatTensor and similar legacy types, mapped to the CPU types of the same names."""
    return {f"{place}{name}": getattr(home, name) for place, home in (("", torch), ("sparse.", torch.sparse))
            for name in vars(torch.cuda) if name.endswith("Tensor") and hasattr(home, name)}


def _lookup(name: str) -> Any:
    """Returns (the submodule of torch.cuda, the name in it) if this version of PyTorch has it."""
    module, _, leaf = name.rpartition(".")
    home = sys.modules.get(f"torch.cuda.{module}") if module else torch.cuda
    return (home, leaf) if home is not None and hasattr(home, leaf) else None


def replace(answers: Dict[str, Any]) -> None:
    """Replaces the objects of torch.cuda, given by name, in every module of torch.cuda, since these modules import each other's names."""
    replaced = {}
    for name, value in answers.items():
        if (found := _lookup(name)) is not None:
            home, leaf = found
            replaced[id(getattr(home, leaf))] = (getattr(home, leaf), value)
            setattr(home, leaf, value)
    for module in [m for n, m in list(sys.modules.items()) if n.startswith("torch.cuda") and m is not None]:
        for name, held in list(vars(module).items()):
            original, value = replaced.get(id(held), (None, None))
            if original is not None and held is original:
                setattr(module, name, value)
    if torch.version.cuda is None:
        torch.version.cuda = "13.0"  # the package chooses its formats by this version


def answer() -> None:
    """Replaces the objects of torch.cuda by the emulation's objects."""
    replace({**_answers(), **_tensor_types()})
    torch.cuda.default_generators = (_DEFAULT,)
