"""Quantised tensors as JAX pytrees of their parts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import jax
import jax.numpy as jnp

from te_fl.errors import InvalidArgument

_PARTS = ("columnwise_data", "scale_inv", "columnwise_scale_inv", "amax", "columnwise_amax", "scale")


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def scale_inv_shape(scaling: str, columnwise: bool, m: int, k: int) -> Tuple[int, ...]:
    """The shape of the scales of a matrix [m, k]; see the table at te_fl_quant in te_fl/plugin.h."""
    if scaling == "tensor":
        return (1,)
    if scaling == "block_1x128":
        return (_up(m, 128) // 128, _up(k, 4)) if columnwise else (_up(k, 128) // 128, _up(m, 4))
    if scaling == "block_128x128":
        rows, columns = (k, m) if columnwise else (m, k)
        return (_up(rows, 128) // 128, _up(_up(columns, 128) // 128, 4))
    if scaling == "mxfp8":
        return (_up(_up(m, 32) // 32, 4), _up(k, 128)) if columnwise else (_up(m, 128), _up(_up(k, 32) // 32, 4))
    raise InvalidArgument(f"scaling is {scaling!r}; te_fl.jax has 'tensor', 'block_1x128', 'block_128x128' and 'mxfp8'")


class BlockLayout(NamedTuple):
    """The layout of a block scale array: the order of its dimensions, and the numbers of rows and columns per scale."""

    columns_first: bool
    rows: int
    columns: int


def block_layout(scaling: str, columnwise: bool) -> Optional[BlockLayout]:
    """Returns the layout of the block scales in a scaling mode; None: one scale for the whole tensor."""
    return {
        "block_1x128": BlockLayout(False, 128, 1) if columnwise else BlockLayout(True, 1, 128),
        "block_128x128": BlockLayout(columnwise, 128, 128),
        "mxfp8": BlockLayout(False, 32, 1) if columnwise else BlockLayout(False, 1, 32),
    }.get(scaling)


def spread_scale_inv(scaling: str, columnwise: bool, rows: Tuple[int, ...], columns: Tuple[int, ...]) -> Tuple[int, ...]:
    """The shape of scale_inv for a tensor viewed as a matrix: the dimensions `rows` form its rows, the dimensions `columns` its columns. Without
    padding the scales keep these dimensions; with padding the shape is that of scale_inv_shape().
    """
    m, k = math.prod(rows), math.prod(columns)
    matrix, layout = scale_inv_shape(scaling, columnwise, m, k), block_layout(scaling, columnwise)
    if layout is None or rows[-1] % layout.rows or columns[-1] % layout.columns:
        return matrix
    parts = [(*rows[:-1], rows[-1] // layout.rows), (*columns[:-1], columns[-1] // layout.columns)]
    parts = parts[::-1] if layout.columns_first else parts
    return (*parts[0], *parts[1]) if tuple(math.prod(p) for p in parts) == matrix else matrix


def scale_dtype(scaling: str) -> Any:
    return jnp.float8_e8m0fnu if scaling == "mxfp8" else jnp.float32


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantised tensor by its parts. Without row-wise data, the shape is that of the matrix before transposition."""

    data: Optional[jax.Array] = None
    columnwise_data: Optional[jax.Array] = None
    scale_inv: Optional[jax.Array] = None
    columnwise_scale_inv: Optional[jax.Array] = None
    amax: Optional[jax.Array] = None
    columnwise_amax: Optional[jax.Array] = None
    scale: Optional[jax.Array] = None
    scaling: str = "tensor"

    def parts(self) -> List[Tuple[str, jax.Array]]:
        data = [] if self.data is None else [("", self.data)]
        return data + [(f".{part}", getattr(self, part)) for part in _PARTS if getattr(self, part) is not None]

    @property
    def shape(self) -> Tuple[int, ...]:
        if self.data is not None:
            return self.data.shape
        shape = self.columnwise_data.shape
        return shape if self.scaling == "mxfp8" else shape[::-1]

    @property
    def dtype(self) -> Any:
        return (self.data if self.data is not None else self.columnwise_data).dtype

    def only(self, columnwise: bool) -> "Quantized":
        """Returns a Quantized with only the column-wise data or only the row-wise data, and with its scales."""
        if columnwise:
            inv = self.scale_inv if self.scaling == "tensor" else None
            return Quantized(columnwise_data=self.columnwise_data, columnwise_scale_inv=self.columnwise_scale_inv, scale_inv=inv,
                             scaling=self.scaling)
        return Quantized(data=self.data, scale_inv=self.scale_inv, scaling=self.scaling)


