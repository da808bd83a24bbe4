"""A norm, a matrix product, an activation and a second matrix product, with gradients."""

from __future__ import annotations

from typing import Mapping, Optional, Sequence, Tuple

import jax
from jax.ad_checkpoint import checkpoint_name

from te_fl.errors import InvalidArgument, Unsupported
from te_fl.jax._product import Activation, product
from te_fl.jax.activation import canonicalize_activation, canonicalize_params
from te_fl.jax.dense import kernel_for
from te_fl.jax.layernorm_dense import layernorm_dense
from te_fl.jax.quantize import QuantizerSet, noop_quantizer_set


def layernorm_mlp(x: jax.Array, gamma: jax.Array, beta: Optional[jax.Array], kernels: Sequence[jax.Array], biases: Sequence[Optional[jax.Array]],
                  norm_type: str, zero_centered_gamma: bool = False, epsilon: float = 1e-6, transpose_batch_sequence: bool = False,
                  norm_input_axes: Optional[Tuple[str, ...]] = None, dot_1_input_axes: Optional[Tuple[str, ...]] = None,
                  dot_2_input_axes: Optional[Tuple[str, ...]] = None, kernel_1_axes: Optional[Tuple[str, ...]] = None,
                  kernel_2_axes: Optional[Tuple[str, ...]] = None, ffn1_ckpt_name: str = "ffn1", ffn2_ckpt_name: str = "ffn2",
                  activation_type: Sequence[str] = ("gelu",), activation_params: Optional[Mapping] = None, collective_op_sets=None,
                  quantizer_sets: Tuple[QuantizerSet, QuantizerSet] = (noop_quantizer_set, noop_quantizer_set)) -> jax.Array:
    """kernels: [K, activations, F] and [F, K']; biases: [activations, F] and [K'], or None. Under FP8 the activation directly writes the FP8
    codes of the second product's input.
    """
    if collective_op_sets is not None:
        raise Unsupported("te_fl.jax: layernorm_mlp(collective_op_sets=..) is not supported: collectives are XLA's; leave it out")
    names = canonicalize_activation(activation_type)
    if kernels[0].ndim != 3 or kernels[0].shape[1] != len(names):
        raise InvalidArgument(f"the first kernel has shape {kernels[0].shape}; for the activations {names} it is [K, {len(names)}, F]")
    hidden = layernorm_dense(x, kernels[0], gamma, beta, biases[0], norm_type, zero_centered_gamma, epsilon, transpose_batch_sequence,
                             norm_input_axes, dot_1_input_axes, kernel_1_axes, quantizer_sets[0])
    hidden = checkpoint_name(hidden, ffn1_ckpt_name)
    rows = hidden if len(names) == 2 else hidden[..., 0, :]
    rows = rows if rows.ndim > len(names) else rows[None]
    bias = None if biases[1] is None else biases[1].astype(x.dtype)
    last = kernel_for(x, kernels[1], quantizer_sets[1])
    y = product(rows, last, bias, (), quantizer_sets[1], Activation(names, canonicalize_params(names, activation_params)), dot_2_input_axes)
    return checkpoint_name(y.reshape(*x.shape[:-1], last.shape[-1]), ffn2_ckpt_name)
