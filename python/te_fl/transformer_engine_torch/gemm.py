"""Products of matrices, plain and quantised."""

from __future__ import annotations

from typing import Any, Optional

import torch

from te_fl import ops
from te_fl.errors import InvalidArgument, Unsupported
from te_fl.transformer_engine_torch import schemes
from te_fl.transformer_engine_torch.dtypes import torch_dtype
from te_fl.transformer_engine_torch.quantize import quantize_into

__all__ = ["generic_gemm", "product"]


def _output_shape(a: Any, trans_a: bool, b: Any, trans_b: bool) -> tuple:
    """Of B op A: B's own leading dimensions where it is not transposed. The package gives the operands in the order of column-major libraries."""
    a_shape, b_shape = schemes.shape_of(a), schemes.shape_of(b)
    a_rows, a_columns = schemes.rows_and_columns(a_shape)
    b_rows, b_columns = schemes.rows_and_columns(b_shape)
    inner_a, inner_b = (a_columns if trans_a else a_rows), (b_rows if trans_b else b_columns)
    if inner_a != inner_b:
        raise InvalidArgument(f"generic_gemm: A {a_shape} {'transposed ' if trans_a else ''}and B {b_shape} {'transposed ' if trans_b else ''}do not "
                              f"multiply: {inner_a} and {inner_b} differ")
    last = a_rows if trans_a else a_columns
    return (b_columns, last) if trans_b else (*b_shape[:-1], last)


def product(a: Any, trans_a: bool, b: Any, trans_b: bool, out: torch.Tensor, **options: Any) -> None:
    """out = op(b) op(a), of operands as the package gives them; out and the tensors of the options are seen as matrices."""
    rows, columns = schemes.rows_and_columns(out.shape)
    for name in ("pre_gelu_in", "pre_gelu_out"):
        if options.get(name) is not None:
            options[name] = options[name].view(rows, columns)
    ops.generic_gemm(a=schemes.operand(b, columnwise=trans_b), trans_a=trans_b, b=schemes.operand(a, columnwise=not trans_a), trans_b=trans_a,
                     d=out.view(rows, columns), **options)


def _without_terms(out: torch.Tensor, accumulate: bool, beta: float, bias_grad: Optional[torch.Tensor], bias: Optional[torch.Tensor], grad: bool) -> None:
    """The product of matrices without elements: no terms, so zero or what was there."""
    if out.numel():
        if accumulate:
            out.mul_(beta)
        else:
            out.zero_()
        if bias is not None and not grad:
            out.add_(bias)
    if bias_grad is not None:
        bias_grad.zero_()


def _refuse_overlap(comm_overlap: Any, comm_type: Any, bulk_overlap: bool) -> None:
    if comm_overlap is not None or comm_type is not None or bulk_overlap:
        raise Unsupported("generic_gemm: comm_overlap is not served by te-fl; leave the ub_ arguments of modules at False")


def generic_gemm(A: Any, transA: bool, B: Any, transB: bool, D: Any, quantizer: Any, output_dtype: Any, bias: Optional[torch.Tensor],
                 bias_type: Any, gelu: bool, gelu_in: Optional[torch.Tensor], grad: bool, workspace: torch.Tensor, workspace_size: int,
                 accumulate: bool, use_split_accumulator: bool, comm_overlap: Any = None, comm_type: Any = None, extra_output: Any = None,
                 bulk_overlap: bool = False, alpha: float = 1.0, beta: Optional[float] = None) -> list:
    """[D, the gradient of the bias or None, GELU's input or None, extra_output]. The workspace is not used: te-fl's backends have their own."""
    _refuse_overlap(comm_overlap, comm_type, bulk_overlap)
    if A is None or B is None:
        raise InvalidArgument(f"generic_gemm: {'A' if A is None else 'B'} is None")
    if not accumulate and beta:
        raise InvalidArgument(f"generic_gemm: beta is {beta} without accumulate; beta scales what is accumulated into")
    shape = _output_shape(A, transA, B, transB)
    low_precision = schemes.is_quantised(A) or schemes.is_quantised(B)
    # The nominal dtype of a quantised A is its codes', so without output_dtype such a product has no dtype to take.
    dtype = torch_dtype(output_dtype) if output_dtype is not None else (A._dtype if schemes.is_quantised(A) else A.dtype)
    device = B.device
    if D is not None and not schemes.is_quantised(D):
        if tuple(D.shape) != shape and D.numel() != torch.Size(shape).numel():
            raise InvalidArgument(f"generic_gemm: D has shape {tuple(D.shape)}; the product has {shape}")
        if output_dtype is not None and D.dtype != dtype:
            raise InvalidArgument(f"generic_gemm: D is {D.dtype}; output_dtype says {dtype}")
        dtype = D.dtype
    values = D if D is not None and quantizer is None and not schemes.is_quantised(D) else torch.empty(shape, dtype=dtype, device=device)
    bias_grad = torch.empty(schemes.rows_and_columns(schemes.shape_of(B))[1], dtype=dtype, device=device) if bias is not None and grad else None
    pre_gelu_out = None
    if gelu and not grad:
        pre_gelu_out = torch.empty(shape, dtype=torch_dtype(bias_type) if low_precision else dtype, device=device)
    if values.numel() == 0 or schemes.rows_and_columns(schemes.shape_of(B))[0 if transB else 1] == 0:
        _without_terms(values, accumulate, 1.0 if beta is None else beta, bias_grad, bias, grad)
        if pre_gelu_out is not None:
            pre_gelu_out.copy_(values)
            values.copy_(torch.nn.functional.gelu(pre_gelu_out, approximate="tanh"))
    else:
        plain_grad = bias_grad is not None and (low_precision or not transB)
        product(A, transA, B, transB, values, bias=bias.contiguous() if bias is not None and not grad else None,
                gelu=gelu and not grad, pre_gelu_out=pre_gelu_out, pre_gelu_in=gelu_in if gelu and grad else None,
                bias_grad=None if plain_grad else bias_grad, accumulate=accumulate, alpha=alpha, beta=1.0 if beta is None else beta,
                use_split_accumulator=use_split_accumulator)
        if plain_grad:
            rows = B if not schemes.is_quantised(B) else B.dequantize(dtype=torch.float32)
            torch.sum(rows.reshape(-1, rows.shape[-1]), 0, out=bias_grad)
    if quantizer is not None:
        scheme = schemes.of_quantizer(quantizer)
        D = scheme.create(quantizer, shape, dtype, device) if D is None else scheme.adapt(quantizer, D)
        quantize_into(values, quantizer, D)
    else:
        D = values
    return [D, bias_grad, pre_gelu_out, extra_output]
