"""Attention with dropout over the devices of a mesh: each device draws the mask of its sequences and heads by a seed of its own.

The counters of random numbers number the elements of a whole call, so XLA's partitioner must not cut such a call: forward and backward
might be cut in two ways, and draw two masks. Here the mesh resource says how both are cut.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from te_fl.jax import _partition, ops, sharding


class Parts(NamedTuple):
    """The mesh, and its axes over which sequences and heads are cut."""

    mesh: Any
    axes: Mapping[str, Tuple[str, ...]]

    def __hash__(self) -> int:
        return hash((self.mesh, tuple(self.axes.items())))

    def spec(self, name: str, shape: Tuple[int, ...], layout: str) -> PartitionSpec:
        factors = _partition.attention_factors(name, shape, layout) or (None,) * len(shape)
        return PartitionSpec(*[self.axes.get(factor) or None for factor in factors])

    def run(self, op: str, prepare: Mapping, arrays: Dict[str, Any], results: Dict[str, Any], scalars: Dict[str, Any]) -> Tuple[jax.Array, ...]:
        """The op's results in the specification's order, which `results` has."""
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
        """The gradient of what sequences share is summed over them."""
        rest = tuple(axis for axes in self.axes.values() for axis in axes if axis not in sharding.flat_axes(spec))
        return jax.lax.psum(value, rest) if rest and name in ("dbias", "dsink") else value


def parts_of(batch: int, heads: int, key_heads: int) -> Optional[Parts]:
    """The parts by the calling thread's mesh resource; None: the call runs whole on each device."""
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
