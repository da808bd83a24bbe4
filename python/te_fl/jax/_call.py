"""One op as one call of XLA's FFI. The call's text (python/src/jax_call.hpp) is its only attribute."""

from __future__ import annotations

import functools
import numbers
from typing import Any, Dict, Mapping, Sequence, Tuple

import jax

from te_fl import _native
from te_fl.jax import _partition
from te_fl.jax._varying import align

Named = Sequence[Tuple[str, Any]]


@functools.cache
def _target(op: str) -> str:
    """The name under which XLA programs call the op. All names lead to the same handler, which reads the text."""
    name = f"te_fl.{op}"
    for platform, handler in _native.jax_handlers().items():
        jax.ffi.register_ffi_target(name, handler, platform=platform)
    return name


def _word(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (tuple, list)):
        return ",".join(str(int(v)) for v in value)
    if isinstance(value, numbers.Integral):  # bool among them
        return str(int(value))
    return repr(float(value))


def call(op: str, operands: Named, results: Named, settings: Mapping[str, Any], elementwise: bool = False) -> Dict[str, jax.Array]:
    """The results by name. A name among operands and results is read and written: XLA gives both the same memory.

    operands: (name, array); results: (name, jax.ShapeDtypeStruct); settings: scalars and NAME.scaling etc.
    elementwise: leading dimensions may be added to all arrays together, so vmap is one call; else it is a loop.
    """
    inputs = [name for name, _ in operands]
    outputs = [name for name, _ in results]
    words = " ".join(f"{name}={_word(value)}" for name, value in settings.items())
    text = f"{op} {' '.join(inputs)} -> {' '.join(outputs)} | {words}".rstrip()
    aliases = {inputs.index(name): i for i, name in enumerate(outputs) if name in inputs}

    def run(shapes, *arrays):
        types = [jax.ShapeDtypeStruct(shape, result.dtype) for shape, (_, result) in zip(shapes, results)]
        return jax.ffi.ffi_call(_target(op), types, vmap_method="broadcast_all" if elementwise else "sequential",
                                input_output_aliases=aliases)(*arrays, call=text)

    arrays = align([array for _, array in operands])
    whole = [result.shape for _, result in results]
    if _partition.may_cut_programs():
        values = _partition.call(run, op, operands, results, settings)
    else:
        values = align(run(whole, *arrays), arrays)  # JAX's FFI does not say that results differ where operands do
    return dict(zip(outputs, values))
