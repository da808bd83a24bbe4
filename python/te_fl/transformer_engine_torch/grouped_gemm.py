"""Grouped GEMMs: one GEMM for each member of a group; members may have no rows.

Workspaces and math_sm_count have no effect; they configure NVIDIA's kernels.
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import torch

from te_fl.errors import InvalidArgument
from te_fl.tensors import Rows
from te_fl.transformer_engine_torch import matrix_ops, schemes, sizes
from te_fl.transformer_engine_torch.dtypes import torch_dtype
from te_fl.transformer_engine_torch.gemm import _output_shape, _without_terms, product
from te_fl.transformer_engine_torch.grouped import members

__all__ = ["get_grouped_gemm_setup_workspace_size", "te_general_grouped_gemm", "te_general_grouped_gemm_for_discrete_in",
           "te_general_grouped_gemm_for_discrete_out", "te_general_grouped_gemm_for_grouped_tensor"]

_grouped_gemm = matrix_ops.grouped_gemm


def get_grouped_gemm_setup_workspace_size(num_tensors: int) -> int:
    """The workspace size in bytes: 0, because te-fl reads a group's shapes on the host."""
    return 0


def _given(tensors: Optional[Sequence[torch.Tensor]], i: int) -> Optional[torch.Tensor]:
    """Tensor i, or None if it is empty: Transformer Engine passes an empty tensor for "none"."""
    return tensors[i] if tensors is not None and tensors[i].numel() else None


def _sum_rows(b: Any, out: torch.Tensor) -> None:
    rows = b.dequantize(dtype=torch.float32) if schemes.is_quantised(b) else b
    rows = rows.detach().reshape(-1, rows.shape[-1])
    if rows.dtype == out.dtype:
        torch.sum(rows, 0, out=out)
    else:
        out.copy_(rows.sum(0, dtype=torch.float32))


def _multiply(a: Any, trans_a: bool, b: Any, trans_b: bool, out: torch.Tensor, terms: int, *, bias: Optional[torch.Tensor] = None,
              pre_gelu: Any = None, grad: bool = False, accumulate: bool = False, use_split_accumulator: bool = False, alpha: float = 1.0,
              beta: float = 1.0) -> None:
    """out = op(b) op(a), with a contraction of length `terms`. With grad, writes the sum of b's rows to bias and reads pre_gelu; otherwise adds bias
    and writes pre_gelu.
    """
    if out.numel() == 0 or terms == 0:
        _without_terms(out, accumulate, beta, bias if grad else None, bias, grad)
        if pre_gelu is not None and not grad:
            pre_gelu.copy_(out)
            out.copy_(torch.nn.functional.gelu(pre_gelu, approximate="tanh"))
        return
    product(a, trans_a, b, trans_b, out, bias=bias if not grad else None, gelu=pre_gelu is not None and not grad,
            pre_gelu_out=None if grad else pre_gelu, pre_gelu_in=pre_gelu if grad else None, accumulate=accumulate, alpha=alpha, beta=beta,
            use_split_accumulator=use_split_accumulator)
    if grad and bias is not None:
        _sum_rows(b, bias)


def _multiply_all(a: Sequence[Any], trans_a: bool, b: Sequence[Any], trans_b: bool, d: Sequence[torch.Tensor], **options: Any) -> None:
    """d[i] = op(b[i]) op(a[i]) in one call, for operands in Transformer Engine's order."""
    _grouped_gemm(a=schemes.operands(b, trans_b), trans_a=trans_b, b=schemes.operands(a, not trans_a), trans_b=trans_a, d=d, **options)


def _one_output(name: str, out: torch.Tensor, rows: Sequence[int], columns: int) -> Rows:
    """Splits D[0] into consecutive row ranges, one for the result of each GEMM. Rows after the last range are not written."""
    total = sum(rows)
    if not out.is_contiguous() or out.numel() < total * columns:
        raise InvalidArgument(f"{name}: D has {out.numel()} elements{'' if out.is_contiguous() else ', not contiguous'}; "
                              f"the products have {total * columns}")
    if out.dim() != 2 or out.shape[1] != columns or out.shape[0] != total:
        out = out.view(-1)[:total * columns].view(total, columns)
    return Rows(out, rows)


