"""reference.xla: implementations of catalogue ops by jax.numpy and lax, on any platform that XLA has.

They hold docs/numerics.md's contract as reference.host does. te_fl.jax traces them into a program when it lowers the program for a platform that no plugin
of te-fl serves, or when the policy chooses them. On arrays in host memory te_fl.ops runs them as well, each op as a program of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import threading
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Sequence, Tuple, Union

import jax
import jax.numpy as jnp
import numpy as np

from te_fl import _native
from te_fl.reference_xla import activation, attention, gemm, norm, quantize, random, rope, softmax
from te_fl.reference_xla.call import SCALINGS, TracedCall
from te_fl.registration import BackendImplKind, OpImpl, OpRegistry
from te_fl.tensors import Quantized

IMPL_ID = "reference.xla"
Wanted = Tuple[Tuple[str, Tuple[int, ...], Any], ...]  # (name, shape, dtype) of each result

_MODULES = (activation, attention, gemm, norm, quantize, random, rope, softmax)
OPS: Dict[str, Callable[[TracedCall], None]] = {name: function for module in _MODULES for name, function in module.OPS.items()}
_SUPPORTS: Dict[str, Callable] = {name: module.supports for module in (attention, quantize, rope) for name in module.OPS}
_PARTS = ("columnwise_data", "scale_inv", "columnwise_scale_inv", "amax", "columnwise_amax", "scale")
_DTYPES = {"f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16, "f8e4m3": jnp.float8_e4m3fn, "f8e5m2": jnp.float8_e5m2,
           "f8e8m0": jnp.float8_e8m0fnu, "i32": jnp.int32, "u8": jnp.uint8, "u64": jnp.uint64, "bool": jnp.bool_}
_thread = threading.local()


def traced(op: str, inputs: Sequence[str], wanted: Wanted, settings: Mapping[str, Any], platform: str) -> Callable[..., List[jax.Array]]:
    """The op as a function of arrays, which JAX can trace. The names of inputs and results, and the settings, are those of a call's text."""
    def run(*arrays: jax.Array) -> List[jax.Array]:
        call = TracedCall(op, dict(zip(inputs, arrays)), {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape, dtype in wanted}, settings, platform)
        OPS[op](call)
        return [call.results[name] for name, _, _ in wanted]

    return run


@contextlib.contextmanager
def lowering() -> Iterator[None]:
    """While this scope is open, the implementations accept calls on this thread on any device, since such calls are not run but only described."""
    _thread.lowering = True
    try:
        yield
    finally:
        _thread.lowering = False


def _tensors(arguments: Mapping[str, Any]) -> Iterator[Any]:
    for value in arguments.values():
        parts = [getattr(value, part) for part in ("data", *_PARTS)] if isinstance(value, Quantized) else [value]
        yield from (part for part in parts if isinstance(part, _native.LentTensor))


def _supports(op: str, **arguments: Any) -> Union[bool, str]:
    if not getattr(_thread, "lowering", False):
        if _native.in_jax_call():
            return "it is chosen when a program is lowered, and this program was lowered to call te-fl"
        if any(not t.device.startswith("cpu") or not t.contiguous for t in _tensors(arguments)):
            return "outside of programs of JAX it runs on contiguous arrays in host memory"
    return _SUPPORTS[op](**arguments) if op in _SUPPORTS else True


def _view(t: Any) -> np.ndarray:
    dtype = np.dtype(_DTYPES[t.dtype])
    count = int(np.prod(t.shape, dtype=np.int64))
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(t.address) if count else b""
    return np.frombuffer(memory, dtype).reshape(t.shape)


@functools.lru_cache(maxsize=4096)
def _program(op: str, inputs: Tuple[str, ...], wanted: Wanted, settings: Tuple[Tuple[str, Any], ...]) -> Callable[..., List[jax.Array]]:
    return jax.jit(traced(op, inputs, wanted, dict(settings), "cpu"))


