"""The streams of PyTorch's devices by their vendor's handles."""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager, Dict, Tuple

import torch

from te_fl.errors import Unsupported

streams: Dict[Tuple[str, int, int], torch.Stream] = {}  # streams that have been current, by device type, index and handle


def private_name() -> str:
    """The vendor's name of PyTorch's PrivateUse1 device; "privateuseone" without one."""
    return torch._C._get_privateuse1_backend_name()


def is_accelerator(device_type: str) -> bool:
    """True if PyTorch has devices of this type, with stream support."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device_type


def handle_of(stream: torch.Stream, device: torch.device) -> int:
    """The vendor's handle of a stream. Before PyTorch 2.11 only the vendor's class of streams has it, as cuda_stream, npu_stream or musa_stream."""
    if hasattr(stream, "native_handle"):
        return stream.native_handle
    kind = getattr(torch.get_device_module(device), "Stream", None)
    name = "sycl_queue" if device.type == "xpu" else f"{device.type}_stream"
    if kind is None or not hasattr(kind, name):
        raise RuntimeError(f"PyTorch {torch.__version__} has no torch.Stream.native_handle, and torch.{device.type} no class Stream with {name}")
    if not hasattr(stream, name):
        stream = kind(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)
    return getattr(stream, name)


def current_stream(device: torch.device) -> int:
    """The vendor's handle of the calling thread's current stream on the device; 0 is the default stream."""
    if device.type == "cuda" and torch.cuda.is_initialized():  # PyTorch's shorter way; a stream can be made again from the handle
        return torch._C._cuda_getCurrentRawStream(device.index or 0)
    try:
        if not is_accelerator(device.type):
            raise RuntimeError(f"PyTorch's accelerator is {torch.accelerator.current_accelerator()}")
        stream = torch.accelerator.current_stream(device.index or 0)
        handle = handle_of(stream, device)
    except (ImportError, RuntimeError) as error:
        raise Unsupported(f"PyTorch does not tell the current stream of {device}, on which te-fl has to work ({error}); the vendor's "
                          f"backend must register PrivateUse1HooksInterface and torch.{device.type}, and its device guard implement "
                          f"getStreamNativeHandle() or torch.{device.type}.Stream have {device.type}_stream") from None
    streams[device.type, device.index or 0, handle] = stream
    return handle


def private_stream(index: int) -> int:
    """current_stream() of the PrivateUse1 device with this index. PyTorch's DLPack exchange API reports the current stream for CUDA only."""
    return current_stream(torch.device(private_name(), index))


def stream_of(device: torch.device, handle: int) -> Any:
    """The stream with this handle: a new object each time, since a Stream context stores the state to restore."""
    known = streams.get((device.type, device.index or 0, handle))
    if known is not None:
        return torch.Stream(stream_id=known.stream_id, device_index=known.device_index, device_type=known.device_type)
    module = torch.get_device_module(device)
    if handle == 0 and hasattr(module, "default_stream"):
        return module.default_stream(device)
    if not hasattr(module, "ExternalStream"):
        raise Unsupported(f"PyTorch has not told te-fl of a stream {handle:#x} of {device}; make it current (with stream: ..) in place of giving its "
                          "handle")
    return module.ExternalStream(handle, device=device)


def on_stream(device: torch.device, handle: int) -> ContextManager:
    """A context that makes the stream with this handle PyTorch's current stream. The CPU has no streams."""
    return contextlib.nullcontext() if device.type == "cpu" or current_stream(device) == handle else stream_of(device, handle)
