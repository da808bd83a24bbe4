"""Conversion between Transformer Engine's quantizers and quantised tensors, which are Python classes, and te_fl.Quantized.

A scheme describes one storage class: the shapes of its buffers, the quantizer's requirements, and the parts that te-fl's ops read and write. The
layout of scales is the same in both libraries (te_fl_quant in te_fl/plugin.h), so nothing is copied.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, Optional, Sequence, Tuple

import torch

from te_fl import _native, ops
from te_fl.errors import InvalidArgument, Unsupported
from te_fl.transformer_engine_torch import nvfp4, square_mxfp8
from te_fl.transformer_engine_torch.dtypes import fp8_dtype
from te_fl.transformer_engine_torch.swizzle import plain_scales
from te_fl.tensors import Quantized, QuantizedNames, QuantizedTarget

__all__ = ["Scheme", "is_quantised", "of_quantizer", "of_tensor", "operand", "operands", "rounded_up", "rows_and_columns", "scale_of", "scheme_of",
           "shape_of"]

empty = torch.empty
_make = tuple.__new__  # makes a named tuple with less host time than its class does


def rounded_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def rows_and_columns(shape: Sequence[int]) -> Tuple[int, int]:
    """(rows, columns) of a tensor seen as a matrix."""
    if len(shape) == 2:
        return shape[0], shape[1]
    return math.prod(shape[:-1]), (shape[-1] if shape else 1)


def _transposed(shape: Sequence[int]) -> Tuple[int, ...]:
    return (shape[-1], *shape[:-1]) if shape else ()


def _pieces(shapes: Sequence[Tuple[int, ...]], dtype: torch.dtype, device: Any) -> Optional[Sequence[torch.Tensor]]:
    """Splits one buffer into tensors; None if a tensor would not be aligned to 16 bytes, as kernels require."""
    first, count = shapes[0], len(shapes)
    if first == (1,) and shapes.count(first) == count:
        return empty((count, 16 // dtype.itemsize), dtype=dtype, device=device)[:, :1].unbind(0)
    sizes = [math.prod(shape) for shape in shapes]
    if any(size * dtype.itemsize % 16 for size in sizes):
        return None
    # No other tensor uses this buffer, so the unsafe split, without view tracking, is correct.
    if all(shape[1:] == first[1:] for shape in shapes):
        rows = [shape[0] for shape in shapes]
        return torch.unsafe_split_with_sizes(empty((sum(rows), *first[1:]), dtype=dtype, device=device), rows)
    return [piece.view(shape) for piece, shape in zip(torch.unsafe_split_with_sizes(empty(sum(sizes), dtype=dtype, device=device), sizes), shapes)]


class Scheme:
    """One storage class. Scheme objects are stateless; state belongs to the quantizer and the tensor."""

    fused = True

    def storage_class(self, quantizer: Any) -> type:
        raise NotImplementedError

    def buffers(self, quantizer: Any, shape: Sequence[int]) -> dict:
        """{attribute of the storage: (shape, dtype)} of all buffers that the quantizer's usages need."""
        raise NotImplementedError

    def constructor_arguments(self, quantizer: Any) -> dict:
        raise NotImplementedError

    # The attributes by which ops read a storage. None: ops get a te_fl.Quantized instead.
    PARTS: Optional[QuantizedNames] = None

    def quantized(self, tensor: Any) -> Any:
        """The tensor as an operand of matrix ops; dequantised to FP32 if no op reads its format."""
        return tensor

    def operand(self, tensor: Any, columnwise: bool) -> Any:
        """The tensor as an operand of a GEMM. The op selects the row-wise or the column-wise data."""
        return self.quantized(tensor)

    def target(self, quantizer: Any, tensor: Any) -> Any:
        """The tensor as an output of matrix ops: a te_fl.Quantized, or the target of _written()."""
        raise NotImplementedError

    def _written(self, tensor: Any, dtype: Any, scale: Any = None, amax: Any = None, flags: int = 0, amax_epsilon: float = 0.0) -> QuantizedTarget:
        if type(tensor) not in _by_type:
            of_tensor(tensor)
        return _make(QuantizedTarget, (tensor, dtype, scale, amax, flags, amax_epsilon))

    def is_fused(self, quantizer: Any) -> bool:
        """True if ops can quantise FP32 results directly for this quantizer, without rounding to the activation dtype first."""
        return self.fused

    def is_single(self, quantizer: Any) -> bool:
        """True if each tensor needs separate steps: its amax is reduced over ranks, or write() writes it."""
        return getattr(quantizer, "with_amax_reduction", False)

    def write(self, quantizer: Any, values: torch.Tensor, tensor: Any, noop: Optional[torch.Tensor]) -> bool:
        """Quantises with PyTorch's ops if the quantizer needs a feature that no op has; every rank of its group must call it. Returns False if an op
        can do it.
        """
        return False

    def write_without_elements(self, tensor: Any, noop: Optional[torch.Tensor]) -> None:
        """Writes the metadata (scales, amaxes) of an empty tensor, which ops do not write."""

    def for_ranks(self, quantizer: Any, values: torch.Tensor, tensor: Any) -> Any:
        """The output whose scale is computed from the amax over the quantizer's group; every rank must call it."""
        raise NotImplementedError

    _NAMES: dict = {}  # attribute of the storage -> argument of its constructor

    def check(self, quantizer: Any) -> None:
        """Refuses settings of a quantizer that te-fl does not support."""

    def create(self, quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, pin_memory: bool = False) -> Any:
        self.check(quantizer)
        shape = tuple(shape)
        parts = dict.fromkeys(self._NAMES.values())
        options = {"pin_memory": True} if pin_memory else {}
        for name, (extents, kind) in self.buffers(quantizer, shape).items():
            parts[self._NAMES[name]] = empty(extents, dtype=kind, device=device, **options)
        parts.update(self.constructor_arguments(quantizer), quantizer=quantizer)
        if quantizer.internal:
            return self.storage_class(quantizer)(fake_dtype=dtype, **parts)
        return self.storage_class(quantizer)(shape=shape, dtype=dtype, device=torch.device(device), **parts)

    def _alike(self, quantizer: Any) -> tuple:
        """All attributes of a quantizer that buffers() and storage_class() depend on."""
        return quantizer.internal, quantizer.rowwise_usage, quantizer.columnwise_usage

    def create_together(self, quantizers: Sequence[Any], shapes: Sequence[Tuple[int, ...]], dtype: torch.dtype, device: Any) -> Optional[list]:
        """Creates several tensors with one buffer for each kind of part. The buffer lives as long as any of the tensors. Returns None if the tensors
        cannot share buffers; the caller then creates each tensor separately.
        """
        first = quantizers[0]
        settings = self._alike(first)
        if not first.internal or any(self._alike(q) != settings for q in quantizers):
            return None
        for quantizer in quantizers:
            self.check(quantizer)
        known: dict = {}
        wanted = [known.get(shape) or known.setdefault(shape, self.buffers(first, shape)) for shape in shapes]
        parts = dict.fromkeys(self._NAMES.values(), itertools.repeat(None))
        for name, (_, kind) in wanted[0].items():
            pieces = _pieces([w[name][0] for w in wanted], kind, device)
            if pieces is None:
                return None
            parts[self._NAMES[name]] = pieces
        storage, names = self.storage_class(first), tuple(parts)
        return [storage(fake_dtype=dtype, quantizer=q, **dict(zip(names, values)), **self.constructor_arguments(q))
                for q, *values in zip(quantizers, *parts.values())]

    def targets(self, quantizers: Sequence[Any], tensors: Sequence[Any]) -> list:
        """target() for each tensor."""
        return [self.target(quantizer, tensor) for quantizer, tensor in zip(quantizers, tensors)]

    def adapt(self, quantizer: Any, tensor: Any) -> Any:
        """Adjusts an output tensor of the caller to have exactly the buffers that the quantizer's usages need."""
        self.check(quantizer)
        shape = shape_of(tensor)
        wanted = self.buffers(quantizer, shape)
        device = next(part.device for part in map(lambda n: getattr(tensor, n), self._NAMES) if part is not None)
        for name in self._NAMES:
            held = getattr(tensor, name)
            if name not in wanted:
                if held is not None:
                    setattr(tensor, name, None)
            elif held is None or tuple(held.shape) != tuple(wanted[name][0]):
                setattr(tensor, name, torch.empty(wanted[name][0], dtype=wanted[name][1], device=device))
        self.mark(quantizer, tensor)
        return tensor

    def mark(self, quantizer: Any, tensor: Any) -> None:
        """Sets the tensor's other metadata."""
        tensor._fp8_dtype = quantizer.dtype


