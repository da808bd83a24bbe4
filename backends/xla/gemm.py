"""Matrix products.

Operands of one dtype are multiplied in it, and codes with one scale as they are, with accumulation in FP32; the scales are factors of the sum. The host
multiplies in FP32, because its products of narrow types may round partial sums.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import jax
import jax.numpy as jnp
from jax import lax

from te_fl.reference_xla.activation import ACTIVATIONS
from te_fl.reference_xla.call import TracedCall

_CODES = (jnp.float8_e4m3fn, jnp.float8_e5m2)


def dot(c: TracedCall, spec: str, x: jax.Array, y: jax.Array, result: Any = jnp.float32) -> jax.Array:
    """jnp.einsum in the dtype of the operands, accumulated in FP32. result: the dtype to which the caller rounds the sums, without a step before it."""
    if c.platform == "cpu":
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(spec, x, y, preferred_element_type=result if result == x.dtype else jnp.float32, precision=precision)


def _codes(c: TracedCall, name: str, contracted: int) -> Tuple[jax.Array, int]:
    """The copy of an operand's codes whose last dimension is contracted if there is one, and its contracted dimension."""
    across = f"{name}.columnwise_data"
    if across in c.arrays and (contracted == 0 or name not in c.arrays):
        return c.arrays[across], 1 - contracted
    return c.arrays[name], contracted


def _of_codes(c: TracedCall, a: int, b: int) -> jax.Array:
    """The product of operands that have one scale each."""
    (left, a), (right, b) = _codes(c, "a", a), _codes(c, "b", b)
    precision: Optional[lax.Precision] = lax.Precision.HIGHEST if c.use_split_accumulator else lax.Precision.DEFAULT
    if c.platform != "cuda":  # XLA multiplies FP8 codes there; BF16 and FP32 hold each code exactly
        wide = jnp.float32 if c.platform == "cpu" else jnp.bfloat16
        left, right, precision = left.astype(wide), right.astype(wide), lax.Precision.HIGHEST if wide == jnp.float32 else None
    total = lax.dot_general(left, right, (((a,), (b,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
    return total * (c.arrays["a.scale_inv"].reshape(()) * c.arrays["b.scale_inv"].reshape(()))


def _of_values(c: TracedCall, a: int, b: int) -> jax.Array:
    """The product of other operands: in their dtype if it is one for both, else in FP32, or BF16 if that is no loss."""
    if c.scaling("a") == c.scaling("b") == "none" and c.dtype("a") == c.dtype("b"):
        left, right = c.arrays["a"], c.arrays["b"]
    else:
        # A block-scaled operand is read from the copy whose blocks run along the contraction.
        left, right = c.values("a", columnwise=a == 0), c.values("b", columnwise=b == 0)
        if c.scaling("a") == c.scaling("b") == "mxfp8":  # a code times a power of two
            left, right = left.astype(jnp.bfloat16), right.astype(jnp.bfloat16)
    spec = ("km" if a == 0 else "mk") + "," + ("kn" if b == 0 else "nk") + "->mn"
    return dot(c, spec, left, right, _rounded_to(c))


def _rounded_to(c: TracedCall) -> Any:
    """The dtype of d if the product is nothing but d, else FP32."""
    follows = c.gelu or c.accumulate or c.alpha != 1 or "d_sum" in c.wanted or any(map(c.has, ("bias", "pre_gelu_in", "residual")))
    return jnp.float32 if follows or "d" not in c.wanted or c.scaling("d") != "none" else c.wanted["d"].dtype


def generic_gemm(c: TracedCall) -> None:
    a, b = 0 if c.trans_a else 1, 1 if c.trans_b else 0  # the contracted dimensions
    if c.has("bias_grad") or "bias_grad" in c.wanted:
        total = c.values("a").sum(a)
        c.put("bias_grad", total + c.values("bias_grad") if c.accumulate_bias_grad else total)
    y = _of_codes(c, a, b) if c.scaling("a") == c.scaling("b") == "tensor" else _of_values(c, a, b)
    y = y * c.alpha if c.alpha != 1 else y
    y = y + c.values("bias") if c.has("bias") else y
    if c.gelu:
        if "pre_gelu_out" in c.wanted or "pre_gelu_out.columnwise_data" in c.wanted:
            c.put("pre_gelu_out", y)
        y = ACTIVATIONS["gelu"][0](y)
    y = y * ACTIVATIONS["gelu"][1](c.values("pre_gelu_in")) if c.has("pre_gelu_in") else y
    y = y + c.values("residual") if c.has("residual") else y
    c.put("d_sum", y.sum(0))
    c.put("d", y + c.beta * c.values("d") if c.accumulate and c.beta != 0 else y)  # with beta 0 the old d is not read


OPS = {"generic_gemm": generic_gemm}
