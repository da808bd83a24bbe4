"""FP8 codes with their scales."""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch

from te_fl import ops, torch_mxfp8
from te_fl.common.recipe import NVFP4Rules
from te_fl.errors import FailedPrecondition, Unsupported
from te_fl.pytorch.fp8 import operands
from te_fl.pytorch.runtime.callers import called_from
from te_fl.pytorch.runtime.dtypes import DTYPE_NAMES
from te_fl.tensors import Quantized

_CODES, _LARGEST = torch.float8_e4m3fn, 448.0
BLOCK = 128  # rows and columns of a block; each block has its own scale


_RECIPES = {"nvfp4": "NVFP4BlockScaling", "factory": "CustomRecipe"}


class Rules(NamedTuple):
    """The rule by which codes get their scales when values are written: from the amax of the new values."""

    scaling: str  # "tensor", "block_128x128" or "mxfp8"
    pow2_scale: bool = False
    amax_epsilon: float = 0.0
    margin: int = 0
    square: bool = False  # MXFP8: one scale for each 32 x 32 values


def make_rules(native_recipe: dict) -> Rules:
    """Returns the rules of a recipe, given as the dict of te_fl.common.recipe.native_of()."""
    kind = native_recipe["kind"]
    if kind == "delayed":
        return Rules("tensor", margin=native_recipe["margin"])
    if kind == "mxfp8":
        return Rules("mxfp8", square=native_recipe["square_weights"])
    if kind not in ("current", "block"):
        raise Unsupported(f"quantized_model_init: weights of codes alone are of FP8 formats, and the recipe is {_RECIPES[kind]}; construct the modules outside "
                          "of it, which quantises the weights in each forward, or give MXFP8BlockScaling or another FP8 recipe")
    return Rules("tensor" if native_recipe["kind"] == "current" else "block_128x128", native_recipe["pow2_scale"],
                 native_recipe["amax_epsilon"])


