"""Activations, plain and gated, with gradients."""

from __future__ import annotations

import functools
from typing import Mapping, Optional, Sequence, Tuple

import jax

from te_fl.errors import InvalidArgument, Unsupported, did_you_mean
from te_fl.jax import ops
from te_fl.jax._partition import Layout

_OPS = {
    ("gelu",): "gelu", ("silu",): "silu", ("relu",): "relu", ("quick_gelu",): "qgelu", ("squared_relu",): "srelu",
    ("gelu", "linear"): "geglu", ("silu", "linear"): "swiglu", ("relu", "linear"): "reglu", ("quick_gelu", "linear"): "qgeglu",
    ("squared_relu", "linear"): "sreglu", ("sigmoid", "linear"): "glu", ("clamped_silu", "clamped_linear"): "clamped_swiglu",
}


def canonicalize_activation(activation_type) -> Tuple[str, ...]:
    """The names as a tuple, the activated half first. InvalidArgument for unknown activations."""
    names = (activation_type,) if isinstance(activation_type, str) else tuple(activation_type)
    if all(isinstance(name, str) for name in names):
        names = tuple(name.lower() for name in names)
        names = names[::-1] if names[0] in ("linear", "clamped_linear") else names
        if names in _OPS:
            return names
    raise InvalidArgument(f"activation_type is {activation_type!r}{nearest(names)}; te_fl.jax has {', '.join(str(n) for n in _OPS)}")


def nearest(names: Sequence, more: Sequence[str] = ()) -> str:
    """The text "; did you mean 'gelu'?" for the first of these names that is neither an activation nor in `more`."""
    known = {*more, *(word for words in _OPS for word in words)}
    wrong = [name for name in names if isinstance(name, str) and name not in known]
    return did_you_mean(wrong[0], sorted(known)) if wrong else ""


def canonicalize_params(names: Tuple[str, ...], params: Optional[Mapping]) -> Tuple[Tuple[str, float], ...]:
    """limit and alpha of the clamped SwiGLU, as sorted pairs; empty for other activations."""
    values = {} if params is None else dict(params)
    known = {"limit", "alpha"} if names[0] == "clamped_silu" else set()
    if not set(values) <= known:
        raise InvalidArgument(f"the parameters of {names} are {sorted(known)}, not {sorted(values)}")
    return tuple(sorted((name, float(value)) for name, value in values.items()))


def forward(x, names, params, output=None):
    """x [.., H], or gated [.., 2, H]; returns [.., H], in the form given by `output`."""
    shape = (*x.shape[:x.ndim - len(names)], x.shape[-1])
    output = jax.ShapeDtypeStruct(shape, x.dtype) if output is None else output.of_shape(shape)
    return ops.run(_OPS[names], _spread(x, names), input=x, output=output, **dict(params))


def _spread(x, names):
    rows = x.ndim - len(names)
    return {"input": (rows, len(names)), "output": (rows, 1)}


def backward(grad, x, names, params):
    return ops.backward(_OPS[names], _spread(x, names), {"input": x}, {"output": grad}, **dict(params))["input"]


def activation(x: jax.Array, activation_type: Sequence[str], quantizer=None, act_params: Optional[Mapping] = None) -> jax.Array:
    """x [.., n, H] for n activations. Returns [.., H]: the activation of x[.., 0, :], times x[.., 1, :] if gated.

    act_params: limit and alpha of ("clamped_silu", "clamped_linear").
    """
    if quantizer is not None:
        raise Unsupported("te_fl.jax: activation(quantizer=..) is not supported; layernorm_mlp quantises what its product reads")
    names = canonicalize_activation(activation_type)
    if x.ndim < 2 or x.shape[-2] != len(names):
        raise InvalidArgument(f"x has shape {x.shape}; for the activations {names} the last dimension but one is {len(names)}")
    rows = x if len(names) == 2 else x[..., 0, :]
    rows = rows if rows.ndim > len(names) else rows[None]
    return _activation(rows, names, canonicalize_params(names, act_params)).reshape(*x.shape[:-2], x.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _activation(x, names, params):
    return forward(x, names, params)


_activation.defvjp(lambda x, names, params: (forward(x, names, params), x),
                   lambda names, params, x, grad: Layout.of((x,)).put((backward(grad, x, names, params),)))
