"""Philox 4x32-10 with 32-bit integers, and dropout with it."""

from __future__ import annotations

from typing import List, Tuple

import jax
import jax.numpy as jnp
import numpy as np

from te_fl.reference_xla.call import TracedCall

_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


def _product(x: jax.Array, factor: int) -> Tuple[jax.Array, jax.Array]:
    """The high and the low word of x * factor, by halves of words."""
    first, second = factor & 0xFFFF, factor >> 16
    low, high = x & 0xFFFF, x >> 16
    middle = high * first + ((low * first) >> 16)
    cross = low * second + (middle & 0xFFFF)
    return high * second + (middle >> 16) + (cross >> 16), x * np.uint32(factor)


def philox(seed: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """The four words of each 64-bit counter, [.., 4]. seed: uint32 [2]."""
    words: List[jax.Array] = [low, high, jnp.zeros_like(low), jnp.zeros_like(low)]
    for turn in range(10):
        (high0, low0), (high1, low1) = _product(words[0], _MULTIPLIERS[0]), _product(words[2], _MULTIPLIERS[1])
        k0, k1 = (seed[i] + np.uint32(turn * weyl & 0xFFFFFFFF) for i, weyl in enumerate(_WEYL))
        words = [high1 ^ words[1] ^ k0, low1, high0 ^ words[3] ^ k1, low0]
    return jnp.stack(words, -1)


def kept(count: int, p: float, rng: jax.Array) -> jax.Array:
    """For each of `count` elements, whether dropout with probability p keeps it. rng: uint32 [4], the seed and the offset."""
    steps = jnp.arange((count + 3) // 4, dtype=jnp.uint32)
    low = rng[2] + steps
    words = philox(rng[:2], low, jnp.broadcast_to(rng[3], low.shape) + (low < steps))
    # p as FP32 times 2^32, rounded up: a word is kept if it is at least that.
    return words.reshape(-1)[:count] >= np.uint32(-int(-float(np.float32(p)) * 2.0**32 // 1))


def dropped(x: jax.Array, keeps: jax.Array, p: float) -> jax.Array:
    return jnp.where(keeps.reshape(x.shape), x / (1 - p), 0.0)


def dropout_fwd(c: TracedCall) -> None:
    x = c.values("input")
    keeps = kept(x.size, c.p, c.arrays["rng"])
    eight = jnp.pad(keeps.astype(jnp.uint8), (0, -x.size % 8)).reshape(-1, 8)
    c.put("mask", (eight << jnp.arange(8, dtype=jnp.uint8)).sum(-1, dtype=jnp.uint8))
    c.put("output", dropped(x, keeps, c.p))


def dropout_bwd(c: TracedCall) -> None:
    dy, mask = c.values("grad_output"), c.arrays["mask"]
    keeps = ((mask[:, None] >> jnp.arange(8, dtype=jnp.uint8)) & 1).reshape(-1)[:dy.size] != 0
    c.put("grad_input", dropped(dy, keeps, c.p))


OPS = {"dropout_fwd": dropout_fwd, "dropout_bwd": dropout_bwd}
