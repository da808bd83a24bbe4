"""A GEMM of plain matrices with Transformer Engine's arguments, for frameworks' own layers."""

from __future__ import annotations

import math
from typing import Any, Optional, Tuple

import torch

from te_fl import ops
from te_fl.errors import InvalidArgument
from te_fl.pytorch.runtime.dtypes import DTYPE_NAMES
from te_fl.pytorch.runtime.refuse import only, refuse

__all__ = ["general_gemm"]


def _extents(where: str, a: torch.Tensor, b: torch.Tensor, trans_a: bool, trans_b: bool) -> Tuple[int, int]:
    """Rows and columns of op(b) op(a) as row-major matrices; the letters of the layout refer to column-major matrices."""
    (rows, inner), (other, columns) = (b.shape[::-1] if trans_b else b.shape), (a.shape[::-1] if trans_a else a.shape)
    if inner != other:
        raise InvalidArgument(f"{where}: A is {tuple(a.shape)} and B is {tuple(b.shape)}; by this layout B sums over {inner} values, A over {other}")
    return rows, columns


def general_gemm(A: torch.Tensor, B: torch.Tensor, out_dtype: Optional[torch.dtype] = None, quantization_params: Optional[Any] = None,
                 gelu: bool = False, gelu_in: torch.Tensor = None, alpha: float = 1.0, beta: Optional[float] = None, accumulate: bool = False,
                 layout: str = "TN", out: Optional[torch.Tensor] = None, bias: Optional[torch.Tensor] = None, use_split_accumulator: bool = False,
                 grad: bool = False, ub: Any = None, ub_type: Any = None, extra_output: Optional[torch.Tensor] = None,
                 bulk_overlap: bool = False) -> Tuple[Optional[torch.Tensor], ...]:
    """Returns (the product, the bias gradient or None, None, None). Not differentiable.

    layout: "TN" is B A^T (+ bias), "NN" is B A, "NT" is B^T A. B may have more dimensions before its last, which are flattened to rows. grad=True
    with a bias and layout "NT" returns the sum of B's rows in the bias's dtype, and adds no bias. accumulate: adds beta times the old contents of
    `out`. Quantised operands and results, GELU and Userbuffers are refused.
    """
    where = "general_gemm"
    only(where, ("quantization_params", quantization_params, None, "quantise the result with te_fl.ops.quantize"),
         ("gelu", bool(gelu), False, "call te_fl.ops.generic_gemm, or torch.nn.functional.gelu"),
         ("gelu_in", gelu_in, None, "call te_fl.ops.generic_gemm"),
         *((name, value, supported, "te-fl has no Userbuffers; leave it out") for name, value, supported in
           (("ub", ub, None), ("ub_type", ub_type, None), ("extra_output", extra_output, None), ("bulk_overlap", bool(bulk_overlap), False))))
    for name, operand in (("A", A), ("B", B)):
        if operand.dtype not in DTYPE_NAMES or type(operand) not in (torch.Tensor, torch.nn.Parameter):
            raise refuse(where, name, f"a {type(operand).__name__} of {operand.dtype}", "give plain torch.float32, torch.bfloat16 or torch.float16")
    if layout not in ("TN", "NN", "NT"):
        raise InvalidArgument(f"{where}: layout is {layout!r}; it is 'TN', 'NN' or 'NT'")
    if beta is not None and not accumulate and beta != 0.0:
        raise InvalidArgument(f"{where}: beta is {beta} without accumulate, which it is a factor of; leave it out")
    lead = B.shape[:-1]
    a, b = (t.detach().reshape(math.prod(t.shape[:-1]), t.shape[-1]).contiguous() for t in (A, B))
    rows, columns = _extents(where, a, b, layout[0] == "T", layout[1] == "T")
    if out is None and accumulate:
        raise InvalidArgument(f"{where}: accumulate=True adds to what `out` has, and there is none; give it")
    d = a.new_empty((rows, columns), dtype=out_dtype or A.dtype) if out is None else out.detach().view(rows, columns)
    sums = torch.empty_like(bias) if grad and bias is not None else None
    if sums is not None and layout != "NT":
        raise InvalidArgument(f"{where}: the bias gradient is a sum over the rows of B that layout 'NT' multiplies; the layout is {layout!r}")
    ops.generic_gemm(a=b, b=a, d=d, bias=bias.detach() if bias is not None and not grad else None, bias_grad=sums, trans_a=layout[1] == "T",
                     trans_b=layout[0] == "T", accumulate=accumulate, use_split_accumulator=use_split_accumulator, alpha=float(alpha),
                     beta=1.0 if beta is None or not accumulate else float(beta))
    if out is None:
        out = d if layout == "NT" else d.view(*lead, columns)
    return out, sums, None, None
