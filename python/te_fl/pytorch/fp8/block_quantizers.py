"""Quantizers of blocks, and those that combine others, with Transformer Engine's names. Quantizer factories return them for CustomRecipe."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from te_fl.common.recipe import NVFP4Rules
from te_fl.errors import InvalidArgument
from te_fl.pytorch.fp8 import operands
from te_fl.pytorch.fp8.codes import Rules
from te_fl.pytorch.fp8.operands import Operand
from te_fl.pytorch.fp8.quantizers import Quantizer
from te_fl.pytorch.runtime.constants import DType
from te_fl.pytorch.runtime.refuse import refuse

__all__ = ["HybridQuantizer", "IdentityQuantizer", "MXFP8Quantizer", "NVFP4Quantizer"]


class MXFP8Quantizer(Quantizer):
    """Quantises with one power-of-two scale for each 32 values, or with with_2d_quantization for each 32 x 32."""

    def __init__(self, fp8_dtype: Any, *, rowwise: bool = True, columnwise: bool = True, with_2d_quantization: bool = False) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self._take_dtype(fp8_dtype)
        self.with_2d_quantization = bool(with_2d_quantization)

    def copy(self) -> "MXFP8Quantizer":
        return MXFP8Quantizer(self.dtype, columnwise=self.columnwise_usage, with_2d_quantization=self.with_2d_quantization)

    def _rules(self) -> Rules:
        return Rules("mxfp8", square=self.with_2d_quantization)

    def operands(self, values: torch.Tensor, rowwise: bool, columnwise: bool) -> Tuple[Operand, Operand]:
        return operands.mxfp8(self._codes_dtype, self.with_2d_quantization)(values, rowwise, columnwise)


class NVFP4Quantizer(Quantizer):
    """Quantises to four bits, with a scale for each 16 values and one for the tensor. The options are those of NVFP4BlockScaling; with_rht takes the amax
    of the transformed values, so with_post_rht_amax has its value.
    """

    def __init__(self, fp4_dtype: Any = DType.kFloat4E2M1, rowwise: bool = True, columnwise: bool = True, with_amax_reduction: bool = False,
                 amax_reduction_group: Optional[Any] = None, with_rht: bool = False, with_post_rht_amax: bool = False, with_2d_quantization: bool = False,
                 stochastic_rounding: bool = False, row_scaled_nvfp4: bool = False, nvfp4_use_4over6: bool = False, nvfp4_e4m3_max: int = 448,
                 nvfp4_4over6_err_mode: str = "MAE", with_random_sign_mask: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        name = type(self).__name__
        self.dtype = DType.cast(fp4_dtype)
        if self.dtype is not DType.kFloat4E2M1:
            raise refuse(name, "fp4_dtype", self.dtype.name, "NVFP4 has kFloat4E2M1")
        if with_amax_reduction:
            raise refuse(name, "with_amax_reduction", True, "each rank quantises with its own amax; leave it out")
        if bool(with_post_rht_amax) != bool(with_rht):
            raise refuse(name, "with_post_rht_amax", with_post_rht_amax, "the amax of a transformed copy is that of the transformed values; give both the "
                         "same value")
        if with_rht and not with_random_sign_mask:
            raise refuse(name, "with_random_sign_mask", False, "the transform has fixed signs; leave it out")
        if nvfp4_e4m3_max not in (448, 256) or nvfp4_4over6_err_mode not in ("MAE", "MSE"):
            raise InvalidArgument(f"{name}: nvfp4_e4m3_max is {nvfp4_e4m3_max!r} and nvfp4_4over6_err_mode is {nvfp4_4over6_err_mode!r}; the first is 448 or "
                                  "256, the second 'MAE' or 'MSE'")
        self.with_rht, self.with_post_rht_amax, self.with_random_sign_mask = bool(with_rht), bool(with_rht), bool(with_random_sign_mask)
        self.with_2d_quantization, self.stochastic_rounding = bool(with_2d_quantization), bool(stochastic_rounding)
        self.row_scaled_nvfp4, self.nvfp4_use_4over6 = bool(row_scaled_nvfp4), bool(nvfp4_use_4over6)
        self.nvfp4_e4m3_max = nvfp4_e4m3_max if nvfp4_use_4over6 else 448
        self.nvfp4_4over6_err_mode, self.with_amax_reduction, self.amax_reduction_group = nvfp4_4over6_err_mode, False, amax_reduction_group
        self._nvfp4().check(name)

    def _nvfp4(self) -> NVFP4Rules:
        return NVFP4Rules(self.with_rht, self.stochastic_rounding, self.with_2d_quantization, self.row_scaled_nvfp4, self.nvfp4_use_4over6,
                          float(self.nvfp4_e4m3_max), self.nvfp4_use_4over6 and self.nvfp4_4over6_err_mode == "MSE")

    def copy(self) -> "NVFP4Quantizer":
        made = object.__new__(NVFP4Quantizer)
        made.__dict__.update(self.__dict__)
        return made

    def _rules(self) -> Rules:
        raise refuse("NVFP4Quantizer", "quantize", "a tensor of four-bit codes", "it quantises operands of products under CustomRecipe; quantise with "
                     "te_fl.ops.quantize and te_fl.Quantized")

    def operands(self, values: torch.Tensor, rowwise: bool, columnwise: bool) -> Tuple[Operand, Operand]:
        return operands.nvfp4(self._nvfp4(), kept=True)(values, rowwise, columnwise)


class IdentityQuantizer(Quantizer):
    """Leaves a tensor in high precision. dtype: the dtype to which it is cast; None: its own."""

    def __init__(self, *, dtype: Optional[torch.dtype] = None, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = dtype
        self.is_identity = dtype is None

    def copy(self) -> "IdentityQuantizer":
        return IdentityQuantizer(dtype=self.dtype, columnwise=self.columnwise_usage)

    def quantize(self, tensor: torch.Tensor, *, out: Optional[torch.Tensor] = None, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
        """The tensor in the quantizer's dtype, or copied to `out`."""
        values = tensor if (dtype or self.dtype) is None else tensor.to(dtype or self.dtype)
        return values if out is None else out.copy_(values)

    def operands(self, values: torch.Tensor, rowwise: bool, columnwise: bool) -> Tuple[Operand, Operand]:
        made = self.quantize(values).contiguous()
        return made if rowwise else None, made if columnwise else None


