"""Emulates CUDA on the host, for programs of NVIDIA's package on machines without CUDA: te_fl.inside_transformer_engine(device="cpu") installs it.

Everything here serves such programs; te-fl's tests of the package are such programs too, and need nothing more.

A device argument "cuda" of any PyTorch function is replaced by the CPU. torch.cuda behaves as for a Hopper GPU (host_cuda.py), and torch.autocast
follows CUDA's rules (host_autocast.py). This applies to the thread that started it, to threads that call install_in_thread(), and to all backward
functions.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, Tuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _triton

from te_fl.inside import emulation, host_autocast, host_cuda, host_groups
from te_fl.inside.emulation import is_cuda


def _on_host(value: Any) -> Any:
    return torch.device("cpu") if is_cuda(value) else value


def _device_on_host(device: Any) -> Any:
    return torch.device("cpu") if isinstance(device, int) and not isinstance(device, bool) else _on_host(device)


_TO_THE_HOST = (torch.Tensor.cpu, torch.Tensor.pin_memory, torch.Tensor.to)
_MARK = "_te_fl_is_of_the_host"


def _is_of_host(tensor: torch.Tensor) -> bool:
    """True if the program has moved this tensor to the host explicitly. Results of moves and computations do not inherit the mark. False while
    torch.compile traces, because traced tensors have no attributes of their own.
    """
    return not torch.compiler.is_compiling() and _MARK in getattr(tensor, "__dict__", ())


def _marked(tensor: torch.Tensor) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        setattr(tensor, _MARK, True)
    return tensor


def _to_the_host(func: Any, args: Tuple, kwargs: dict) -> Any:
    """An explicit move to the CPU gives a copy, so that later writes to the tensor do not affect it."""
    if func is torch.Tensor.pin_memory:
        return _marked(args[0].clone())
    moved = func is torch.Tensor.cpu
    if func is torch.Tensor.to:
        moved = "cpu" in (v for v in (*args[1:2], kwargs.get("device")) if type(v) is str)
        args = (args[0], *map(_device_on_host, args[1:2]), *args[2:])
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _device_on_host(kwargs["device"])}
    result = func(*args, **kwargs)
    if type(result) not in (torch.Tensor, torch.nn.Parameter):
        return result
    if moved:
        return _marked(result.clone() if result is args[0] else result)
    placed = any(isinstance(v, (str, torch.device)) for v in (*args[1:2], kwargs.get("device")))
    return result.clone() if placed and result is args[0] and _is_of_host(result) else result


def _type(args: Tuple, kwargs: dict) -> Any:
    """Tensor.type(): returns and accepts CUDA type names, which programs compare."""
    names = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, str)]
    if len(args) == 1 and kwargs.get("dtype") is None and _is_of_host(args[0]):
        return torch.Tensor.type(args[0])
    if len(args) == 1 and kwargs.get("dtype") is None:
        return torch.Tensor.type(args[0]).replace("torch.", "torch.cuda.", 1)
    for name in names:
        args = tuple(v.replace("torch.cuda.", "torch.", 1) if v is name else v for v in args)
        kwargs = {k: v.replace("torch.cuda.", "torch.", 1) if v is name else v for k, v in kwargs.items()}
    return torch.Tensor.type(*args, **kwargs)


class _HostMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == emulation.IS_CUDA:
            return args[0].device.type == "cpu" and not _is_of_host(args[0])
        if func == emulation.IS_CPU:
            return _is_of_host(args[0])
        if func is torch.Tensor.get_device and args[0].device.type == "cpu":
            return -1 if _is_of_host(args[0]) else 0
        if func is torch.Tensor.type:
            return _type(args, kwargs)
        if func is torch.Tensor.cuda:
            return args[0].clone() if _is_of_host(args[0]) else args[0]
        if func in _TO_THE_HOST:
            return _to_the_host(func, args, kwargs)
        if func is torch.device and (any(map(is_cuda, (*args, *kwargs.values()))) or type(args[0] if args else None) is int):
            return torch.device("cpu")  # the device index has no meaning here
        if kwargs:
            if "device" in kwargs:
                kwargs = {**kwargs, "device": _device_on_host(kwargs["device"])}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
            if isinstance(kwargs.get("generator"), host_cuda.Generator):
                kwargs = {**kwargs, "generator": kwargs["generator"].real}
        if any(map(is_cuda, args)):
            args = tuple(map(_on_host, args))
        return func(*args, **kwargs)


_mode = _HostMode()


def install_in_thread() -> None:
    """Enables the emulation in a thread that the program starts: PyTorch's function modes are thread-local."""
    _mode.__enter__()


def _random_state_of_the_host() -> None:
    """Makes fork_rng handle the single random state of the host; a program with GPUs has one more for each GPU."""
    @contextlib.contextmanager
    def fork_rng(devices: Any = None, enabled: bool = True, *arguments: Any, **options: Any) -> Any:
        state = torch.get_rng_state() if enabled else None
        try:
            yield
        finally:
            if state is not None:
                torch.set_rng_state(state)

    torch.random.fork_rng = fork_rng


def _compiler_of_the_host() -> None:
    """Patches torch.compile: its tracer evaluates is_cuda and is_cpu itself, and treats objects of known classes, such as device properties, as
    constants.
    """
    from torch._dynamo import utils

    utils.common_constant_types.add(host_cuda.Properties)
    emulation.teach_compiler((sys.modules[__name__], emulation), lambda traced: traced.device.type == "cpu", lambda traced: False)
    # If the module is not imported yet, package.py calls trace_patterns() at its import.
    if (module := sys.modules.get("torch._inductor.fx_passes.joint_graph")) is not None:
        trace_patterns(module)


def trace_patterns(module: Any) -> None:
    """Wraps lazy_init(), so that inductor traces its patterns under _HostMode, which is otherwise inactive during compilation. module:
    torch._inductor.fx_passes.joint_graph."""
    module.lazy_init = emulation.in_mode(_mode, module.lazy_init)


def install() -> None:
    if torch.distributed.is_available():
        host_groups.install()
    emulation.place_makers(_device_on_host)
    emulation.place_generators(_device_on_host)
    torch.Tensor.record_stream = lambda self, stream: None  # It bypasses function modes, and accepts only PyTorch's stream class.
    _random_state_of_the_host()
    emulation.enter_in_backwards(_mode)
    emulation.enter_in_unpacking(_mode)
    emulation.register_custom_ops(_mode, "cpu")
    host_cuda.answer()
    host_autocast.install("cpu")
    _compiler_of_the_host()
    # The package fuses small functions with torch.compile, whose compiler would look for CUDA's driver. The tracer would also ask for an
    # accelerator's stream, which does not exist.
    os.environ.setdefault("NVTE_TORCH_COMPILE", "0")
    torch.accelerator.is_available = lambda: False
    # Without this, a program's own torch.compile would make Triton look for CUDA's driver, only to compute the name of a cache.
    _triton.has_triton = lambda: False
    install_in_thread()
    print("te-fl answers for CUDA by the host in this process: torch.cuda.is_available() is true, tensors of the device cuda lie on the CPU",
          file=sys.stderr)
