"""Scaled dot-product attention of dense layouts, without FP8. The scores are one matrix in FP32.

The gradient computes scores and probabilities by the operations of the forward, so that XLA keeps those of the forward if both are in one program.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, Optional, Tuple, Union

import jax
import jax.numpy as jnp

from te_fl import attention_shapes
from te_fl.reference_xla.call import TracedCall
from te_fl.reference_xla.gemm import dot
from te_fl.reference_xla.random import dropped, kept
from te_fl.tensors import Quantized


class _Problem:
    """q [B, Sq, G, R, D] for R queries of each key head, without R if that is 1; k and v [B, Sk, G, D]; scores are [B, H, Sq, Sk]."""

    def __init__(self, c: TracedCall):
        self.c, self.sbhd = c, c.layout == "sbhd"
        self.k, self.v = self.batched("k"), self.batched("v")
        q = self.batched("q")
        batch, rows, heads, size = q.shape
        self.groups, self.keys = self.k.shape[2], self.k.shape[1]
        self.shared = heads != self.groups
        self.q = q.reshape(batch, rows, self.groups, heads // self.groups, size) if self.shared else q
        self.extents = (batch, heads, rows, self.keys)
        self.hidden, self.relative = self._masked()
        self.keeps = kept(batch * heads * rows * self.keys, c.dropout_p, c.arrays["rng"]).reshape(self.extents) if c.dropout_p else None

    def batched(self, name: str) -> jax.Array:
        """The argument as [B, S, heads, size], in its dtype."""
        x = self.c.arrays[name]
        return x.swapaxes(0, 1) if self.sbhd else x

    def dot(self, spec: str, x: jax.Array, y: jax.Array, result: Any = jnp.float32) -> jax.Array:
        """gemm.dot(), whose spec names the extents b, s, t (keys), g, r and d."""
        return dot(self.c, spec if self.shared else spec.replace("r", ""), x, y, result)

    def put(self, name: str, x: jax.Array) -> None:
        """Writes [B, S, heads.., size]."""
        x = x.reshape(*x.shape[:2], math.prod(x.shape[2:-1]), x.shape[-1])
        self.c.put(name, x.swapaxes(0, 1) if self.sbhd else x)

    def _masked(self) -> Tuple[jax.Array, jax.Array]:
        """Where a query does not see a key, [1 or B, 1 or H, Sq, Sk], and the key's position relative to the query's with the ends aligned."""
        c, (_, _, rows, keys) = self.c, self.extents
        i, j = jnp.arange(rows, dtype=jnp.int32)[:, None], jnp.arange(keys, dtype=jnp.int32)[None]
        rows_length, keys_length = (jnp.diff(c.arrays[name])[:, None, None, None] if name in c.arrays else extent
                                    for name, extent in (("cu_seqlens_q", rows), ("cu_seqlens_kv", keys)))
        shift = keys_length - rows_length
        hidden = jnp.zeros((1, 1, rows, keys), bool)
        if "cu_seqlens_q" in c.arrays or "cu_seqlens_kv" in c.arrays:
            hidden = (i >= rows_length) | (j >= keys_length)
        diagonal = i if c.mask_type in ("causal", "padding_causal") else i + shift
        right = 0 if "causal" in c.mask_type and c.window_right != 0 else c.window_right
        if right >= 0:
            hidden = hidden | (j > diagonal + right)
        if c.window_left >= 0:
            hidden = hidden | (j < diagonal - c.window_left)
        if "attn_mask" in c.arrays:
            hidden = hidden | (c.arrays["attn_mask"] != 0)
        return hidden, j - i - shift

    def scores(self) -> Tuple[jax.Array, Union[float, jax.Array]]:
        """Returns the scores, -inf where hidden, and their derivative by scale * Q K^T."""
        c = self.c
        x, slope = self.dot("bsgrd,btgd->bgrst", self.q, self.k).reshape(self.extents) * c.scale, 1.0
        if c.softcap > 0:
            part = jnp.tanh(x / c.softcap)
            x, slope = c.softcap * part, 1 - part * part
        if c.has("bias"):
            x = x + c.values("bias")
        if c.has("alibi_slopes"):
            slopes = c.arrays["alibi_slopes"]
            x = x + (slopes if slopes.ndim == 2 else slopes[None])[:, :, None, None] * self.relative.astype(jnp.float32)
        return jnp.where(self.hidden, -jnp.inf, x), slope

    def sinks(self) -> Optional[jax.Array]:
        """The logit of the sink of each head, [H, 1]."""
        kind = self.c.softmax_type
        return None if kind == "vanilla" else jnp.zeros((self.extents[1], 1)) if kind == "off_by_one" else self.c.arrays["softmax_sink"][:, None]

    def narrow(self, x: jax.Array) -> jax.Array:
        """Probabilities or their gradients [B, H, Sq, Sk] as an operand [B, G, R, Sq, Sk] of a product, in the dtype of the other operand."""
        batch, heads, rows, keys = self.extents
        x = x.astype(self.q.dtype if self.c.platform != "cpu" else jnp.float32)
        return x.reshape(batch, self.groups, heads // self.groups, rows, keys) if self.shared else x

    def dropped(self, x: jax.Array) -> jax.Array:
        return x if self.keeps is None else dropped(x, self.keeps, self.c.dropout_p)


def _weights(scores: jax.Array, lse: jax.Array) -> jax.Array:
    return jnp.exp(scores - jnp.where(lse == -jnp.inf, 0.0, lse)[..., None])


def fused_attn_fwd(c: TracedCall) -> None:
    p = _Problem(c)
    scores, _ = p.scores()
    most = scores.max(-1, initial=-jnp.inf)
    empty = most == -jnp.inf
    total = jnp.exp(scores - jnp.where(empty, 0.0, most)[..., None]).sum(-1)
    lse = jnp.where(empty, -jnp.inf, most + jnp.log(total))
    sinks = p.sinks()
    if sinks is not None:
        lse = jnp.where(empty, lse, jnp.logaddexp(lse, sinks))
    p.put("o", p.dot("bgrst,btgd->bsgrd", p.narrow(p.dropped(_weights(scores, lse))), p.v, p.q.dtype))
    c.put("softmax_lse", lse)


def fused_attn_bwd(c: TracedCall) -> None:
    p, lse = _Problem(c), c.arrays["softmax_lse"]
    empty = lse == -jnp.inf
    scores, slope = p.scores()
    weights = _weights(scores, lse)
    dout = p.batched("d_o")
    delta = (dout.astype(jnp.float32) * p.batched("o").astype(jnp.float32)).sum(-1).swapaxes(1, 2)  # [B, H, Sq]
    delta = jnp.where(empty, 0.0, delta)
    dout = dout.reshape(*p.q.shape[:-1], p.v.shape[-1])
    dp = p.dropped(p.dot("bsgrd,btgd->bgrst", dout, p.v).reshape(p.extents))
    ds = weights * (dp - delta[..., None])
    dx = p.narrow(ds * slope * c.scale)
    p.put("dq", p.dot("bgrst,btgd->bsgrd", dx, p.k, p.q.dtype))
    p.put("dk", p.dot("bgrst,bsgrd->btgd", dx, p.q, p.q.dtype))
    p.put("dv", p.dot("bgrst,bsgrd->btgd", p.narrow(p.dropped(weights)), dout, p.q.dtype))
    if "dbias" in c.wanted:
        shape = c.shape("bias")
        c.put("dbias", ds.sum(tuple(d for d in (0, 1) if shape[d] == 1 and ds.shape[d] != 1), keepdims=True))
    sinks = p.sinks()
    if "dsink" in c.wanted and sinks is not None:
        share = jnp.where(empty, 0.0, jnp.exp(sinks - jnp.where(empty, 0.0, lse)))
        c.put("dsink", -(share * delta).sum((0, 2)))


_SHAPED = tuple(inspect.signature(attention_shapes.fit).parameters)


def supports(q: Any, k: Any, v: Any, layout: str, s_quant: Any, **others: Any) -> Union[bool, str]:
    if layout == "thd":
        return "thd is not implemented"
    if s_quant is not None or any(isinstance(t, Quantized) or t.dtype.startswith("f8") for t in (q, k, v)):
        return "FP8 attention is not implemented"
    if not q.dtype == k.dtype == v.dtype:
        return "q, k and v of several dtypes are not implemented"
    return attention_shapes.fit(q, k, v, layout, **{name: t for name, t in others.items() if name in _SHAPED})


OPS = {"fused_attn_fwd": fused_attn_fwd, "fused_attn_bwd": fused_attn_bwd}