def _run(op: str, **arguments: Any) -> None:
    """Runs the op on arrays in host memory."""
    schema = {arg["name"]: arg for arg in _native.schema(op)["args"]}
    inputs: Dict[str, np.ndarray] = {}
    outputs: Dict[str, np.ndarray] = {}
    settings: Dict[str, Any] = {}
    for name, value in arguments.items():
        if value is None or name not in schema:
            continue
        if isinstance(value, Quantized):
            parts = {"": value.data, **{f".{part}": getattr(value, part) for part in _PARTS}}
            views = {name + part: _view(t) for part, t in parts.items() if t is not None}
            settings |= {f"{name}.scaling": value.scaling, f"{name}.amax_epsilon": value.amax_epsilon,
                         f"{name}.compute_scale": bool(value._flags & 1), f"{name}.pow2_scale": bool(value._flags & 2)}
        elif isinstance(value, _native.LentTensor):
            views = {name: _view(value)}
        else:
            settings[name] = value
            continue
        if schema[name]["role"] != 1:
            inputs |= views
        if schema[name]["role"] != 0:
            outputs |= views
            if isinstance(value, Quantized):
                inputs |= {part: views[part] for part in (f"{name}.scale", f"{name}.amax") if part in views}
                outputs = {part: view for part, view in outputs.items() if part != f"{name}.scale" or value._flags & 1}
    if "seed" in arguments:
        state = [arguments["seed"], arguments["offset"]]
        for i, name in enumerate(("seed_tensor", "offset_tensor")):
            if arguments[name] is not None:
                state[i] = int(_view(arguments[name])[0]) + (state[i] if i else 0)
        inputs["rng"] = np.asarray([n % 2**64 for n in state], np.uint64).view(np.uint32)
    wanted = tuple((name, view.shape, view.dtype) for name, view in outputs.items())
    with jax.default_device(jax.devices("cpu")[0]):
        results = _program(op, tuple(inputs), wanted, tuple(settings.items()))(*inputs.values())
        for view, result in zip(outputs.values(), results):
            if view.size:  # NumPy refuses to write to an array without memory
                view[...] = np.asarray(result)


def _named(op: str, function: Callable, context: Tuple[str, ...]) -> Callable:
    """function(op, **arguments) as one that names every argument of the op, so that te-fl passes arguments that the op gained later too."""
    schema = _native.schema(op)
    names = [arg["name"] for arg in schema["args"] if arg["type"] != 8] + list(context if schema["random"] else ())
    bound = functools.partial(function, op)

    def named(**arguments: Any) -> Any:
        return bound(**arguments)

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]
    named.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    named.__qualname__ = f"{op} by XLA"
    return named


def implementations(devices: Iterable[str]) -> Iterable[OpImpl]:
    """One OpImpl for each op, for te-fl's device types such as "cpu" or "ext:tpu"."""
    for op in OPS:
        yield OpImpl(op_name=op, impl_id=IMPL_ID, kind=BackendImplKind.REFERENCE,
                     fn=_named(op, _run, ("seed", "offset", "seed_tensor", "offset_tensor")), supports=_named(op, _supports, ()),
                     devices=tuple(devices), scalings=SCALINGS, in_place=True, deterministic=True)


_registered: List[str] = []
_registering = threading.Lock()


def ensure_registered(device_type: str) -> None:
    """Registers the implementations with te-fl for this device type, unless that was done. One device type of an extension can be registered."""
    with _registering:
        if device_type in _registered:
            return
        registry = OpRegistry.instance()
        if _registered:
            for op in OPS:
                registry.unregister(op, IMPL_ID)
        _registered[:] = [*(known for known in _registered if not (known.startswith("ext:") and device_type.startswith("ext:"))), device_type]
        registry.register_many(implementations(_registered))


def register(registry: OpRegistry) -> None:
    ensure_registered("cpu")
