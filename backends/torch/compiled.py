"""reference.torch_compiled: ops of reference.torch whose operations torch.compile fuses into few kernels.

The functions are those of reference.torch. Each is compiled when it is first called with arguments of a new kind, which takes seconds. A product is
PyTorch's own operation, and what follows it is one kernel.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
import types
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import torch
import torch._dynamo.config
import torch._dynamo.exc
from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration
from torch._inductor.compile_fx import compile_fx

from te_fl.registration import BackendImplKind, OpImpl
from te_fl.tensors import PARTS, Quantized

from te_fl.reference_torch import activation, gemm, norm, quantize, repeat, rope, scaled_activation, softmax

_LIMIT = 64  # kinds of arguments of one op; a call of a further kind runs without compilation
_MOST = 16  # tensors in a list; the compiler would unroll a longer one
_MODULES = (activation, norm, quantize, scaled_activation, softmax)  # whose functions check no values, which the compiler cannot trace
_FAILURES = tuple(getattr(torch._dynamo.exc, name) for name in ("TorchDynamoException", "FailOnRecompileLimitHit") if hasattr(torch._dynamo.exc, name))
log = logging.getLogger("te_fl")
_turn = threading.RLock()  # PyTorch's compiler crashes if two threads compile at once, and any call may compile for new sizes


def _forget_turn() -> None:
    """Replaces the lock in a forked child: another thread of the parent may have held it."""
    global _turn
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_forget_turn)


class _Last(threading.local):
    """The compiled code that a thread has run last, with its arguments."""

    call: Optional[Tuple[Callable[..., Any], Tuple[Any, ...]]] = None


_last = _Last()


def _inductor(graph: torch.fx.GraphModule, inputs: List[Any]) -> Callable[..., Any]:
    """PyTorch's own backend of torch.compile, which also tells the code that a call has come to. That code is valid for the sizes of its arguments."""
    code = compile_fx(graph, inputs)

    def run(*arguments: Any) -> Any:
        _last.call = code, arguments
        return code(*arguments)
    return run


def missing(device_type: str) -> Optional[str]:
    """Returns why PyTorch's compiler has no kernels for PyTorch's device type, or None if it has."""
    if getattr(torch._dynamo.config, "disable", False):
        return "torch.compile is off (TORCH_COMPILE_DISABLE)"
    init_backend_registration()
    return None if get_scheduling_for_device(device_type) else f"PyTorch's compiler has no backend for {device_type}"


class _Kind:
    """Identifies what a compiled function depends on: a call's arguments without sizes, and the width of the first tensor. torch.compile makes kernels
    for the sizes of the first call, which are the faster ones, and at other sizes kernels for any; it takes sizes of 0 and 1 as constants.

    Tensors with the same memory become one tensor in `arguments`, so that the compiler knows that an output is in the place of an input.
    """

    def __init__(self, arguments: Dict[str, Any]):
        self.separate = True  # False: tensors overlap and differ, one is empty, or a list is long; such calls run without compilation
        self._key: List[Any] = []
        self._seen: Dict[int, torch.Tensor] = {}
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                if not self._seen:
                    self._key.append(value.shape[-1:])
                arguments[name] = self._add(value)
            elif isinstance(value, Quantized):
                self._key.append((value.scaling, value._flags, value.amax_epsilon))
                for part in PARTS:
                    held = getattr(value, part)
                    if held is None:
                        self._key.append(None)
                    else:
                        setattr(value, part, self._add(held))
            elif isinstance(value, list):
                self.separate = self.separate and len(value) <= _MOST and all(isinstance(t, torch.Tensor) for t in value)
                self._key.append(len(value))
                arguments[name] = [self._add(t) if isinstance(t, torch.Tensor) else t for t in value]
            else:
                self._key.append(value)
        self.key = tuple(self._key)

    def _add(self, t: torch.Tensor) -> torch.Tensor:
        first = self._seen.setdefault(t.data_ptr(), t)
        if first is t:
            self.separate = self.separate and t.numel() != 0
            self._key.append((t.dtype, t.get_device(), t.is_contiguous(), *[n if n == 1 else 2 for n in t.shape]))
            return t
        if first.dtype != t.dtype or first.shape != t.shape or first.stride() != t.stride():
            self.separate = False
        self._key.append(list(self._seen).index(t.data_ptr()))
        return first


