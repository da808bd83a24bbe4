"""Delayed scaling state used several times in one step: the sum of the uses' gradients, which JAX or a program computes, becomes the state after one
step over all uses.
"""

from __future__ import annotations

from typing import Any, Tuple

import jax
import jax.numpy as jnp

from te_fl.errors import Unsupported


def _joining() -> Any:
    """Flax's dtype fm32: its values are FP32, and JAX's sum of gradients in this dtype is their maximum. Its zero is -inf."""
    try:
        from flax.linen.fp8_ops import fm32
    except ImportError as error:
        raise ModuleNotFoundError("te_fl.jax.quantize.accumulating() needs Flax, whose dtype fm32 it takes: pip install flax; or give each use of a "
                                  "product a state of its own", name="flax") from error
    return fm32


# The gradient of accumulating()'s states is (-scale, history), so that the maximum keeps the smallest scale and the largest amaxes, as one step over
# all uses would. A use without an amax, or on which the loss does not depend, contributes -inf, which gives a state with scale 0.
@jax.custom_vjp
def _join(state: Tuple[jax.Array, jax.Array]) -> Tuple[jax.Array, jax.Array]:
    return tuple(jax.lax.convert_element_type(array, _joining()) for array in state)


def _join_bwd(state, grads):
    negative, history = (jax.lax.convert_element_type(grad, jnp.float32) for grad in grads)
    changed = negative != -jnp.inf
    return ((jnp.where(changed, -negative, state[0]), jnp.where(changed, history, state[1])),)


_join.defvjp(lambda state: (_join(state), state), _join_bwd)


@jax.custom_vjp
def read(state: Tuple[jax.Array, jax.Array]) -> Tuple[jax.Array, jax.Array]:
    """Scale and history of accumulating(), converted to FP32 for a matrix product."""
    return tuple(jax.lax.convert_element_type(array, jnp.float32) for array in state)


def _read_bwd(_, after):
    had_amax = after[0] != 0
    if not isinstance(had_amax, jax.core.Tracer):
        raise Unsupported("te_fl.jax.quantize.accumulating(): JAX adds up gradients of this dtype in a program alone; put the gradient under jax.jit")
    return (tuple(jax.lax.convert_element_type(jnp.where(had_amax, value, -jnp.inf), _joining()) for value in (-after[0], after[1])),)


read.defvjp(lambda state: (read(state), None), _read_bwd)


def _had_amax(before: Tuple[jax.Array, jax.Array], after: Tuple[jax.Array, jax.Array]) -> jax.Array:
    """False if `after` is the state of a step without an amax, or of a matrix product that did not contribute to the loss. scale is [.., 1], history
    [.., length].

    If an equal amax leaves the state unchanged, the two cases cannot be distinguished. The result is then True: too large a scale would clip values.
    """
    scale, history = before
    changed = (after[0] != scale) | jnp.any(after[1] != history, axis=-1, keepdims=True)
    newest = history[..., -1:]
    rests = scale != 1 if history.shape[-1] == 1 else (newest != 0) & jnp.all(history[..., 1:] == newest, axis=-1, keepdims=True)
    return (after[0] != 0) & (changed | rests)


def _states(tree: Any) -> Tuple[list, Any, list]:
    """The leaves of a tree, its structure, and the positions of each delayed scaling's scale and history among the leaves."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = {(path[:-1], getattr(path[-1], "key", getattr(path[-1], "name", None))): i for i, (path, _) in enumerate(paths) if path}
    pairs = [(i, names[(above, name.removesuffix("scale") + "amax_history")]) for (above, name), i in names.items()
             if isinstance(name, str) and name.endswith("scale") and (above, name.removesuffix("scale") + "amax_history") in names]
    return [leaf for _, leaf in paths], structure, pairs


def accumulating(variables: Any) -> Any:
    """Prepares variables, or quantisers, for a loss that uses them several times: microbatches in a scan, or a layer called twice.

    JAX sums the gradients of the uses. For the delayed scaling states returned here, that sum is the state after one step over all uses: the largest
    amaxes, and the scale computed from them. Call it once, inside of the differentiated function, under jit.
    """
    leaves, structure, pairs = _states(variables)
    for scale, history in pairs:
        if leaves[scale].dtype == jnp.float32:
            leaves[scale], leaves[history] = _join((leaves[scale], leaves[history]))
    return jax.tree.unflatten(structure, leaves)


def add_gradients(total: Any, grads: Any, variables: Any) -> Any:
    """Adds two gradients with respect to `variables`, from microbatches that started from the same state. The delayed scaling states become the state
    after a step over both microbatches; do not divide them by the number of microbatches. If a state is equal with and without an amax, it counts as
    having the last step's amax.
    """
    leaves, structure, pairs = _states(variables)
    first, second = structure.flatten_up_to(total), structure.flatten_up_to(grads)
    made = [a if getattr(a, "dtype", None) == jax.dtypes.float0 else a + b for a, b in zip(first, second)]
    for scale, history in pairs:
        told = [_had_amax((leaves[scale], leaves[history]), (side[scale], side[history])) for side in (first, second)]
        for place, lowest, join in ((scale, jnp.inf, jnp.minimum), (history, -jnp.inf, jnp.maximum)):
            joined = join(*[jnp.where(one, side[place], lowest) for one, side in zip(told, (first, second))])
            made[place] = jnp.where(told[0] | told[1], joined, leaves[place])
    return jax.tree.unflatten(structure, made)
