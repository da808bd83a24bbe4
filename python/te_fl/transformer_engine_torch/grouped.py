"""Groups of tensors in one buffer (Transformer Engine's GroupedTensor): quantisation of the members, and row offsets.

The members' row counts are in device memory. The host reads them once for all calls that share them (sizes.py).
"""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any, List, Optional, Sequence, Tuple

import torch

from te_fl import ops
from te_fl.errors import InvalidArgument, Unsupported
from te_fl.tensors import Quantized, Rows
from te_fl.transformer_engine_torch import matrix_ops, schemes, sizes
from te_fl.transformer_engine_torch.dtypes import fp8_dtype, torch_dtype
from te_fl.transformer_engine_torch.quantize import bulk_allocate as bulk_allocated
from te_fl.transformer_engine_torch.quantize import dequantize, quantize_into
from te_fl.transformer_engine_torch.swizzle import grouped_swizzle_for_gemm, plain_scales, swizzle_scales_for_gemm_

__all__ = ["bgrad_group_quantize", "copy_data_ptrs_to_device", "group_dequantize", "group_quantize", "group_requantize_inplace",
           "splits_to_offsets", "splits_to_offsets_multi"]

_GROUPS = ("MXFP8Quantizer", "Float8CurrentScalingQuantizer", "Float8BlockQuantizer")


def members(grouped: Any) -> List[Any]:
    """The members of a group, as views of its buffer."""
    _know_shapes(grouped)
    parts = grouped.split_into_quantized_tensors()
    if grouped.quantizer is not None:
        for part in parts:
            if hasattr(part, "_with_gemm_swizzled_scales"):
                part._with_gemm_swizzled_scales = grouped._with_gemm_swizzled_scales
    return parts


def _know_shapes(grouped: Any) -> None:
    """Stores the members' shapes in the group, which would otherwise read them from the device each time."""
    if grouped.tensor_shapes is None and (grouped.first_dims is not None or grouped.last_dims is not None):
        count, (rows, columns) = grouped.num_tensors, grouped.logical_shape
        grouped.tensor_shapes = list(zip(*([common] * count if dims is None else sizes.read(dims, "a group's dimensions")
                                           for dims, common in ((grouped.first_dims, rows), (grouped.last_dims, columns)))))
    if grouped.offsets is None and grouped.tensor_offsets is not None:
        grouped.offsets = sizes.read(grouped.tensor_offsets, "a group's tensor_offsets")


def _shapes(name: str, rows: int, columns: int, num_tensors: int, first_dims: Optional[torch.Tensor],
            last_dims: Optional[torch.Tensor]) -> List[Tuple[int, int]]:
    """The members' shapes, which must fit into rows x columns; there may be rows after the last member."""
    def numbers(dims: Optional[torch.Tensor], common: int, what: str) -> List[int]:
        if dims is None:
            return [common] * num_tensors
        if dims.numel() != num_tensors:
            raise InvalidArgument(f"{name}: {what} has {dims.numel()} elements for {num_tensors} tensors")
        found = sizes.read(dims, f"{name}: {what}")
        if min(found, default=0) < 0:
            raise InvalidArgument(f"{name}: {what} {found} has a negative number")
        return found

    if num_tensors <= 0:
        raise InvalidArgument(f"{name}: num_tensors is {num_tensors}; it is at least 1")
    if first_dims is None and last_dims is None and rows % num_tensors:
        raise InvalidArgument(f"{name}: {rows} rows do not divide into {num_tensors} tensors of one shape; give first_dims")
    common = rows if last_dims is not None else rows // num_tensors
    shapes = list(zip(numbers(first_dims, common, "first_dims"), numbers(last_dims, columns, "last_dims")))
    total = sum(m * n for m, n in shapes)
    if total > rows * columns:
        raise InvalidArgument(f"{name}: the tensors of {shapes} have {total} elements; the input has {rows * columns}")
    return shapes


