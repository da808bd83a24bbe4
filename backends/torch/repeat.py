"""Calls of one signature by the operations of an earlier one, without the Python code that chose them.

A signature is all that a call has but the contents of its tensors: dtypes, shapes, strides, scalars, and which outputs are in the place of an input. te-fl
runs the second call of a signature by record(), and later ones by the function that it returns (OpImpl.repeat).
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from te_fl.reference_torch import checks
from te_fl.tensors import Quantized

# Functions and attributes of a tensor whose results depend on the signature alone. Implementations compare addresses only to find tensors in one place.
_METADATA = frozenset(("data_ptr", "shape", "dtype", "device", "layout", "ndim", "is_cuda", "requires_grad", "dim", "size", "stride", "numel", "nelement", "element_size",
                       "storage_offset", "is_contiguous", "get_device", "is_floating_point", "__len__"))
_CONSTANTS = (float, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, type(...))  # others could hold a call's memory
_RANDOM = ("seed_tensor", "offset_tensor")  # a call's random state is no part of its signature
_IN_PLACE = frozenset(("__setitem__",))  # functions without a result that write to a tensor, besides those whose names end in "_"


class _Unrepeatable(Exception):
    """A later call would need more than the recorded operations."""


class Recording(TorchFunctionMode):
    """Notes the operations that run while it is active, as the lines of a function."""

    def __init__(self, tensors: List[torch.Tensor]):
        super().__init__()
        self._tensors: Dict[int, Tuple[Any, str]] = {}  # by id: a weak reference, and the tensor's name
        self._constants: Dict[str, Any] = {}
        self._names: Dict[int, str] = {}  # of constants, by id
        self._lines: List[Tuple[str, Set[str]]] = []  # statements, and the names of tensors in them
        self._count = 0
        self.possible = True
        self._inputs = [self._named(t) for t in tensors]

    def __torch_function__(self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.possible:
            try:
                self._note(func, args, kwargs or {}, result)
            except _Unrepeatable:
                self.possible = False
        return result

    def add(self, function: Callable[..., Any], arguments: Tuple[Any, ...]) -> None:
        """Notes a call of a function that has no result. Its own operations are not recorded."""
        try:
            self._line("", function, arguments, {})
        except _Unrepeatable:
            self.possible = False

    def _named(self, t: torch.Tensor) -> str:
        known = self._known(t)
        if known is None:
            self._count += 1
            known = f"t{self._count}"
            self._tensors[id(t)] = weakref.ref(t), known
        return known

    def _known(self, t: torch.Tensor) -> Optional[str]:
        reference, name = self._tensors.get(id(t), (None, None))
        return name if reference is not None and reference() is t else None

    def _constant(self, value: Any) -> str:
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = f"c{len(self._constants)}"
            self._constants[name] = value  # keeps the value, and so its id
        return name

    def _text(self, value: Any, used: Set[str]) -> str:
        if isinstance(value, torch.Tensor):
            name = self._known(value)
            if name is None:
                if not checks.is_flag(value):  # its contents may be this call's
                    raise _Unrepeatable
                return self._constant(value)
            used.add(name)
            return name
        if isinstance(value, list):
            return f"[{', '.join(self._text(v, used) for v in value)}]"
        if type(value) is tuple:
            return f"({''.join(self._text(v, used) + ', ' for v in value)})"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        if isinstance(value, slice):
            return f"slice({', '.join(self._text(v, used) for v in (value.start, value.stop, value.step))})"
        if isinstance(value, _CONSTANTS):
            return self._constant(value)
        raise _Unrepeatable

    def _line(self, target: str, function: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
        used: Set[str] = set()
        words = [self._text(v, used) for v in args] + [f"{name}={self._text(v, used)}" for name, v in kwargs.items()]
        self._lines.append((f"{target}{self._constant(function)}({', '.join(words)})", used))

    def _note(self, func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any], result: Any) -> None:
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        if name in _METADATA:
            return
        if isinstance(result, torch.Tensor):
            known = self._known(result)
            # A result that is an argument was written in place.
            self._line("" if known else f"{self._new(result)} = ", func, args, kwargs)
        elif isinstance(result, (tuple, list)) and any(isinstance(r, torch.Tensor) for r in result):
            self._line("".join(self._new(r) + ", " for r in result) + "= ", func, args, kwargs)
        elif result is None and (name in _IN_PLACE or name.endswith("_")):
            self._line("", func, args, kwargs)
        else:  # a number that was read from a tensor's memory, say
            raise _Unrepeatable

    def _new(self, result: Any) -> str:
        return self._named(result) if isinstance(result, torch.Tensor) else "_"

    def function(self, name: str) -> Optional[Callable[[List[torch.Tensor]], None]]:
        """A function that runs the operations on the tensors of another call; None if they are not all that a call needs."""
        if not self.possible:
            return None
        last: Dict[str, int] = {}
        for at, (line, used) in enumerate(self._lines):
            made = line.partition(" = ")[0].replace(" ", "").split(",") if " = " in line.partition("(")[0] else []
            for used_name in (*used, *(m for m in made if m not in ("", "_"))):
                last[used_name] = at
        ends: Dict[int, List[str]] = {}
        for used_name, at in last.items():
            if used_name not in self._inputs:
                ends.setdefault(at, []).append(used_name)
        body = [f"    [{', '.join(self._inputs)}] = tensors"]
        for at, (line, _) in enumerate(self._lines):
            body.append(f"    {line}")
            if at in ends:  # a tensor's memory is free for the next operation as soon as nothing reads it any more
                body.append(f"    del {', '.join(ends[at])}")
        scope = dict(self._constants)
        exec(compile("\n".join(["def operations(tensors):", *body, ""]), f"<te_fl: {name}>", "exec"), scope)  # only text of this module: values are names
        operations = uncast(scope.pop("operations"))  # without the entry there is no cycle of references
        return lambda tensors: NotImplemented if _observed() else operations(tensors)


_autocasts = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def uncast(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function outside of torch.autocast, under which PyTorch would compute products of FP32 in half precision."""
    @functools.wraps(function)
    def run(*positional: Any, **arguments: Any) -> Any:
        if not _autocasts():
            return function(*positional, **arguments)
        with torch._C._DisableAutocast():
            return function(*positional, **arguments)
    return run


