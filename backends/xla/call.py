"""A call of an op that is traced into an XLA program: its arrays, its scalars, and what it writes."""

from __future__ import annotations

import functools
from typing import Any, Dict, Mapping, Optional, Tuple

import jax
import jax.numpy as jnp
from jax import lax

from te_fl import _native
from te_fl.reference_xla.values import (FLT_MAX, amax_of, bits_of, cast, codes_as_bytes, from_bits, largest_of, matrix, mx_code, mx_factor, product, quotient,
                                        scale_from_amax)

SCALINGS = ("none", "tensor", "block_1x128", "block_128x128", "mxfp8")
# Extents of a block, by scaling mode. The column-wise copy is laid out as the row-wise copy of the transposed matrix, in MXFP8 with blocks of 32 rows.
_BLOCKS = {"block_1x128": (1, 128), "block_128x128": (128, 128), "mxfp8": (1, 32)}


@functools.cache
def _defaults(op: str) -> Dict[str, Any]:
    return {arg["name"]: arg["enum"][arg["default"]] if arg["enum"] and arg["default"] is not None else arg["default"]
            for arg in _native.schema(op)["args"]}


def _padded(x: jax.Array, high: int, wide: int) -> jax.Array:
    return jnp.pad(x, ((0, -x.shape[0] % high), (0, -x.shape[1] % wide)))


def _expanded(factors: jax.Array, scaling: str, rows: int, columns: int) -> jax.Array:
    """The factor of each element of a matrix, from scale_inv in the row-wise layout."""
    high, wide = _BLOCKS[scaling]
    factors = factors.T if scaling == "block_1x128" else factors
    return jnp.repeat(jnp.repeat(factors, high, 0)[:rows], wide, 1)[:, :columns]