class Float8(Scheme):
    """One scale per tensor. The column-wise copy is transposed."""

    _NAMES = {"_data": "data", "_transpose": "data_transpose", "_scale_inv": "fp8_scale_inv"}
    PARTS = QuantizedNames("_data", "_transpose", "_scale_inv", code="_fp8_dtype", stale="_transpose_invalid")

    def create(self, quantizer, shape, dtype, device, pin_memory=False):
        rowwise, columnwise = quantizer.rowwise_usage, quantizer.columnwise_usage
        if pin_memory or not quantizer.internal or not (rowwise or columnwise):
            return super().create(quantizer, shape, dtype, device, pin_memory)
        # Equivalent to the general code, with less host time: layers create many tensors here.
        return _classes()["Float8TensorStorage"](
            data=empty(shape, dtype=torch.uint8, device=device) if rowwise else None,
            data_transpose=empty(_transposed(shape), dtype=torch.uint8, device=device) if columnwise else None,
            fp8_scale_inv=empty(1, dtype=torch.float32, device=device), fp8_dtype=quantizer.dtype, fake_dtype=dtype, quantizer=quantizer)

    def storage_class(self, quantizer):
        classes = _classes()
        return classes["Float8TensorStorage"] if quantizer.internal else classes["Float8Tensor"]

    def buffers(self, quantizer, shape):
        wanted = {"_scale_inv": ((1,), torch.float32)}
        if quantizer.rowwise_usage:
            wanted["_data"] = (tuple(shape), torch.uint8)
        if quantizer.columnwise_usage:
            wanted["_transpose"] = (_transposed(shape), torch.uint8)
        if len(wanted) == 1:
            raise InvalidArgument(f"{type(quantizer).__name__} has neither row-wise nor column-wise usage; set one by set_usage()")
        return wanted

    def constructor_arguments(self, quantizer):
        return {"fp8_dtype": quantizer.dtype}

    def mark(self, quantizer, tensor):
        tensor._fp8_dtype = quantizer.dtype
        tensor._transpose_invalid = not quantizer.columnwise_usage

    def target(self, quantizer, tensor):
        return self._written(tensor, quantizer.dtype, scale_of(quantizer, tensor._scale_inv.device), quantizer.amax)