jax.tree_util.register_dataclass(Quantized, data_fields=["data", *_PARTS], meta_fields=["scaling"])


@dataclasses.dataclass(frozen=True)
class QuantizedOutput:
    """Describes a quantised output.

    scaling "tensor": with `scale` (FP32 [1]) the values are multiplied by it, and amax starts from 0; without, the scale is computed from the values
    (current scaling). The other modes always compute their scales.
    """

    dtype: Any
    scaling: str = "tensor"
    rowwise: bool = True
    columnwise: bool = False
    scale: Optional[jax.Array] = None
    pow2_scale: bool = False
    amax_epsilon: float = 0.0
    shape: Optional[Tuple[int, ...]] = None
    spread: Optional[Tuple[int, int]] = None  # numbers of dimensions of the rows and of the columns; None: all dimensions but the last form the rows

    def of_shape(self, shape: Tuple[int, ...]) -> "QuantizedOutput":
        return dataclasses.replace(self, shape=tuple(shape))

    def _derives(self) -> bool:
        return self.scaling == "tensor" and self.scale is None

    def operands(self) -> List[Tuple[str, jax.Array]]:
        if self.scale is None:
            return []
        return [(".scale", self.scale), (".amax", jnp.zeros((1,), jnp.float32))]

    def results(self) -> List[Tuple[str, jax.ShapeDtypeStruct]]:
        at = len(self.shape) - 1 if self.spread is None else self.spread[0]
        m, k, columns = math.prod(self.shape[:at]), math.prod(self.shape[at:]), self.shape[at:]
        rows = (m,) if self.spread is None else self.shape[:at]
        made = [("", jax.ShapeDtypeStruct(self.shape, self.dtype))] if self.rowwise else []
        if self.columnwise:
            made.append((".columnwise_data", jax.ShapeDtypeStruct((*rows, *columns) if self.scaling == "mxfp8" else (*columns, *rows), self.dtype)))
        for columnwise, wanted in ((False, self.rowwise or self.scaling == "tensor"), (True, self.columnwise and self.scaling != "tensor")):
            if wanted:
                shape = scale_inv_shape(self.scaling, columnwise, m, k) if self.spread is None else \
                    spread_scale_inv(self.scaling, columnwise, rows, columns)
                made.append((".columnwise_scale_inv" if columnwise else ".scale_inv", jax.ShapeDtypeStruct(shape, scale_dtype(self.scaling))))
        one = jax.ShapeDtypeStruct((1,), jnp.float32)
        if self.scaling == "tensor":
            made.append((".amax", one))
        return made + ([(".scale", one)] if self._derives() else [])

    def settings(self) -> Dict[str, Any]:
        wanted: Dict[str, Any] = {"scaling": self.scaling}
        if self._derives():
            wanted["compute_scale"] = True
        if self.pow2_scale:
            wanted["pow2_scale"] = True
        if self.amax_epsilon:
            wanted["amax_epsilon"] = self.amax_epsilon
        return wanted

    def value(self, name: str, values: Dict[str, jax.Array]) -> Quantized:
        made = {part.lstrip(".") or "data": values[name + part] for part, _ in self.results()}
        return Quantized(scaling=self.scaling, **made)