def _create(name: str, quantizer: Any, tensor: torch.Tensor, shapes: Sequence[Tuple[int, int]], first_dims: Optional[torch.Tensor],
            last_dims: Optional[torch.Tensor], tensor_offsets: Optional[torch.Tensor]) -> Any:
    """Creates a group for the slices of a matrix."""
    ends = [0, *itertools.accumulate(m * n for m, n in shapes)]
    if tensor_offsets is not None and (own := sizes.read(tensor_offsets, f"{name}: tensor_offsets")) != ends:
        raise InvalidArgument(f"{name}: tensor_offsets {own} are not those of tensors that follow each other, {ends}")
    if tensor_offsets is None and (first_dims is not None or last_dims is not None):
        tensor_offsets = torch.tensor(ends, dtype=torch.int64, device="cpu").to(tensor.device, non_blocking=True)
    kind = _storage_module().GroupedTensorStorage if quantizer.internal else sys.modules["transformer_engine.pytorch.tensor"].GroupedTensor
    return kind(tuple(tensor.shape), tensor.dtype, num_tensors=len(shapes), shapes=list(shapes), quantizer=quantizer, first_dims=first_dims,
                last_dims=last_dims, tensor_offsets=tensor_offsets, offsets=ends, with_gemm_swizzled_scales=_swizzles(quantizer),
                **_buffers(quantizer, shapes, tensor.numel(), tensor.device))


def _storage_module() -> Any:
    return sys.modules["transformer_engine.pytorch.tensor.storage.grouped_tensor_storage"]


def _buffers(quantizer: Any, shapes: Sequence[Tuple[int, int]], elements: int, device: torch.device) -> dict:
    """Returns the group's new buffers and the offsets of the members' scales, as one dict keyed by the constructor's argument names."""
    rowwise, columnwise = quantizer.rowwise_usage, quantizer.columnwise_usage
    if _kind(quantizer) == "Float8CurrentScalingQuantizer":
        # If FP8 GEMMs support every transposition, Transformer Engine creates only the row-wise data.
        any_layout = getattr(_storage_module(), "is_non_tn_fp8_gemm_supported", None)
        if any_layout is not None and any_layout():
            rowwise, columnwise = True, False
        scales, amax, inverses = (torch.empty(len(shapes), dtype=torch.float32, device=device) for _ in range(3))
        parts = {"scale": scales, "amax": amax}
        ends = list(range(len(shapes) + 1))
        factors = {side: (inverses, ends) for side in (False, True)}
    else:
        scheme, parts = schemes.of_quantizer(quantizer), {}
        wanted = {shape: scheme.buffers(quantizer, shape) for shape in set(shapes)}
        factors = {}
        for side, name in ((False, "_rowwise_scale_inv"), (True, "_columnwise_scale_inv")):
            if not (columnwise if side else rowwise):
                continue
            sizes_of = {shape: math.prod(buffers[name][0]) for shape, buffers in wanted.items()}
            ends = [0, *itertools.accumulate(sizes_of[shape] for shape in shapes)]
            factors[side] = torch.empty(ends[-1], dtype=wanted[shapes[0]][name][1], device=device), ends
    if rowwise:
        parts["data"] = torch.empty(elements, dtype=torch.uint8, device=device)
        parts["scale_inv"], parts["scale_inv_offsets"] = factors[False]
    if columnwise:
        parts["columnwise_data"] = torch.empty(elements, dtype=torch.uint8, device=device)
        parts["columnwise_scale_inv"], parts["columnwise_scale_inv_offsets"] = factors[True]
    return parts


def _make_plain(shapes: Sequence[Tuple[int, int]], first_dims: Optional[torch.Tensor], last_dims: Optional[torch.Tensor], whole: Sequence[int],
                device: torch.device, dtype: torch.dtype) -> Any:
    """Creates Transformer Engine's group of plain members. Its row counts are passed as host tensors, since the constructor reads them."""
    storage = _storage_module().GroupedTensorStorage
    here = [None if dims is None else torch.tensor(numbers, dtype=torch.int64, device="cpu") for dims, numbers in zip((first_dims, last_dims), zip(*shapes))]
    group = storage.make_grouped_tensor(len(shapes), *here, *whole, None, device, dtype)
    group.first_dims, group.last_dims = first_dims, last_dims
    if group.tensor_offsets is not None:
        group.tensor_offsets = group.tensor_offsets.to(device, non_blocking=True)
    return group


