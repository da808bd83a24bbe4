"""Runs an op as one call of an XLA program. The call's text (python/src/jax/jax_call.hpp) says all but its shapes."""

from __future__ import annotations

import math
import numbers
import threading
from typing import Any, Callable, Dict, Mapping, Sequence, Tuple

import jax
import jax.numpy as jnp
import numpy as np

from te_fl import _native, reference_xla
from te_fl.jax import _partition
from te_fl.jax._derivatives import underived
from te_fl.jax._op import OpCall, bind, target
from te_fl.jax._partition import Spread
from te_fl.jax._tensors import block_layout
from te_fl.jax._varying import align

Named = Sequence[Tuple[str, Any]]


def register_targets() -> None:
    """Registers the FFI targets of all ops, so that programs exported by another process find ops that this process has never traced."""
    for op in _native.op_names():
        target(op)
    reference_xla.ensure_registered("cpu")


# The settings of te_fl.policy on this thread, as one line of text. It is part of JAX's trace cache key and of the attribute that every FFI call has.
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
    """From now on, whatever is traced inside a policy scope of this thread, also one that is open already, includes the scope's settings."""
    _follow(_native.follow_policy(_follow))


def _constant(value: Any) -> Any:
    """The value of a setting as text, a number or a tuple of integers, which can be a key."""
    if isinstance(value, (tuple, list)):
        return tuple(int(v) for v in value)
    return value if isinstance(value, str) else int(value) if isinstance(value, (numbers.Integral, np.bool_)) else float(value)


def _word(constant: Any) -> str:
    if isinstance(constant, tuple):
        return ",".join(str(v) for v in constant)
    return constant if isinstance(constant, str) else repr(constant)


def _flat(name: str, shape: Tuple[int, ...], spread: Spread, settings: Mapping[str, Any]) -> Tuple[int, ...]:
    """The shape passed to te-fl for an array whose matrix rows or columns consist of several dimensions: these dimensions are merged."""
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
    """Returns the results by name. A name that is both an operand and a result is updated in place: XLA uses one buffer for both.

    operands: (name, array). results: (name, jax.ShapeDtypeStruct). settings: scalars, NAME.scaling etc.
    spread: for each matrix argument, (number of array dimensions that form the rows, number that form the columns), so that a mesh can shard each
    dimension: (2, 2) for an array [b, s, n, N] that is the matrix [b * s, n * N]. Its column-wise FP8 data has the shape [n, N, b, s]; in MXFP8 it is
    not transposed and has the shape [b, s, n, N]. A number of 0 means that the argument has no row dimension, or no column dimension.
    prepare: functions that convert a device's shard of an operand to what the op reads.
    elementwise: all arrays may have the same extra leading dimensions, so vmap is one call; otherwise vmap is a loop.
    """
    inputs = [name for name, _ in operands]
    outputs = [name for name, _ in results]
    constants = tuple((name, _constant(value)) for name, value in settings.items())
    words = " ".join(f"{name}={_word(value)}" for name, value in constants)
    text = f"{op} {' '.join(inputs)} -> {' '.join(outputs)} | {words}".rstrip()
    text += f" | {_policy.value}" if _policy.value else ""
    aliases = tuple((inputs.index(name), i) for i, name in enumerate(outputs) if name in inputs)
    one = OpCall(op, text, tuple(inputs), tuple(outputs), constants, aliases, elementwise)

    def run(shapes, *arrays):
        arrays = [prepare[name](array) if name in prepare else array for array, name in zip(arrays, inputs)]
        types = tuple((_flat(name, shape, spread, settings), jnp.dtype(result.dtype)) for shape, (name, result) in zip(shapes, results))
        arrays = [array.reshape(_flat(name, array.shape, spread, settings)) for array, (name, _) in zip(arrays, operands)] if spread else arrays
        values = bind(one, types, arrays)
        return [value.reshape(shape) for value, shape in zip(values, shapes)] if spread else values

    def whole(*arrays):
        arrays = align(list(arrays))
        # The results of te-fl's primitive have no varying mesh axes; align() gives them those of the operands.
        return align(run([result.shape for _, result in results], *arrays), arrays)

    def cut(*arrays):
        return _partition.call(run, op, arrays, operands, results, settings, spread, prepare)

    function = underived(op, cut if _partition.may_cut_programs() else whole)
    return dict(zip(outputs, function(*[array for _, array in operands])))
