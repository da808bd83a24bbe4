"""Inside shard_map JAX's types say over which mesh axes an array's value differs between devices. Outside of it nothing here does anything."""

from __future__ import annotations

from typing import Any, FrozenSet, Sequence

import jax


def varying(*arrays: Any) -> FrozenSet[str]:
    """The axes over which any of these differs."""
    axes: FrozenSet[str] = frozenset()
    for array in jax.tree.leaves(arrays):
        kind = getattr(jax.typeof(array), "manual_axis_type", None)
        axes |= kind.varying if kind is not None else frozenset()
    return axes


def align(tree: Any, *others: Any) -> Any:
    """Makes all arrays differ over the axes of any of them, `others` included: the gradient of one that does not is then summed
    over the devices."""
    axes = varying(tree, *others)
    if not axes:
        return tree

    def cast(array):
        missing = tuple(sorted(axes - varying(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(cast, tree)


def largest(array: jax.Array, of: jax.Array) -> jax.Array:
    """The largest of the devices' values, over the axes over which `array` differs and `of` does not."""
    axes = tuple(sorted(varying(array) - varying(of)))
    return jax.lax.pmax(array, axes) if axes else array


def largest_over(array: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The largest of the devices' values over these axes, as far as it differs over them."""
    over = tuple(axis for axis in axes if axis in varying(array)) if is_told() else tuple(axes)
    return jax.lax.pmax(array, over) if over else array


def is_told() -> bool:
    """True if JAX says over which axes arrays differ: not inside pmap and shard_map(check_vma=False), where the types above are
    empty."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return not axes or bool(varying(jax.lax.axis_index(axes[0])))
