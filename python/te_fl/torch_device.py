"""Devices of PyTorch as te-fl uses them: their names and memory, and te-fl devices that are made from them.

Where PyTorch has a device that no plugin of te-fl supports, te-fl makes a device of that name from PyTorch's memory, copies, streams and events
(TorchDevice). Vendors need to provide nothing beyond their PyTorch.
"""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
from typing import Any, Callable, Dict, Optional, Set, Tuple

import torch

from te_fl import _native, flaggems, reference_torch, registration
from te_fl.errors import Unsupported
from te_fl.reference_torch import checks
from te_fl.torch_streams import current_stream, handle_of, is_accelerator, on_stream, private_name, stream_of, streams

# PyTorch's device types by DLPack's numbers, which are also te-fl's; an extension device is PrivateUse1.
_TYPES = {2: "cuda", 10: "cuda", 14: "xpu"}
_ROCM, _EXTENSION = 10, 12
# te-fl's names of PyTorch's device types. On ROCm, PyTorch calls its devices cuda. Metal (mps) is missing: its tensors are buffers with offsets, not
# addresses.
_NAMES = {"cpu": "cpu", "cuda": "rocm" if torch.version.hip else "cuda", "xpu": "oneapi"}

_registering = threading.Lock()
_registered: Set[str] = set()  # te-fl's device types for which the ops by PyTorch are registered


def native_name(device: torch.device) -> str:
    """te-fl's name of the device, such as "cuda:0" or "ext:acme:0"; te_fl.errors.Unsupported, with the reason, if it has none."""
    index = device.index or 0
    if device.type == "cpu":
        return "cpu"
    if device.type not in (*_NAMES, private_name()):
        raise Unsupported(f"te_fl.pytorch does not run on {device}; it runs on {', '.join(_NAMES)}, and the PrivateUse1 device of one vendor")
    if device.type == "cuda":  # a device of PyTorch's own knows its index
        return f"{_NAMES['cuda']}:{index}"
    current_stream(device)
    if index >= torch.accelerator.device_count():
        raise Unsupported(f"PyTorch has no {device}: it has {torch.accelerator.device_count()} devices {device.type}")
    if device.type in _NAMES:
        return f"{_NAMES[device.type]}:{index}"
    found = [name for name in _native.info()["devices"] if name.startswith("ext:") and name.endswith(f":{index}")]
    if len(found) > 1:
        raise Unsupported(f"te-fl does not know which of {', '.join(found)} is {device}: DLPack has no vendor's name; load the plugin of its "
                          "vendor alone (TE_FL_PLUGIN_PATH, TE_FL_PLUGIN_MODULES)")
    return found[0] if found else f"ext:{device.type}:{index}"  # te-fl makes this device from PyTorch's when it looks it up


def default() -> Optional[torch.device]:
    """PyTorch's current accelerator, if it is available and te-fl can use it."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return None
    device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    try:
        native_name(device)
    except Unsupported:
        return None
    return device


def allocator(device: torch.device) -> Tuple[Callable[[int, int], int], Callable[[int], None], Callable[[], None]]:
    """PyTorch's allocator of the device for te-fl: allocate(bytes, stream handle) -> address, free(address), and trim()."""
    device = torch.device(device.type, device.index or 0)
    blocks: Dict[int, Any] = {}

    def allocate(size: int, handle: int) -> int:
        with on_stream(device, handle):  # PyTorch allocates for its current stream
            block = torch.UntypedStorage(size, device=device)
        blocks[block.data_ptr()] = block
        return block.data_ptr()

    def trim() -> None:
        empty_cache = getattr(getattr(torch, device.type, None), "empty_cache", None)
        if empty_cache is not None:
            empty_cache()

    return allocate, lambda address: blocks.pop(address) and None, trim


def default_generator(device: torch.device) -> torch.Generator:
    """PyTorch's default random number generator of the device."""
    generators = getattr(getattr(torch, device.type, None), "default_generators", None)
    if generators is None:
        raise Unsupported(f"PyTorch does not tell the generator of {device}: torch.{device.type} has no default_generators")
    return generators[device.index or 0]


def find(dlpack_type: int, index: int, provider: str) -> Optional["TorchDevice"]:
    """The device with this number of DLPack's if PyTorch has it, else None. provider: the vendor's name of an extension device. te-fl calls this
    when a device is looked up that no plugin has.
    """
    kind = _TYPES.get(dlpack_type) if dlpack_type != _EXTENSION else provider if provider == private_name() else None
    if kind is None or not is_accelerator(kind) or not 0 <= index < torch.accelerator.device_count():
        return None
    if kind == "cuda" and (dlpack_type == _ROCM) != bool(torch.version.hip):
        return None
    device = TorchDevice(torch.device(kind, index))
    _register_ops(kind, f"ext:{kind}" if dlpack_type == _EXTENSION else _NAMES[kind])
    return device


