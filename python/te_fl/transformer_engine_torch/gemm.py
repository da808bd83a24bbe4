"""Matrix products of plain and quantised matrices."""

from __future__ import annotations

import math
from typing import Any, Optional, Tuple

import torch

from te_fl.errors import InvalidArgument, Unsupported
from te_fl.transformer_engine_torch import matrix_ops, schemes
from te_fl.transformer_engine_torch.dtypes import torch_dtype
from te_fl.transformer_engine_torch.enums import DType
from te_fl.transformer_engine_torch.quantize import quantize_into

__all__ = ["generic_gemm", "product"]

_gemm = matrix_ops.generic_gemm


def _output_shape(a: Any, trans_a: bool, b: Any, trans_b: bool) -> Tuple[tuple, int]:
    """Returns (the shape of op(B) op(A), with B's leading dimensions if B is not transposed; the length of the contraction). Transformer Engine
    passes operands in column-major order.
    """
    a_shape, b_shape = (t.size() if type(t) is torch.Tensor else schemes.shape_of(t) for t in (a, b))
    a_rows, a_columns = schemes.rows_and_columns(a_shape)
    b_rows, b_columns = schemes.rows_and_columns(b_shape)
    inner_a, inner_b = (a_columns if trans_a else a_rows), (b_rows if trans_b else b_columns)
    if inner_a != inner_b:
        raise InvalidArgument(f"generic_gemm: A {tuple(a_shape)} {'transposed ' if trans_a else ''}and B {tuple(b_shape)} "
                              f"{'transposed ' if trans_b else ''}do not multiply: {inner_a} and {inner_b} differ")
    last = a_rows if trans_a else a_columns
    return (b_columns, last) if trans_b else (*b_shape[:-1], last), inner_b


def product(a: Any, trans_a: bool, b: Any, trans_b: bool, out: torch.Tensor, **options: Any) -> None:
    """out = op(b) op(a) for operands in Transformer Engine's order. out and tensor options are treated as matrices."""
    _gemm(a=schemes.operand(b, trans_b), trans_a=trans_b, b=schemes.operand(a, not trans_a), trans_b=trans_a, d=out, **options)


def _without_terms(out: torch.Tensor, accumulate: bool, beta: float, bias_grad: Optional[torch.Tensor], bias: Optional[torch.Tensor], grad: bool) -> None:
    """The product if the contraction has length 0: zero, or the old contents with accumulate."""
    if out.numel():
        if accumulate:
            out.mul_(beta)
        else:
            out.zero_()
        if bias is not None and not grad:
            out.add_(bias)
    if bias_grad is not None:
        bias_grad.zero_()


def _check_output(out: torch.Tensor, shape: tuple, dtype: Optional[torch.dtype]) -> None:
    if out.shape != shape and out.numel() != torch.Size(shape).numel():
        raise InvalidArgument(f"generic_gemm: D has shape {tuple(out.shape)}; the product has {shape}")
    if dtype is not None and out.dtype != dtype:
        raise InvalidArgument(f"generic_gemm: D is {out.dtype}; output_dtype says {dtype}")


def _refusal_of_blocks(a: Any, b: Any, shape: tuple, terms: int, dtype: torch.dtype, bias: bool, gelu: bool, grad: bool, split: bool) -> str:
    """The reason why NVIDIA's extension refuses a product of two block-scaled operands; empty if it accepts. The text equals that of NVIDIA's
    error, which programs search for.
    """
    rows, columns = schemes.rows_and_columns(shape)
    if terms % 16:
        return f"{terms} elements are contracted, which breaks the leading dimension requirement: multiples of 16"
    if columns % 8 or (rows % 8 and not b._is_2D_scaled):
        return f"the result has {rows} rows and {columns} columns, which breaks the outer dimension requirement: multiples of 8"
    if a._is_2D_scaled and b._is_2D_scaled:
        return "both have 128 x 128 blocks. Only 1D by 1D, 1D by 2D, and 2D by 1D block scaling GEMM is supported"
    if (bias and grad) or (gelu and (bias or not grad)):
        return "Epilogue requested outside of the available ones: a bias, or the gradient of GELU"
    if not split:
        return "use_split_accumulator is not set (cuBLAS: CUBLAS_STATUS_NOT_SUPPORTED); set it"
    if int(a._fp8_dtype) == int(b._fp8_dtype) == int(DType.kFloat8E5M2):
        return "both are E5M2 (cuBLAS: CUBLAS_STATUS_NOT_SUPPORTED); one of them is E4M3"
    if gelu and dtype == torch.float32:
        return "the gradient of GELU is requested in float32 (cuBLAS: an unsupported value or parameter was passed); request bfloat16"
    return ""


def _activate_sum(values: torch.Tensor, pre_gelu_out: Optional[torch.Tensor], gelu_in: Optional[torch.Tensor]) -> None:
    """For a product that was accumulated: writes the sum to pre_gelu_out and applies GELU to it in place; without pre_gelu_out, applies GELU's
    gradient at gelu_in. The fused op instead applies GELU before accumulating.
    """
    total = values.clone()
    if pre_gelu_out is None:
        matrix_ops.dgelu(grad=total, input=gelu_in, output=values)
    else:
        pre_gelu_out.copy_(total)
        matrix_ops.gelu(input=total, output=values)


