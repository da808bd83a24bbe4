"""Parts of the emulation of CUDA that do not depend on the device that takes CUDA's place: the host (host_device.py) or another vendor's device
(other_device.py). Each replaces the device "cuda" in PyTorch's functions by a TorchFunctionMode; these functions enter the mode where PyTorch leaves it,
and replace what a mode does not see.
"""

from __future__ import annotations

import functools
from types import FunctionType, ModuleType
from typing import Any, Callable, Iterable

import torch
from torch.overrides import TorchFunctionMode

IS_CUDA, IS_CPU = torch.Tensor.is_cuda.__get__, torch.Tensor.is_cpu.__get__  # method-wrappers; each access makes new, equal ones


def is_cuda(value: Any) -> bool:
    """True for "cuda", "cuda:1" and such a torch.device."""
    return (isinstance(value, str) and value.split(":")[0] == "cuda") or (isinstance(value, torch.device) and value.type == "cuda")


def in_mode(mode: TorchFunctionMode, function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with mode:
            return function(*arguments, **options)

    return call


def enter_in_backwards(mode: TorchFunctionMode) -> None:
    """Wraps backward functions to enter the mode, since autograd's engine runs them outside of it."""
    context = torch.autograd.function.BackwardCFunction
    apply = context.apply

    def apply_in_mode(self: Any, *gradients: Any) -> Any:
        with mode:
            return apply(self, *gradients)

    context.apply = apply_in_mode


def enter_in_unpacking(mode: TorchFunctionMode) -> None:
    """Wraps saved-tensor unpack hooks to enter the mode, since autograd runs them outside of it; a checkpoint recomputes its forward there."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    init = hooks.__init__

    def with_mode(self: Any, pack_hook: Any, unpack_hook: Any) -> None:
        init(self, pack_hook, in_mode(mode, unpack_hook))

    hooks.__init__ = with_mode


def register_custom_ops(mode: TorchFunctionMode, device_type: str) -> None:
    """Registers the package's custom CUDA ops for the device type too. PyTorch calls their functions outside of the mode, so they are wrapped."""
    custom_op = torch.library.custom_op

    def registered(name: str, fn: Any = None, /, *, device_types: Any = None, **options: Any) -> Any:
        if fn is None:
            return lambda function: registered(name, function, device_types=device_types, **options)
        if device_types is not None:
            kinds = {device_types} if isinstance(device_types, str) else set(device_types)
            device_types = tuple(kinds - {"cuda"} | {device_type}) if "cuda" in kinds else device_types
        return custom_op(name, in_mode(mode, fn), device_types=device_types, **options)

    torch.library.custom_op = registered


class _GeneratorType(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, torch._C.Generator)


def place_generators(place: Callable[[Any], Any]) -> None:
    """Replaces torch.Generator, which bypasses function modes. Pickles of a generator contain this class's name. place: maps a device argument."""
    class Generator(torch._C.Generator, metaclass=_GeneratorType):
        __module__, __qualname__ = "torch", "Generator"

        def __new__(cls, device: Any = "cpu") -> Any:
            return torch._C.Generator(place(device))

    torch.Generator = Generator


def place_makers(place: Callable[[Any], Any]) -> None:
    """Wraps two tensor factories that bypass function modes: torch.range, which NVIDIA's package calls, and the factory of quantised tensors. place: maps
    a device argument."""
    def of(make: Any) -> Any:
        def placed(*arguments: Any, **options: Any) -> torch.Tensor:
            if "device" in options:
                options["device"] = place(options["device"])
            return make(*(place(a) if is_cuda(a) else a for a in arguments), **options)

        return placed

    torch.range = of(torch.range)
    torch.Tensor._make_wrapper_subclass = staticmethod(of(torch.Tensor._make_wrapper_subclass))


def teach_compiler(modes: Iterable[ModuleType], is_cuda_tensor: Callable[[Any], Any], is_cpu_tensor: Any = None) -> None:
    """Patches torch.compile: its tracer evaluates is_cuda and is_cpu itself. modes: the modules that define the mode. The others are functions from a
    traced tensor to the answer.
    """
    from torch._dynamo import eval_frame
    from torch._dynamo.variables import constant, tensor

    # After a graph break, torch.compile would also compile the functions of the mode. Its guards do not distinguish the getters of tensors, so code
    # compiled for Tensor.shape would also run for Tensor.device.
    for module in modes:
        for function in vars(module).values():
            of_mode = getattr(function, "__torch_function__", None) if isinstance(function, type) and issubclass(function, TorchFunctionMode) else function
            if isinstance(of_mode, FunctionType) and of_mode.__module__ == module.__name__:
                eval_frame.skip_code(of_mode.__code__)

    def answer(of: Callable[[Any], Any]) -> Callable:
        return lambda self, tx: None if self.device is None else constant.ConstantVariable.create(of(self))

    tensor.TensorVariable.method_attr_is_cuda = answer(is_cuda_tensor)
    if is_cpu_tensor is not None:
        tensor.TensorVariable.method_attr_is_cpu = answer(is_cpu_tensor)