def _swizzles(quantizer: Any) -> bool:
    """True for a quantizer whose groups store scales in the tensor cores' swizzled order."""
    return _kind(quantizer) == "MXFP8Quantizer" and bool(quantizer.optimize_for_gemm)


def _kind(quantizer: Any) -> str:
    return next((c.__name__ for c in type(quantizer).__mro__ if c.__name__ in _GROUPS), type(quantizer).__name__)


def _check_quantizer(name: str, quantizer: Any, kinds: Sequence[str], shapes: Sequence[Tuple[int, int]]) -> None:
    kind = _kind(quantizer)
    if kind not in kinds:
        raise Unsupported(f"{name}: a quantizer of class {type(quantizer).__name__} is not supported by te-fl; it supports {', '.join(kinds)}")
    schemes.of_quantizer(quantizer).check(quantizer)
    if kind == "MXFP8Quantizer":
        for rows, columns in shapes:
            if (quantizer.columnwise_usage and rows % 32) or (quantizer.rowwise_usage and columns % 32):
                raise InvalidArgument(f"{name}: a tensor has shape {(rows, columns)}; MXFP8 takes multiples of 32 along its blocks")


def _quantize_member(values: torch.Tensor, quantizer: Any, group: Any, i: int, part: Any, noop: Optional[torch.Tensor]) -> None:
    if not group._with_gemm_swizzled_scales:
        quantize_into(values, quantizer, part, noop)
        if _kind(quantizer) == "Float8CurrentScalingQuantizer" and group.scale is not None:
            torch.div(torch.ones_like(part._scale_inv), part._scale_inv, out=group.scale[i:i + 1])
            ops.compute_amax(input=values.contiguous(), amax=group.amax[i:i + 1])
        return
    # Ops write scales in plain order. If a noop flag is set, old scales must survive, so they are unswizzled first and swizzled again.
    views = part._rowwise_scale_inv, part._columnwise_scale_inv
    if noop is not None:
        _overwrite(views, plain_scales(part))
    part._with_gemm_swizzled_scales = False
    quantize_into(values, quantizer, part, noop)
    swizzle_scales_for_gemm_(part)
    _overwrite(views, (part._rowwise_scale_inv, part._columnwise_scale_inv))


def _overwrite(views: Sequence[Optional[torch.Tensor]], values: Sequence[Optional[torch.Tensor]]) -> None:
    for view, value in zip(views, values):
        if view is not None:
            view.copy_(value)


def _parts(tensor: torch.Tensor, shapes: Sequence[Tuple[int, int]]) -> List[torch.Tensor]:
    flat, begin, parts = tensor.contiguous().view(-1), 0, []
    for shape in shapes:
        parts.append(flat[begin:begin + math.prod(shape)].view(shape))
        begin += parts[-1].numel()
    return parts


def _check_output(name: str, output: Any, quantizer: Any, tensor: torch.Tensor, num_tensors: int, dims: Sequence[Any]) -> None:
    if any(d is not None for d in dims):
        raise InvalidArgument(f"{name}: an output is taken for tensors of one shape only; leave first_dims, last_dims and tensor_offsets out")
    if output.num_tensors != num_tensors or tuple(output.logical_shape) != tuple(tensor.shape):
        raise InvalidArgument(f"{name}: output holds {output.num_tensors} tensors, together {tuple(output.logical_shape)}; the input is "
                              f"{num_tensors} of {tuple(tensor.shape)}")
    if output.quantizer is not quantizer:
        raise InvalidArgument(f"{name}: output was made by another quantizer; make it by this one")


