"""Emulates CUDA on the host, for programs of NVIDIA's package on machines without CUDA: te_fl.inside_transformer_engine(device="cpu") installs it.

Everything here serves such programs; te-fl's tests of the package are such programs too, and need nothing more.

A device argument "cuda" of any PyTorch function is replaced by the CPU. torch.cuda behaves as for a Hopper GPU (host_cuda.py), and torch.autocast
follows CUDA's rules (host_autocast.py). This applies to the thread that started it, to threads that call install_in_thread(), and to all backward
functions.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from types import FunctionType
from typing import Any, Tuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _triton

from te_fl.inside import host_autocast, host_cuda, host_groups


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, str) and value.split(":")[0] == "cuda") or (isinstance(value, torch.device) and value.type == "cuda")


def _on_host(value: Any) -> Any:
    return torch.device("cpu") if _is_cuda(value) else value


def _device_on_host(device: Any) -> Any:
    return torch.device("cpu") if isinstance(device, int) and not isinstance(device, bool) else _on_host(device)


_IS_CUDA, _IS_CPU = torch.Tensor.is_cuda.__get__, torch.Tensor.is_cpu.__get__


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
        if func == _IS_CUDA:  # a method-wrapper, which is a new object at each access
            return args[0].device.type == "cpu" and not _is_of_host(args[0])
        if func == _IS_CPU:
            return _is_of_host(args[0])
        if func is torch.Tensor.get_device and args[0].device.type == "cpu":
            return -1 if _is_of_host(args[0]) else 0
        if func is torch.Tensor.type:
            return _type(args, kwargs)
        if func is torch.Tensor.cuda:
            return args[0].clone() if _is_of_host(args[0]) else args[0]
        if func in _TO_THE_HOST:
            return _to_the_host(func, args, kwargs)
        if func is torch.device and (any(map(_is_cuda, (*args, *kwargs.values()))) or type(args[0] if args else None) is int):
            return torch.device("cpu")  # the device index has no meaning here
        if kwargs:
            if "device" in kwargs:
                kwargs = {**kwargs, "device": _device_on_host(kwargs["device"])}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
            if isinstance(kwargs.get("generator"), host_cuda.Generator):
                kwargs = {**kwargs, "generator": kwargs["generator"].real}
        if any(map(_is_cuda, args)):
            args = tuple(map(_on_host, args))
        return func(*args, **kwargs)


_mode = _HostMode()


def install_in_thread() -> None:
    """Enables the emulation in a thread that the program starts: PyTorch's function modes are thread-local."""
    _mode.__enter__()


def _enter_in_backwards() -> None:
    """Wraps backward functions to enter the mode, since autograd's engine runs them outside of it."""
    context = torch.autograd.function.BackwardCFunction
    apply = context.apply

    def apply_in_mode(self: Any, *gradients: Any) -> Any:
        with _mode:
            return apply(self, *gradients)

    context.apply = apply_in_mode


def _in_mode(function: Any) -> Any:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with _mode:
            return function(*arguments, **options)

    return call


def _enter_in_unpacking() -> None:
    """Wraps saved-tensor unpack hooks to enter the mode, since autograd runs them outside of it; a checkpoint recomputes its forward there."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    init = hooks.__init__

    def with_mode(self: Any, pack_hook: Any, unpack_hook: Any) -> None:
        init(self, pack_hook, _in_mode(unpack_hook))

    hooks.__init__ = with_mode


def _ops_of_the_host() -> None:
    """Registers the package's custom CUDA ops for the CPU too. PyTorch calls their functions outside of the mode, so they are wrapped."""
    custom_op = torch.library.custom_op

    def on_host(name: str, fn: Any = None, /, *, device_types: Any = None, **options: Any) -> Any:
        if fn is None:
            return lambda function: on_host(name, function, device_types=device_types, **options)
        if device_types is not None:
            kinds = {device_types} if isinstance(device_types, str) else set(device_types)
            device_types = tuple(kinds - {"cuda"} | {"cpu"}) if "cuda" in kinds else device_types
        return custom_op(name, _in_mode(fn), device_types=device_types, **options)

    torch.library.custom_op = on_host


class _GeneratorType(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, torch._C.Generator)


class _Generator(torch._C.Generator, metaclass=_GeneratorType):
    """Replaces torch.Generator, which bypasses function modes. Pickles of a generator contain this class name."""

    __module__, __qualname__ = "torch", "Generator"

    def __new__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator(_device_on_host(device))


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
    torch.Generator = _Generator


def _makers_of_the_host() -> None:
    """Wraps two tensor factories that bypass function modes: torch.range, which NVIDIA's package calls, and the factory of quantised tensors."""
    def of(make: Any) -> Any:
        def on_host(*arguments: Any, **options: Any) -> torch.Tensor:
            if "device" in options:
                options["device"] = _device_on_host(options["device"])
            return make(*map(_on_host, arguments), **options)

        return on_host

    torch.range = of(torch.range)
    torch.Tensor.record_stream = lambda self, stream: None  # It also bypasses function modes, and accepts only PyTorch's stream class.
    torch.Tensor._make_wrapper_subclass = staticmethod(of(torch.Tensor._make_wrapper_subclass))


def _compiler_of_the_host() -> None:
    """Patches torch.compile: its tracer evaluates is_cuda and is_cpu itself, and treats objects of known classes, such as device properties, as
    constants.
    """
    from torch._dynamo import eval_frame, utils
    from torch._dynamo.variables import constant, tensor

    utils.common_constant_types.add(host_cuda.Properties)
    # After a graph break, torch.compile would also compile the functions of this mode. Its guards do not distinguish the getters of tensors, so code
    # compiled for Tensor.shape would also run for Tensor.device.
    for function in (_HostMode.__torch_function__, *globals().values()):
        if isinstance(function, FunctionType) and function.__module__ == __name__:
            eval_frame.skip_code(function.__code__)

    def is_cuda(self: Any, tx: Any) -> Any:
        return None if self.device is None else constant.ConstantVariable.create(self.device.type == "cpu")

    def is_cpu(self: Any, tx: Any) -> Any:
        return None if self.device is None else constant.ConstantVariable.create(False)

    tensor.TensorVariable.method_attr_is_cuda, tensor.TensorVariable.method_attr_is_cpu = is_cuda, is_cpu
    # If the module is not imported yet, package.py calls trace_patterns() at its import.
    if (module := sys.modules.get("torch._inductor.fx_passes.joint_graph")) is not None:
        trace_patterns(module)


def trace_patterns(module: Any) -> None:
    """Wraps lazy_init(), so that inductor traces its patterns under _HostMode, which is otherwise inactive during compilation. module:
    torch._inductor.fx_passes.joint_graph."""
    module.lazy_init = _in_mode(module.lazy_init)


def install() -> None:
    if torch.distributed.is_available():
        host_groups.install()
    _makers_of_the_host()
    _random_state_of_the_host()
    _enter_in_backwards()
    _enter_in_unpacking()
    _ops_of_the_host()
    host_cuda.answer()
    host_autocast.install()
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
