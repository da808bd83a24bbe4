"""torch.cuda when another vendor's device takes the place of CUDA devices: the functions of that name of the vendor's module, or of torch.accelerator.
A function that neither has raises an error that names it.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Dict, Optional

import torch

from te_fl.inside import host_cuda
from te_fl.inside.emulation import is_cuda

# Functions of torch.cuda that the vendor's module has under the same name, if it has them.
_VENDORS = """synchronize current_stream default_stream set_stream stream Stream ExternalStream Event StreamContext is_current_stream_capturing MemPool
    use_mem_pool manual_seed manual_seed_all seed seed_all initial_seed get_rng_state set_rng_state get_rng_state_all set_rng_state_all mem_get_info
    memory_snapshot memory_stats memory_summary memory_allocated max_memory_allocated memory_reserved max_memory_reserved reset_peak_memory_stats
    reset_accumulated_memory_stats reset_max_memory_allocated empty_cache set_per_process_memory_fraction get_per_process_memory_fraction
    can_device_access_peer ipc_collect make_graphed_callables graph_pool_handle caching_allocator_alloc caching_allocator_delete
    change_current_allocator current_blas_handle host_memory_stats utilization""".split()
_OF_ACCELERATOR = """memory_stats memory_allocated max_memory_allocated memory_reserved max_memory_reserved reset_peak_memory_stats
    reset_accumulated_memory_stats""".split()
_CLASSES = ("ExternalStream", "MemPool", "StreamContext", "CUDAGraph", "graph")


def _refused(kind: str, name: str) -> Any:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError(f"torch.cuda.{name}: torch.{kind} has no {name}; te-fl answers for CUDA by the device {kind} here")

    return type(name, (), {"__new__": refuse}) if name in _CLASSES else refuse


class _Like(type):
    """The metaclass of classes whose instances are PyTorch's streams or events of the device."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.base) and value.device.type == cls.kind  # type: ignore[attr-defined]


class _Generators:
    """torch.cuda.default_generators of a vendor whose module has none."""

    def __init__(self, kind: str):
        self._kind = kind

    def __getitem__(self, index: int) -> Any:
        raise RuntimeError(f"torch.cuda.default_generators: torch.{self._kind} has no default_generators; te-fl answers for CUDA by the device "
                           f"{self._kind} here")


def _properties(module: Any, device: Any) -> host_cuda.Properties:
    """The vendor's properties where it has them, with the architecture of Hopper, by which the package chooses its formats."""
    made, theirs = host_cuda.Properties(), module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
    for name in ("name", "total_memory", "multi_processor_count", "warp_size", "max_threads_per_multi_processor"):
        if hasattr(theirs, name):
            setattr(made, name, getattr(theirs, name))
    return made


