"""One call of an op as a primitive of JAX.

What the call becomes is chosen for each platform when the program is lowered for it, by te-fl's policy: an XLA FFI call of te-fl, or the operations of
reference.xla. A platform that no plugin of te-fl serves has only the latter.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, List, NamedTuple, Sequence, Tuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from te_fl import _native, reference_xla
from te_fl.errors import Error, Unsupported

DTYPES = (jnp.float64, jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn, jnp.float8_e8m0fnu,
          jnp.int8, jnp.int16, jnp.int32, jnp.int64, jnp.uint8, jnp.uint16, jnp.uint32, jnp.uint64, jnp.bool_)
CODES = {jnp.dtype(dtype): code for code, dtype in enumerate(DTYPES)}
_TYPES = {"cpu": "cpu", "cuda": "cuda", "rocm": "rocm"}  # te-fl's device types of JAX's platforms; the others are extension devices

Results = Tuple[Tuple[Tuple[int, ...], Any], ...]  # shape and dtype of each result


class OpCall(NamedTuple):
    """A call without its shapes. settings: the scalars of the text. aliases: (operand, result) pairs that share a buffer."""

    op: str
    text: str
    inputs: Tuple[str, ...]
    outputs: Tuple[str, ...]
    settings: Tuple[Tuple[str, Any], ...]
    aliases: Tuple[Tuple[int, int], ...]
    elementwise: bool

    def __repr__(self) -> str:  # in the text of a jaxpr
        return f"te_fl.{self.text}"


_primitive = Primitive("te_fl_op")
_primitive.multiple_results = True


def bind(call: OpCall, results: Results, arrays: Sequence[jax.Array]) -> List[jax.Array]:
    return _primitive.bind(*arrays, call=call, results=results)


@functools.cache
def target(op: str) -> str:
    """The FFI target name of the op in XLA programs. All names map to the same handler, which reads the text."""
    name = f"te_fl.{op}"
    for platform, handler in _native.jax_handlers().items():
        jax.ffi.register_ffi_target(name, handler, platform=platform)
    return name


def _by_te_fl(call: OpCall, results: Results) -> Callable[..., List[jax.Array]]:
    types = [jax.ShapeDtypeStruct(*one) for one in results]
    run = jax.ffi.ffi_call(target(call.op), types, vmap_method="sequential", input_output_aliases=dict(call.aliases))
    return lambda *arrays: run(*arrays, call=call.text)


def device_type(platform: str) -> str:
    return _TYPES.get(platform, f"ext:{platform}")


@functools.cache
def _is_served(platform: str) -> bool:
    """True if a plugin of te-fl has devices of this platform when a program is first lowered for it, and te-fl has a handler for it."""
    if platform != "cuda":
        return platform == "cpu"
    _native.info()  # loads the plugins of all devices
    return any(device.startswith("cuda:") for plugin in _native.info()["plugins"] if plugin["state"] == "active" for device in plugin["devices"])


def _choose(platform: str, avals: Sequence[Any], call: OpCall, results: Results) -> Callable[..., List[jax.Array]]:
    """The function of arrays that computes the call on this platform."""
    served = _is_served(platform)
    if call.op in reference_xla.OPS:
        reference_xla.ensure_registered(device_type(platform) if not served else "cpu")
    arrays = [[(CODES[jnp.dtype(one.dtype)], tuple(one.shape)) for one in both]
              for both in (avals, [jax.ShapeDtypeStruct(*result) for result in results])]
    try:
        with reference_xla.lowering():
            decision = _native.jax_resolve(call.text, device_type(platform) + ("" if platform == "cpu" else ":0"), *arrays)
    except Error:
        if served:
            return _by_te_fl(call, results)  # the call raises this error when it runs
        raise
    candidates = {c["impl_id"]: c for c in decision["candidates"]}
    found = candidates.get(reference_xla.IMPL_ID)
    if served and decision["impl_id"] != reference_xla.IMPL_ID:
        return _by_te_fl(call, results)
    if found is None or not found["accepted"]:
        why = f"reference.xla refuses the call: {found['reason']}" if found else f"reference.xla has {', '.join(sorted(reference_xla.OPS))}"
        raise Unsupported(f"te_fl.jax: no implementation can serve op {call.op!r} on the platform {platform}, which no plugin of te-fl serves; {why} "
                          f"(policy: {decision['policy']})")
    _native.jax_count(call.op, reference_xla.IMPL_ID)
    wanted = tuple((name, *result) for name, result in zip(call.outputs, results))
    return reference_xla.traced(call.op, call.inputs, wanted, dict(call.settings), platform)


def _lower(platform: Any, ctx: Any, *operands: Any, call: OpCall, results: Results) -> Any:
    chosen = _choose(platform or ctx.module_context.platforms[0], ctx.avals_in, call, results)
    return mlir.lower_fun(chosen, multiple_results=True)(ctx, *operands)


def _abstract(*avals: Any, call: OpCall, results: Results) -> List[Any]:
    mesh = jax.sharding.get_abstract_mesh()
    sharding = {} if mesh.empty else {"sharding": NamedSharding(mesh, PartitionSpec())}
    return [jax.core.ShapedArray(shape, jnp.dtype(dtype), **sharding) for shape, dtype in results]


@functools.lru_cache(maxsize=4096)
def _program(call: OpCall, results: Results) -> Callable[..., List[jax.Array]]:
    return jax.jit(lambda *arrays: bind(call, results, arrays))


def _run(*arrays: jax.Array, call: OpCall, results: Results) -> List[jax.Array]:
    return _program(call, results)(*arrays)


def _batch(arrays: Sequence[jax.Array], dims: Sequence[Any], *, call: OpCall, results: Results) -> Tuple[List[jax.Array], Tuple[int, ...]]:
    size = next(array.shape[d] for array, d in zip(arrays, dims) if d is not None)
    moved = [array if d is None else jnp.moveaxis(array, d, 0) for array, d in zip(arrays, dims)]
    if call.elementwise:
        wide = [jnp.broadcast_to(array, (size, *array.shape)) if d is None else array for array, d in zip(moved, dims)]
        made = bind(call, tuple(((size, *shape), dtype) for shape, dtype in results), wide)
    else:
        def one(mapped: List[jax.Array]) -> List[jax.Array]:
            rest = iter(mapped)
            return bind(call, results, [array if d is None else next(rest) for array, d in zip(moved, dims)])

        made = jax.lax.map(one, [array for array, d in zip(moved, dims) if d is not None])
    return made, (0,) * len(made)


_primitive.def_abstract_eval(_abstract)
_primitive.def_impl(_run)
batching.primitive_batchers[_primitive] = _batch
mlir.register_lowering(_primitive, functools.partial(_lower, None))
for _platform in ("cpu", "cuda", "rocm", "tpu"):
    mlir.register_lowering(_primitive, functools.partial(_lower, _platform), platform=_platform)
