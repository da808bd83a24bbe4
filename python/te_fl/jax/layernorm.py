"""Layer and RMS normalisation with gradients."""

from __future__ import annotations

import functools
from typing import Optional

import jax
import jax.numpy as jnp

from te_fl.errors import InvalidArgument, Unsupported
from te_fl.jax import ops
from te_fl.jax._partition import Layout
from te_fl.jax._varying import align

_NORMS = ("layernorm", "rmsnorm")


def canonicalize_norm_type(x: str) -> str:
    name = x.lower().strip().replace("-", "").replace("_", "")
    if name not in _NORMS:
        raise InvalidArgument(f"norm_type is {x!r}; it is one of {', '.join(_NORMS)}")
    return name


def check_beta(norm_type: str, beta: Optional[jax.Array], zero_centered_gamma: bool) -> None:
    if norm_type == "rmsnorm" and beta is not None:
        raise InvalidArgument("rmsnorm has no beta: give None")


def _spread(x):
    rows = x.ndim - 1
    return {**{name: (rows, 1) for name in ("x", "z")}, "mu": (rows, 0), "rsigma": (rows, 0)}


def forward(x, gamma, beta, norm_type, zero_centered_gamma, epsilon, z=True):
    """Returns the normalised x [.., H], in the form given by `z`, and the statistics that the backward reads, by name: mu, rsigma [..]."""
    scalars = {"epsilon": float(epsilon), "zero_centered_gamma": bool(zero_centered_gamma)}
    of_rows = jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)
    if norm_type == "layernorm":
        result, mu, rsigma = ops.run("layernorm_fwd", _spread(x), x=x, gamma=gamma, beta=beta, z=z, mu=of_rows, rsigma=of_rows, **scalars)
        return result, {"mu": mu, "rsigma": rsigma}
    result, rsigma = ops.run("rmsnorm_fwd", _spread(x), x=x, gamma=gamma, z=z, rsigma=of_rows, **scalars)
    return result, {"rsigma": rsigma}


def backward(dz, x, gamma, beta, saved, norm_type, zero_centered_gamma):
    """Returns dx, dgamma, dbeta (None without beta)."""
    made = ops.backward(f"{norm_type}_fwd", _spread(x), {"x": x, "gamma": gamma, "beta": beta, **saved}, {"z": dz},
                        zero_centered_gamma=bool(zero_centered_gamma))
    return made["x"], made["gamma"], made.get("beta")


def layernorm(x: jax.Array, gamma: jax.Array, beta: Optional[jax.Array], norm_type: str, zero_centered_gamma: bool = False,
              epsilon: float = 1e-6, quantizer=None) -> jax.Array:
    """x normalised over its last dimension, times gamma (zero_centered_gamma: times 1 + gamma), plus beta (layernorm only)."""
    if quantizer is not None:
        raise Unsupported("te_fl.jax: layernorm(quantizer=..) is not supported; layernorm_dense quantises what its product reads")
    norm_type = canonicalize_norm_type(norm_type)
    check_beta(norm_type, beta, zero_centered_gamma)
    rows, gamma, beta = align((x if x.ndim > 1 else x[None], gamma, beta))
    return _layernorm(rows, gamma, beta, norm_type, zero_centered_gamma, epsilon).reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _layernorm(x, gamma, beta, norm_type, zero_centered_gamma, epsilon):
    return forward(x, gamma, beta, norm_type, zero_centered_gamma, epsilon)[0]


def _layernorm_fwd(x, gamma, beta, norm_type, zero_centered_gamma, epsilon):
    z, saved = forward(x, gamma, beta, norm_type, zero_centered_gamma, epsilon)
    return z, (x, gamma, beta, saved)


def _layernorm_bwd(norm_type, zero_centered_gamma, epsilon, kept, dz):
    x, gamma, beta, saved = kept
    return Layout.of((x, gamma, beta)).put(backward(dz, x, gamma, beta, saved, norm_type, zero_centered_gamma))


_layernorm.defvjp(_layernorm_fwd, _layernorm_bwd)
