"""Casts between high-precision tensors and Transformer Engine's quantised tensors."""

from __future__ import annotations

import math
from typing import Any, List, Optional, Sequence

import torch

from te_fl.errors import InvalidArgument
from te_fl.transformer_engine_torch import matrix_ops as ops
from te_fl.transformer_engine_torch import schemes
from te_fl.transformer_engine_torch.dtypes import FP8, fp8_dtype, torch_dtype

__all__ = ["bgrad_quantize", "bulk_allocate", "compute_amax", "create_empty_quantized_tensor", "dequantize", "fp8_transpose",
           "fused_amax_and_scale_update_after_reduction", "multi_tensor_quantize", "quantize", "split_quantize", "swap_first_dims"]


_quantize = ops.quantize


def matrix(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as a matrix over its last dimension."""
    tensor = tensor.contiguous()
    return tensor if tensor.dim() == 2 else tensor.view(-1, tensor.shape[-1]) if tensor.numel() else tensor.reshape(schemes.rows_and_columns(tensor.shape))


def _high_precision(tensor: Any) -> torch.Tensor:
    """Dequantises a tensor that the caller has already quantised, as emulated FP8 attention does with a gradient."""
    return tensor.dequantize() if type(tensor) is not torch.Tensor and schemes.is_quantised(tensor) else tensor


def quantize_into(values: torch.Tensor, quantizer: Any, output: Any, noop: Optional[torch.Tensor] = None) -> Any:
    """Quantises into output, a Transformer Engine tensor whose buffers fit the quantizer."""
    scheme = schemes.of_quantizer(quantizer)
    if scheme.write(quantizer, values, output, noop):
        return output
    # Every rank must take part in the amax reduction, also with an empty tensor.
    target = scheme.for_ranks(quantizer, values, output) if getattr(quantizer, "with_amax_reduction", False) else None
    if values.numel() == 0:
        if target is None:
            scheme.write_without_elements(output, noop)
        return output
    _quantize(input=values, output=scheme.target(quantizer, output) if target is None else target, noop_flag=noop)
    return output


def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: Optional[torch.Tensor] = None) -> Any:
    scheme, tensor = schemes.of_quantizer(quantizer), _high_precision(tensor)
    if output is None:
        output = scheme.create(quantizer, tensor.shape, tensor.dtype, tensor.device)
    else:
        output = scheme.adapt(quantizer, output)
    if getattr(quantizer, "use_existing_amax", False):  # exists before version 2.16, where only this function uses it
        if tensor.numel():
            _quantize(input=tensor, output=scheme.by_existing_amax(quantizer, output), noop_flag=noop)
        return output
    return quantize_into(tensor, quantizer, output, noop)


def dequantize(input: Any, otype: Any) -> torch.Tensor:
    shape, dtype = schemes.shape_of(input), torch_dtype(otype)
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype, device=input.device)
    operand = schemes.of_tensor(input).quantized(input)
    return (operand.to(dtype) if type(operand) is torch.Tensor else ops.dequantize(operand, output=dtype)).view(shape)


def create_empty_quantized_tensor(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, pin_memory: bool) -> Any:
    return schemes.of_quantizer(quantizer).create(quantizer, shape, dtype, device, pin_memory)


def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> list:
    """Returns [the bias gradient in input's dtype, the quantised gradient (without a quantizer: the gradient itself)]."""
    values = _high_precision(input).contiguous()
    if values.numel() == 0:
        return [values.new_zeros(values.shape[-1]), values if quantizer is None else quantize(values, quantizer)]
    if quantizer is None:
        return [values.detach().view(-1, values.shape[-1]).sum(0), values]
    scheme = schemes.of_quantizer(quantizer)
    output = scheme.create(quantizer, values.shape, values.dtype, values.device)
    if scheme.is_single(quantizer):
        return [values.detach().view(-1, values.shape[-1]).sum(0), quantize_into(values, quantizer, output)]
    return [ops.bgrad_quantize(values, output=scheme.target(quantizer, output)), output]


def multi_tensor_quantize(tensor_list: Sequence[torch.Tensor], quantizer_list: Sequence[Any]) -> List[Any]:
    if len(tensor_list) != len(quantizer_list):
        raise InvalidArgument(f"multi_tensor_quantize: {len(tensor_list)} tensors have {len(quantizer_list)} quantizers; give one for each")
    return [quantize(tensor, quantizer) for tensor, quantizer in zip(tensor_list, quantizer_list)]


def split_quantize(tensor: torch.Tensor, split_sections: Sequence[int], quantizer_list: Sequence[Any], disable_bulk_allocation: bool = False) -> List[Any]:
    """Splits along the first dimension and quantises each part with its quantizer. Unless disable_bulk_allocation, the parts may share a buffer."""
    sections = [int(n) for n in split_sections]
    if len(sections) != len(quantizer_list):
        raise InvalidArgument(f"split_quantize: {len(sections)} sections have {len(quantizer_list)} quantizers; give one for each")
    if min(sections, default=0) < 0 or sum(sections) != tensor.shape[0]:
        raise InvalidArgument(f"split_quantize: split_sections {sections} do not sum to the tensor's {tensor.shape[0]} rows, each at least 0")
    if not sections:
        return []
    tensor = tensor.contiguous()
    shapes = [(n, *tensor.shape[1:]) for n in sections]
    schemes_of = [schemes.of_quantizer(q) for q in quantizer_list]
    one = schemes_of[0] if schemes_of.count(schemes_of[0]) == len(schemes_of) else None
    outputs = None
    if one is not None and not disable_bulk_allocation:
        outputs = one.create_together(quantizer_list, shapes, tensor.dtype, tensor.device)
    if outputs is None:
        outputs = [s.create(q, shape, tensor.dtype, tensor.device) for s, q, shape in zip(schemes_of, quantizer_list, shapes)]
    if any(s.is_single(q) for s, q in zip(schemes_of, quantizer_list)):
        return [quantize_into(part, q, out) for part, q, out in zip(tensor.split(sections), quantizer_list, outputs)]
    if tensor.numel():
        targets = one.targets(quantizer_list, outputs) if one is not None else [s.target(*each) for s, *each in zip(schemes_of, quantizer_list, outputs)]
        ops.split_quantize(input=tensor, outputs=targets)
    for rows, scheme, output in zip(sections, schemes_of, outputs):
        if rows == 0:
            scheme.write_without_elements(output, None)
    return outputs


def fp8_transpose(input: torch.Tensor, dtype: Any, *, out: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Transposes codes: [last, others...]."""
    if int(dtype) not in FP8:
        fp8_dtype(dtype)  # raises for other dtypes
    codes = input.contiguous()
    shape = (codes.shape[-1], *codes.shape[:-1]) if codes.dim() else ()
    if out is None:
        out = torch.empty(shape, dtype=torch.uint8, device=codes.device)
    elif out.numel() != codes.numel() or not out.is_contiguous():
        raise InvalidArgument(f"fp8_transpose: out has {out.numel()} elements{'' if out.is_contiguous() else ', not contiguous'}; input has {codes.numel()}")
    if codes.numel():
        rows, columns = schemes.rows_and_columns(codes.shape)
        ops.fp8_transpose(input=codes.view(torch.uint8), output=out.view(torch.uint8).view(columns, rows))
    return out


def apart(values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Returns the values, copied if they share a storage with the output. PyTorch's copies do not check for overlap, while te-fl's ops do."""
    return values.clone() if values.untyped_storage().data_ptr() == out.untyped_storage().data_ptr() else values


def swap_first_dims(tensor: torch.Tensor, *, out: Optional[torch.Tensor] = None) -> torch.Tensor:
    if tensor.dim() < 2:
        raise InvalidArgument(f"swap_first_dims: the tensor has {tensor.dim()} dimensions; it needs 2 or more")
    swapped = tensor.transpose(0, 1)
    if out is None:
        out = torch.empty(swapped.shape, dtype=tensor.dtype, device=tensor.device)
    elif out.shape != swapped.shape or out.dtype != swapped.dtype:
        raise InvalidArgument(f"swap_first_dims: out is {out.dtype} {tuple(out.shape)}; the result is {swapped.dtype} {tuple(swapped.shape)}")
    return out.copy_(apart(swapped, out))


def compute_amax(input: torch.Tensor, amax: torch.Tensor) -> None:
    ops.compute_amax(input=input.contiguous(), amax=amax.view(1))


def fused_amax_and_scale_update_after_reduction(amax_reduction_buffer: torch.Tensor, amax_histories: Sequence[torch.Tensor],
                                                scales: Sequence[torch.Tensor], amax_compute_algo: str, fp8_dtype: Any, margin: float) -> None:
    if amax_compute_algo not in ("max", "most_recent"):
        raise InvalidArgument(f"amax_compute_algo is {amax_compute_algo!r}; it is 'max' or 'most_recent'")
    formats = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
    ops.fused_amax_and_scale_update_after_reduction(amax_histories=list(amax_histories), scales=list(scales),
                                                    amax_reduction_buffer=amax_reduction_buffer, algo=amax_compute_algo,
                                                    fp8_dtype=formats[FP8[int(fp8_dtype)]], margin=float(margin))


def bulk_allocate(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], device: Any = None, alignments: Any = None) -> List[torch.Tensor]:
    """Allocates tensors in one buffer, each aligned to its alignment in bytes (default 256)."""
    if len(shapes) != len(dtypes) or (alignments is not None and len(alignments) != len(shapes)):
        raise InvalidArgument(f"bulk_allocate: {len(shapes)} shapes have {len(dtypes)} dtypes and "
                              f"{'no' if alignments is None else len(alignments)} alignments; give one for each")
    places, end = [], 0
    for i, (shape, dtype) in enumerate(zip(shapes, dtypes)):
        begin = schemes.rounded_up(end, max(int(alignments[i]) if alignments is not None else 256, dtype.itemsize))
        end = begin + torch.Size(shape).numel() * dtype.itemsize
        places.append((begin, end))
    memory = torch.empty(end, dtype=torch.uint8, device="cuda" if device is None else device)
    return [memory[begin:end].view(dtype).view(tuple(shape)) for (begin, end), shape, dtype in zip(places, shapes, dtypes)]