class TracedCall:
    """arrays: the operands by their names in the call's text. wanted: shapes and dtypes of the results, by name. settings: as in the call's text."""

    def __init__(self, op: str, arrays: Mapping[str, jax.Array], wanted: Mapping[str, Any], settings: Mapping[str, Any], platform: str):
        self.op, self.arrays, self.wanted, self.settings, self.platform = op, arrays, wanted, settings, platform
        self.results: Dict[str, jax.Array] = {}

    def __getattr__(self, name: str) -> Any:
        """A scalar argument."""
        return self.settings.get(name, _defaults(self.op)[name])

    def has(self, name: str) -> bool:
        return name in self.arrays or f"{name}.columnwise_data" in self.arrays

    def scaling(self, name: str) -> str:
        return self.settings.get(f"{name}.scaling", "none")

    def shape(self, name: str) -> Tuple[int, ...]:
        if name in self.arrays:
            return self.arrays[name].shape
        shape = self.arrays[f"{name}.columnwise_data"].shape
        return shape if self.scaling(name) == "mxfp8" else shape[::-1]

    def dtype(self, name: str) -> Any:
        return self.arrays[name if name in self.arrays else f"{name}.columnwise_data"].dtype

    def values(self, name: str, columnwise: Optional[bool] = None) -> jax.Array:
        """The argument in FP32. columnwise: the copy to read if the argument has both; None: the row-wise one."""
        scaling = self.scaling(name)
        if scaling == "none":
            return self.arrays[name].astype(jnp.float32)
        across = f"{name}.columnwise_data"
        columnwise = across in self.arrays and (bool(columnwise) or name not in self.arrays)
        codes = self.arrays[across if columnwise else name]
        turned = columnwise and scaling != "mxfp8"
        if scaling == "tensor":
            x = codes.astype(jnp.float32) * self.arrays[f"{name}.scale_inv"]
        else:
            factors = self.arrays[f"{name}.columnwise_scale_inv" if columnwise else f"{name}.scale_inv"]
            x = matrix(codes).astype(jnp.float32)
            if scaling == "mxfp8":
                factors = mx_factor(codes_as_bytes(factors))
                expanded = _expanded(factors.T, scaling, *x.shape[::-1]).T if columnwise else _expanded(factors, scaling, *x.shape)
            else:
                expanded = _expanded(factors, scaling, *x.shape)
            x = (x * expanded).reshape(codes.shape)
        return x.T if turned else x

    def put(self, name: str, x: jax.Array) -> None:
        """Writes FP32 values to the output `name`, if the call has it."""
        scaling = self.scaling(name)
        if scaling == "none":
            if name in self.wanted:
                wanted = self.wanted[name]
                self.results[name] = x.astype(wanted.dtype).reshape(wanted.shape)
        elif scaling == "tensor":
            self._put_tensor(name, x)
        else:
            self._put_blocks(name, x, scaling)

    def _write(self, name: str, x: jax.Array) -> None:
        """Writes bytes of codes, or numbers, to a part of an output, if the call has it."""
        if name in self.wanted:
            wanted = self.wanted[name]
            x = lax.bitcast_convert_type(x, wanted.dtype) if x.dtype == jnp.uint8 else x
            self.results[name] = x.reshape(wanted.shape)

    def _code_dtype(self, name: str) -> Any:
        return self.wanted[name if name in self.wanted else f"{name}.columnwise_data"].dtype

    def _settings_of(self, name: str) -> Tuple[float, bool]:
        return self.settings.get(f"{name}.amax_epsilon", 0.0), bool(self.settings.get(f"{name}.pow2_scale", False))

    def _put_tensor(self, name: str, x: jax.Array) -> None:
        dtype, amax = self._code_dtype(name), amax_of(x)
        if self.settings.get(f"{name}.compute_scale"):
            epsilon, pow2 = self._settings_of(name)
            scale = scale_from_amax(amax, largest_of(dtype), epsilon, pow2, FLT_MAX)
            self._write(f"{name}.scale", scale)
        else:
            scale = self.arrays[f"{name}.scale"].reshape(())
            if f"{name}.amax" in self.arrays:
                amax = from_bits(jnp.maximum(bits_of(self.arrays[f"{name}.amax"].reshape(())), bits_of(amax)))
        codes = cast(product(x, scale, self.platform), dtype)
        self._write(name, codes)
        self._write(f"{name}.columnwise_data", matrix(codes).T)
        self._write(f"{name}.amax", amax)
        for part in ("scale_inv", "columnwise_scale_inv"):
            self._write(f"{name}.{part}", quotient(1.0, scale))

    def _put_blocks(self, name: str, x: jax.Array, scaling: str) -> None:
        x = matrix(x)
        self._write(f"{name}.amax", amax_of(x))
        for data, part, values in ((name, "scale_inv", x), (f"{name}.columnwise_data", "columnwise_scale_inv", x.T)):
            if data not in self.wanted:
                continue
            codes, factors = self._block_codes(name, values, scaling, self.wanted[data].dtype)
            turned = scaling == "mxfp8" and data != name
            self._write(data, codes.T if turned else codes)
            factors = factors.T if scaling == "block_1x128" or turned else factors
            extents = self.wanted[f"{name}.{part}"].shape
            self._write(f"{name}.{part}", jnp.pad(factors, [(0, extent - found) for extent, found in zip(extents, factors.shape)]))

    def _block_codes(self, name: str, x: jax.Array, scaling: str, dtype: Any) -> Tuple[jax.Array, jax.Array]:
        """Codes of a matrix and scale_inv [blocks of rows, blocks of columns]."""
        high, wide = _BLOCKS[scaling]
        padded = _padded(x, high, wide)
        blocks = padded.reshape(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
        amax, (epsilon, pow2) = amax_of(blocks, (1, 3)), self._settings_of(name)
        if scaling == "mxfp8":
            inverse = mx_code(amax, largest_of(dtype), epsilon)
            scale = mx_factor(254 - inverse)
        else:
            # The input's largest value takes the place of an infinite scale.
            scale = scale_from_amax(amax, largest_of(dtype), epsilon, pow2, largest_of(self._input_dtype()))
            inverse = quotient(1.0, scale)
        codes = cast(product(blocks, scale[:, None, :, None], self.platform), dtype)
        return codes.reshape(padded.shape)[:x.shape[0], :x.shape[1]], inverse

    def _input_dtype(self) -> Any:
        """The dtype of the values that are quantised."""
        first = next(iter(self.arrays))
        dtype = self.dtype(first.partition(".")[0])
        return dtype if jnp.finfo(dtype).bits >= 16 else jnp.float32
