"""One op as one call of XLA's FFI. The call's text (python/src/jax/jax_call.hpp) is its only attribute."""

from __future__ import annotations

import functools
import math
import numbers
import threading
from typing import Any, Callable, Dict, Mapping, Sequence, Tuple

import jax
import numpy as np

from te_fl import _native
from te_fl.jax import _partition
from te_fl.jax._derivatives import underived
from te_fl.jax._partition import Spread
from te_fl.jax._tensors import block_layout
from te_fl.jax._varying import align

Named = Sequence[Tuple[str, Any]]


@functools.cache
def _target(op: str) -> str:
    """The name under which XLA programs call the op. All names lead to the same handler, which reads the text."""
    name = f"te_fl.{op}"
    for platform, handler in _native.jax_handlers().items():
        jax.ffi.register_ffi_target(name, handler, platform=platform)
    return name


def register_targets() -> None:
    """Makes the calls of all ops known to XLA, so that a program that another process has exported finds those that this one never traced."""
    for op in _native.op_names():
        _target(op)


# The settings of te_fl.policy on this thread, as a line of words: a part of the keys under which JAX keeps what it traced, and of every call's
# text.
_policy = jax.make_user_context("")
_held = threading.local()


def _follow(line: str) -> None:
    entered = getattr(_held, "entered", None)
    if entered is not None:
        _held.entered = None
        entered.__exit__(None, None, None)
    if line:
        entered = _policy(line)
        entered.__enter__()
        _held.entered = entered


def follow_policy() -> None:
    """From now on this thread's policy scopes, those that are open included, are parts of what is traced in them."""
    _follow(_native.follow_policy(_follow))


def _word(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (tuple, list)):
        return ",".join(str(int(v)) for v in value)
    if isinstance(value, (numbers.Integral, np.bool_)):  # bool among them
        return str(int(value))
    return repr(float(value))


def _flat(name: str, shape: Tuple[int, ...], spread: Spread, settings: Mapping[str, Any]) -> Tuple[int, ...]:
    """The shape that te-fl sees of an array whose rows or columns are spread over several dimensions."""
    arg, _, part = name.partition(".")
    first, second = spread.get(arg, (0, 0))
    layout = block_layout(settings.get(f"{arg}.scaling", "tensor"), part == "columnwise_scale_inv")
    factors = part.endswith("scale_inv") and layout is not None and len(shape) == first + second
    if arg not in spread or not factors and part not in ("", "columnwise_data"):
        return shape
    if layout.columns_first if factors else part and settings.get(f"{arg}.scaling") != "mxfp8":
        first, second = second, first
    return tuple(math.prod(dims) for count, dims in ((first, shape[:first]), (second, shape[first:])) if count)


def call(op: str, operands: Named, results: Named, settings: Mapping[str, Any], elementwise: bool = False,
         spread: Spread = {}, prepare: Mapping[str, Callable[[jax.Array], jax.Array]] = {}) -> Dict[str, jax.Array]:
    """The results by name. A name among operands and results is read and written: XLA gives both the same memory.

    operands: (name, array); results: (name, jax.ShapeDtypeStruct); settings: scalars and NAME.scaling etc.
    spread: for arguments that are matrices to the op, the number of dimensions over which their rows and their columns are spread,
    so that a mesh can cut each: (2, 2) for [b, s, n, N] as a matrix [b * s, n * N]. Its column-wise codes are [n, N, b, s], or in MXFP8 in
    the same order. 0: the argument has no rows, or no columns.
    prepare: functions that make of a device's part of an operand what the op reads.
    elementwise: leading dimensions may be added to all arrays together, so vmap is one call; else it is a loop.
    """
    inputs = [name for name, _ in operands]
    outputs = [name for name, _ in results]
    words = " ".join(f"{name}={_word(value)}" for name, value in settings.items())
    text = f"{op} {' '.join(inputs)} -> {' '.join(outputs)} | {words}".rstrip()
    text += f" | {_policy.value}" if _policy.value else ""
    aliases = {inputs.index(name): i for i, name in enumerate(outputs) if name in inputs}

    def run(shapes, *arrays):
        arrays = [prepare[name](array) if name in prepare else array for array, name in zip(arrays, inputs)]
        types = [jax.ShapeDtypeStruct(_flat(name, shape, spread, settings), result.dtype) for shape, (name, result) in zip(shapes, results)]
        arrays = [array.reshape(_flat(name, array.shape, spread, settings)) for array, (name, _) in zip(arrays, operands)] if spread else arrays
        values = jax.ffi.ffi_call(_target(op), types, vmap_method="broadcast_all" if elementwise else "sequential",
                                input_output_aliases=aliases)(*arrays, call=text)
        return [value.reshape(shape) for value, shape in zip(values, shapes)] if spread else values

    def whole(*arrays):
        arrays = align(list(arrays))
        return align(run([result.shape for _, result in results], *arrays), arrays)  # JAX's FFI does not say that results differ where operands do

    def cut(*arrays):
        return _partition.call(run, op, arrays, operands, results, settings, spread, prepare)

    function = underived(op, cut if _partition.may_cut_programs() else whole)
    return dict(zip(outputs, function(*[array for _, array in operands])))
