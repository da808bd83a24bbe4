"""Scaled softmax with masks, computed in FP32."""

from __future__ import annotations

from typing import Optional

import jax
import jax.numpy as jnp

from te_fl.reference_xla.call import TracedCall


def _softmax(c: TracedCall, hidden: Optional[jax.Array]) -> None:
    x = c.values("input") * c.scale
    if hidden is None:
        c.put("output", jax.nn.softmax(x, -1))
        return
    y = jax.nn.softmax(jnp.where(hidden, -jnp.inf, x), -1)
    c.put("output", jnp.where(hidden, 0.0, y))


def _above(rows: int, columns: int, shift: int) -> jax.Array:
    return jnp.arange(columns)[None] > jnp.arange(rows)[:, None] + shift


def scaled_softmax_forward(c: TracedCall) -> None:
    _softmax(c, None)


def scaled_masked_softmax_forward(c: TracedCall) -> None:
    _softmax(c, jnp.broadcast_to(c.arrays["mask"] != 0, c.shape("input")))


def scaled_upper_triang_masked_softmax_forward(c: TracedCall) -> None:
    _softmax(c, _above(*c.shape("input")[-2:], 0))


def scaled_aligned_causal_masked_softmax_forward(c: TracedCall) -> None:
    rows, columns = c.shape("input")[-2:]
    _softmax(c, _above(rows, columns, columns - rows))


def _backward(c: TracedCall) -> None:
    dy, y = c.values("output_grad"), c.values("softmax_results")
    c.put("input_grad", c.scale * y * (dy - (dy * y).sum(-1, keepdims=True)))


_FORWARDS = (scaled_softmax_forward, scaled_masked_softmax_forward, scaled_upper_triang_masked_softmax_forward,
             scaled_aligned_causal_masked_softmax_forward)
OPS = {f.__name__: f for f in _FORWARDS} | {f.__name__.replace("_forward", "_backward"): _backward for f in _FORWARDS}
