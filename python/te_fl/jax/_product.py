"""y = prologue(x) kernel + bias with its gradient: what dense, layernorm_dense and layernorm_mlp share.

The prologue (a norm, an activation, or nothing) belongs to the product because under FP8 it writes the codes that the product reads. What is
kept for the backward is what the backward reads: of an FP8 product the column-wise codes of its input and the row-wise ones of its kernel.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Optional, Tuple

import jax
import jax.numpy as jnp

from te_fl.jax import _partition, activation, layernorm, ops
from te_fl.jax._partition import Layout
from te_fl.jax._varying import align
from te_fl.jax.quantize import QuantizerSet


class Norm(NamedTuple):
    norm_type: str
    zero_centered_gamma: bool
    epsilon: float

    def forward(self, x, params, output=None):
        return layernorm.forward(x, *params, *self, z=True if output is None else output)

    def backward(self, dz, x, params, saved):
        dx, dgamma, dbeta = layernorm.backward(dz, x, *params, saved, self.norm_type, self.zero_centered_gamma)
        return dx, (dgamma, dbeta)


class Activation(NamedTuple):
    names: Tuple[str, ...]
    params: Tuple[Tuple[str, float], ...]

    def forward(self, x, params, output=None):
        return activation.forward(x, self.names, self.params, output), ()

    def backward(self, dz, x, params, saved):
        return activation.backward(dz, x, self.names, self.params), ()


def _gemm(a, b, trans_a: bool, trans_b: bool, shape, dtype, packed: str, split: bool = False, bias: Optional[jax.Array] = None) -> jax.Array:
    return ops.run("generic_gemm", frozenset(packed.split()), a=a, b=b, d=jax.ShapeDtypeStruct(shape, dtype), bias=bias, trans_a=trans_a, trans_b=trans_b,
                            use_split_accumulator=split)


def _input(x, prologue, params, quantizers):
    """The input of the product, its amax if it is quantised, and the values that the prologue's backward reads."""
    quantizer = quantizers.x
    if prologue is None:
        return (x, None, ()) if quantizer is None else _with_amax(quantizer.quantize(x), ())
    if quantizer is None or quantizer.cut:
        z, saved = prologue.forward(x, params)
        return (z, None, saved) if quantizer is None else _with_amax(quantizer.quantize(z), saved)
    return _with_amax(*prologue.forward(x, params, quantizer.output()))


def _add(y, bias):
    return y if bias is None else y + bias


def _with_amax(quantised, saved):
    return quantised, quantised.amax, saved


def product(x, kernel, bias, params, quantizers: QuantizerSet, prologue: Any):
    """x [M, K'] (before a gated activation [M, 2, K]), kernel [K, N] or [K, n, N], bias [N] or [n, N] or None, params: the prologue's
    arrays. The result, [M, N] or [M, n, N], has x's dtype."""
    x, kernel, bias, params = align((x, kernel, bias, params))
    return _product(x, kernel, bias, params, quantizers, prologue)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _product(x, kernel, bias, params, quantizers: QuantizerSet, prologue: Any):
    return _forward(x, kernel, bias, params, quantizers, prologue)[0]


def _forward(x, kernel, bias, params, quantizers, prologue):
    layout = Layout.of((x, kernel, bias, params, quantizers))
    z, x_amax, saved = _input(x, prologue, params, quantizers)
    # A product that is cut along K is a sum over devices, to which the bias belongs once.
    inside, after = (None, bias) if _partition.may_cut_programs() else (bias, None)
    shape, packed = (x.shape[0], *kernel.shape[1:]), kernel.ndim == 3
    names = "b d bias" if packed else ""
    if not quantizers.active:
        y = _gemm(z, kernel, False, False, shape, x.dtype, names, bias=inside)
        return _add(y, after), (x, z, kernel, bias, params, saved, quantizers, None, layout)
    k = quantizers.kernel.quantize(kernel, packed=packed)
    y = _gemm(z.only(columnwise=False), k.only(columnwise=True), False, False, shape, x.dtype, names, quantizers.split_accumulator[0], inside)
    kept_x = x if prologue is not None else jnp.zeros((0,), x.dtype)
    kept_kernel = jnp.zeros((0,), kernel.dtype)
    return _add(y, after), (kept_x, z.only(columnwise=True), (k.only(columnwise=False), kept_kernel), bias, params, saved, quantizers, (x_amax, k.amax),
                            layout)


def _backward(prologue, kept, dy):
    x, z, kernel, bias, params, saved, quantizers, amaxes, layout = kept
    split = quantizers.split_accumulator
    dbias = None if bias is None else jnp.sum(dy, axis=0, dtype=jnp.float32).astype(bias.dtype)
    rows, width, packed = dy.shape[0], z.shape[1], dy.ndim == 3
    if quantizers.active:
        codes, like_kernel = kernel
        grad = quantizers.dgrad.quantize(dy, packed=packed)
        across, down = grad.only(columnwise=False), grad.only(columnwise=True)
        kernel, kernel_dtype = codes, like_kernel.dtype
        after = QuantizerSet(quantizers.x.after(amaxes[0]), quantizers.kernel.after(amaxes[1]), quantizers.dgrad.after(grad.amax), split)
    else:
        across = down = dy
        kernel_dtype, after = kernel.dtype, quantizers
    dz = _gemm(across, kernel, False, True, (rows, width), x.dtype, "a b" if packed else "", split[1])
    dkernel = _gemm(z, down, True, False, (width, *dy.shape[1:]), kernel_dtype, "b d" if packed else "", split[2])
    if prologue is None:
        return layout.put((dz, dkernel, dbias, params, after))
    dx, dparams = prologue.backward(dz, x, params, saved)
    return layout.put((dx, dkernel, dbias, dparams, after))


_product.defvjp(_forward, _backward)