def _observed() -> int:
    """True if a mode observes operations, which has to see those of the implementation itself."""
    return torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()


def tensors_of(arguments: Dict[str, Any]) -> List[torch.Tensor]:
    """The tensors of a call in the order in which te-fl passes them to a repeating function."""
    found: List[torch.Tensor] = []
    for name, value in arguments.items():
        for item in value if isinstance(value, list) else (value,):
            if isinstance(item, Quantized):
                found += item.parts()
            elif isinstance(item, torch.Tensor) and name not in _RANDOM:
                found.append(item)
    return found


def record(name: str, function: Callable[..., None], /, **arguments: Any) -> Any:
    """Calls function(**arguments). Returns a function that does the same with the tensors of another call, or None."""
    if _observed():
        return function(**arguments)
    recording = Recording(tensors_of(arguments))
    with recording:
        result = function(**arguments)
    return result if result is NotImplemented else recording.function(name)


def abandon() -> None:
    """Marks the call that is being recorded as one whose operations depend on numbers that are no part of a signature, such as a seed."""
    mode = _get_current_function_mode()
    if isinstance(mode, Recording):
        mode.possible = False


def as_one(call: Callable[[], Optional[Tuple[Callable[..., Any], Tuple[Any, ...]]]]) -> None:
    """Runs call(), whose operations are not recorded; it returns a function and its arguments that stand for them, or None if nothing does."""
    mode = _get_current_function_mode()
    if not isinstance(mode, Recording):
        call()
        return
    with _pop_mode_temporarily():
        made = call()
    if made is None:
        mode.possible = False
    else:
        mode.add(*made)