def _check_matrix(name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() != 2:
        raise InvalidArgument(f"{name}: the tensor has {tensor.dim()} dimensions; it has 2")


def group_quantize(tensor: torch.Tensor, quantizer: Any, num_tensors: int, first_dims: Optional[torch.Tensor],
                   last_dims: Optional[torch.Tensor] = None, tensor_offsets: Optional[torch.Tensor] = None,
                   noop_flag: Optional[torch.Tensor] = None, output: Any = None) -> Any:
    """Creates a group from slices of a matrix that are adjacent in memory, and quantises each separately. Rows after the last slice are ignored."""
    name = "group_quantize"
    _check_matrix(name, tensor)
    shapes = _shapes(name, *tensor.shape, num_tensors, first_dims, last_dims)
    _check_quantizer(name, quantizer, _GROUPS, shapes)
    if output is None:
        output = _create(name, quantizer, tensor, shapes, first_dims, last_dims, tensor_offsets)
    else:
        _check_output(name, output, quantizer, tensor, num_tensors, (first_dims, last_dims, tensor_offsets))
    return _quantize_members(tensor, quantizer, shapes, output, noop_flag)


def _quantize_members(tensor: torch.Tensor, quantizer: Any, shapes: Sequence[Tuple[int, int]], group: Any, noop: Optional[torch.Tensor] = None) -> Any:
    if _in_one_call(quantizer, group):
        if group.last_dims is None:
            _quantize_rows(tensor, quantizer, [rows for rows, _ in shapes], group, noop)
            return group
        pairs = [(i, *pair) for i, pair in enumerate(zip(_parts(tensor, shapes), members(group))) if pair[0].numel()]
        if pairs:
            filled, inputs, parts = zip(*pairs)
            matrix_ops.multi_tensor_quantize(inputs=inputs, outputs=_targets(quantizer, group, parts, filled), noop_flag=noop)
        return group
    for i, (values, part) in enumerate(zip(_parts(tensor, shapes), members(group))):
        _quantize_member(values, quantizer, group, i, part, noop)
    return group


def _quantize_rows(tensor: torch.Tensor, quantizer: Any, rows: Sequence[int], group: Any, noop: Optional[torch.Tensor]) -> None:
    """Quantises members with equal column counts directly into the group's buffer, without creating a tensor for each."""
    columns, total = tensor.shape[1], sum(rows)
    if total * columns == 0:
        return
    data, other = group.rowwise_data, group.columnwise_data
    codes, kind = fp8_dtype(quantizer.dtype), _kind(quantizer)
    parts = {"data": None if data is None else data[:total * columns].view(total, columns).view(codes),
             "columnwise_data": None if other is None else other.view(codes), "shape": (total, columns),
             "scale_inv": group.scale_inv, "columnwise_scale_inv": group.columnwise_scale_inv}
    if kind == "Float8CurrentScalingQuantizer":
        scale, amax = (torch.empty(len(rows), dtype=torch.float32, device=tensor.device) if t is None else t for t in (group.scale, group.amax))
        parts.update(scale_inv=group.columnwise_scale_inv if group.scale_inv is None else group.scale_inv, columnwise_scale_inv=None, scale=scale,
                     amax=amax, compute_scale=True, pow2_scale=quantizer.force_pow_2_scales, amax_epsilon=quantizer.amax_epsilon)
    elif kind == "Float8BlockQuantizer":
        parts.update(scaling="block_128x128" if quantizer.block_scaling_dim == 2 else "block_1x128", pow2_scale=quantizer.force_pow_2_scales,
                     amax_epsilon=quantizer.amax_epsilon)
    else:
        parts["scaling"] = "mxfp8"
    if kind != "Float8CurrentScalingQuantizer":
        rows = [n for n in rows if n]  # empty members have no scales
    values = tensor.contiguous()
    ops.multi_tensor_quantize(inputs=Rows(values if total == len(values) else values[:total], rows), outputs=Rows(Quantized(**parts), rows), noop_flag=noop)


def _in_one_call(quantizer: Any, group: Any) -> bool:
    """True unless members need separate calls, or the quantizer stores state of its last tensor."""
    if group._with_gemm_swizzled_scales or schemes.of_quantizer(quantizer).is_single(quantizer):
        return False
    return _kind(quantizer) != "Float8CurrentScalingQuantizer" or getattr(quantizer, "scale", None) is None


def _targets(quantizer: Any, group: Any, parts: Sequence[Any], places: Sequence[int]) -> list:
    """The members as op outputs, whose scales and amaxes are written to the group's buffers."""
    scheme = schemes.of_quantizer(quantizer)
    if group.scale is None or group.amax is None or _kind(quantizer) != "Float8CurrentScalingQuantizer":
        return scheme.targets([quantizer] * len(parts), parts)
    return [scheme.target_with(quantizer, part, group.scale[i:i + 1], group.amax[i:i + 1]) for part, i in zip(parts, places)]


def bgrad_group_quantize(tensor: torch.Tensor, quantizer: Any, num_tensors: int, first_dims: Optional[torch.Tensor],
                         last_dims: Optional[torch.Tensor] = None, tensor_offsets: Optional[torch.Tensor] = None) -> tuple:
    """Returns (the group of gradients, the bias gradients [num_tensors, columns] in the tensor's dtype)."""
    name = "bgrad_group_quantize"
    _check_matrix(name, tensor)
    if last_dims is not None:
        raise InvalidArgument(f"{name}: last_dims is given; the tensors have one number of columns")
    shapes = _shapes(name, *tensor.shape, num_tensors, first_dims, None)
    _check_quantizer(name, quantizer, ("MXFP8Quantizer", "Float8BlockQuantizer"), shapes)
    group = _quantize_members(tensor, quantizer, shapes, _create(name, quantizer, tensor, shapes, first_dims, None, tensor_offsets))
    return group, _column_sums(tensor, shapes)


def _column_sums(tensor: torch.Tensor, shapes: Sequence[Tuple[int, int]]) -> torch.Tensor:
    """The column sums of each slice, accumulated in FP32 and rounded once."""
    rows, columns = shapes[0]
    if all(shape == shapes[0] for shape in shapes) and rows * len(shapes) == tensor.shape[0]:
        return tensor.contiguous().view(len(shapes), rows, columns).sum(1, dtype=torch.float32).to(tensor.dtype)
    return torch.stack([part.sum(0, dtype=torch.float32).to(tensor.dtype) for part in _parts(tensor, shapes)])


def group_dequantize(input: Any, otype: Any) -> Any:
    """Dequantises to a group of plain tensors."""
    dtype = torch_dtype(otype)
    if input.quantizer is None:
        raise InvalidArgument("group_dequantize: the group is not quantised")
    data = input.rowwise_data if input.rowwise_data is not None else input.columnwise_data
    parts = members(input)
    group = _make_plain([schemes.rows_and_columns(schemes.shape_of(part)) for part in parts], input.first_dims, input.last_dims, input.logical_shape,
                        data.device, dtype)
    for part, out in zip(parts, members(group)):
        if out.numel():
            out.copy_(dequantize(part, otype))
    return group


def group_requantize_inplace(grouped_x: Any, quantizer: Any, num_tensors: int, first_dims: Optional[torch.Tensor], otype: Any,
                             tensor_offsets: Optional[torch.Tensor] = None, return_dequantized: bool = False) -> Optional[torch.Tensor]:
    """Adds column-wise data to a group of row-wise MXFP8 tensors, if the quantizer requests it, and swizzles the scales for tensor cores."""
    name = "group_requantize_inplace"
    if grouped_x.rowwise_data is None or grouped_x.scale_inv is None:
        raise InvalidArgument(f"{name}: the group has no row-wise data and factors")
    if grouped_x.quantizer is None or type(grouped_x.quantizer) is not type(quantizer) or int(grouped_x.quantizer.dtype) != int(quantizer.dtype):
        raise InvalidArgument(f"{name}: the group and the quantizer are of two formats")
    wanted = bool(quantizer.columnwise_usage)
    if grouped_x._with_gemm_swizzled_scales:
        if return_dequantized or (wanted and grouped_x.columnwise_data is None):
            raise InvalidArgument(f"{name}: the group's factors are in the order of the tensor cores already; give it before it is swizzled")
        return None
    if grouped_x.columnwise_data is not None:
        raise InvalidArgument(f"{name}: the group has its column-wise copy already")
    if _kind(quantizer) != "MXFP8Quantizer":
        raise Unsupported(f"{name}: a quantizer of class {type(quantizer).__name__} is not supported by te-fl; it supports MXFP8Quantizer")
    plain = None
    if wanted or return_dequantized:
        plain = group_dequantize(grouped_x, otype).rowwise_data.view(tuple(grouped_x.logical_shape))
    grouped_swizzle_for_gemm(grouped_x, True, False)
    if wanted:
        quantizer.set_usage(rowwise=False, columnwise=True)
        columnwise = group_quantize(plain, quantizer, num_tensors, first_dims, None, tensor_offsets)
        if not columnwise._with_gemm_swizzled_scales:
            grouped_swizzle_for_gemm(columnwise, False, True)
        grouped_x.columnwise_data, grouped_x.columnwise_scale_inv = columnwise.columnwise_data, columnwise.columnwise_scale_inv
        grouped_x.columnwise_scale_inv_offsets = columnwise.columnwise_scale_inv_offsets
    return plain if return_dequantized else None


def _sums(splits: torch.Tensor, stride: int, leading_zero: bool, dtype: torch.dtype) -> torch.Tensor:
    sums = torch.cumsum(splits.to(torch.int64) * stride, 0)
    return (torch.cat([sums.new_zeros(1), sums]) if leading_zero else sums).to(dtype)


def splits_to_offsets(first_dims: torch.Tensor, logical_last_dim: int) -> torch.Tensor:
    """INT64 [n + 1]: the prefix sums of first_dims, times logical_last_dim."""
    if first_dims.dtype != torch.int64 or first_dims.dim() != 1:
        raise InvalidArgument(f"splits_to_offsets: first_dims is {first_dims.dtype} of {first_dims.dim()} dimensions; it is int64 of one")
    if logical_last_dim <= 0:
        raise InvalidArgument(f"splits_to_offsets: logical_last_dim is {logical_last_dim}; it is at least 1")
    return sizes.note(_sums(first_dims, logical_last_dim, True, torch.int64))


def splits_to_offsets_multi(split_sizes: torch.Tensor, device: Any, *, strides: Sequence[int], include_leading_zero: Sequence[bool],
                            dtypes: Sequence[torch.dtype], bulk_allocate: bool = False) -> tuple:
    """Returns (split_sizes as INT64 on the device, and for each stride the prefix sums times the stride). bulk_allocate: the sums share one buffer,
    aligned to 16 bytes.
    """
    if not len(strides) == len(include_leading_zero) == len(dtypes):
        raise InvalidArgument(f"splits_to_offsets_multi: {len(strides)} strides, {len(include_leading_zero)} include_leading_zero and "
                              f"{len(dtypes)} dtypes; give one of each for every output")
    # Always a copy, so that the values recorded on the host stay valid.
    splits = split_sizes.to(device=device, dtype=torch.int64, copy=True)
    sizes.note(splits, None if split_sizes.is_cuda or split_sizes.device.type != "cpu" else split_sizes.tolist())
    sums = [_sums(splits, *each) for each in zip(strides, include_leading_zero, dtypes)]
    if bulk_allocate and sums:
        memory = bulk_allocated([tuple(s.shape) for s in sums], list(dtypes), splits.device, [16] * len(sums))
        sums = [place.copy_(s) for place, s in zip(memory, sums)]
    return splits, [sizes.note(s, None, sizes.running_sums(splits, stride, leading)) for s, stride, leading in zip(sums, strides, include_leading_zero)]


def copy_data_ptrs_to_device(tensors: Sequence[torch.Tensor], device: Any) -> torch.Tensor:
    """INT64: the addresses of the tensors' data."""
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device="cpu").to(device)