def _present(tensors: Optional[Sequence[torch.Tensor]]) -> Optional[bool]:
    """True if every tensor is non-empty, False if all are empty (Transformer Engine passes an empty tensor for "none"), None if mixed."""
    if tensors is None:
        return False
    first = tensors[0]
    if all(t is first for t in tensors):
        return first.numel() > 0
    count = sum(t.numel() > 0 for t in tensors)
    return count > 0 if count in (0, len(tensors)) else None


def _check_groups(name: str, A: Sequence[Any], B: Sequence[Any], lists: dict) -> None:
    if not A:
        raise InvalidArgument(f"{name}: A has no tensor")
    for what, tensors in {"B": B, **lists}.items():
        if tensors is not None and len(tensors) != len(A):
            raise InvalidArgument(f"{name}: {what} has {len(tensors)} tensors, A {len(A)}")


def te_general_grouped_gemm(A: Sequence[Any], transa: bool, B: Sequence[Any], transb: bool, D: Optional[Sequence[torch.Tensor]], D_type: Any,
                            m_splits: Sequence[int], bias: Sequence[torch.Tensor], bias_type: Any, single_output: bool,
                            pre_gelu_out: Sequence[torch.Tensor], grad: bool, workspace: Sequence[torch.Tensor], workspace_size: int,
                            accumulate: bool, use_split_accumulator: bool, math_sm_count: int) -> Sequence[torch.Tensor]:
    """D[i] = op(B[i]) op(A[i]). single_output: D[0] holds all results, concatenated by rows. Returns bias, which is written with grad."""
    name = "te_general_grouped_gemm"
    _check_groups(name, A, B, {"bias": bias, "pre_gelu_out": pre_gelu_out})
    if D is None:
        raise InvalidArgument(f"{name}: D is None; give the tensors that the products are written to")
    dtype = torch_dtype(D_type)
    for found in {out.dtype for out in D} - {dtype}:
        raise InvalidArgument(f"{name}: an output is {found}; D_type says {dtype}")
    if not single_output and len(D) != len(A):
        raise InvalidArgument(f"{name}: D has {len(D)} tensors, A {len(A)}")
    d = D
    if single_output:
        rows = m_splits if isinstance(m_splits, list) and not transb else [_output_shape(a, transa, b, transb)[0][0] for a, b in zip(A, B)]
        d = _one_output(name, D[0], rows, schemes.rows_and_columns(schemes.shape_of(A[0]))[0 if transa else 1])
    with_bias = _present(bias)
    if _present(pre_gelu_out) is not False or with_bias is None:
        _one_by_one(A, transa, B, transb, d.tensor.split(d.sizes) if single_output else D, bias, pre_gelu_out, grad, accumulate, use_split_accumulator)
        return bias
    options = {}
    summed = with_bias and grad and not (transb and schemes.scheme_of(B[0]) is None)
    if with_bias and not summed:
        options["bias_grad" if grad else "bias"] = bias
    _multiply_all(A, transa, B, transb, d, accumulate=accumulate, use_split_accumulator=use_split_accumulator, **options)
    if summed:
        for b, out in zip(B, bias):
            _sum_rows(b, out)
    return bias


def _one_by_one(A: Sequence[Any], transa: bool, B: Sequence[Any], transb: bool, D: Sequence[torch.Tensor], bias: Sequence[torch.Tensor],
                pre_gelu_out: Sequence[torch.Tensor], grad: bool, accumulate: bool, use_split_accumulator: bool) -> None:
    """Runs the GEMMs of the group one by one; used with GELU, or if only some of them have a bias."""
    for i, (a, b, out) in enumerate(zip(A, B, D)):
        _multiply(a, transa, b, transb, out, _output_shape(a, transa, b, transb)[1], bias=_given(bias, i), pre_gelu=_given(pre_gelu_out, i), grad=grad,
                  accumulate=accumulate, use_split_accumulator=use_split_accumulator)


def _each(factors: torch.Tensor, count: int, name: str) -> List[float]:
    """Returns alpha or beta of each GEMM, from a device tensor with one element for all GEMMs or one element for each."""
    values = sizes.factors(factors, name)
    if len(values) not in (1, count):
        raise InvalidArgument(f"{name}: {len(values)} factors for {count} products; it takes 1 or one each")
    return values if len(values) == count else values * count