def generic_gemm(A: Any, transA: bool, B: Any, transB: bool, D: Any, quantizer: Any, output_dtype: Any, bias: Optional[torch.Tensor],
                 bias_type: Any, gelu: bool, gelu_in: Optional[torch.Tensor], grad: bool, workspace: torch.Tensor, workspace_size: int,
                 accumulate: bool, use_split_accumulator: bool, comm_overlap: Any = None, comm_type: Any = None, extra_output: Any = None,
                 bulk_overlap: bool = False, alpha: float = 1.0, beta: Optional[float] = None) -> list:
    """Returns [D, bias gradient or None, GELU's input or None, extra_output]. workspace has no effect; te-fl's backends have their own."""
    if comm_overlap is not None or comm_type is not None or bulk_overlap:
        raise Unsupported("generic_gemm: comm_overlap is not supported by te-fl; leave the ub_ arguments of modules at False")
    if A is None or B is None:
        raise InvalidArgument(f"generic_gemm: {'A' if A is None else 'B'} is None")
    if not accumulate and beta:
        raise InvalidArgument(f"generic_gemm: beta is {beta} without accumulate; beta scales what is accumulated into")
    if accumulate and (D is None or quantizer is not None):
        raise InvalidArgument(f"generic_gemm: accumulate is set {'without D' if D is None else 'with a quantizer'}; it adds to a D that is not quantised")
    if D is not None and quantizer is None and schemes.scheme_of(D) is not None:
        raise InvalidArgument("generic_gemm: D is quantised and there is no quantizer; give the one that its codes are made by")
    if gelu and grad and gelu_in is None:
        raise InvalidArgument("generic_gemm: gelu with grad needs gelu_in, GELU's input in the forward")
    shape, terms = _output_shape(A, transA, B, transB)
    quantised_a = schemes.scheme_of(A) is not None
    # The dtype of a quantised A is that of its codes, so without output_dtype the result's dtype is undefined.
    dtype = torch_dtype(output_dtype) if output_dtype is not None else A._dtype if quantised_a else A.dtype
    if quantised_a and terms and schemes.are_blocks(A, B) and math.prod(shape):
        refusal = _refusal_of_blocks(A, B, shape, terms, dtype, bias is not None, gelu, grad, use_split_accumulator)
        if refusal:
            raise Unsupported(f"generic_gemm: A and B are scaled by blocks, and {refusal}")
    device = B.device
    values = None
    if D is not None and schemes.scheme_of(D) is None:
        _check_output(D, shape, dtype if output_dtype is not None else None)
        dtype = D.dtype
        values = D if quantizer is None else None
    if values is None:
        values = torch.empty(shape, dtype=dtype, device=device)
    options: dict = {}
    bias_grad = pre_gelu_out = None
    if bias is not None and grad:
        bias_grad = torch.empty(shape[0] if transB else terms, dtype=dtype, device=device)
    elif bias is not None:
        options["bias"] = bias if bias.dim() == 1 else bias.reshape(-1)
    if gelu and not grad:
        low_precision = quantised_a or schemes.scheme_of(B) is not None
        pre_gelu_out = torch.empty(shape, dtype=torch_dtype(bias_type) if low_precision else dtype, device=device)
    if gelu and not accumulate:
        options.update({"pre_gelu_in": gelu_in} if grad else {"gelu": True, "pre_gelu_out": pre_gelu_out})
    if accumulate:
        options.update(accumulate=True, beta=1.0 if beta is None else beta)
    if terms == 0 or values.numel() == 0:
        _without_terms(values, accumulate, 1.0 if beta is None else beta, bias_grad, bias, grad)
        if pre_gelu_out is not None and not accumulate:
            pre_gelu_out.copy_(values)
            values.copy_(torch.nn.functional.gelu(pre_gelu_out, approximate="tanh"))
    else:
        plain_grad = bias_grad is not None and (not transB or quantised_a or schemes.scheme_of(B) is not None)
        if bias_grad is not None and not plain_grad:
            options["bias_grad"] = bias_grad
        _gemm(a=schemes.operand(B, transB), trans_a=transB, b=schemes.operand(A, not transA), trans_b=transA, d=values, alpha=alpha,
              use_split_accumulator=use_split_accumulator, **options)
        if plain_grad:
            rows = B if not schemes.is_quantised(B) else B.dequantize(dtype=torch.float32)
            torch.sum(rows.detach().reshape(-1, rows.shape[-1]), 0, out=bias_grad)
    if gelu and accumulate and values.numel():
        _activate_sum(values, pre_gelu_out, gelu_in)
    if quantizer is not None:
        scheme = schemes.of_quantizer(quantizer)
        D = scheme.create(quantizer, shape, dtype, device) if D is None else scheme.adapt(quantizer, D)
        quantize_into(values, quantizer, D)
    else:
        D = values
    return [D, bias_grad, pre_gelu_out, extra_output]
