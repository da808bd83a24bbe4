"""Attention with dropout, sharded over a mesh: each device draws the dropout mask of its sequences and heads with its own seed.

The random number counters index the elements of the whole call, so XLA's partitioner must not shard such a call: it might shard forward and backward
differently and draw different masks. Here the mesh resource determines the sharding of both.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from te_fl.jax import _partition, ops, sharding


class Parts(NamedTuple):
    """The mesh, and the axes along which sequences and heads are sharded."""

    mesh: Any
    axes: Mapping[str, Tuple[str, ...]]

    def __hash__(self) -> int:
        return hash((self.mesh, tuple(self.axes.items())))

    def spec(self, name: str, shape: Tuple[int, ...], layout: str) -> PartitionSpec:
        factors = _partition.attention_factors(name, shape, layout) or (None,) * len(shape)
        return PartitionSpec(*[self.axes.get(factor) or None for factor in factors])

    def run(self, op: str, prepare: Mapping, arrays: Dict[str, Any], results: Dict[str, Any], scalars: Dict[str, Any]) -> Tuple[jax.Array, ...]:
        """Runs the op on each device's shards. Returns the results in the order of `results`, which is the specification's order."""
        cut = tuple(axis for axes in self.axes.values() for axis in axes)
        layout = scalars["layout"]
        wanted = {name: struct for name, struct in results.items() if struct is not False}
        ins = {name: self.spec(name, array.shape, layout) for name, array in arrays.items()}
        outs = {name: self.spec(name, struct.shape, layout) for name, struct in wanted.items()}

        def of_a_device(arrays):
            seed = jax.random.fold_in(jax.random.wrap_key_data(arrays["rng"][:2], impl="threefry2x32"), jax.lax.axis_index(cut))
            rng = jnp.concatenate([jax.random.key_data(seed), arrays["rng"][2:]])
            local = {name: jax.ShapeDtypeStruct(NamedSharding(self.mesh, outs[name]).shard_shape(struct.shape), struct.dtype)
                     for name, struct in wanted.items()}
            made = ops.run(op, {}, prepare, **{**arrays, "rng": rng}, **{name: local.get(name, False) for name in results}, **scalars)
            made = [value for value in made if value is not None]
            return tuple(self._whole(name, value, outs[name]) for name, value in zip(wanted, made, strict=True))

        explicit = AxisType.Explicit in self.mesh.axis_types
        arrays = {name: jax.sharding.reshard(a, NamedSharding(self.mesh, ins[name])) for name, a in arrays.items()} if explicit else arrays
        return jax.shard_map(of_a_device, mesh=self.mesh, in_specs=(ins,), out_specs=tuple(outs.values()), check_vma=False)(arrays)

    def _whole(self, name: str, value: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Sums the gradient of a tensor that sequences share (bias, sink) over the devices."""
        rest = tuple(axis for axes in self.axes.values() for axis in axes if axis not in sharding.flat_axes(spec))
        return jax.lax.psum(value, rest) if rest and name in ("dbias", "dsink") else value


def split_mesh(batch: int, heads: int, key_heads: int) -> Optional[Parts]:
    """The sharding given by the calling thread's mesh resource; None: each device runs the whole call."""
    mesh = sharding.current_mesh()
    if mesh is None or not _partition.may_cut_programs():
        return None
    rules = sharding.get_sharding_map_logic_axis_to_mesh_axis()

    def axes(name: str, extents: List[int]) -> Tuple[str, ...]:
        found = rules.get(name)
        flat = sharding.flat_axes([found])
        size = math.prod(mesh.shape[axis] for axis in flat)
        return flat if size > 1 and all(extent % size == 0 for extent in extents) else ()

    found = {"b": axes(sharding.BATCH_AXES, [batch]), "h": axes(sharding.HEAD_AXES, [heads, key_heads])}
    return Parts(mesh, found) if any(found.values()) else None
