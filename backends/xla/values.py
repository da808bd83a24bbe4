"""FP32 values, scales and FP8 codes by XLA's operations, as docs/numerics.md defines them.

Exact results do not depend on how a platform divides, flushes denormals or converts to FP8: they are computed with 32-bit integers.
"""

from __future__ import annotations

import math
from typing import Any, Optional, Tuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

FLT_MAX = float(np.finfo(np.float32).max)
_MAGNITUDE, _INFINITE = 0x7FFFFFFF, 0x7F800000
# Mantissa bits and exponent bias of the FP8 types.
_FORMATS = {jnp.dtype(jnp.float8_e4m3fn): (3, 7), jnp.dtype(jnp.float8_e5m2): (2, 15)}


def largest_of(dtype: Any) -> float:
    return float(jnp.finfo(dtype).max)


def bits_of(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def from_bits(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits.astype(jnp.uint32), jnp.float32)


def codes_as_bytes(codes: jax.Array) -> jax.Array:
    return codes if codes.dtype == jnp.uint8 else lax.bitcast_convert_type(codes, jnp.uint8)


def matrix(x: jax.Array) -> jax.Array:
    """The array as a matrix of rows of its last dimension."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) if x.ndim else x.reshape(1, 1)


def amax_of(x: jax.Array, axis: Optional[Tuple[int, ...]] = None) -> jax.Array:
    """The largest absolute value, without NaN; 0 if there are no values."""
    bits = bits_of(x) & _MAGNITUDE
    return from_bits(jnp.max(jnp.where(bits > _INFINITE, 0, bits), axis=axis, initial=0))


def quotient(numerator: float, x: jax.Array) -> jax.Array:
    """numerator / x, rounded once to the nearest even FP32 number. Both are positive, and x is finite."""
    mantissa, exponent = math.frexp(numerator)
    n = int(mantissa * 2**24)  # numerator is n * 2^(exponent - 24)
    bits = bits_of(x).astype(jnp.int32)
    subnormal = bits < 1 << 23
    shift = jnp.where(subnormal, lax.clz(bits) - 8, 0)
    m = jnp.where(subnormal, bits << shift, (bits & 0x7FFFFF) | 1 << 23)
    power = jnp.where(subnormal, 1 - shift, bits >> 23)  # x is m * 2^(power - 150)
    small = n < m
    # The division of floats may be wrong in its last bits. The exact remainder, which fits in 32 bits, corrects it.
    q = (jnp.float32(n) / m.astype(jnp.float32) * jnp.where(small, np.float32(2**24), np.float32(2**23))).astype(jnp.int32)
    low = jnp.where(small, np.uint32((n << 24) & 0xFFFFFFFF), np.uint32((n << 23) & 0xFFFFFFFF))
    rest = lax.bitcast_convert_type(low - m.astype(jnp.uint32) * q.astype(jnp.uint32), jnp.int32)
    for _ in range(4):
        step = jnp.where(rest < 0, -1, jnp.where(rest >= m, 1, 0))
        q, rest = q + step, rest - step * m
    place = exponent - 24 - power + 150 - jnp.where(small, 24, 23) + 150  # the biased exponent of q * 2^(place - 150)
    rounded = q + ((2 * rest > m) | ((2 * rest == m) & (q & 1 == 1)))
    normal = ((place - 1) << 23) + rounded
    cut = jnp.clip(1 - place, 1, 25)  # a subnormal result loses this many bits
    kept, half = q >> cut, 1 << (cut - 1)
    lost = q & ((1 << cut) - 1)
    tiny = kept + ((lost > half) | ((lost == half) & ((rest > 0) | (kept & 1 == 1))))
    return from_bits(jnp.where(place < 1, tiny, jnp.where(place > 254, _INFINITE, jnp.minimum(normal, _INFINITE))))


def scale_from_amax(amax: jax.Array, largest: float, epsilon: float, pow2: bool, infinite: float) -> jax.Array:
    """docs/numerics.md, Scale from amax. infinite: the value that takes the place of an infinite scale."""
    bits = jnp.maximum(bits_of(amax), np.float32(epsilon).view(np.uint32))
    scale = bits_of(quotient(largest, from_bits(bits)))
    scale = jnp.where(scale == _INFINITE, np.float32(infinite).view(np.uint32), scale)
    scale = jnp.where((bits == 0) | (bits >= _INFINITE), np.float32(1).view(np.uint32), scale)
    return from_bits(scale & _INFINITE if pow2 else scale)


def _lowered(x: jax.Array, power: int) -> jax.Array:
    """x / 2^power for x of at least 0, 0 if that is denormal."""
    bits = bits_of(x)
    return from_bits(jnp.where(bits >> 23 > power, bits - (power << 23), 0))


def product(x: jax.Array, scale: jax.Array, platform: str) -> jax.Array:
    """x * scale, exact to one rounding also for a denormal x unless the product itself is denormal. XLA's programs for hosts and TPUs take denormals for 0."""
    if platform in ("cuda", "rocm"):
        return x * scale
    bits = bits_of(x)
    size = bits & _MAGNITUDE
    # x is size * 2^-149. The factors are normal numbers; XLA would join constant powers of two to one that is denormal, so they are added to exponents.
    tiny = _lowered(size.astype(jnp.float32), 75) * _lowered(scale, 74)
    return jnp.where(size < 1 << 23, jnp.where(bits >> 31 != 0, -tiny, tiny), x * scale)


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """FP8 codes of FP32 values, uint8: rounded to nearest even, saturated; NaN becomes 0x7F."""
    digits, bias = _FORMATS[jnp.dtype(dtype)]
    bits = bits_of(x)
    size, shift = bits & _MAGNITUDE, 23 - digits
    normal = ((size + ((1 << (shift - 1)) - 1) + ((size >> shift) & 1)) >> shift) - ((127 - bias) << digits)
    # Below the smallest normal number, the sum with 2^23 units of the last place has the code as its lowest bits.
    magic = np.float32(2.0 ** (23 + 1 - bias - digits))
    tiny = bits_of(from_bits(size) + magic) - magic.view(np.uint32)
    code = jnp.where(size < (128 - bias) << 23, tiny, normal)
    largest = np.asarray(largest_of(dtype), dtype).view(np.uint8)
    code = jnp.minimum(code, np.uint32(largest)) | ((bits >> 24) & 0x80)
    return jnp.where(size > _INFINITE, np.uint32(0x7F), code).astype(jnp.uint8)


def mx_code(amax: jax.Array, largest: float, epsilon: float) -> jax.Array:
    """The E8M0 code of a block with this amax: amax / largest, rounded up to a power of two."""
    _, exponent = math.frexp(largest)  # 1.75 * 2^(exponent - 1), for both FP8 types
    bits = jnp.maximum(bits_of(amax), np.float32(epsilon).view(np.uint32)).astype(jnp.int32)
    code = (bits >> 23) - (exponent - 1) + ((bits & 0x7FFFFF) > 0x600000)
    return jnp.where(bits >= _INFINITE, 0xFE, jnp.maximum(code, 0)).astype(jnp.uint8)


def mx_factor(code: jax.Array) -> jax.Array:
    """The factor of an E8M0 code."""
    code = code.astype(jnp.uint32)
    return from_bits(jnp.where(code == 0, 0x00400000, jnp.where(code == 255, 0x7FC00000, code << 23)))