def scale_of(quantizer: Any, device: torch.device) -> torch.Tensor:
    """The quantizer's scale (delayed scaling); 1 if the quantizer holds an empty tensor, as in NVIDIA's extension."""
    scale = quantizer.scale
    return scale if scale.numel() else torch.ones(1, dtype=torch.float32, device=device)


def _largest_of_ranks(quantizer: Any, values: torch.Tensor) -> torch.Tensor:
    """FP32 [1]: the amax over the quantizer's group; every rank must call it."""
    amax = ops.compute_amax(input=values.contiguous())
    torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=quantizer._canonicalized_amax_reduction_group())
    return amax


class CurrentFloat8(Float8):
    """The scale comes from the values' own amax, or from the amax over a group of ranks."""

    fused = False  # as in Transformer Engine, the scale is computed from values rounded to the activation dtype

    def target(self, quantizer, tensor):
        scale, amax = self._kept(quantizer)
        if scale is None:
            scale = amax = empty(2, dtype=torch.float32, device=tensor._scale_inv.device)
        return self.target_with(quantizer, tensor, scale, amax)

    def target_with(self, quantizer: Any, tensor: Any, scale: torch.Tensor, amax: torch.Tensor) -> Any:
        """target() that writes the scale and the amax to these tensors."""
        return self._written(tensor, quantizer.dtype, scale, amax, 3 if quantizer.force_pow_2_scales else 1, quantizer.amax_epsilon)

    def targets(self, quantizers, tensors):
        if self._kept(quantizers[0])[0] is not None:
            return super().targets(quantizers, tensors)
        both = empty((len(tensors), 2), dtype=torch.float32, device=tensors[0]._scale_inv.device).unbind(0)
        return [self._written(t, q.dtype, b, b, 3 if q.force_pow_2_scales else 1, q.amax_epsilon) for q, t, b in zip(quantizers, tensors, both)]

    @staticmethod
    def _kept(quantizer: Any) -> tuple:
        """Returns (scale, amax): before version 2.16, the tensors in which a quantizer stores scale and amax of its last tensor; else (None, None).
        """
        return getattr(quantizer, "scale", None), getattr(quantizer, "amax", None)

    def for_ranks(self, quantizer, values, tensor):
        scale = self._scale_of_ranks(quantizer, values)
        kept, _ = self._kept(quantizer)
        if kept is not None:
            kept.copy_(scale)
        if values.numel() == 0:  # no op writes an empty tensor
            torch.div(torch.ones_like(scale), scale, out=tensor._scale_inv)
        return self._written(tensor, quantizer.dtype, scale)

    def _scale_of_ranks(self, quantizer, values):
        """The scale, FP32 [1], computed from the amax over the quantizer's group."""
        amax = _largest_of_ranks(quantizer, values)
        _, kept = self._kept(quantizer)
        if kept is not None:
            kept.copy_(amax)
        return self._scale_of(quantizer, amax)

    def by_existing_amax(self, quantizer: Any, tensor: Any) -> Any:
        """The output whose scale is computed from the quantizer's stored amax, for use_existing_amax before 2.16."""
        if quantizer.with_amax_reduction:
            raise Unsupported("Float8CurrentScalingQuantizer.use_existing_amax with with_amax_reduction; reduce the amax, and leave one of them at False")
        quantizer.scale.copy_(self._scale_of(quantizer, quantizer.amax))
        return self._written(tensor, quantizer.dtype, quantizer.scale)

    @staticmethod
    def _scale_of(quantizer: Any, amax: torch.Tensor) -> torch.Tensor:
        scale = torch.empty_like(amax)
        # Quantising the amax itself yields the scale with exactly the op's rules.
        ops.quantize(input=amax, output=Quantized(torch.empty(1, dtype=fp8_dtype(quantizer.dtype), device=amax.device), scale=scale,
                                                  scale_inv=torch.empty_like(amax), amax=torch.empty_like(amax), compute_scale=True,
                                                  pow2_scale=quantizer.force_pow_2_scales, amax_epsilon=quantizer.amax_epsilon))
        return scale


