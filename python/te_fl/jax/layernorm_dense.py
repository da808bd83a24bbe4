"""A norm followed by a matrix product with a kernel, with gradients."""

from __future__ import annotations

from typing import Optional, Tuple

import jax

from te_fl.jax._product import Norm, product
from te_fl.jax.dense import as_matrices, kernel_for
from te_fl.jax.layernorm import canonicalize_norm_type, check_beta
from te_fl.jax.quantize import QuantizerSet, noop_quantizer_set
from te_fl.jax.sharding import with_sharding_constraint_by_logical_axes


def layernorm_dense(x: jax.Array, kernel: jax.Array, gamma: jax.Array, beta: Optional[jax.Array], bias: Optional[jax.Array] = None,
                    norm_type: str = "layernorm", zero_centered_gamma: bool = False, epsilon: float = 1e-6,
                    transpose_batch_sequence: bool = False, layernorm_input_axes: Optional[Tuple[str, ...]] = None,
                    dot_input_axes: Optional[Tuple[str, ...]] = None, kernel_axes: Optional[Tuple[str, ...]] = None,
                    quantizer_set: QuantizerSet = noop_quantizer_set) -> jax.Array:
    """layernorm(x) kernel + bias, contracted over x's last and the kernel's first dimension. Under FP8 the norm writes FP8 codes directly."""
    norm_type = canonicalize_norm_type(norm_type)
    check_beta(norm_type, beta, zero_centered_gamma)
    x = with_sharding_constraint_by_logical_axes(x, layernorm_input_axes)
    a, b, shape = as_matrices(x, kernel_for(x, kernel, quantizer_set), ((-1,), (0,)))
    flat = None if bias is None else bias.astype(x.dtype).reshape(b.shape[1:])
    y = product(a, b, flat, (gamma, beta), quantizer_set, Norm(norm_type, bool(zero_centered_gamma), float(epsilon)), dot_input_axes)
    return y.reshape(shape)
