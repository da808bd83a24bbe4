"""Activations with a factor for each row (an expert's token weights), and SiTU-GLU.

Computed in FP32 and rounded once. Gated forms take [.., 2H], with two contiguous halves, or halves that alternate in blocks of glu_interleave_size
columns.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch

from te_fl.errors import InvalidArgument, Unsupported
from te_fl.transformer_engine_torch import matrix_ops as ops
from te_fl.transformer_engine_torch import schemes
from te_fl.transformer_engine_torch.grouped import group_quantize
from te_fl.transformer_engine_torch.quantize import matrix, quantize, quantize_into

__all__ = ["dsituglu", "group_scaled_clamped_swiglu", "group_scaled_swiglu", "scaled_clamped_dswiglu", "scaled_clamped_swiglu", "scaled_dsituglu",
           "scaled_dsrelu", "scaled_dswiglu", "scaled_situglu", "scaled_srelu", "scaled_swiglu", "situglu"]


def _check_betas(name: str, beta1: float, beta2: float) -> None:
    for what, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0 < beta < float("inf"):
            raise InvalidArgument(f"{name}: {what} is {beta}; it is finite and greater than 0")


def _from_fp32(values: torch.Tensor, shape: Any, dtype: torch.dtype, quantizer: Any) -> Any:
    """Rounds the FP32 values to dtype, or quantises them. Schemes with fused quantisation round only once."""
    if quantizer is None or not schemes.of_quantizer(quantizer).is_fused(quantizer):
        rounded = values.to(dtype).view(shape)
        return rounded if quantizer is None else quantize(rounded, quantizer)
    return quantize_into(values, quantizer, schemes.of_quantizer(quantizer).create(quantizer, shape, dtype, values.device))


def situglu(input: torch.Tensor, quantizer: Any, beta1: float = 4.0, beta2: float = 25.0) -> Any:
    """beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2) for the halves a and b."""
    _check_betas("situglu", beta1, beta2)
    values = ops.situglu(matrix(input), beta1, beta2, output=torch.float32)
    return _from_fp32(values, (*input.shape[:-1], input.shape[-1] // 2), input.dtype, quantizer)


def dsituglu(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any, beta1: float = 4.0, beta2: float = 25.0) -> Any:
    _check_betas("dsituglu", beta1, beta2)
    values = ops.dsituglu(matrix(grad), matrix(fwd_input), beta1, beta2, output=torch.float32)
    return _from_fp32(values, fwd_input.shape, fwd_input.dtype, quantizer)


class _Rows:
    """An input as [rows, columns], and its row factors."""

    def __init__(self, name: str, input: torch.Tensor, scales: torch.Tensor, gated: bool, interleave: int):
        shape = tuple(input.shape)
        if gated and (not shape or shape[-1] % 2):
            raise InvalidArgument(f"{name}: the input has shape {shape}; its last dimension is two halves")
        columns = shape[-1] // (2 if gated else 1)
        if interleave and (interleave < 0 or columns % interleave):
            raise InvalidArgument(f"{name}: glu_interleave_size is {interleave}; it is 0, or divides the {columns} columns of a half")
        self.result_shape, self.matrix = (*shape[:-1], columns), matrix(input)
        if scales.numel() != self.matrix.shape[0]:
            raise InvalidArgument(f"{name}: act_scales has {scales.numel()} elements; the input has {self.matrix.shape[0]} rows")
        self.arguments = {"input": self.matrix, "act_scales": scales.reshape(-1).contiguous(), **({"glu_interleave_size": interleave} if gated else {})}


def _scaled(name: str, input: torch.Tensor, scales: torch.Tensor, quantizer: Any, gated: bool = True, interleave: int = 0, **options: float) -> Any:
    rows = _Rows(name, input, scales, gated, interleave)
    out = getattr(ops, name)(**rows.arguments, **options).view(rows.result_shape)
    return out if quantizer is None else quantize(out, quantizer)


def _scaled_gradients(name: str, grad: torch.Tensor, input: torch.Tensor, scales: torch.Tensor, quantizer: Any, wanted: bool, gated: bool = True,
                      interleave: int = 0, **options: float) -> tuple:
    """Returns (the gradient of the input, the gradient of the factors or None)."""
    rows = _Rows(name, input, scales, gated, interleave)
    if matrix(grad).shape != (rows.matrix.shape[0], rows.result_shape[-1]):
        raise InvalidArgument(f"the gradient of a scaled activation has shape {tuple(grad.shape)}; the output has {rows.result_shape}")
    made = getattr(ops, name)(grad=matrix(grad), grad_scales=True if wanted else None, **rows.arguments, **options)
    dx, factors = made if wanted else (made, None)
    dx = dx.view(input.shape)
    return dx if quantizer is None else quantize(dx, quantizer), None if factors is None else factors.view(scales.shape)


def scaled_swiglu(input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any, glu_interleave_size: int = 0) -> Any:
    return _scaled("scaled_swiglu", input, act_scales, quantizer, interleave=glu_interleave_size)


def scaled_dswiglu(grad: torch.Tensor, fwd_input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any, glu_interleave_size: int = 0,
                   compute_scale_grad: bool = True) -> tuple:
    return _scaled_gradients("scaled_dswiglu", grad, fwd_input, act_scales, quantizer, compute_scale_grad, interleave=glu_interleave_size)


def scaled_situglu(input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any, beta1: float = 4.0, beta2: float = 25.0,
                   glu_interleave_size: int = 0) -> Any:
    _check_betas("scaled_situglu", beta1, beta2)
    return _scaled("scaled_situglu", input, act_scales, quantizer, interleave=glu_interleave_size, beta1=beta1, beta2=beta2)


def scaled_dsituglu(grad: torch.Tensor, fwd_input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any, beta1: float = 4.0, beta2: float = 25.0,
                    glu_interleave_size: int = 0, compute_scale_grad: bool = True) -> tuple:
    _check_betas("scaled_dsituglu", beta1, beta2)
    return _scaled_gradients("scaled_dsituglu", grad, fwd_input, act_scales, quantizer, compute_scale_grad, interleave=glu_interleave_size, beta1=beta1,
                             beta2=beta2)


def scaled_clamped_swiglu(input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any, limit: float = 7.0, alpha: float = 1.702,
                          glu_linear_offset: float = 1.0, glu_interleave_size: int = 0) -> Any:
    return _scaled("scaled_clamped_swiglu", input, act_scales, quantizer, interleave=glu_interleave_size, limit=limit, alpha=alpha,
                   glu_linear_offset=glu_linear_offset)


def scaled_clamped_dswiglu(grad: torch.Tensor, fwd_input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any, limit: float = 7.0,
                           alpha: float = 1.702, glu_linear_offset: float = 1.0, glu_interleave_size: int = 0,
                           compute_scale_grad: bool = True) -> tuple:
    return _scaled_gradients("scaled_clamped_dswiglu", grad, fwd_input, act_scales, quantizer, compute_scale_grad, interleave=glu_interleave_size,
                             limit=limit, alpha=alpha, glu_linear_offset=glu_linear_offset)


def scaled_srelu(input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any) -> Any:
    return _scaled("scaled_srelu", input, act_scales, quantizer, gated=False)


def scaled_dsrelu(grad: torch.Tensor, fwd_input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any, compute_scale_grad: bool = True) -> tuple:
    return _scaled_gradients("scaled_dsrelu", grad, fwd_input, act_scales, quantizer, compute_scale_grad, gated=False)


def _group(name: str, input_2h: torch.Tensor, prob: torch.Tensor, quantizer: Any, values: Callable, num_tensors: int,
           dims: Tuple[Optional[torch.Tensor], ...]) -> Any:
    if not any(c.__name__ == "MXFP8Quantizer" for c in type(quantizer).__mro__):
        raise Unsupported(f"{name}: a quantizer of class {type(quantizer).__name__} is not supported by te-fl; it supports MXFP8Quantizer")
    if input_2h.dim() != 2 or prob.dim() != 1 or prob.dtype != input_2h.dtype:
        raise InvalidArgument(f"{name}: input_2h is {input_2h.dtype} of {input_2h.dim()} dimensions and prob {prob.dtype} of {prob.dim()}; "
                              "they are of one dtype, of 2 and 1")
    return group_quantize(values(), quantizer, num_tensors, *dims)


def group_scaled_swiglu(input_2h: torch.Tensor, prob: torch.Tensor, quantizer: Any, num_tensors: int, first_dims: Optional[torch.Tensor] = None,
                        last_dims: Optional[torch.Tensor] = None, tensor_offsets: Optional[torch.Tensor] = None) -> Any:
    """scaled_swiglu, with each group of rows quantised to MXFP8."""
    return _group("group_scaled_swiglu", input_2h, prob, quantizer, lambda: scaled_swiglu(input_2h, prob, None), num_tensors,
                  (first_dims, last_dims, tensor_offsets))


def group_scaled_clamped_swiglu(input_2h: torch.Tensor, prob: torch.Tensor, quantizer: Any, num_tensors: int, limit: float, alpha: float = 1.702,
                                glu_linear_offset: float = 1.0, first_dims: Optional[torch.Tensor] = None,
                                last_dims: Optional[torch.Tensor] = None, tensor_offsets: Optional[torch.Tensor] = None) -> Any:
    """scaled_clamped_swiglu, with each group of rows quantised to MXFP8."""
    if not 0 < limit < float("inf"):
        raise InvalidArgument(f"group_scaled_clamped_swiglu: limit is {limit}; it is finite and greater than 0")
    return _group("group_scaled_clamped_swiglu", input_2h, prob, quantizer,
                  lambda: scaled_clamped_swiglu(input_2h, prob, None, limit, alpha, glu_linear_offset), num_tensors,
                  (first_dims, last_dims, tensor_offsets))
