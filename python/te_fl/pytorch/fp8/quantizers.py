"""Quantizers, which construct Float8Tensors, with Transformer Engine's names."""

from __future__ import annotations

import warnings
from typing import Any, Dict, Iterable, List, Optional, Tuple, Union

import torch

from te_fl.errors import InvalidArgument
from te_fl.pytorch.fp8 import operands
from te_fl.pytorch.fp8.codes import Codes, Rules
from te_fl.pytorch.fp8.float8_tensor import Float8Tensor, QuantizedTensor
from te_fl.pytorch.runtime.constants import DType
from te_fl.pytorch.runtime.device import device_of
from te_fl.pytorch.runtime.dtypes import DTYPE_NAMES
from te_fl.pytorch.runtime.refuse import refuse

_CODES_DTYPES = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}

__all__ = ["Float8BlockQuantizer", "Float8CurrentScalingQuantizer", "Float8Quantizer", "Quantizer"]


class _Quantise(torch.autograd.Function):
    """Quantises; the backward passes the gradient unchanged (straight-through)."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, quantizer: "Quantizer") -> Float8Tensor:
        made = quantizer._empty(tensor.shape, tensor.dtype, tensor.device)
        quantizer._write(tensor, made._codes)
        return made

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad, None


class Quantizer:
    """Base class: quantizer(tensor) quantises high-precision values to a tensor of E4M3 codes. Derived classes determine the scale.

    rowwise: codes in the tensor's own order, which te-fl's tensors always have. columnwise: also the transpose, for products along the other
    dimension; matrices only.
    """

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.set_usage(rowwise=rowwise, columnwise=columnwise)

    def _take_dtype(self, fp8_dtype: Any) -> None:
        self.dtype = DType.cast(fp8_dtype)
        if self.dtype not in _CODES_DTYPES:
            raise refuse(type(self).__name__, "fp8_dtype", self.dtype.name, "give kFloat8E4M3 or kFloat8E5M2")

    @property
    def _codes_dtype(self) -> torch.dtype:
        return _CODES_DTYPES[self.dtype]

    def set_usage(self, *, rowwise: Optional[bool] = None, columnwise: Optional[bool] = None) -> None:
        """Sets whether quantising produces row-wise codes and their transpose (column-wise codes); None leaves a setting unchanged."""
        if rowwise is not None and not rowwise:
            raise refuse(type(self).__name__, "rowwise", False, "a Float8Tensor has its codes in its own order; give rowwise=True")
        if columnwise is not None:
            self.columnwise_usage = bool(columnwise)

    @property
    def rowwise_usage(self) -> bool:
        return True

    @rowwise_usage.setter
    def rowwise_usage(self, rowwise: bool) -> None:
        self.set_usage(rowwise=rowwise)

    def get_usages(self) -> Dict[str, bool]:
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        """False for tensors whose shape or dtype cannot be quantised."""
        return inp.dtype in DTYPE_NAMES and (inp.dim() == 2 or (inp.dim() > 0 and not self.columnwise_usage))

    def quantize(self, tensor: torch.Tensor, *, out: Optional[QuantizedTensor] = None, dtype: Optional[torch.dtype] = None) -> Float8Tensor:
        """Quantises into a new tensor with nominal dtype `dtype` (None: the values' dtype), or into `out`."""
        if out is not None:
            return self.update_quantized(tensor, out)
        return _Quantise.apply(tensor if dtype is None else tensor.to(dtype), self)

    def __call__(self, tensor: torch.Tensor) -> Float8Tensor:
        return self.quantize(tensor)

    def multi_quantize(self, list_of_tensors: Iterable[torch.Tensor]) -> List[Float8Tensor]:
        return [self.quantize(tensor) for tensor in list_of_tensors]

    def update_quantized(self, src: torch.Tensor, dst: QuantizedTensor, *, noop_flag: Optional[torch.Tensor] = None) -> Float8Tensor:
        """Quantises src into dst, which has the same shape."""
        if noop_flag is not None:
            raise refuse(type(self).__name__, "noop_flag", "a tensor", "call it where something is to be written")
        if not isinstance(dst, Float8Tensor) or dst._codes.rules.scaling != self._rules().scaling or dst.shape != src.shape:
            what = f"{dst!r:.60}" if not isinstance(dst, Float8Tensor) else f"a Float8Tensor {tuple(dst.shape)} scaled by {dst._codes.rules.scaling}"
            raise InvalidArgument(f"{type(self).__name__}: the output is {what}; it is a Float8Tensor {tuple(src.shape)} scaled by {self._rules().scaling}")
        with torch.no_grad():
            self._write(src, dst._codes)
        torch.autograd.graph.increment_version(dst)
        return dst

    def make_empty(self, shape: Iterable[int], *, dtype: torch.dtype = torch.float32, device: Union[torch.device, str, None] = None,
                   requires_grad: bool = False, pin_memory: bool = False) -> Float8Tensor:
        """A tensor of zeros, to be written later. device: None is the default device."""
        if pin_memory:
            raise refuse(type(self).__name__, "pin_memory", True, "leave it out")
        made = self._empty(torch.Size(shape), dtype, device_of(device))
        made._codes.data.view(torch.uint8).zero_()
        return made.requires_grad_(requires_grad)

    def _empty(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Float8Tensor:
        if getattr(self, "dtype", DType.kFloat8E4M3) is DType.kFloat8E5M2:
            raise refuse(type(self).__name__, "fp8_dtype", self.dtype.name, "a Float8Tensor of te-fl's holds E4M3; quantise E5M2 with te_fl.ops.quantize")
        if dtype not in DTYPE_NAMES:
            raise refuse(type(self).__name__, "dtype", dtype, "codes show torch.float32, torch.bfloat16 or torch.float16")
        if len(shape) != 2 and (self.columnwise_usage or self._rules().scaling != "tensor"):
            raise InvalidArgument(f"{type(self).__name__}: the tensor has shape {tuple(shape)}; blocks and transposes are of matrices: give two dimensions, or "
                                  "a quantizer by tensor with columnwise=False")
        return Float8Tensor(Codes.empty(self._rules(), shape, device), dtype)

    def _rules(self) -> Rules:
        raise NotImplementedError(f"{type(self).__name__} has no rule for scales; te-fl's quantizers are {', '.join(__all__[:3])}")

    def _write(self, values: torch.Tensor, codes: Codes) -> None:
        codes.write(values.detach())
        if self.columnwise_usage:
            codes.add_columns()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(columnwise_usage={self.columnwise_usage})"


class Float8Quantizer(Quantizer):
    """Quantises with a given scale, F32 [1], such as delayed scaling computes from earlier values. amax, F32 [1], is updated to the running maximum.

    Later in-place writes to the tensor use the written values' own amax; update_quantized() uses this scale.
    """

    def __init__(self, scale: torch.Tensor, amax: torch.Tensor, fp8_dtype: Any, *, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        for name, t in (("scale", scale), ("amax", amax)):
            if not isinstance(t, torch.Tensor) or t.dtype != torch.float32 or t.numel() != 1:
                raise InvalidArgument(f"Float8Quantizer: {name} is {t!r:.60}; it is a tensor float32 [1]")
        self._take_dtype(fp8_dtype)
        self.scale, self.amax = scale, amax

    def copy(self) -> "Float8Quantizer":
        """A quantizer with the same scale and amax tensors."""
        return Float8Quantizer(self.scale, self.amax, self.dtype, columnwise=self.columnwise_usage)

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Sets amax to the largest magnitude of the tensor."""
        if tensor.numel():
            self.amax.copy_(tensor.detach().abs().amax().float().view_as(self.amax))

    def _rules(self) -> Rules:
        return Rules("tensor")

    def operands(self, values: torch.Tensor, rowwise: bool, columnwise: bool) -> Tuple[operands.Operand, operands.Operand]:
        return operands.by_given_scale(self._codes_dtype, self.scale.view(1), self.amax.view(1))(values, rowwise, columnwise)

    def _write(self, values: torch.Tensor, codes: Codes) -> None:
        codes.write_scaled(values.detach(), self.scale.view(1))
        self.amax.copy_(torch.maximum(self.amax, codes.amax.view_as(self.amax)))
        if self.columnwise_usage:
            codes.add_columns()


class Float8CurrentScalingQuantizer(Quantizer):
    """Quantises with the largest magnitude of the values themselves. device, use_existing_amax, scale and amax have no effect, as in Transformer
    Engine.
    """

    def __init__(self, fp8_dtype: Any, device: Any = None, *, rowwise: bool = True, columnwise: bool = True, use_existing_amax: bool = False,
                 with_amax_reduction: bool = False, amax_reduction_group: Optional[Any] = None, force_pow_2_scales: bool = False,
                 amax_epsilon: float = 0.0, scale: Optional[torch.Tensor] = None, amax: Optional[torch.Tensor] = None) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if with_amax_reduction:
            raise refuse("Float8CurrentScalingQuantizer", "with_amax_reduction", True, "te-fl's layers find one amax over ranks themselves; here give "
                         "Float8Quantizer a scale from an amax that the ranks have reduced")
        if use_existing_amax or scale is not None or amax is not None:
            warnings.warn("Float8CurrentScalingQuantizer: use_existing_amax, scale and amax have no effect", DeprecationWarning, stacklevel=2)
        self._take_dtype(fp8_dtype)
        self.force_pow_2_scales, self.amax_epsilon = bool(force_pow_2_scales), float(amax_epsilon)

    def copy(self) -> "Float8CurrentScalingQuantizer":
        return Float8CurrentScalingQuantizer(self.dtype, columnwise=self.columnwise_usage, force_pow_2_scales=self.force_pow_2_scales,
                                             amax_epsilon=self.amax_epsilon)

    def _rules(self) -> Rules:
        return Rules("tensor", self.force_pow_2_scales, self.amax_epsilon)

    def operands(self, values: torch.Tensor, rowwise: bool, columnwise: bool) -> Tuple[operands.Operand, operands.Operand]:
        return operands.by_tensor(self._codes_dtype, self.force_pow_2_scales, self.amax_epsilon)(values, rowwise, columnwise)


class Float8BlockQuantizer(Quantizer):
    """Quantises with the largest magnitude of each block of 128 x 128, or with block_scaling_dim=1, for products only, of 1 x 128."""

    def __init__(self, fp8_dtype: Any, *, rowwise: bool, columnwise: bool, amax_epsilon: float = 0.0, force_pow_2_scales: bool = True,
                 block_scaling_dim: int = 2) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if block_scaling_dim not in (1, 2):
            raise InvalidArgument(f"Float8BlockQuantizer: block_scaling_dim is {block_scaling_dim!r}; it is 1 (1 x 128) or 2 (128 x 128)")
        self._take_dtype(fp8_dtype)
        self.block_len, self.block_scaling_dim = 128, block_scaling_dim
        self.force_pow_2_scales, self.amax_epsilon = bool(force_pow_2_scales), float(amax_epsilon)

    def copy(self) -> "Float8BlockQuantizer":
        return Float8BlockQuantizer(self.dtype, rowwise=True, columnwise=self.columnwise_usage, amax_epsilon=self.amax_epsilon,
                                    force_pow_2_scales=self.force_pow_2_scales, block_scaling_dim=self.block_scaling_dim)

    def operands(self, values: torch.Tensor, rowwise: bool, columnwise: bool) -> Tuple[operands.Operand, operands.Operand]:
        square = self.block_scaling_dim == 2
        return operands.by_blocks(self._codes_dtype, square, self.force_pow_2_scales, self.amax_epsilon)(values, rowwise, columnwise)

    def _rules(self) -> Rules:
        if self.block_scaling_dim != 2:
            raise refuse("Float8BlockQuantizer", "block_scaling_dim", self.block_scaling_dim, "a Float8Tensor has blocks of 128 x 128; quantise blocks of "
                         "1 x 128 with te_fl.ops.quantize and te_fl.Quantized")
        return Rules("block_128x128", self.force_pow_2_scales, self.amax_epsilon)
