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
from te_fl.errors import InvalidArgument, Unsupported
from te_fl.pytorch.runtime.dtypes import LIKE
from te_fl.tensors import Quantized
from te_fl.torch_streams import on_stream

Operand = Union[None, torch.Tensor, Quantized]
Quantiser = Callable[[torch.Tensor, bool, bool], Tuple[Operand, Operand]]


def _nvfp4_codes(x: torch.Tensor, rules: NVFP4Rules) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The NVFP4 codes, block scales and amax of x in blocks along its rows."""
    x = x.float()
    magnitudes = torch_nvfp4.sizes(x)
    amax = magnitudes.amax(1) if rules.by_rows else magnitudes.amax().view(1)
    return *torch_nvfp4.quantised(x, amax, rules), amax


def _nvfp4_along(x: torch.Tensor, rules: NVFP4Rules) -> torch.Tensor:
    """FP32: the values of x's NVFP4 codes in blocks along its rows."""
    return torch_nvfp4.values(*_nvfp4_codes(x, rules), rules.largest_scale) if x.numel() else x.float()


def _nvfp4_kept(turned: torch.Tensor, rules: NVFP4Rules) -> Quantized:
    """The column-wise codes of the matrix whose transpose is `turned`, as UINT8 with two codes a byte."""
    codes, factors, amax = _nvfp4_codes(turned, rules)
    columns, rows = turned.shape
    scales = torch.zeros(columns + -columns % 128, (rows // torch_nvfp4.BLOCK + 3) // 4 * 4, dtype=torch.uint8, device=turned.device)
    scales[:columns, :rows // torch_nvfp4.BLOCK] = factors.view(torch.uint8)
    return Quantized(columnwise_data=torch_nvfp4.packed(codes), columnwise_scale_inv=scales.view(torch.float8_e4m3fn),
                     amax=amax, shape=(rows, columns), scaling="nvfp4")


def nvfp4(rules: NVFP4Rules, kept: bool = False) -> Quantiser:
    """Quantises to NVFP4. Operands are FP32 values, since no product reads 4-bit codes. kept: the operand for products over rows, which a backward
    reads, is made of codes if te-fl's tensors have the format. Rows that do not fill a block are filled with zeros.
    """
    kept = kept and not rules.by_rows and rules.largest_scale == torch_nvfp4.LARGEST_FACTOR

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
        if kept and turned.numel() and (rules.hadamard or not rows % torch_nvfp4.BLOCK):
            return by_rows, _nvfp4_kept(turned, rules)
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


def by_tensor(dtype: torch.dtype, pow2_scale: bool, amax_epsilon: float) -> Quantiser:
    """Quantises with one scale, from the amax of the values."""
    def quantise(values: torch.Tensor, rowwise: bool, columnwise: bool) -> Tuple[Operand, Operand]:
        x = values.contiguous()
        scale, amax, scale_inv = torch.zeros(3, 1, dtype=torch.float32, device=x.device).unbind(0)
        made = Quantized(torch.empty(x.shape, dtype=dtype, device=x.device), scale=scale, scale_inv=scale_inv, amax=amax, compute_scale=True,
                         pow2_scale=pow2_scale, amax_epsilon=amax_epsilon,
                         columnwise_data=torch.empty(x.shape[::-1], dtype=dtype, device=x.device) if columnwise else None)
        if x.numel():
            ops.quantize(input=x, output=made)
        return made, made if columnwise else None

    return quantise


def by_given_scale(dtype: torch.dtype, scale: torch.Tensor, amax: torch.Tensor) -> Quantiser:
    """Quantises with the given scale, and adds the amax of the values to `amax`."""
    def quantise(values: torch.Tensor, rowwise: bool, columnwise: bool) -> Tuple[Operand, Operand]:
        x = values.contiguous()
        made = Quantized(torch.empty(x.shape, dtype=dtype, device=x.device), scale=scale, scale_inv=torch.empty_like(scale), amax=amax,
                         columnwise_data=torch.empty(x.shape[::-1], dtype=dtype, device=x.device) if columnwise else None)
        if x.numel():
            ops.quantize(input=x, output=made)
        return made, made if columnwise else None

    return quantise


def by_blocks(dtype: torch.dtype, square: bool, pow2_scale: bool, amax_epsilon: float) -> Quantiser:
    """Quantises with one scale for each 1 x 128 or 128 x 128 values."""
    def scales(rows: int, columns: int, device: torch.device) -> torch.Tensor:
        blocks = (columns + 127) // 128
        extents = ((rows + 127) // 128, (blocks + 3) // 4 * 4) if square else (blocks, (rows + 3) // 4 * 4)
        return torch.zeros(extents, dtype=torch.float32, device=device)

    def quantise(values: torch.Tensor, rowwise: bool, columnwise: bool) -> Tuple[Operand, Operand]:
        x, (rows, columns) = values.contiguous(), values.shape
        made = Quantized(torch.empty(x.shape, dtype=dtype, device=x.device), scale_inv=scales(rows, columns, x.device), pow2_scale=pow2_scale,
                         amax_epsilon=amax_epsilon, scaling="block_128x128" if square else "block_1x128",
                         columnwise_data=torch.empty(columns, rows, dtype=dtype, device=x.device) if columnwise else None,
                         columnwise_scale_inv=scales(columns, rows, x.device) if columnwise else None)
        if x.numel():
            ops.quantize(input=x, output=made)
        return made, made if columnwise else None

    return quantise


def values_of(operand: Operand, like: torch.Tensor) -> torch.Tensor:
    """The values of an operand for products over columns, in the dtype of `like`."""
    if isinstance(operand, torch.Tensor):
        return operand.to(like.dtype)
    read = torch.empty_like(like, memory_format=torch.contiguous_format)
    if read.numel():
        ops.dequantize(input=operand, output=read)
    return read


def _called(quantiser: Quantiser, values: torch.Tensor, rowwise: bool, columnwise: bool, stream: int) -> Tuple[Operand, Operand]:
    with torch.no_grad(), on_stream(values.device, stream):
        return quantiser(values, rowwise, columnwise)


Named = Optional[Tuple[str, Quantiser]]  # a quantiser with its name for messages; None: high precision
Linear = Tuple[Named, Named, Named]  # the quantisers of a linear map's input, weight and gradient


def native(name: str, override: Optional[str], quantisers: Linear, fc2: Optional[Linear] = None) -> Any:
    """The _native object of a recipe. fc2: the quantisers of LayerNormMLP's second linear map; None: the first's."""
    def called(linear: Linear) -> tuple:
        return tuple(None if q is None else (q[0], functools.partial(_called, q[1])) for q in linear)

    return _native.quantisers(name, called(quantisers), None if fc2 is None else called(fc2), override, LIKE)


@functools.lru_cache(maxsize=64)
def _nvfp4_recipe(override: Optional[str], *rules: tuple) -> Any:
    inp, weight, gradient = (("NVFP4", nvfp4(NVFP4Rules(*fields), kept=i < 2)) for i, fields in enumerate(rules))
    return native("NVFP4", override, (inp, weight, gradient))


@functools.lru_cache(maxsize=64)
def _mxfp8_recipe(override: Optional[str], form: str) -> Any:
    """MXFP8 with square blocks of weights."""
    gradient = torch.float8_e5m2 if form == "hybrid" else torch.float8_e4m3fn
    return native("MXFP8", override, (("MXFP8", mxfp8(torch.float8_e4m3fn)), ("square MXFP8", mxfp8(torch.float8_e4m3fn, square=True)),
                                      ("MXFP8", mxfp8(gradient))))


def _refuse(values: torch.Tensor, rowwise: bool, columnwise: bool) -> Tuple[Operand, Operand]:
    raise Unsupported("CustomRecipe: this call has no module whose tensors the factory could be asked about; use another recipe around it")


@functools.lru_cache(maxsize=8)
def _no_module(override: Optional[str]) -> Any:
    """A CustomRecipe outside of the modules, which have scopes of their own in it."""
    return native("custom", override, (("none", _refuse),) * 3)


def native_of(described: dict) -> Any:
    """The _native object of a recipe whose dict of te_fl.common.recipe.native_of() has a kind that is not C++'s. Equal dicts give the same object."""
    if "native" in described:  # of one module
        return described["native"]
    kind, override = described["kind"], described["backward_override"]
    if kind == "factory":
        return _no_module(override)
    if kind == "nvfp4":
        return _nvfp4_recipe(override, described["input"], described["weight"], described["gradient"])
    return _mxfp8_recipe(override, described["format"])