def _register_ops(kind: str, device_type: str) -> None:
    """Registers the ops by PyTorch, and by FlagGems if it is installed, for te-fl's devices of this type, PyTorch's of `kind`,
    unless that was done.
    """
    with _registering:
        if device_type in _registered:
            return
        registration.OpRegistry.instance().register_many([*reference_torch.implementations((device_type,)),
                                                          *reference_torch.compiled_implementations(kind, (device_type,))])
        _registered.add(device_type)
        try:
            flaggems.register_for(device_type)
        except (Exception, SystemExit) as error:
            warnings.warn(f"FlagGems' kernels are not used on {device_type}: {type(error).__name__}: {' '.join(str(error).split())}; to do without them, set "
                          f"TE_FL_SKIP_MODULES={flaggems.__name__}", stacklevel=2)


class TorchDevice:
    """The functions of one te-fl device. te-fl calls them on any thread; streams (0 is the default stream), addresses and events are integers."""

    def __init__(self, device: torch.device):
        self.device, self._module = device, torch.get_device_module(device)
        self.like = torch.empty(0, dtype=torch.uint8, device=device)
        self._lock = threading.Lock()
        self._blocks: Dict[int, Tuple[Any, int]] = {}  # by address: the storage, and the stream that it was allocated on
        self._made: Set[int] = set()  # handles of the streams that te-fl has made
        self._events: Dict[int, torch.Event] = {}
        self._numbers = itertools.count(1)
        # torch.cuda.is_current_stream_capturing() checks each time whether PyTorch has CUDA at all.
        own = torch._C._cuda_isCurrentStreamCapturing if device.type == "cuda" else None
        self._capturing: Optional[Callable[[], bool]] = own or getattr(self._module, "is_current_stream_capturing", None)
        current_stream(device)
        self._current = functools.partial(torch._C._cuda_getCurrentRawStream, device.index) if device.type == "cuda" else functools.partial(current_stream, device)
        checks.watch(device)

    def create_stream(self) -> int:
        for _ in range(64):  # PyTorch may hand out the streams of a pool in turn
            stream = torch.Stream(self.device)
            handle = handle_of(stream, self.device)
            with self._lock:
                if handle not in self._made:
                    self._made.add(handle)
                    streams[self.device.type, self.device.index, handle] = stream
                    return handle
        raise Unsupported(f"PyTorch has no more streams of {self.device} than the {len(self._made)} that te-fl has made; destroy one")

    def destroy_stream(self, handle: int) -> None:
        with self._lock:
            self._made.discard(handle)

    def synchronize(self, handle: int) -> None:
        stream_of(self.device, handle).synchronize()
        checks.report(self.device)

    def is_capturing(self, handle: int) -> bool:
        if self._capturing is None:
            return False
        if self._current() == handle:
            return bool(self._capturing())
        with on_stream(self.device, handle):
            return bool(self._capturing())

    def allocate(self, size: int, alignment: int, handle: int) -> int:
        with on_stream(self.device, handle):  # PyTorch allocates for its current stream
            storage = torch.UntypedStorage(size, device=self.device)
            if storage.data_ptr() % alignment:
                storage = torch.UntypedStorage(size + alignment, device=self.device)
        address = -(-storage.data_ptr() // alignment) * alignment
        self._blocks[address] = storage, handle
        return address

    def free(self, address: int, handle: int) -> None:
        storage, own = self._blocks.pop(address)
        if handle != own:  # PyTorch reuses the memory in the order of the stream that it was allocated on
            stream_of(self.device, own).wait_stream(stream_of(self.device, handle))
        del storage

    def copy(self, to: torch.Tensor, source: torch.Tensor, handle: int) -> None:
        """Copies bytes. A copy to or from the host waits, since the memory there may be pageable."""
        with on_stream(self.device, handle):
            to.copy_(source, non_blocking=to.device == source.device)

    def fill(self, to: torch.Tensor, value: int, handle: int) -> None:
        with on_stream(self.device, handle):
            to.fill_(value)

    def create_event(self, timed: int) -> int:
        number = next(self._numbers)
        self._events[number] = torch.Event(self.device, enable_timing=bool(timed))
        return number

    def destroy_event(self, number: int) -> None:
        del self._events[number]

    def record_event(self, number: int, handle: int) -> None:
        self._events[number].record(stream_of(self.device, handle))

    def wait_event(self, number: int, handle: int) -> None:
        self._events[number].wait(stream_of(self.device, handle))

    def synchronize_event(self, number: int) -> None:
        self._events[number].synchronize()

    def query_event(self, number: int) -> bool:
        return bool(self._events[number].query())

    def elapsed_time(self, start: int, end: int) -> int:
        """Nanoseconds."""
        return max(0, int(self._events[start].elapsed_time(self._events[end]) * 1e6))

    def properties(self) -> Tuple[int, int, int, int, str, str]:
        """Bytes of memory, of which free, compute units, architecture, name and driver; 0 for what PyTorch does not report."""
        free, total = self._module.mem_get_info(self.device) if hasattr(self._module, "mem_get_info") else (0, 0)
        about = self._module.get_device_properties(self.device) if hasattr(self._module, "get_device_properties") else None
        arch = 10 * getattr(about, "major", 0) + getattr(about, "minor", 0)
        return (total or getattr(about, "total_memory", 0), free, getattr(about, "multi_processor_count", 0), arch,
                getattr(about, "name", str(self.device)), f"PyTorch {torch.__version__}")
