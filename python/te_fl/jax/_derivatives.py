"""The error for unsupported derivatives. te_fl.jax's functions have first derivatives in reverse mode; the ops themselves have none."""

from __future__ import annotations

import functools
from typing import Any, Callable

import jax

from te_fl import specification
from te_fl.errors import Unsupported

# The ops that a function of te_fl.jax runs, without their backward ops.
_FUNCTIONS = {
    "activation.activation": "gelu silu relu qgelu srelu geglu swiglu reglu qgeglu sreglu glu clamped_swiglu",
    "attention.fused_attn": "fused_attn_fwd",
    "dense.dense": "generic_gemm quantize",
    "layernorm.layernorm": "layernorm_fwd rmsnorm_fwd",
    "rope.rotary_pos_emb": "fused_rope_forward",
    "softmax.softmax": "scaled_softmax_forward scaled_masked_softmax_forward scaled_upper_triang_masked_softmax_forward",
}


def _runs(forward: str, op: str) -> bool:
    rule = specification.gradient(forward)
    return op == forward or rule is not None and op == rule.op


def _refuse(op: str) -> None:
    function = next((name for name, ops in _FUNCTIONS.items() if any(_runs(forward, op) for forward in ops.split())), None)
    if function is None:
        raise Unsupported(f"te_fl.jax: the op {op} has no derivative, and no function of te_fl.jax has one of it; make one of te_fl.jax.ops.{op} and the op "
                          "of its gradient (docs/ops.md) with jax.custom_vjp, or compute this part in jax.numpy")
    raise Unsupported(f"te_fl.jax: the op {op} has no derivative of its own; te_fl.jax.{function} has a first one, in reverse mode (jax.grad, jax.vjp). For a "
                      "second one, or forward mode (jax.hessian, jax.jacfwd), compute this part in jax.numpy, or give it a rule with jax.custom_jvp")


def underived(op: str, function: Callable) -> Callable:
    """Wraps the function: taking its derivative raises an error that names the op, where JAX's error would name a primitive."""
    def call(*arrays: jax.Array) -> Any:
        if not any(isinstance(array, jax.core.Tracer) for array in arrays):
            return function(*arrays)
        wrapped = jax.custom_jvp(function)
        wrapped.defjvp(functools.partial(_rule, op))
        return wrapped(*arrays)

    return call


def _rule(op: str, primals: Any, tangents: Any) -> None:
    _refuse(op)