class Codes:
    """E4M3 codes [rows, columns], their inverse scales, and their transpose, which a training forward creates on first use."""

    __slots__ = ("rules", "data", "scale_inv", "amax", "columns", "columns_scale_inv", "columns_are_old", "writes")

    def __init__(self, rules: Rules, data: torch.Tensor, scale_inv: torch.Tensor, amax: Optional[torch.Tensor]):
        self.rules, self.data, self.scale_inv, self.amax = rules, data, scale_inv, amax
        self.columns = self.columns_scale_inv = None
        self.columns_are_old = False  # the codes were written after the transpose was made
        self.writes = 0  # counts writes of values and copies from other codes

    @classmethod
    def empty(cls, rules: Rules, shape: torch.Size, device: torch.device) -> "Codes":
        data = torch.empty(shape, dtype=_CODES, device=device)
        if rules.scaling == "mxfp8":
            made = MXFP8Codes(rules, data, torch_mxfp8.row_scales(*shape, device).zero_().view(torch.float8_e8m0fnu), None)
            made.columns, made.columns_scale_inv = torch.empty_like(data), torch_mxfp8.column_scales(*shape, device).zero_().view(torch.float8_e8m0fnu)
            return made
        if rules.scaling == "tensor":
            return cls(rules, data, *(torch.zeros(1, dtype=torch.float32, device=device) for _ in range(2)))
        return cls(rules, data, _block_scales(*shape, device), None)

    def write(self, values: torch.Tensor, amax: Optional[torch.Tensor] = None) -> None:
        """Quantises values of any floating dtype and device. amax: F32 [1], the amax that determines the scale instead of the values' own amax."""
        values = self._prepared(values)
        self.writes += 1
        if values.numel() == 0:
            return
        parts = {"scale_inv": self.scale_inv, "columnwise_data": self.columns, "columnwise_scale_inv": self.columns_scale_inv}
        if self.rules.scaling == "tensor":
            if amax is None and self.rules.margin == 0:
                parts.update(amax=self.amax, compute_scale=True, scale=torch.empty_like(self.amax))
            else:
                self.amax.copy_(self.largest(values) if amax is None else amax)
                parts.update(amax=torch.empty_like(self.amax), compute_scale=False, scale=self.scale_of(self.amax))
        ops.quantize(input=values, output=Quantized(self.data, scaling=self.rules.scaling, pow2_scale=self.rules.pow2_scale,
                                                    amax_epsilon=self.rules.amax_epsilon, **parts))
        self.columns_are_old = False

    def write_scaled(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        """Quantises values with the given per-tensor scale, F32 [1], and sets amax to the values' amax."""
        values = self._prepared(values)
        self.writes += 1
        self.amax.zero_()
        if values.numel():
            ops.quantize(input=values, output=Quantized(self.data, scale_inv=self.scale_inv, columnwise_data=self.columns, amax=self.amax, scale=scale))
        self.columns_are_old = False

    def _prepared(self, values: torch.Tensor) -> torch.Tensor:
        dtype = values.dtype if values.dtype in DTYPE_NAMES else torch.float32
        return values.to(self.data.device, dtype).expand(self.data.shape).contiguous()

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The amax of values, F32 [1]; 0 for an empty tensor."""
        amax = torch.zeros(1, dtype=torch.float32, device=self.data.device)
        if values.numel():
            ops.compute_amax(input=self._prepared(values), amax=amax)
        return amax

    def scale_of(self, amax: torch.Tensor) -> torch.Tensor:
        """The scale, F32 [1], for values with this amax, equal to the quantising op's."""
        if self.rules.margin != 0:
            largest = torch.full_like(amax, _LARGEST * 2.0 ** -self.rules.margin)
            return torch.where(amax == 0, torch.ones_like(amax), largest / amax)
        scale, code = torch.empty_like(amax), torch.empty(1, 1, dtype=_CODES, device=amax.device)
        ops.quantize(input=amax.reshape(1, 1), output=Quantized(
            code, scaling="tensor", pow2_scale=self.rules.pow2_scale, amax_epsilon=self.rules.amax_epsilon, compute_scale=True, scale=scale,
            scale_inv=torch.empty_like(amax), amax=torch.empty_like(amax)))
        return scale

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantised values in new memory."""
        values = torch.empty(self.data.shape, dtype=dtype if dtype in DTYPE_NAMES else torch.float32, device=self.data.device)
        if values.numel():
            ops.dequantize(input=Quantized(self.data, scaling=self.rules.scaling, scale_inv=self.scale_inv), output=values)
        return values.to(dtype)

    def add_columns(self) -> None:
        if self.columns is not None:
            if self.columns_are_old:
                self._fill_columns()
            return
        if self.data.is_cuda and torch.cuda.is_current_stream_capturing():
            raise FailedPrecondition("a training forward is captured that is the first to read the weight "
                                     f"{tuple(self.data.shape)} of FP8 codes, whose transpose would be the graph's; run a step before")
        rows, columns = self.data.shape
        scales = _block_scales(columns, rows, self.data.device) if self.rules.scaling != "tensor" else None
        made = torch.empty(columns, rows, dtype=_CODES, device=self.data.device)
        self._transpose_into(made, scales)  # before `columns` is set, because another thread uses `columns` as soon as it is set
        self.columns_scale_inv, self.columns = scales, made
        self.columns_are_old = False

    def drop_columns(self) -> None:
        self.columns = self.columns_scale_inv = None

    def _fill_columns(self) -> None:
        self._transpose_into(self.columns, self.columns_scale_inv)
        self.columns_are_old = False

    def _transpose_into(self, columns: torch.Tensor, scale_inv: Optional[torch.Tensor]) -> None:
        ops.fp8_transpose(input=self.data, output=columns)
        if scale_inv is not None:
            down, across = (-(-n // BLOCK) for n in self.data.shape)
            scale_inv[:across, :down] = self.scale_inv[:down, :across].t()

    def copy_(self, other: "Codes") -> None:
        """Copies codes and scales of the same shape and rules, possibly from another device."""
        self.writes += 1
        for part in ("data", "scale_inv", "amax"):
            own = getattr(self, part)
            if own is not None:
                own.copy_(getattr(other, part))
        if self.columns is not None:
            self._fill_columns()

    def to(self, device: torch.device, non_blocking: bool = False, always: bool = False) -> "Codes":
        parts = (None if part is None else part.to(device, non_blocking=non_blocking, copy=always)
                 for part in (self.data, self.scale_inv, self.amax))
        made = Codes(self.rules, *parts)
        made.writes = self.writes
        return made

    def __deepcopy__(self, memo: dict) -> "Codes":
        staged = called_from("torch.distributed.checkpoint.")  # distributed checkpoint copies to the host while the program continues
        return self.to(torch.device("cpu") if staged else self.data.device, always=True)


class MXFP8Codes(Codes):
    """MXFP8 codes: row-wise ones, and column-wise ones with scales of their own, both quantised from the values. The latter are not transposed."""

    __slots__ = ()

    def write(self, values: torch.Tensor, amax: Optional[torch.Tensor] = None) -> None:
        values = self._prepared(values)
        self.writes += 1
        if values.numel() == 0:
            return
        if self.rules.square:
            codes, by_row, by_column = torch_mxfp8.square(values, _CODES)
            for to, part, scales, factors in ((self.data, codes, self.scale_inv, by_row), (self.columns, codes, self.columns_scale_inv, by_column)):
                to.view(torch.uint8).copy_(part.view(torch.uint8))
                scales.view(torch.uint8).copy_(torch_mxfp8.padded(factors, scales.view(torch.uint8)))
            return
        ops.quantize(input=values, output=Quantized(self.data, scaling="mxfp8", scale_inv=self.scale_inv, columnwise_data=self.columns,
                                                    columnwise_scale_inv=self.columns_scale_inv))

    def add_columns(self) -> None:
        """The column-wise codes exist from the beginning, since they do not follow from the row-wise ones."""

    def drop_columns(self) -> None:
        """See add_columns()."""

    def copy_(self, other: Codes) -> None:
        self.writes += 1
        for part in ("data", "scale_inv", "columns", "columns_scale_inv"):
            getattr(self, part).view(torch.uint8).copy_(getattr(other, part).view(torch.uint8))

    def to(self, device: torch.device, non_blocking: bool = False, always: bool = False) -> Codes:
        made = MXFP8Codes(self.rules, *(part.to(device, non_blocking=non_blocking, copy=always) for part in (self.data, self.scale_inv)), None)
        made.columns, made.columns_scale_inv = (part.to(device, non_blocking=non_blocking, copy=always) for part in (self.columns, self.columns_scale_inv))
        made.writes = self.writes
        return made


def rounded(values: torch.Tensor, native_recipe: dict, gradient: bool) -> torch.Tensor:
    """The activations or gradients after a round trip through current or block scaling, in new memory of their dtype."""
    if values.numel() == 0:
        return values.clone()
    if native_recipe["kind"] in ("mxfp8", "nvfp4", "factory"):
        return _rounded_by_operands(values, native_recipe, gradient)
    matrix = values.to(values.dtype if values.dtype in DTYPE_NAMES else torch.float32).reshape(-1, values.shape[-1] if values.dim() else 1).contiguous()
    (rows, columns), device = matrix.shape, values.device
    dtype = torch.float8_e5m2 if gradient and native_recipe["format"] == "hybrid" else _CODES

    def scales(*extents: int) -> torch.Tensor:
        return torch.zeros(extents, dtype=torch.float32, device=device)

    if native_recipe["kind"] == "current":
        parts = {"scaling": "tensor", "scale_inv": scales(1), "amax": scales(1), "scale": scales(1), "compute_scale": True}
    else:
        parts = {"scaling": "block_1x128", "scale_inv": scales(-(-columns // BLOCK), -(-rows // 4) * 4)}
    codes = Quantized(torch.empty(rows, columns, dtype=dtype, device=device), pow2_scale=native_recipe["pow2_scale"],
                      amax_epsilon=native_recipe["amax_epsilon"], **parts)
    ops.quantize(input=matrix, output=codes)
    read = torch.empty_like(matrix)
    ops.dequantize(input=codes, output=read)
    return read.view(values.shape).to(values.dtype)


def _rounded_by_operands(values: torch.Tensor, native_recipe: dict, gradient: bool) -> torch.Tensor:
    """rounded() by the quantiser of the operands of products."""
    if native_recipe["kind"] == "factory":
        raise Unsupported("te.ops.Quantize: a CustomRecipe's factory is asked by linear operations; leave the operation out, or use another recipe")
    if native_recipe["kind"] == "nvfp4":
        quantiser = operands.nvfp4(NVFP4Rules(*native_recipe["gradient" if gradient else "input"]))
    else:
        quantiser = operands.mxfp8(torch.float8_e5m2 if gradient and native_recipe["format"] == "hybrid" else _CODES)
    matrix = values.reshape(-1, values.shape[-1] if values.dim() else 1)
    return operands.values_of(quantiser(matrix, True, False)[0], matrix).view(values.shape)


def _block_scales(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Inverse scales of blocks of 128 x 128 in te_fl_quant's layout: each row of the array is padded to a multiple of four."""
    across = -(-columns // BLOCK)
    return torch.zeros(-(-rows // BLOCK), -(-across // 4) * 4, dtype=torch.float32, device=device)