@functools.lru_cache(maxsize=1024)
def _block_shapes(shape: Tuple[int, ...], square: bool) -> tuple:
    """The shapes of codes and scales, row-wise and column-wise."""
    rows, columns = rows_and_columns(shape)

    def scales(m, k):
        return (-(-m // 128), rounded_up(-(-k // 128), 4)) if square else (-(-k // 128), rounded_up(m, 4))
    return shape, scales(rows, columns), _transposed(shape), scales(columns, rows)


class Float8Block(Scheme):
    """One scale per 1 x 128 or 128 x 128 elements. The column-wise copy is transposed."""

    fused = False

    _NAMES = {"_rowwise_data": "rowwise_data", "_columnwise_data": "columnwise_data", "_rowwise_scale_inv": "rowwise_scale_inv",
              "_columnwise_scale_inv": "columnwise_scale_inv"}
    PARTS = QuantizedNames("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv", code="_fp8_dtype",
                           square="_is_2D_scaled")

    def storage_class(self, quantizer):
        classes = _classes()
        return classes["Float8BlockwiseQTensorStorage"] if quantizer.internal else classes["Float8BlockwiseQTensor"]

    def _alike(self, quantizer):
        return *super()._alike(quantizer), quantizer.block_scaling_dim

    def create(self, quantizer, shape, dtype, device, pin_memory=False):
        rowwise, columnwise = quantizer.rowwise_usage, quantizer.columnwise_usage
        if pin_memory or not quantizer.internal or not (rowwise or columnwise):
            return super().create(quantizer, shape, dtype, device, pin_memory)
        # equivalent to the general code, with less host time
        self.check(quantizer)
        square = quantizer.block_scaling_dim == 2
        codes, row_scales, transposed, column_scales = _block_shapes(tuple(shape), square)
        bytes_, f32 = torch.uint8, torch.float32
        return _classes()["Float8BlockwiseQTensorStorage"](
            rowwise_data=empty(codes, dtype=bytes_, device=device) if rowwise else None,
            rowwise_scale_inv=empty(row_scales, dtype=f32, device=device) if rowwise else None,
            columnwise_data=empty(transposed, dtype=bytes_, device=device) if columnwise else None,
            columnwise_scale_inv=empty(column_scales, dtype=f32, device=device) if columnwise else None,
            fp8_dtype=quantizer.dtype, quantizer=quantizer, is_2D_scaled=square, fake_dtype=dtype)

    def buffers(self, quantizer, shape):
        codes, row_scales, transposed, column_scales = _block_shapes(tuple(shape), quantizer.block_scaling_dim == 2)
        wanted = {}
        if quantizer.rowwise_usage:
            wanted.update(_rowwise_data=(codes, torch.uint8), _rowwise_scale_inv=(row_scales, torch.float32))
        if quantizer.columnwise_usage:
            wanted.update(_columnwise_data=(transposed, torch.uint8), _columnwise_scale_inv=(column_scales, torch.float32))
        if not wanted:
            raise InvalidArgument(f"{type(quantizer).__name__} has neither row-wise nor column-wise usage; set one by set_usage()")
        return wanted

    def constructor_arguments(self, quantizer):
        return {"fp8_dtype": quantizer.dtype, "is_2D_scaled": quantizer.block_scaling_dim == 2}

    def check(self, quantizer):
        if quantizer.block_scaling_dim not in (1, 2):
            raise InvalidArgument(f"block_scaling_dim is {quantizer.block_scaling_dim}; it is 1 (1 x 128) or 2 (128 x 128)")

    def mark(self, quantizer, tensor):
        tensor._fp8_dtype = quantizer.dtype
        tensor._is_2D_scaled = quantizer.block_scaling_dim == 2

    def target(self, quantizer, tensor):
        return self._written(tensor, quantizer.dtype, flags=2 if quantizer.force_pow_2_scales else 0, amax_epsilon=quantizer.amax_epsilon)


def _put_in_plain_order(tensor: Any) -> None:
    """Unswizzles an output's scales before an op writes them in plain order, so that a set noop flag preserves the old scales."""
    if tensor._with_gemm_swizzled_scales:
        for held, plain in zip((tensor._rowwise_scale_inv, tensor._columnwise_scale_inv), plain_scales(tensor)):
            if held is not None:
                held.copy_(plain)
        tensor._with_gemm_swizzled_scales = False


class MXFP8(Scheme):
    """One E8M0 scale per 32 elements. Neither copy is transposed."""

    fused = False  # Transformer Engine quantises values rounded to the activation dtype

    _NAMES = Float8Block._NAMES

    def storage_class(self, quantizer):
        classes = _classes()
        return classes["MXFP8TensorStorage"] if quantizer.internal else classes["MXFP8Tensor"]

    def buffers(self, quantizer, shape):
        rows, columns = rows_and_columns(shape)
        wanted = {}
        if quantizer.rowwise_usage:
            wanted.update(_rowwise_data=(tuple(shape), torch.uint8),
                          _rowwise_scale_inv=((rounded_up(rows, 128), rounded_up(-(-columns // 32), 4)), torch.uint8))
        if quantizer.columnwise_usage:
            wanted.update(_columnwise_data=(tuple(shape), torch.uint8),
                          _columnwise_scale_inv=((rounded_up(-(-rows // 32), 4), rounded_up(columns, 128)), torch.uint8))
        if not wanted:
            raise InvalidArgument(f"{type(quantizer).__name__} has neither row-wise nor column-wise usage; set one by set_usage()")
        return wanted

    def constructor_arguments(self, quantizer):
        return {"fp8_dtype": quantizer.dtype, "with_gemm_swizzled_scales": False}

    def is_single(self, quantizer):
        return self._is_square(quantizer)

    @staticmethod
    def _is_square(quantizer: Any) -> bool:
        return getattr(quantizer, "with_2d_quantization", False)  # exists since 2.19

    def write(self, quantizer, values, tensor, noop):
        if not self._is_square(quantizer):
            return False
        square_mxfp8.write(values, quantizer, tensor, noop)
        return True

    def mark(self, quantizer, tensor):
        _put_in_plain_order(tensor)
        tensor._fp8_dtype = quantizer.dtype

    def _parts(self, tensor, dtype):
        codes = fp8_dtype(dtype)
        rows, columns = rows_and_columns(shape_of(tensor))
        data, other = tensor._rowwise_data, tensor._columnwise_data
        row_scales, column_scales = plain_scales(tensor)
        return {"data": None if data is None else data.view(rows, columns).view(codes),
                "columnwise_data": None if other is None else other.view(rows, columns).view(codes),
                "scale_inv": None if row_scales is None else row_scales.view(torch.float8_e8m0fnu),
                "columnwise_scale_inv": None if column_scales is None else column_scales.view(torch.float8_e8m0fnu),
                "shape": (rows, columns), "scaling": "mxfp8"}

    def quantized(self, tensor):
        return Quantized(**self._parts(tensor, tensor._fp8_dtype))

    def target(self, quantizer, tensor):
        return Quantized(**self._parts(tensor, quantizer.dtype))


class NVFP4(Scheme):
    """One E4M3 scale per 16 elements and one amax per tensor. The column-wise copy is transposed. A byte holds two codes."""

    _NAMES = {**Float8Block._NAMES, "_amax_rowwise": "amax_rowwise", "_amax_columnwise": "amax_columnwise"}
    fused = False  # Transformer Engine quantises values rounded to the activation dtype

    def storage_class(self, quantizer):
        classes = _classes()
        return classes["NVFP4TensorStorage"] if quantizer.internal else classes["NVFP4Tensor"]

    def _alike(self, quantizer):
        return *super()._alike(quantizer), nvfp4.by_rows(quantizer)

    def buffers(self, quantizer, shape):
        rows, columns = rows_and_columns(shape)
        if rows % 16 or columns % 16:
            raise InvalidArgument(f"NVFP4Quantizer: a tensor has shape {tuple(shape)}; seen as a matrix both its dimensions are multiples of 16")

        def scales(m, k):
            return (rounded_up(m, 128), rounded_up(-(-k // 16), 4)), torch.uint8

        wanted = {}
        if quantizer.rowwise_usage:
            wanted.update(_rowwise_data=((*shape[:-1], columns // 2), torch.uint8), _rowwise_scale_inv=scales(rows, columns),
                          _amax_rowwise=((rows if nvfp4.by_rows(quantizer) else 1,), torch.float32))
        if quantizer.columnwise_usage:
            wanted.update(_columnwise_data=((columns, rows // 2), torch.uint8), _columnwise_scale_inv=scales(columns, rows),
                          _amax_columnwise=((columns if nvfp4.by_rows(quantizer) else 1,), torch.float32))
        if not wanted:
            raise InvalidArgument(f"{type(quantizer).__name__} has neither row-wise nor column-wise usage; set one by set_usage()")
        return wanted

    def constructor_arguments(self, quantizer):
        return {"fp4_dtype": quantizer.dtype, "with_gemm_swizzled_scales": False, **nvfp4.settings(quantizer)}

    def check(self, quantizer):
        nvfp4.check(quantizer)

    def is_single(self, quantizer):
        return super().is_single(quantizer) or nvfp4.needs_missing_feature(quantizer)

    def write(self, quantizer, values, tensor, noop):
        if not nvfp4.needs_missing_feature(quantizer):
            return False
        nvfp4.write(values, quantizer, tensor, noop)
        return True

    def write_without_elements(self, tensor, noop):
        for amax in (tensor._amax_rowwise, tensor._amax_columnwise):
            if amax is not None:
                nvfp4.overwrite(amax, torch.zeros_like(amax), noop)

    def mark(self, quantizer, tensor):
        _put_in_plain_order(tensor)
        tensor._fp4_dtype = quantizer.dtype
        for name, default in (("row_scaled_nvfp4", False), ("nvfp4_use_4over6", False), ("nvfp4_e4m3_max", 448)):
            if hasattr(tensor, f"_{name}"):  # exists since 2.17
                setattr(tensor, f"_{name}", getattr(quantizer, name, default))

    def _parts(self, tensor):
        rows, columns = rows_and_columns(shape_of(tensor))
        data, other = tensor._rowwise_data, tensor._columnwise_data
        row_scales, column_scales = plain_scales(tensor)
        if not hasattr(torch, "float4_e2m1fn_x2"):
            raise Unsupported(f"NVFP4 tensors need torch.float4_e2m1fn_x2, which PyTorch has from 2.8 on; this is PyTorch {torch.__version__}")
        row_amax, column_amax = tensor._amax_rowwise, tensor._amax_columnwise
        return {"data": None if data is None else data.view(rows, columns // 2).view(torch.float4_e2m1fn_x2),
                "columnwise_data": None if other is None else other.view(columns, rows // 2).view(torch.float4_e2m1fn_x2),
                "scale_inv": None if row_scales is None else row_scales.view(torch.float8_e4m3fn),
                "columnwise_scale_inv": None if column_scales is None else column_scales.view(torch.float8_e4m3fn),
                # Column-wise data without elements have no memory, and therefore no separate amax.
                "amax": column_amax if row_amax is None else row_amax,
                "columnwise_amax": None if row_amax is None or other is None or not other.numel() else column_amax,
                "shape": (rows, columns), "scaling": "nvfp4"}

    def quantized(self, tensor):
        return Quantized(**self._parts(tensor)) if nvfp4.is_plain(tensor) else nvfp4.values(tensor, False)

    def target(self, quantizer, tensor):
        return Quantized(**self._parts(tensor))

    def operand(self, tensor, columnwise):
        if not nvfp4.is_plain(tensor):
            return nvfp4.values(tensor, columnwise)
        # No op multiplies 4-bit codes, so they are dequantised to FP32 from the copy that tensor cores would read; the values are the same.
        parts = self._parts(tensor)
        if columnwise and parts["columnwise_data"] is not None:
            parts["data"] = parts["scale_inv"] = None
        elif parts["data"] is not None:
            parts["columnwise_data"] = parts["columnwise_scale_inv"] = parts["columnwise_amax"] = None
        if parts["data"] is None and parts["columnwise_amax"] is not None:
            parts["amax"], parts["columnwise_amax"] = parts["columnwise_amax"], None
        return ops.dequantize(input=Quantized(**parts), output=torch.float32)

    def for_ranks(self, quantizer, values, tensor):
        target = self.target(quantizer, tensor)
        amax = _largest_of_ranks(quantizer, values)
        if values.numel() == 0:  # no op writes an empty tensor
            for held in (tensor._amax_rowwise, tensor._amax_columnwise):
                if held is not None:
                    held.copy_(amax)
        # amax_epsilon sets a lower bound of the amax, and no value of this rank exceeds the reduced amax.
        target.amax_epsilon = amax.item()
        return target


_FLOAT8, _CURRENT, _BLOCK, _MX, _NV = Float8(), CurrentFloat8(), Float8Block(), MXFP8(), NVFP4()
_QUANTIZERS = {"Float8Quantizer": _FLOAT8, "Float8CurrentScalingQuantizer": _CURRENT, "Float8BlockQuantizer": _BLOCK, "MXFP8Quantizer": _MX,
               "NVFP4Quantizer": _NV}
_STORAGES = {"Float8TensorStorage": _FLOAT8, "Float8BlockwiseQTensorStorage": _BLOCK, "MXFP8TensorStorage": _MX, "NVFP4TensorStorage": _NV}
_by_type: dict = {}  # type of a quantizer or quantised tensor -> its scheme; type of a plain tensor -> None
_package_classes: dict = {}


def _classes() -> dict:
    """Transformer Engine's classes by name. Imported late, because Transformer Engine imports this module."""
    if not _package_classes:
        from transformer_engine.pytorch.tensor import float8_blockwise_tensor, float8_tensor, mxfp8_tensor, nvfp4_tensor
        modules = (float8_tensor, float8_blockwise_tensor, mxfp8_tensor, nvfp4_tensor)
        _package_classes.update((n, c) for m in modules for n, c in vars(m).items() if isinstance(c, type))
    return _package_classes


def _scheme(kind: type, table: dict, what: str) -> Scheme:
    found = _by_type.get(kind)
    if found is None:
        known = _classes()
        found = next((scheme for name, scheme in table.items() if issubclass(kind, known[name])), None)
        if found is None:
            raise Unsupported(f"{what} of class {kind.__name__} is not supported by te-fl; it supports {', '.join(table)}")
        if table is _STORAGES and found.PARTS is not None:
            _native.quantized_class(kind, found.PARTS)
        _by_type[kind] = found
    return found


def of_quantizer(quantizer: Any) -> Scheme:
    return _by_type.get(type(quantizer)) or _scheme(type(quantizer), _QUANTIZERS, "a quantizer")


def of_tensor(tensor: Any) -> Scheme:
    return _scheme(type(tensor), _STORAGES, "a quantised tensor")


def scheme_of(tensor: Any) -> Optional[Scheme]:
    """The scheme of a quantised tensor; None for a plain tensor."""
    kind = type(tensor)
    if kind not in _by_type:
        if is_quantised(tensor):
            return of_tensor(tensor)
        if kind not in (torch.Tensor, torch.nn.Parameter):
            return None
        _by_type[kind] = None
    return _by_type[kind]


def are_blocks(a: Any, b: Any) -> bool:
    """True if both tensors have FP8 block scaling (1 x 128 or 128 x 128)."""
    return scheme_of(a) is _BLOCK and scheme_of(b) is _BLOCK


def is_quantised(tensor: Any) -> bool:
    return hasattr(tensor, "_quantizer")


def shape_of(tensor: Any) -> Tuple[int, ...]:
    """The logical shape of a tensor or storage. If there is only a transposed copy, [last, others...], the shape is computed from it: before 2.19
    size() is wrong for such a storage with more than two dimensions, and for NVFP4 it warns.
    """
    transpose = getattr(tensor, "_transpose", None)
    if transpose is not None and tensor._data is None:
        return (*transpose.shape[1:], transpose.shape[0])
    if transpose is None and hasattr(tensor, "_fp4_dtype") and tensor._rowwise_data is None and not isinstance(tensor, torch.Tensor):
        packed = tensor._columnwise_data.shape
        return (*packed[1:-1], 2 * packed[-1], packed[0])
    return tuple(tensor.size())


def operand(tensor: Any, columnwise: bool = False) -> Any:
    """A plain or quantised tensor as a matrix operand of a GEMM. columnwise: the GEMM contracts over the tensor's rows."""
    scheme = scheme_of(tensor)
    return tensor if scheme is None else scheme.operand(tensor, columnwise)


def operands(tensors: Sequence[Any], columnwise: bool = False) -> Sequence[Any]:
    """operand() for each tensor."""
    if all(kind in _by_type and ((scheme := _by_type[kind]) is None or scheme.PARTS is not None) for kind in set(map(type, tensors))):
        return tensors  # matrix ops can read these directly
    return [operand(tensor, columnwise) for tensor in tensors]
