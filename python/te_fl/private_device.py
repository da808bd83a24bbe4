"""PyTorch's PrivateUse1 device, under its vendor's name: functions that DLPack does not provide.

DLPack represents such a device as kDLExtDev, without a vendor name, and PyTorch 2.11's exchange API reports the current stream for CUDA only.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager, Dict, Optional, Tuple

import torch

from te_fl import _native
from te_fl.errors import Unsupported

_name = torch._C._get_privateuse1_backend_name
_streams: Dict[Tuple[int, int], torch.Stream] = {}  # streams that have been current, by device index and handle


def native_name(device: torch.device) -> str:
    """te-fl's name of the device, such as "ext:acme:0"; te_fl.errors.Unsupported, with the reason, if it has none."""
    index = device.index or 0
    if device.type != _name():
        raise Unsupported(f"te_fl.pytorch does not run on {device}; it runs on cpu, cuda, and the PrivateUse1 device of one vendor's plugin")
    found = [name for name in _native.info()["devices"] if name.startswith("ext:") and name.endswith(f":{index}")]
    if not found:
        raise Unsupported(f"te-fl does not know {device}: no plugin of te-fl's has an extension device of index {index}; install its vendor's, "
                          "or name it in TE_FL_PLUGIN_MODULES (te_fl.info() lists the devices that are known)")
    if len(found) > 1:
        raise Unsupported(f"te-fl does not know which of {', '.join(found)} is {device}: DLPack has no vendor's name; load the plugin of its "
                          "vendor alone (TE_FL_PLUGIN_PATH, TE_FL_PLUGIN_MODULES)")
    current_stream(index)
    return found[0]


def registered() -> bool:
    """True if PyTorch has a PrivateUse1 device with stream support."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == _name()


def default() -> Optional[torch.device]:
    """The vendor's current device, if PyTorch reports it as available and te-fl has a plugin for it."""
    if not registered() or not torch.accelerator.is_available():
        return None
    device = torch.device(_name(), torch.accelerator.current_device_index())
    try:
        native_name(device)
    except Unsupported:
        return None
    return device


def _current(index: int) -> Tuple[torch.Stream, int]:
    """Returns (the current stream, the vendor's handle of it)."""
    try:
        if not registered():
            raise RuntimeError(f"PyTorch's accelerator is {torch.accelerator.current_accelerator()}")
        stream = torch.accelerator.current_stream(index)
        return stream, stream.native_handle
    except (ImportError, RuntimeError) as error:
        raise Unsupported(f"PyTorch does not tell the current stream of {_name()}:{index}, on which te-fl has to work ({error}); the vendor's "
                          f"backend must register PrivateUse1HooksInterface and torch.{_name()}, and its device guard implement "
                          "getStreamNativeHandle()") from None


def current_stream(index: int) -> int:
    """The vendor's handle of the calling thread's current stream on the device; 0 is the default stream."""
    stream, handle = _current(index)
    _streams[index, handle] = stream
    return handle


def on_stream(index: int, handle: int) -> ContextManager:
    """A context that makes the stream with this handle PyTorch's current stream."""
    if _current(index)[1] == handle:
        return contextlib.nullcontext()
    stream = _streams.get((index, handle))
    if stream is None:
        raise Unsupported(f"PyTorch has not told te-fl of a stream {handle:#x} of {_name()}:{index}; make it current (with stream: ..) in "
                          "place of giving its handle")
    # A new object each time, since a Stream context stores the state to restore.
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def allocator(device: torch.device) -> Tuple[Callable[[int, int], int], Callable[[int], None], Callable[[], None]]:
    """PyTorch's allocator of the device for te-fl: allocate(bytes, stream handle) -> address, free(address), and trim()."""
    index = device.index or 0
    device = torch.device(device.type, index)
    blocks: Dict[int, Any] = {}

    def allocate(size: int, handle: int) -> int:
        with on_stream(index, handle):  # PyTorch allocates for its current stream
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