def _add_scaled_bias(outputs: Sequence[torch.Tensor], biases: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
    """Adds scale * bias to each output. scale: one factor for each row, for the concatenated rows of all outputs."""
    for out, bias, factors in zip(outputs, biases, scale.split([out.shape[0] for out in outputs])):
        out.copy_(out.float() + factors.float().view(-1, 1) * bias.float().view(1, -1))


def _grouped(name: str, A: Any, transa: bool, B: Any, transb: bool, D: Any, bias: Any, bias_scale: Optional[torch.Tensor], alpha: torch.Tensor,
             beta: torch.Tensor, use_split_accumulator: bool) -> Any:
    a, b, outputs = (list(x) if isinstance(x, (list, tuple)) else members(x) for x in (A, B, D))
    biases = None if bias is None else members(bias)
    _check_groups(name, a, b, {"D": outputs, "bias": biases})
    alphas, betas = _each(alpha, len(a), f"{name}: alpha"), _each(beta, len(a), f"{name}: beta")
    rows = sum(_output_shape(x, transa, y, transb)[0][0] for x, y in zip(a, b))
    if bias_scale is not None:
        if bias_scale.numel() < rows:
            raise InvalidArgument(f"{name}: bias_scale has {bias_scale.numel()} elements for {rows} rows")
        bias_scale = bias_scale.view(-1)[:rows]
    added = [bias.reshape(-1) for bias in biases] if biases is not None and bias_scale is None else None
    if len(set(alphas)) == len(set(betas)) == 1:
        _multiply_all(a, transa, b, transb, outputs, bias=added, accumulate=betas[0] != 0, alpha=alphas[0], beta=betas[0] or 1.0,
                      use_split_accumulator=use_split_accumulator)
    else:
        for i, out in enumerate(outputs):
            _multiply_all(a[i:i + 1], transa, b[i:i + 1], transb, outputs[i:i + 1], bias=added and added[i:i + 1], accumulate=betas[i] != 0,
                          alpha=alphas[i], beta=betas[i] or 1.0, use_split_accumulator=use_split_accumulator)
    if biases is not None and bias_scale is not None:
        _add_scaled_bias(outputs, biases, bias_scale)
    return D


def te_general_grouped_gemm_for_grouped_tensor(A: Any, transa: bool, B: Any, transb: bool, D: Any, bias: Any, bias_scale: Optional[torch.Tensor],
                                               alpha: torch.Tensor, beta: torch.Tensor, workspace_setup: torch.Tensor,
                                               workspace_cublas: torch.Tensor, use_split_accumulator: bool, math_sm_count: int) -> Any:
    """D = alpha op(B) op(A) + bias [times bias_scale] + beta D for each member of the groups; with beta 0, D's old contents are not read. Returns D.
    """
    return _grouped("te_general_grouped_gemm_for_grouped_tensor", A, transa, B, transb, D, bias, bias_scale, alpha, beta, use_split_accumulator)


def te_general_grouped_gemm_for_discrete_in(A: Any, transa: bool, B: Any, transb: bool, D: Any, bias: Any, bias_scale: Optional[torch.Tensor],
                                            alpha: torch.Tensor, beta: torch.Tensor, workspace_setup: torch.Tensor,
                                            workspace_cublas: torch.Tensor, use_split_accumulator: bool, math_sm_count: int) -> Any:
    """As te_general_grouped_gemm_for_grouped_tensor, with a list A."""
    return _grouped("te_general_grouped_gemm_for_discrete_in", A, transa, B, transb, D, bias, bias_scale, alpha, beta, use_split_accumulator)


def te_general_grouped_gemm_for_discrete_out(A: Any, transa: bool, B: Any, transb: bool, D: Any, bias: Any, bias_scale: Optional[torch.Tensor],
                                             alpha: torch.Tensor, beta: torch.Tensor, workspace_setup: torch.Tensor,
                                             workspace_cublas: torch.Tensor, use_split_accumulator: bool, math_sm_count: int) -> Any:
    """As te_general_grouped_gemm_for_grouped_tensor, with a list D and without a bias."""
    name = "te_general_grouped_gemm_for_discrete_out"
    if bias is not None:
        raise InvalidArgument(f"{name}: a bias is given; it takes none, so add it after the product")
    return _grouped(name, A, transa, B, transb, D, None, bias_scale, alpha, beta, use_split_accumulator)
