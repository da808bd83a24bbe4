"""Layer and RMS normalisation, computed in FP32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from te_fl.reference_xla.call import TracedCall
from te_fl.reference_xla.values import matrix


def _weight(c: TracedCall) -> jax.Array:
    gamma = c.values("gamma")
    return gamma + 1 if c.zero_centered_gamma else gamma


def _of_rows(c: TracedCall, name: str, x: jax.Array) -> jax.Array:
    """One number for each row of x, such that it broadcasts over the row."""
    return c.arrays[name].reshape(*x.shape[:-1], 1)


def _input(c: TracedCall) -> jax.Array:
    """x, or x + residual rounded to the dtype of `sum`, which is written."""
    x = c.values("x")
    if not c.has("residual"):
        return x
    total = (x + c.values("residual")).astype(c.wanted["sum"].dtype)
    c.put("sum", total)
    return total.astype(jnp.float32)


def layernorm_fwd(c: TracedCall) -> None:
    x = _input(c)
    mean = x.mean(-1, keepdims=True)
    centred = x - mean
    inverse = lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + c.epsilon)
    z = centred * inverse * _weight(c)
    c.put("z", z + c.values("beta") if c.has("beta") else z)
    c.put("mu", mean)
    c.put("rsigma", inverse)


def layernorm_bwd(c: TracedCall) -> None:
    dy, x = c.values("dz"), c.values("x")
    inverse = _of_rows(c, "rsigma", x)
    normed = (x - _of_rows(c, "mu", x)) * inverse
    d = dy * _weight(c)
    dx = inverse * (d - d.mean(-1, keepdims=True) - normed * (d * normed).mean(-1, keepdims=True))
    c.put("dx", dx + c.values("add") if c.has("add") else dx)
    c.put("dgamma", matrix(dy * normed).sum(0))
    c.put("dbeta", matrix(dy).sum(0))


def rmsnorm_fwd(c: TracedCall) -> None:
    x = _input(c)
    inverse = lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + c.epsilon)
    c.put("z", x * inverse * _weight(c))
    c.put("rsigma", inverse)


def rmsnorm_bwd(c: TracedCall) -> None:
    dy, x = c.values("dz"), c.values("x")
    inverse = _of_rows(c, "rsigma", x)
    normed = x * inverse
    d = dy * _weight(c)
    dx = inverse * (d - normed * (d * normed).mean(-1, keepdims=True))
    c.put("dx", dx + c.values("add") if c.has("add") else dx)
    c.put("dgamma", matrix(dy * normed).sum(0))


OPS = {"layernorm_fwd": layernorm_fwd, "layernorm_bwd": layernorm_bwd, "rmsnorm_fwd": rmsnorm_fwd, "rmsnorm_bwd": rmsnorm_bwd,
       "rmsnorm_bwd_add": rmsnorm_bwd}
