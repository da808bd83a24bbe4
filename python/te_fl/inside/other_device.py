"""Lets another vendor's device take the place of CUDA devices, for programs of NVIDIA's package: te_fl.inside_transformer_engine(device="musa").

A device argument "cuda:1" of any PyTorch function is replaced by the device of that index. torch.cuda behaves as the vendor's module (other_cuda.py), and
an autocast scope or NCCL group for cuda is one for the device. This applies to the thread that started it, to threads that call install_in_thread(), and
to all backward functions.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any, Optional, Tuple

import torch
from torch.overrides import TorchFunctionMode

from te_fl import _native, registration
from te_fl.errors import FailedPrecondition
from te_fl.inside import emulation, host_autocast, host_groups, other_cuda
from te_fl.inside.emulation import is_cuda


def place(kind: str, value: Any) -> Any:
    """The device of the vendor for a device argument: "cuda", "cuda:1", a torch.device, or an index. Returns other values unchanged."""
    if isinstance(value, int) and not isinstance(value, bool):
        return torch.device(kind, value)
    if not is_cuda(value):
        return value
    index = value.index if isinstance(value, torch.device) else int(value.partition(":")[2]) if ":" in value else None
    return torch.device(kind) if index is None else torch.device(kind, index)


class _DeviceMode(TorchFunctionMode):
    def __init__(self, kind: str):
        super().__init__()
        self._kind = kind

    def _type(self, args: Tuple, kwargs: dict) -> Any:
        """Tensor.type(): returns and accepts CUDA's type names, which programs compare."""
        def named(value: Any) -> Any:
            return value.replace("torch.cuda.", f"torch.{self._kind}.", 1) if isinstance(value, str) else value

        made = torch.Tensor.type(*map(named, args), **{name: named(value) for name, value in kwargs.items()})
        return made.replace(f"torch.{self._kind}.", "torch.cuda.", 1) if isinstance(made, str) else made

    def __torch_function__(self, func: Any, types: Any, args: Tuple = (), kwargs: Any = None) -> Any:
        kwargs, kind = kwargs or {}, self._kind
        if func == emulation.IS_CUDA:
            return args[0].device.type == kind
        if func is torch.Tensor.type:
            return self._type(args, kwargs)
        if func is torch.Tensor.cuda:
            where = args[1] if len(args) > 1 and args[1] is not None else kwargs.get("device")
            others = {name: value for name, value in kwargs.items() if name != "device"}
            return torch.Tensor.to(args[0], torch.device(kind, torch.accelerator.current_device_index()) if where is None else place(kind, where),
                                   *args[2:], **others)
        if func is torch.device:
            if args and is_cuda(args[0]) and len(args) > 1:
                return torch.device(kind, args[1])
            if is_cuda(kwargs.get("type")):
                return torch.device(kind, *args, **{name: value for name, value in kwargs.items() if name != "type"})
            return func(*(place(kind, value) for value in args[:1]), *args[1:], **kwargs)
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], place(kind, args[1]), *args[2:])
        if "device" in kwargs:
            kwargs = {**kwargs, "device": place(kind, kwargs["device"])}
        if any(map(is_cuda, args)):
            args = tuple(place(kind, value) if is_cuda(value) else value for value in args)
        return func(*args, **kwargs)


_mode: Optional[_DeviceMode] = None


def install_in_thread() -> None:
    """Lets the device take CUDA's place in a thread that the program starts: PyTorch's function modes are thread-local."""
    assert _mode is not None
    _mode.__enter__()


def _find(kind: str) -> None:
    """Imports the vendor's package if PyTorch has not; FailedPrecondition if PyTorch has no such device."""
    accelerator = torch.accelerator.current_accelerator()
    if (accelerator is None or accelerator.type != kind) and importlib.util.find_spec(f"torch_{kind}") is not None:
        importlib.import_module(f"torch_{kind}")
        accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != kind:
        raise FailedPrecondition(f"te_fl.inside_transformer_engine: device is {kind!r}, and PyTorch's accelerator is {accelerator}; import the package of "
                                 "the device's vendor before this call")


def _random_states(kind: str) -> None:
    fork_rng = torch.random.fork_rng

    def placed(*arguments: Any, device_type: str = "cuda", **options: Any) -> Any:
        return fork_rng(*arguments, device_type=kind if device_type == "cuda" else device_type, **options)

    torch.random.fork_rng = placed


def _loads(kind: str) -> None:
    load = torch.load

    def placed(f: Any, map_location: Any = None, *arguments: Any, **options: Any) -> Any:
        return load(f, place(kind, map_location) if is_cuda(map_location) else map_location, *arguments, **options)

    torch.load = placed


def _leave_in_implementations() -> None:
    """Runs the implementations of ops that are functions in Python outside of the mode: the tensors there are not of CUDA."""
    on_stream = registration._on_stream

    def outside(*arguments: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return on_stream(*arguments)

    _native.set_registration_helpers(registration._describe_error, outside)


def trace_patterns(module: Any) -> None:
    """Wraps lazy_init(), so that inductor traces its patterns under the mode. module: torch._inductor.fx_passes.joint_graph."""
    assert _mode is not None
    module.lazy_init = emulation.in_mode(_mode, module.lazy_init)


def install(kind: str) -> None:
    global _mode
    _find(kind)
    _mode = _DeviceMode(kind)

    def placed(value: Any) -> Any:
        return place(kind, value)

    if torch.distributed.is_available():
        host_groups.install_for(kind)
    emulation.place_makers(placed)
    emulation.place_generators(placed)
    _random_states(kind)
    _loads(kind)
    emulation.enter_in_backwards(_mode)
    emulation.enter_in_unpacking(_mode)
    emulation.register_custom_ops(_mode, kind)
    _leave_in_implementations()
    other_cuda.answer(kind, placed)
    host_autocast.install(kind)
    emulation.teach_compiler((sys.modules[__name__], emulation), lambda traced: traced.device.type == kind)
    if (module := sys.modules.get("torch._inductor.fx_passes.joint_graph")) is not None:
        trace_patterns(module)
    # The package fuses small functions with torch.compile, which would compile Triton kernels for CUDA.
    os.environ.setdefault("NVTE_TORCH_COMPILE", "0")
    install_in_thread()
    print(f"te-fl answers for CUDA by the device {kind} in this process: torch.cuda.is_available() is true, tensors of the device cuda lie on {kind}",
          file=sys.stderr)
