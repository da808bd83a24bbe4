"""Varying axes inside shard_map: JAX's array types list the mesh axes over which values differ between devices. Outside of shard_map these functions
have no effect.
"""

from __future__ import annotations

from typing import Any, FrozenSet, Sequence

import jax


def varying(*arrays: Any) -> FrozenSet[str]:
    """The axes over which any of these arrays varies."""
    axes: FrozenSet[str] = frozenset()
    for array in jax.tree.leaves(arrays):
        kind = getattr(jax.typeof(array), "manual_axis_type", None)
        axes |= kind.varying if kind is not None else frozenset()
    return axes


def align(tree: Any, *others: Any) -> Any:
    """Makes all arrays vary over the union of the axes of these arrays and `others`. The gradient of an array that did not vary is then summed over
    the devices.
    """
    axes = varying(tree, *others)
    if not axes:
        return tree

    def cast(array):
        missing = tuple(sorted(axes - varying(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(cast, tree)


def largest(array: jax.Array, of: jax.Array) -> jax.Array:
    """The maximum over the axes over which `array` varies and `of` does not."""
    axes = tuple(sorted(varying(array) - varying(of)))
    return jax.lax.pmax(array, axes) if axes else array


def largest_over(array: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The maximum over those of these axes over which `array` varies."""
    over = tuple(axis for axis in axes if axis in varying(array)) if tracks_axes() else tuple(axes)
    return jax.lax.pmax(array, over) if over else array


def tracks_axes() -> bool:
    """True if JAX tracks varying axes. False inside pmap and shard_map(check_vma=False), where array types list no axes."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return not axes or bool(varying(jax.lax.axis_index(axes[0])))
