"""Functions that quantise the operands of products in Python, for the recipes that te-fl's layers in C++ have no kind of.

A quantiser is a function (values [rows, columns], rowwise, columnwise) -> (operand for products over columns, operand for products over rows). An operand
is None if it is not asked for, a tensor with the values of codes, or a te_fl.Quantized.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional, Tuple, Union

import torch

from te_fl import _native, ops, torch_mxfp8, torch_nvfp4
from te_fl.common.recipe import NVFP4Rules
from te_fl.errors import InvalidArgument
from te_fl.pytorch.runtime.dtypes import LIKE
from te_fl.tensors import Quantized
from te_fl.torch_streams import on_stream

Operand = Union[None, torch.Tensor, Quantized]
Quantiser = Callable[[torch.Tensor, bool, bool], Tuple[Operand, Operand]]


def _nvfp4_along(x: torch.Tensor, rules: NVFP4Rules) -> torch.Tensor:
    """FP32: the values of x's NVFP4 codes in blocks along its rows."""
    if x.numel() == 0:
        return x.float()
    x = x.float()
    magnitudes = torch_nvfp4.sizes(x)
    amax = magnitudes.amax(1) if rules.by_rows else magnitudes.amax().view(1)
    codes, factors = torch_nvfp4.quantised(x, amax, rules)
    return torch_nvfp4.values(codes, factors, amax, rules.largest_scale)


def nvfp4(rules: NVFP4Rules) -> Quantiser:
    """Quantises to NVFP4. Operands are FP32 values, since no product reads 4-bit codes. Rows that do not fill a block are filled with zeros."""
    def quantise(values: torch.Tensor, rowwise: bool, columnwise: bool) -> Tuple[Operand, Operand]:
        rows, columns = values.shape
        if columns % torch_nvfp4.BLOCK:
            raise InvalidArgument(f"NVFP4: the tensor has shape {tuple(values.shape)}; its last dimension is a multiple of {torch_nvfp4.BLOCK}, the length of "
                                  "a block")
        whole = torch.nn.functional.pad(values, (0, 0, 0, -rows % torch_nvfp4.BLOCK))
        by_rows = _nvfp4_along(whole if rules.square else values, rules)[:rows] if rowwise else None
        if not columnwise:
            return by_rows, None
        turned = whole.t().contiguous()
        if rules.hadamard:  # both operands of a product over rows keep the rows that fill the last block
            turned = torch_nvfp4.transformed(turned, torch_nvfp4.hadamard_matrix(values.device))
        by_columns = _nvfp4_along(turned, rules).t()
        return by_rows, (by_columns if rules.hadamard else by_columns[:rows]).contiguous()

    return quantise


def mxfp8(dtype: torch.dtype, square: bool = False) -> Quantiser:
    """Quantises to MXFP8 with codes of `dtype`."""
    def quantise(values: torch.Tensor, rowwise: bool, columnwise: bool) -> Tuple[Operand, Operand]:
        x = values.contiguous()
        row_scales, column_scales = torch_mxfp8.row_scales(*x.shape, x.device), torch_mxfp8.column_scales(*x.shape, x.device)
        if square and x.numel():
            codes, by_row, by_column = torch_mxfp8.square(x, dtype)
            row_scales, column_scales = torch_mxfp8.padded(by_row, row_scales), torch_mxfp8.padded(by_column, column_scales)
            data = columns = codes
        else:
            data, columns = (torch.empty(x.shape, dtype=dtype, device=x.device) for _ in range(2))
        made = (torch_mxfp8.rowwise(data, row_scales) if rowwise else None, torch_mxfp8.columnwise(columns, column_scales) if columnwise else None)
        for one in made if not square else ():
            if one is not None and x.numel():
                ops.quantize(input=x, output=one)
        return made

    return quantise


def _called(quantiser: Quantiser, values: torch.Tensor, rowwise: bool, columnwise: bool, stream: int) -> Tuple[Operand, Operand]:
    with torch.no_grad(), on_stream(values.device, stream):
        return quantiser(values, rowwise, columnwise)


def native(name: str, override: Optional[str], **quantisers: Optional[Tuple[str, Quantiser]]) -> Any:
    """The _native object of a recipe with quantisers of input, weight and gradient, each (name, function), or None for high precision."""
    functions = (None if q is None else (q[0], functools.partial(_called, q[1])) for q in (quantisers["input"], quantisers["weight"], quantisers["gradient"]))
    return _native.quantisers(name, *functions, override, LIKE)


@functools.lru_cache(maxsize=64)
def _nvfp4_recipe(override: Optional[str], *rules: tuple) -> Any:
    made = [("NVFP4", nvfp4(NVFP4Rules(*fields))) for fields in rules]
    return native("NVFP4", override, input=made[0], weight=made[1], gradient=made[2])


@functools.lru_cache(maxsize=64)
def _mxfp8_recipe(override: Optional[str], form: str) -> Any:
    """MXFP8 with square blocks of weights."""
    gradient = torch.float8_e5m2 if form == "hybrid" else torch.float8_e4m3fn
    return native("MXFP8", override, input=("MXFP8", mxfp8(torch.float8_e4m3fn)), weight=("square MXFP8", mxfp8(torch.float8_e4m3fn, square=True)),
                  gradient=("MXFP8", mxfp8(gradient)))


def native_of(described: dict) -> Any:
    """The _native object of a recipe whose dict of te_fl.common.recipe.native_of() has a kind that is not C++'s. Equal dicts give the same object."""
    kind, override = described["kind"], described["backward_override"]
    if kind == "nvfp4":
        return _nvfp4_recipe(override, described["input"], described["weight"], described["gradient"])
    return _mxfp8_recipe(override, described["format"])