class HybridQuantizer(Quantizer):
    """Quantises the operand for products over columns by one quantizer, and the operand for products over rows by another one. columnwise_source: the
    latter is made from the original values, or with "rowwise_dequantized" from the former's values.
    """

    def __init__(self, *, rowwise_quantizer: Quantizer, columnwise_quantizer: Quantizer, columnwise_source: str = "original") -> None:
        super().__init__(rowwise=True, columnwise=True)
        for side, quantizer in (("rowwise", rowwise_quantizer), ("columnwise", columnwise_quantizer)):
            if not isinstance(quantizer, Quantizer) or not hasattr(quantizer, "operands"):
                raise TypeError(f"HybridQuantizer: {side}_quantizer is {quantizer!r}; it is a quantizer of te-fl's")
        if columnwise_source not in ("original", "rowwise_dequantized"):
            raise InvalidArgument(f"HybridQuantizer: columnwise_source is {columnwise_source!r}; it is 'original' or 'rowwise_dequantized'")
        self.rowwise_quantizer, self.columnwise_quantizer, self.columnwise_source = rowwise_quantizer, columnwise_quantizer, columnwise_source

    def copy(self) -> "HybridQuantizer":
        return HybridQuantizer(rowwise_quantizer=self.rowwise_quantizer, columnwise_quantizer=self.columnwise_quantizer,
                               columnwise_source=self.columnwise_source)

    def operands(self, values: torch.Tensor, rowwise: bool, columnwise: bool) -> Tuple[Operand, Operand]:
        again = columnwise and self.columnwise_source == "rowwise_dequantized"
        by_rows = self.rowwise_quantizer.operands(values, True, False)[0] if rowwise or again else None
        if not columnwise:
            return by_rows, None
        source = operands.values_of(by_rows, values) if again else values
        return by_rows if rowwise else None, self.columnwise_quantizer.operands(source, False, True)[1]
