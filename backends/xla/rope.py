"""Rotary position embedding, computed in FP32, for dense layouts without start positions."""

from __future__ import annotations

from typing import Any, Union

import jax
import jax.numpy as jnp

from te_fl.reference_xla.call import TracedCall


def _rotated(x: jax.Array, interleaved: bool) -> jax.Array:
    """(-b, a) for each pair (a, b)."""
    if interleaved:
        return jnp.stack((-x[..., 1::2], x[..., ::2]), -1).reshape(x.shape)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate((-b, a), -1)


def _turn(c: TracedCall, backward: bool) -> None:
    """Writes the rotation of the input, or its transpose."""
    x, freqs, sbhd = c.values("input"), c.arrays["freqs"], c.layout == "sbhd"
    length, width = x.shape[0 if sbhd else 1], freqs.shape[-1]
    angles = freqs[:length].reshape((length, 1, 1, width) if sbhd else (1, length, 1, width))
    cos, sin, part = jnp.cos(angles), jnp.sin(angles), x[..., :width]
    turned = part * cos - _rotated(part * sin, c.interleaved) if backward else part * cos + _rotated(part, c.interleaved) * sin
    c.put("output", jnp.concatenate((turned, x[..., width:]), -1) if width < x.shape[-1] else turned)


def fused_rope_forward(c: TracedCall) -> None:
    _turn(c, False)


def fused_rope_backward(c: TracedCall) -> None:
    _turn(c, True)


def supports(start_positions: Any, layout: str, cp_size: int, freqs: Any, input: Any, **_: Any) -> Union[bool, str]:
    if layout == "thd" or start_positions is not None or cp_size != 1:
        return "thd, start positions and context parallelism are not implemented"
    if freqs.shape[0] < input.shape[0 if layout == "sbhd" else 1] or freqs.shape[-1] > input.shape[-1]:
        return "there are angles for fewer positions or for more columns than the input has"
    return True


OPS = {f.__name__: f for f in (fused_rope_forward, fused_rope_backward)}
