"""Activations and their gradients, computed in FP32."""

from __future__ import annotations

import functools
import math
from typing import Callable, Dict, Tuple

import jax
import jax.numpy as jnp

from te_fl.reference_xla.call import TracedCall
from te_fl.reference_xla.values import matrix

_C = math.sqrt(2 / math.pi)
_FAR = 1e4  # from here on the derivatives are 0 or 1; their terms must not become infinity times 0


def _twice_inner(x: jax.Array) -> jax.Array:
    """GELU is x sigmoid of this. XLA's tanh is -1 from a few units below 0 on, where 1 + tanh still counts."""
    return 2 * _C * (x + 0.044715 * x * x * x)


def _gelu(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(_twice_inner(x))


def _dgelu(x: jax.Array) -> jax.Array:
    x = jnp.clip(x, -_FAR, _FAR)
    inner = _twice_inner(x)
    s = jax.nn.sigmoid(inner)
    return s + x * s * jax.nn.sigmoid(-inner) * 2 * _C * (1 + 3 * 0.044715 * x * x)


def _dsilu(x: jax.Array, factor: float = 1.0) -> jax.Array:
    t = jnp.clip(factor * x, -_FAR, _FAR)
    s = jax.nn.sigmoid(t)
    return s + t * s * (1 - s)


def _dsigmoid(x: jax.Array) -> jax.Array:
    s = jax.nn.sigmoid(x)
    return s * (1 - s)


def _relu(x: jax.Array) -> jax.Array:
    return jnp.where(x < 0, 0.0, x)


# Each activation with its derivative.
ACTIVATIONS: Dict[str, Tuple[Callable, Callable]] = {
    "gelu": (_gelu, _dgelu),
    "qgelu": (lambda x: x * jax.nn.sigmoid(1.702 * x), lambda x: _dsilu(x, 1.702)),
    "relu": (_relu, lambda x: jnp.where(x > 0, 1.0, jnp.where(jnp.isnan(x), x, 0.0))),
    "srelu": (lambda x: jnp.square(_relu(x)), lambda x: 2 * _relu(x)),
    "silu": (lambda x: x * jax.nn.sigmoid(x), _dsilu),
    "sigmoid": (jax.nn.sigmoid, _dsigmoid),
}
_GATES = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu", "glu": "sigmoid"}


def _halves(c: TracedCall) -> Tuple[jax.Array, jax.Array]:
    a, b = jnp.split(c.values("input"), 2, -1)
    return a, b


def _forward(name: str, c: TracedCall) -> None:
    c.put("output", ACTIVATIONS[name][0](c.values("input")))


def _backward(name: str, c: TracedCall) -> None:
    dx = c.values("grad") * ACTIVATIONS[name][1](c.values("input"))
    c.put("dbias", matrix(dx).sum(0)) if "dbias" in c.wanted else None
    c.put("output", dx)


def _gated_forward(name: str, c: TracedCall) -> None:
    a, b = _halves(c)
    c.put("output", ACTIVATIONS[name][0](a) * b)


def _gated_backward(name: str, c: TracedCall) -> None:
    (act, slope), dy, (a, b) = ACTIVATIONS[name], c.values("grad"), _halves(c)
    c.put("output", jnp.concatenate((dy * slope(a) * b, dy * act(a)), -1))


def clamped_swiglu(c: TracedCall) -> None:
    a, b = _halves(c)
    a, b = jnp.minimum(a, c.limit), jnp.clip(b, -c.limit, c.limit)
    c.put("output", a * jax.nn.sigmoid(c.alpha * a) * (b + c.glu_linear_offset))


def clamped_dswiglu(c: TracedCall) -> None:
    dy, (a, b) = c.values("grad"), _halves(c)
    first, second = jnp.minimum(a, c.limit), jnp.clip(b, -c.limit, c.limit)
    da = dy * _dsilu(first, c.alpha) * (second + c.glu_linear_offset)
    db = dy * first * jax.nn.sigmoid(c.alpha * first)
    c.put("output", jnp.concatenate((jnp.where(a > c.limit, 0.0, da), jnp.where(jnp.abs(b) > c.limit, 0.0, db)), -1))


def _ops() -> Dict[str, Callable[[TracedCall], None]]:
    found: Dict[str, Callable[[TracedCall], None]] = {"clamped_swiglu": clamped_swiglu, "clamped_dswiglu": clamped_dswiglu}
    for name in ("gelu", "qgelu", "relu", "srelu", "silu"):
        found[name] = functools.partial(_forward, name)
        found["d" + name] = found["dbias_d" + name] = functools.partial(_backward, name)
    for name, gate in _GATES.items():
        found[name] = functools.partial(_gated_forward, gate)
        found["d" + name] = functools.partial(_gated_backward, gate)
    return found


OPS = _ops()
