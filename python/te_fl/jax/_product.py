"""y = prologue(x) kernel + bias with its gradient; the common part of dense, layernorm_dense and layernorm_mlp.

The prologue (a norm, an activation, or nothing) is computed here because under FP8 it directly writes the FP8 codes of the GEMM's input. The forward
saves exactly what the backward reads; under FP8 these are the input's column-wise codes and the kernel's row-wise codes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Optional, Tuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from te_fl.jax import _partition, activation, layernorm, ops
from te_fl.jax._partition import Layout, Spread
from te_fl.jax._tensors import Quantized
from te_fl.jax._varying import align
from te_fl.jax.quantize import QuantizerSet
from te_fl.jax.sharding import with_sharding_constraint_by_logical_axes


class Norm(NamedTuple):
    norm_type: str
    zero_centered_gamma: bool
    epsilon: float

    def rows(self, x) -> int:
        return x.ndim - 1

    def forward(self, x, params, output=None):
        return layernorm.forward(x, *params, *self, z=True if output is None else output)

    def backward(self, dz, x, params, saved):
        dx, dgamma, dbeta = layernorm.backward(dz, x, *params, saved, self.norm_type, self.zero_centered_gamma)
        return dx, (dgamma, dbeta)


class Activation(NamedTuple):
    names: Tuple[str, ...]
    params: Tuple[Tuple[str, float], ...]

    def rows(self, x) -> int:
        return x.ndim - len(self.names)

    def forward(self, x, params, output=None):
        return activation.forward(x, self.names, self.params, output), ()

    def backward(self, dz, x, params, saved):
        return activation.backward(dz, x, self.names, self.params), ()


def _gemm(a, b, trans_a: bool, trans_b: bool, shape, dtype, spread: Spread, split: bool = False, bias: Optional[jax.Array] = None) -> jax.Array:
    return ops.run("generic_gemm", spread, a=a, b=b, d=jax.ShapeDtypeStruct(shape, dtype), bias=bias, trans_a=trans_a, trans_b=trans_b,
                   use_split_accumulator=split)


def _input(x, prologue, params, quantizers):
    """Returns (the GEMM's input, the values that the prologue's backward reads)."""
    quantizer = quantizers.x
    if prologue is not None and quantizer is not None and not quantizer.cut:
        return prologue.forward(x, params, quantizer.output(spread=(prologue.rows(x), 1)))
    z, saved = (x, ()) if prologue is None else prologue.forward(x, params)
    return (z if quantizer is None else quantizer.quantize(z, spread=(z.ndim - 1, 1))), saved


def _laid_out(z, axes):
    """Shards the GEMM's input along the logical axes; if the input is quantised, devices exchange its FP8 codes."""
    if not axes:
        return z
    if not isinstance(z, Quantized):
        return with_sharding_constraint_by_logical_axes(z, axes)
    across = axes if z.scaling == "mxfp8" else (axes[-1], *axes[:-1])
    return dataclasses.replace(z, data=with_sharding_constraint_by_logical_axes(z.data, axes),
                               columnwise_data=with_sharding_constraint_by_logical_axes(z.columnwise_data, across))


def _named(quantised: Quantized, name: Optional[str]) -> Quantized:
    return quantised if name is None else jax.tree.map(lambda array: checkpoint_name(array, name), quantised)


def _add(y, bias):
    return y if bias is None else y + bias


def product(x, kernel, bias, params, quantizers: QuantizerSet, prologue: Any, input_axes: Optional[Tuple[Optional[str], ...]] = None):
    """x [.., K'] (before a gated activation [.., 2, K]), kernel [K, N] or [K, n, N], bias [N] or [n, N] or None, params: the prologue's arrays. The
    result, [.., N] or [.., n, N], has x's dtype. input_axes: logical axes of the product's input [.., K].
    """
    x, kernel, bias, params = align((x, kernel, bias, params))
    return _product(x, kernel, bias, params, quantizers.read(), prologue, None if input_axes is None else tuple(input_axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _product(x, kernel, bias, params, quantizers: QuantizerSet, prologue: Any, axes: Any):
    return _forward(x, kernel, bias, params, quantizers, prologue, axes)[0]


def _forward(x, kernel, bias, params, quantizers, prologue, axes):
    layout = Layout.of((x, kernel, bias, params, quantizers))
    z, saved = _input(x, prologue, params, quantizers)
    z = _laid_out(z, axes)
    # The results of a GEMM sharded along K are summed over devices, so the bias is added once, after the sum.
    inside, after = (None, bias) if _partition.may_cut_programs() else (bias, None)
    rows, columns = z.shape[:-1], kernel.ndim - 1
    shape, like_kernel = (*rows, *kernel.shape[1:]), (1, columns)
    spread = {"a": (len(rows), 1), "b": like_kernel, "d": (len(rows), columns), "bias": (0, columns)}
    if not quantizers.active:
        y = _gemm(z, kernel, False, False, shape, x.dtype, spread, bias=inside)
        return _add(y, after), (x, z, kernel, bias, params, saved, quantizers, None, layout)
    z, k = (_named(made, quantizers.checkpoint_name) for made in (z, quantizers.kernel.quantize(kernel, spread=like_kernel)))
    y = _gemm(z.only(columnwise=False), k.only(columnwise=True), False, False, shape, x.dtype, spread, quantizers.split_accumulator[0], inside)
    kept_x = x if prologue is not None else jnp.zeros((0,), x.dtype)
    kept_kernel = jnp.zeros((0,), kernel.dtype)
    return _add(y, after), (kept_x, z.only(columnwise=True), (k.only(columnwise=False), kept_kernel), bias, params, saved, quantizers, (z.amax, k.amax),
                            layout)


def _backward(prologue, axes, kept, dy):
    x, z, kernel, bias, params, saved, quantizers, amaxes, layout = kept
    split = quantizers.split_accumulator
    columns = len((kernel[0] if quantizers.active else kernel).shape) - 1
    rows = dy.ndim - columns
    dbias = None if bias is None else jnp.sum(dy, axis=tuple(range(rows)), dtype=jnp.float32).astype(bias.dtype)
    like_dy, like_kernel = (rows, columns), (1, columns)
    if quantizers.active:
        codes, empty = kernel
        grad = quantizers.dgrad.quantize(dy, spread=like_dy)
        across, down = grad.only(columnwise=False), grad.only(columnwise=True)
        kernel, kernel_dtype = codes, empty.dtype
        after = dataclasses.replace(quantizers, x=quantizers.x.after(amaxes[0]), kernel=quantizers.kernel.after(amaxes[1]),
                                    dgrad=quantizers.dgrad.after(grad.amax))
    else:
        across = down = dy
        kernel_dtype, after = kernel.dtype, quantizers
    width = kernel.shape[0]
    dz = _gemm(across, kernel, False, True, (*dy.shape[:rows], width), x.dtype, {"a": like_dy, "b": like_kernel, "d": (rows, 1)}, split[1])
    dkernel = _gemm(z, down, True, False, (width, *dy.shape[rows:]), kernel_dtype, {"a": (rows, 1), "b": like_dy, "d": like_kernel}, split[2])
    if axes and not isinstance(prologue, Norm):  # if the prologue is a norm, dz is better left sharded over the sequence
        dz = with_sharding_constraint_by_logical_axes(dz, axes)
    if prologue is None:
        return layout.put((dz, dkernel, dbias, params, after))
    dx, dparams = prologue.backward(dz, x, params, saved)
    return layout.put((dx, dkernel, dbias, dparams, after))


_product.defvjp(_forward, _backward)
