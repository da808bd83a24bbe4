"""Scaled softmax over the last dimension, with gradient."""

from __future__ import annotations

import functools
from enum import Enum
from typing import Optional

import jax
import jax.numpy as jnp

from te_fl.errors import InvalidArgument
from te_fl.jax import ops
from te_fl.jax._partition import Layout


class SoftmaxFusionType(Enum):
    SCALED = "scaled"
    SCALED_MASKED = "scaled_masked"
    SCALED_UPPER_TRIANG_MASKED = "scaled_upper_triang_masked"


def softmax(logits: jax.Array, mask: Optional[jax.Array] = None, scale_factor: Optional[float] = 1.0,
            softmax_fusion_type: Optional[SoftmaxFusionType] = SoftmaxFusionType.SCALED) -> jax.Array:
    """softmax(scale_factor * logits), [batch, heads, queries, keys]. mask: nonzero is masked out; a fully masked row gives zeros.

    SCALED_UPPER_TRIANG_MASKED is causal.
    """
    kind = SoftmaxFusionType(softmax_fusion_type)
    if (mask is not None) != (kind is SoftmaxFusionType.SCALED_MASKED):
        raise InvalidArgument(f"softmax_fusion_type {kind.name} goes {'with' if mask is None else 'without'} a mask")
    if logits.ndim != 4:
        raise InvalidArgument(f"logits has shape {logits.shape}, not [batch, heads, queries, keys]")
    if kind is SoftmaxFusionType.SCALED_UPPER_TRIANG_MASKED and logits.shape[-1] != logits.shape[-2]:
        raise InvalidArgument(f"logits has shape {logits.shape}; a causal softmax has as many queries as keys")
    if mask is not None:
        mask = jnp.broadcast_to((mask != 0).astype(jnp.uint8), (*mask.shape[:2], *logits.shape[2:]))
    return _softmax(logits, mask, float(scale_factor), kind)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _softmax(logits, mask, scale, kind):
    return _forward(logits, mask, scale, kind)


def _forward(logits, mask, scale, kind):
    if kind is SoftmaxFusionType.SCALED:
        return ops.scaled_softmax_forward(input=logits, scale=scale)
    if kind is SoftmaxFusionType.SCALED_MASKED:
        return ops.scaled_masked_softmax_forward(input=logits, mask=mask, scale=scale)
    flat = logits.reshape(logits.shape[0] * logits.shape[1], *logits.shape[2:])
    return ops.scaled_upper_triang_masked_softmax_forward(input=flat, scale=scale).reshape(logits.shape)


def _softmax_fwd(logits, mask, scale, kind):
    result = _forward(logits, mask, scale, kind)
    return result, (result, mask)


def _softmax_bwd(scale, kind, kept, grad):
    result, mask = kept
    dmask = None if mask is None else jnp.zeros(mask.shape, jax.dtypes.float0)
    # The gradient depends only on the probabilities, which are zero where masked.
    grads = ops.backward("scaled_softmax_forward", {}, {"output": result}, {"output": grad}, scale=scale)
    (dlogits,) = Layout.of((result,)).put((grads["input"],))
    return dlogits, dmask


_softmax.defvjp(_softmax_fwd, _softmax_bwd)
