"""Products of matrices by groups: one product for each member, whose numbers of rows may be zero.

The workspaces and math_sm_count belong to the launch of other kernels; te-fl's backends have their own.
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import torch

from te_fl.errors import InvalidArgument
from te_fl.transformer_engine_torch import schemes
from te_fl.transformer_engine_torch.dtypes import torch_dtype
from te_fl.transformer_engine_torch.gemm import _output_shape, _without_terms, product
from te_fl.transformer_engine_torch.grouped import members

__all__ = ["get_grouped_gemm_setup_workspace_size", "te_general_grouped_gemm", "te_general_grouped_gemm_for_discrete_in",
           "te_general_grouped_gemm_for_discrete_out", "te_general_grouped_gemm_for_grouped_tensor"]


def get_grouped_gemm_setup_workspace_size(num_tensors: int) -> int:
    """In bytes: none, since te-fl reads the shapes of a group on the host."""
    return 0


def _given(tensors: Optional[Sequence[torch.Tensor]], i: int) -> Optional[torch.Tensor]:
    """Tensor i, or None for one without elements, as the package says that there is none."""
    return tensors[i] if tensors is not None and tensors[i].numel() else None


def _sum_rows(b: Any, out: torch.Tensor) -> None:
    rows = b.dequantize(dtype=torch.float32) if schemes.is_quantised(b) else b
    rows = rows.reshape(-1, rows.shape[-1])
    if rows.dtype == out.dtype:
        torch.sum(rows, 0, out=out)
    else:
        out.copy_(rows.sum(0, dtype=torch.float32))


def _multiply(a: Any, trans_a: bool, b: Any, trans_b: bool, out: torch.Tensor, terms: int, *, bias: Optional[torch.Tensor] = None,
              pre_gelu: Any = None, grad: bool = False, accumulate: bool = False, use_split_accumulator: bool = False, alpha: float = 1.0,
              beta: float = 1.0) -> None:
    """out = op(b) op(a), sums of so many terms. With grad, bias is written with the sum of b's rows and pre_gelu is read, else bias is added and
    pre_gelu written."""
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


def _check_dtype(name: str, out: torch.Tensor, dtype: torch.dtype) -> None:
    if out.dtype != dtype:
        raise InvalidArgument(f"{name}: an output is {out.dtype}; D_type says {dtype}")


def _outputs(name: str, shapes: Sequence[Tuple[int, ...]], D: Sequence[torch.Tensor], dtype: torch.dtype, single_output: bool) -> List[torch.Tensor]:
    """The tensor of each product: of D, or of D[0] row after row."""
    for out in D:
        _check_dtype(name, out, dtype)
    if not single_output:
        if len(D) != len(shapes):
            raise InvalidArgument(f"{name}: D has {len(D)} tensors, A {len(shapes)}")
        for i, (out, shape) in enumerate(zip(D, shapes)):
            if out.numel() != torch.Size(shape).numel():
                raise InvalidArgument(f"{name}: D[{i}] has shape {tuple(out.shape)}; the product has {shape}")
        return list(D)
    whole, total = D[0], sum(torch.Size(shape).numel() for shape in shapes)
    if not whole.is_contiguous() or whole.numel() < total:
        raise InvalidArgument(f"{name}: D has {whole.numel()} elements{'' if whole.is_contiguous() else ', not contiguous'}; "
                              f"the products have {total}")
    flat, parts, begin = whole.view(-1), [], 0
    for shape in shapes:
        parts.append(flat[begin:begin + torch.Size(shape).numel()].view(shape))
        begin += parts[-1].numel()
    return parts


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
    """D[i] = op(B[i]) op(A[i]); single_output: D[0] holds them all, row after row. Returns bias, which with grad is written."""
    name = "te_general_grouped_gemm"
    _check_groups(name, A, B, {"bias": bias, "pre_gelu_out": pre_gelu_out})
    if D is None:
        raise InvalidArgument(f"{name}: D is None; give the tensors that the products are written to")
    shapes, terms = zip(*(_output_shape(a, transa, b, transb) for a, b in zip(A, B)))
    outputs = _outputs(name, shapes, D, torch_dtype(D_type), single_output)
    for a, b, out, i in zip(A, B, outputs, range(len(A))):
        _multiply(a, transa, b, transb, out, terms[i], bias=_given(bias, i), pre_gelu=_given(pre_gelu_out, i), grad=grad, accumulate=accumulate,
                  use_split_accumulator=use_split_accumulator)
    return bias


def _each(factors: torch.Tensor, count: int, name: str) -> List[float]:
    """alpha or beta of each product: they lie on the device, one for all or one each."""
    values = factors.tolist()
    if len(values) not in (1, count):
        raise InvalidArgument(f"{name}: {len(values)} factors for {count} products; it takes 1 or one each")
    return values if len(values) == count else values * count


def _add_scaled_bias(outputs: Sequence[torch.Tensor], biases: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
    """scale: a factor for each row of all outputs."""
    for out, bias, factors in zip(outputs, biases, scale.split([out.shape[0] for out in outputs])):
        out.copy_(out.float() + factors.float().view(-1, 1) * bias.float().view(1, -1))


def _grouped(name: str, A: Any, transa: bool, B: Any, transb: bool, D: Any, bias: Any, bias_scale: Optional[torch.Tensor], alpha: torch.Tensor,
             beta: torch.Tensor, use_split_accumulator: bool) -> Any:
    a, b, outputs = (list(x) if isinstance(x, (list, tuple)) else members(x) for x in (A, B, D))
    biases = None if bias is None else members(bias)
    _check_groups(name, a, b, {"D": outputs, "bias": biases})
    alphas, betas = _each(alpha, len(a), f"{name}: alpha"), _each(beta, len(a), f"{name}: beta")
    shapes, terms = zip(*(_output_shape(x, transa, y, transb) for x, y in zip(a, b)))
    for i, (out, shape) in enumerate(zip(outputs, shapes)):
        if out.numel() != torch.Size(shape).numel():
            raise InvalidArgument(f"{name}: D {i} has shape {tuple(out.shape)}; the product has {shape}")
    rows = sum(shape[0] for shape in shapes)
    if bias_scale is not None:
        if bias_scale.numel() < rows:
            raise InvalidArgument(f"{name}: bias_scale has {bias_scale.numel()} elements for {rows} rows")
        bias_scale = bias_scale.view(-1)[:rows]
    for i, out in enumerate(outputs):
        _multiply(a[i], transa, b[i], transb, out, terms[i], bias=biases[i].reshape(-1) if biases is not None and bias_scale is None else None,
                  accumulate=betas[i] != 0, alpha=alphas[i], beta=betas[i] or 1.0, use_split_accumulator=use_split_accumulator)
    if biases is not None and bias_scale is not None:
        _add_scaled_bias(outputs, biases, bias_scale)
    return D


def te_general_grouped_gemm_for_grouped_tensor(A: Any, transa: bool, B: Any, transb: bool, D: Any, bias: Any, bias_scale: Optional[torch.Tensor],
                                               alpha: torch.Tensor, beta: torch.Tensor, workspace_setup: torch.Tensor,
                                               workspace_cublas: torch.Tensor, use_split_accumulator: bool, math_sm_count: int) -> Any:
    """D = alpha op(B) op(A) + bias [times bias_scale] + beta D for each member of the groups; beta 0: what D holds is not read. Returns D."""
    return _grouped("te_general_grouped_gemm_for_grouped_tensor", A, transa, B, transb, D, bias, bias_scale, alpha, beta, use_split_accumulator)


def te_general_grouped_gemm_for_discrete_in(A: Any, transa: bool, B: Any, transb: bool, D: Any, bias: Any, bias_scale: Optional[torch.Tensor],
                                            alpha: torch.Tensor, beta: torch.Tensor, workspace_setup: torch.Tensor,
                                            workspace_cublas: torch.Tensor, use_split_accumulator: bool, math_sm_count: int) -> Any:
    """As te_general_grouped_gemm_for_grouped_tensor, of a list A."""
    return _grouped("te_general_grouped_gemm_for_discrete_in", A, transa, B, transb, D, bias, bias_scale, alpha, beta, use_split_accumulator)


def te_general_grouped_gemm_for_discrete_out(A: Any, transa: bool, B: Any, transb: bool, D: Any, bias: Any, bias_scale: Optional[torch.Tensor],
                                             alpha: torch.Tensor, beta: torch.Tensor, workspace_setup: torch.Tensor,
                                             workspace_cublas: torch.Tensor, use_split_accumulator: bool, math_sm_count: int) -> Any:
    """As te_general_grouped_gemm_for_grouped_tensor, into a list D, without a bias."""
    name = "te_general_grouped_gemm_for_discrete_out"
    if bias is not None:
        raise InvalidArgument(f"{name}: a bias is given; it takes none, so add it after the product")
    return _grouped(name, A, transa, B, transb, D, None, bias_scale, alpha, beta, use_split_accumulator)