class Compiled:
    """A function that torch.compile compiles once for each kind of arguments."""

    def __init__(self, name: str, function: Callable, unless: Optional[Callable[..., bool]] = None):
        """name: for messages. unless: called with a call's arguments; True if it is one operation without compilation."""
        self._name, self._function, self._unless = name, function, unless
        self._by_kind: Dict[Any, Callable] = {}
        self.__signature__ = inspect.signature(function)

    def __call__(self, **arguments: Any) -> Any:
        # A mode that observes operations has to see them.
        if torch._C._len_torch_dispatch_stack() > 0 or self._unless is not None and self._unless(**arguments):
            return self._function(**arguments)
        kind = _Kind(arguments)
        if not kind.separate:
            return self._function(**arguments)
        return repeat.as_one(lambda: self._run(kind.key, arguments))

    def _run(self, key: Any, arguments: Dict[str, Any]) -> Optional[Tuple[Callable[..., Any], Tuple[Any, ...]]]:
        """Runs the compiled function. Returns the code that it has come to, with its arguments; None if it ran operations one by one."""
        _last.call = None
        try:
            with _turn:
                run = self._by_kind.get(key) or self._new(key)
                run(**arguments)
        except _FAILURES as error:  # nothing has run
            log.warning("%s: torch.compile failed, so these arguments run without it: %s", self._name, " ".join(str(error).split("\n")[:2]))
            self._by_kind[key] = self._function
            self._function(**arguments)
        made, _last.call = _last.call, None
        return made

    def _new(self, key: Any) -> Callable:
        if _capturing() or len(self._by_kind) >= _LIMIT:  # a compilation waits for the device, which a capture forbids
            return self._function
        own, first, named = self._function, (), {}
        if isinstance(own, functools.partial):
            own, first, named = own.func, own.args, own.keywords
        # PyTorch limits compilations for each code object, so each kind has its own.
        copy = types.FunctionType(own.__code__.replace(), own.__globals__, own.__name__, own.__defaults__, own.__closure__)
        copy.__kwdefaults__ = own.__kwdefaults__
        made = functools.partial(torch.compile(copy, fullgraph=True, backend=_inductor), *first, **named)
        return self._by_kind.setdefault(key, made)


def _capturing() -> bool:
    module = torch.get_device_module()
    return hasattr(module, "is_current_stream_capturing") and module.is_current_stream_capturing()


_epilogue = Compiled("generic_gemm", gemm.epilogue)


def _generic_gemm(**arguments: Any) -> None:
    gemm.run_gemm(_epilogue, **arguments)


_generic_gemm.__signature__ = inspect.signature(gemm.generic_gemm)  # type: ignore[attr-defined]

_rope = rope.ops(*(Compiled(f"rope's {function.__name__}", function) for function in (rope.turn, rope.turn_packed, rope.turn_packed_back)))


def implementations(devices: Iterable[str], supports: Dict[str, Callable]) -> Iterable[OpImpl]:
    """One OpImpl for each op. devices: te-fl's device types. supports: the ops' functions of that name."""
    def made(name: str, function: Callable) -> OpImpl:
        function = repeat.uncast(function)
        return OpImpl(op_name=name, impl_id="reference.torch_compiled", kind=BackendImplKind.REFERENCE, fn=function, supports=supports.get(name),
                      devices=tuple(devices), scalings=("none", *gemm.FP8_SCALINGS), tensors="torch", supports_tensors="te_fl", in_place=True, deterministic=True,
                      graph_safe=True, priority=60, repeat=functools.partial(repeat.record, name, function))

    for module in _MODULES:
        for name, function in module.OPS.items():
            yield made(name, Compiled(name, function, functools.partial(activation.is_one_operation, function) if module is activation else None))
    yield made("generic_gemm", _generic_gemm)
    for name, function in _rope.items():
        yield made(name, function)