def _streams(kind: str, index: Callable[..., int]) -> Dict[str, Any]:
    """Streams and events by PyTorch's own classes, for a vendor whose module has none."""
    def make_stream(cls: type, device: Any = None, priority: int = 0, **options: Any) -> torch.Stream:
        return torch.Stream(**options) if options else torch.Stream(device=torch.device(kind, index(device, True)), priority=priority)

    def make_event(cls: type, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False) -> torch.Event:
        return torch.Event(kind, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    @contextlib.contextmanager
    def stream(stream: Optional[torch.Stream]) -> Any:
        with stream if stream is not None else contextlib.nullcontext():
            yield

    return {"Stream": _Like("Stream", (), {"__new__": make_stream, "kind": kind, "base": torch.Stream}),
            "Event": _Like("Event", (), {"__new__": make_event, "kind": kind, "base": torch.Event}),
            "current_stream": lambda device=None: torch.accelerator.current_stream(index(device, True)), "set_stream": torch.accelerator.set_stream,
            "stream": stream}


def _devices(index: Callable[..., int]) -> Dict[str, Any]:
    accelerator = torch.accelerator

    def set_device(device: Any) -> None:
        if (number := index(device, True)) >= 0:
            accelerator.set_device_index(number)

    class Device:
        """torch.cuda.device: makes a device the current one while the scope lasts."""

        def __init__(self, device: Any):
            self.idx, self.prev_idx = index(device, True), -1

        def __enter__(self) -> None:
            self.prev_idx = accelerator.current_device_index()
            set_device(self.idx)

        def __exit__(self, *error: Any) -> bool:
            set_device(self.prev_idx)
            return False

    class DeviceOf(Device):
        def __init__(self, value: Any):
            super().__init__(value.get_device() if value.is_cuda else -1)

    return {"is_available": lambda: True, "is_initialized": lambda: True, "init": lambda: None, "_lazy_init": lambda: None,
            "device_count": accelerator.device_count, "current_device": accelerator.current_device_index, "set_device": set_device,
            "_get_device_index": index, "device": Device, "device_of": DeviceOf, "is_bf16_supported": lambda including_emulation=True: True,
            "get_device_capability": lambda device=None: host_cuda.CAPABILITY, "synchronize": lambda device=None: accelerator.synchronize(index(device, True))}


def _index_of(kind: str, placed: Callable[[Any], Any]) -> Callable[..., int]:
    def index(device: Any = None, optional: bool = False, allow_cpu: bool = False) -> int:
        """torch.cuda._get_device_index()."""
        if isinstance(device, int):
            return device
        where = None if device is None else placed(device)
        where = torch.device(where) if isinstance(where, str) else where
        if where is not None and where.type != kind:
            if allow_cpu and where.type == "cpu":
                return -1
            raise ValueError(f"Expected a cuda device, but got: {device}")
        if where is None and not optional:
            raise ValueError(f"Expected a torch.device with a specified index or an integer, but got: {device}")
        return torch.accelerator.current_device_index() if where is None or where.index is None else where.index

    return index


def _of_vendor(module: Any, name: str, placed: Callable[[Any], Any]) -> Any:
    """The vendor's function, which gets its own device where the program names cuda; or the vendor's class."""
    found = getattr(module, name)
    if isinstance(found, type):
        return found

    @functools.wraps(found)
    def call(*arguments: Any, **options: Any) -> Any:
        return found(*(placed(a) if is_cuda(a) else a for a in arguments), **{n: placed(v) if is_cuda(v) else v for n, v in options.items()})

    return call


def _answers(kind: str, placed: Callable[[Any], Any]) -> Dict[str, Any]:
    module, index = torch.get_device_module(kind), _index_of(kind, placed)
    answers: Dict[str, Any] = {name: _refused(kind, name) for name in (*_VENDORS, *_CLASSES)}
    answers.update(_devices(index), **_streams(kind, index))
    answers.update({name: getattr(torch.accelerator, name) for name in _OF_ACCELERATOR if hasattr(torch.accelerator, name)})
    answers.update({"empty_cache": lambda: None, "ipc_collect": lambda: None, "is_current_stream_capturing": lambda: False,
                    "can_device_access_peer": lambda device, peer_device: False})
    if not (hasattr(module, "current_stream") and hasattr(module, "Stream") and hasattr(module, "Event")):
        mine = set(_VENDORS) - {"Stream", "Event", "current_stream", "set_stream", "stream", "default_stream", "ExternalStream", "StreamContext"}
    else:
        mine = set(_VENDORS)
    answers.update({name: _of_vendor(module, name, placed) for name in mine if hasattr(module, name)})
    if not hasattr(module, "manual_seed") and hasattr(module, "manual_seed_all"):  # the function that PyTorch itself needs
        answers["manual_seed"] = module.manual_seed_all
    graphs = getattr(module, "CUDAGraph", getattr(module, f"{kind.upper()}Graph", None))
    if graphs is not None and hasattr(module, "graph"):
        answers.update(CUDAGraph=graphs, graph=module.graph)
    answers["get_device_properties"] = lambda device=None: _properties(module, torch.device(kind, index(device, True)))
    answers["get_device_name"] = lambda device=None: answers["get_device_properties"](device).name
    if not hasattr(module, "nvtx"):
        answers.update({f"nvtx.{name}": lambda *arguments, **options: None for name in ("range_push", "range_pop", "range_start", "range_end", "mark")})
    answers.update({f"profiler.{name}": lambda: None for name in ("start", "stop")})
    return answers


def answer(kind: str, placed: Callable[[Any], Any]) -> None:
    """Replaces the objects of torch.cuda. placed: maps a device argument to the vendor's device."""
    host_cuda.replace(_answers(kind, placed))
    torch.cuda.default_generators = getattr(torch.get_device_module(kind), "default_generators", None) or _Generators(kind)
