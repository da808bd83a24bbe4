"""Rotary position embedding with gradient."""

from __future__ import annotations

from typing import Tuple

import jax
import jax.numpy as jnp

from te_fl.errors import InvalidArgument
from te_fl.jax import ops
from te_fl.jax._partition import Layout

_METHODS = {"consecutive": True, "alternate": False}  # true for pairs (2i, 2i + 1)


def rotary_pos_emb(x: jax.Array, windows: Tuple[int, int], transpose_batch_sequence: bool, group_method: str = "consecutive") -> jax.Array:
    """Rotates x [batch, sequence, heads, size], or [sequence, batch, ..] if transposed, by angles whose periods lie between the windows."""
    name = group_method.lower().strip().replace("-", "").replace("_", "")
    if name not in _METHODS:
        raise InvalidArgument(f"group_method is {group_method!r}; it is one of {', '.join(_METHODS)}")
    if x.ndim != 4 or x.shape[-1] % 2 != 0:
        raise InvalidArgument(f"x has shape {x.shape}; rotary embedding takes four dimensions, the last one even")
    size = x.shape[-1]
    scales = windows[0] * (windows[1] / windows[0]) ** (2 * jnp.arange(size // 2, dtype=jnp.float32) / size)
    angles = jnp.arange(x.shape[0 if transpose_batch_sequence else 1], dtype=jnp.float32)[:, None] / scales
    interleaved = _METHODS[name]
    angles = jnp.repeat(angles, 2, axis=-1) if interleaved else jnp.concatenate([angles, angles], axis=-1)
    return _rope(x, angles[:, None, None, :], "sbhd" if transpose_batch_sequence else "bshd", interleaved)


def _forward(x, freqs, layout, interleaved):
    return ops.fused_rope_forward(input=x, freqs=freqs, layout=layout, interleaved=interleaved)


_rope = jax.custom_vjp(_forward, nondiff_argnums=(2, 3))


def _rope_bwd(layout, interleaved, kept, grad):
    freqs, lies = kept
    grads = ops.backward("fused_rope_forward", {}, {"freqs": freqs}, {"output": grad}, layout=layout, interleaved=interleaved)
    return lies.put((grads["input"], jnp.zeros_like(freqs)))


_rope.defvjp(lambda x, freqs, layout, interleaved: (_forward(x, freqs, layout, interleaved), (freqs, Layout.of((x, freqs)))), _rope_bwd)
