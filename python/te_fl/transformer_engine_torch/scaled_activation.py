"""Activations with a factor for each row, as experts weigh their tokens, and SiTU-GLU.

All is computed in FP32 and rounded once. Gated forms take [.., 2H], both halves one behind the other, or in turns of glu_interleave_size columns.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch

from te_fl import ops
from te_fl.errors import InvalidArgument, Unsupported
from te_fl.transformer_engine_torch import schemes
from te_fl.transformer_engine_torch.grouped import group_quantize
from te_fl.transformer_engine_torch.quantize import matrix, quantize, quantize_into

__all__ = ["dsituglu", "group_scaled_clamped_swiglu", "group_scaled_swiglu", "scaled_clamped_dswiglu", "scaled_clamped_swiglu", "scaled_dsituglu",
           "scaled_dsrelu", "scaled_dswiglu", "scaled_situglu", "scaled_srelu", "scaled_swiglu", "situglu"]


def _situ(input: torch.Tensor, beta1: float, beta2: float) -> Tuple[torch.Tensor, ...]:
    """(the gate, the gate's derivative, the other half, its derivative), each FP32 [rows, H]."""
    a, b = input.float().chunk(2, -1)
    tanh_a, tanh_b, sigmoid = torch.tanh(a / beta1), torch.tanh(b / beta2), torch.sigmoid(a)
    slope = (1 - tanh_a * tanh_a) * sigmoid + beta1 * tanh_a * sigmoid * (1 - sigmoid)
    return beta1 * tanh_a * sigmoid, slope, beta2 * tanh_b, 1 - tanh_b * tanh_b


def _situ_forward(*, input: torch.Tensor, output: torch.Tensor, beta1: float, beta2: float) -> None:
    gate, _, other, _ = _situ(input, beta1, beta2)
    torch.mul(gate, other, out=output)


def _situ_backward(*, grad: torch.Tensor, input: torch.Tensor, output: torch.Tensor, beta1: float, beta2: float) -> None:
    gate, slope, other, other_slope = _situ(input, beta1, beta2)
    grad = grad.float()
    output.copy_(torch.cat([grad * other * slope, grad * gate * other_slope], -1))


def _check_betas(name: str, beta1: float, beta2: float) -> None:
    for what, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0 < beta < float("inf"):
            raise InvalidArgument(f"{name}: {what} is {beta}; it is finite and greater than 0")


def _from_fp32(values: torch.Tensor, shape: Any, dtype: torch.dtype, quantizer: Any) -> Any:
    """The values rounded to dtype, or quantised: a scheme whose ops fuse it rounds once."""
    if quantizer is None or not schemes.of_quantizer(quantizer).fused:
        rounded = values.to(dtype).view(shape)
        return rounded if quantizer is None else quantize(rounded, quantizer)
    return quantize_into(values, quantizer, schemes.of_quantizer(quantizer).create(quantizer, shape, dtype, values.device))


def situglu(input: torch.Tensor, quantizer: Any, beta1: float = 4.0, beta2: float = 25.0) -> Any:
    """beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2) of the halves a and b."""
    _check_betas("situglu", beta1, beta2)
    gate, _, other, _ = _situ(matrix(input), beta1, beta2)
    return _from_fp32(gate * other, (*input.shape[:-1], input.shape[-1] // 2), input.dtype, quantizer)


def dsituglu(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any, beta1: float = 4.0, beta2: float = 25.0) -> Any:
    _check_betas("dsituglu", beta1, beta2)
    x = matrix(fwd_input)
    values = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _situ_backward(grad=matrix(grad), input=x, output=values, beta1=beta1, beta2=beta2)
    return _from_fp32(values, fwd_input.shape, fwd_input.dtype, quantizer)


class _Layout:
    """The input as [rows, 2H] with whole halves, and gradients back in the input's order."""

    def __init__(self, name: str, input: torch.Tensor, scales: torch.Tensor, gated: bool, interleave: int = 0):
        self.shape, self.interleave = tuple(input.shape), interleave
        if gated and (not self.shape or self.shape[-1] % 2):
            raise InvalidArgument(f"{name}: the input has shape {self.shape}; its last dimension is two halves")
        self.columns = self.shape[-1] // (2 if gated else 1)
        if interleave and (interleave < 0 or self.columns % interleave):
            raise InvalidArgument(f"{name}: glu_interleave_size is {interleave}; it is 0, or divides the {self.columns} columns of a half")
        self.matrix = matrix(input)
        if scales.numel() != self.matrix.shape[0]:
            raise InvalidArgument(f"{name}: act_scales has {scales.numel()} elements; the input has {self.matrix.shape[0]} rows")
        if interleave:
            self.matrix = self._turns(self.matrix, self.columns // interleave, 2)
        self.scales = scales.reshape(-1, 1).float()

    def _turns(self, values: torch.Tensor, first: int, second: int) -> torch.Tensor:
        return values.view(values.shape[0], first, second, self.interleave).transpose(1, 2).reshape(values.shape)

    def in_order(self, values: torch.Tensor) -> torch.Tensor:
        values = self._turns(values, 2, self.columns // self.interleave) if self.interleave else values
        return values.view(self.shape)


def _activated(op: Callable, layout: _Layout, options: dict) -> torch.Tensor:
    """The activation without its factors, FP32."""
    out = torch.empty((layout.matrix.shape[0], layout.columns), dtype=torch.float32, device=layout.matrix.device)
    if out.numel():
        op(input=layout.matrix, output=out, **options)
    return out


def _scaled(op: Callable, layout: _Layout, dtype: torch.dtype, quantizer: Any, **options: Any) -> Any:
    out = (_activated(op, layout, options) * layout.scales).to(dtype).view((*layout.shape[:-1], layout.columns))
    return out if quantizer is None else quantize(out, quantizer)


def _scaled_gradients(forward: Callable, backward: Callable, layout: _Layout, grad: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype,
                      quantizer: Any, wanted: bool, **options: Any) -> tuple:
    """(the gradient of the input, of the factors or None)."""
    dy = matrix(grad).float()
    if tuple(dy.shape) != (layout.matrix.shape[0], layout.columns):
        raise InvalidArgument(f"the gradient of a scaled activation has shape {tuple(grad.shape)}; the output has "
                              f"{(*layout.shape[:-1], layout.columns)}")
    dx = torch.empty(layout.matrix.shape, dtype=dtype, device=dy.device)
    if dx.numel():
        backward(grad=dy * layout.scales, input=layout.matrix, output=dx, **options)
    dx = layout.in_order(dx)
    factors = (dy * _activated(forward, layout, options)).sum(-1).to(scales.dtype).view(scales.shape) if wanted else None
    return dx if quantizer is None else quantize(dx, quantizer), factors


def scaled_swiglu(input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any, glu_interleave_size: int = 0) -> Any:
    return _scaled(ops.swiglu, _Layout("scaled_swiglu", input, act_scales, True, glu_interleave_size), input.dtype, quantizer)


def scaled_dswiglu(grad: torch.Tensor, fwd_input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any, glu_interleave_size: int = 0,
                   compute_scale_grad: bool = True) -> tuple:
    layout = _Layout("scaled_dswiglu", fwd_input, act_scales, True, glu_interleave_size)
    return _scaled_gradients(ops.swiglu, ops.dswiglu, layout, grad, act_scales, fwd_input.dtype, quantizer, compute_scale_grad)


def scaled_situglu(input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any, beta1: float = 4.0, beta2: float = 25.0,
                   glu_interleave_size: int = 0) -> Any:
    _check_betas("scaled_situglu", beta1, beta2)
    layout = _Layout("scaled_situglu", input, act_scales, True, glu_interleave_size)
    return _scaled(_situ_forward, layout, input.dtype, quantizer, beta1=beta1, beta2=beta2)


def scaled_dsituglu(grad: torch.Tensor, fwd_input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any, beta1: float = 4.0, beta2: float = 25.0,
                    glu_interleave_size: int = 0, compute_scale_grad: bool = True) -> tuple:
    _check_betas("scaled_dsituglu", beta1, beta2)
    layout = _Layout("scaled_dsituglu", fwd_input, act_scales, True, glu_interleave_size)
    return _scaled_gradients(_situ_forward, _situ_backward, layout, grad, act_scales, fwd_input.dtype, quantizer, compute_scale_grad,
                             beta1=beta1, beta2=beta2)


def scaled_clamped_swiglu(input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any, limit: float = 7.0, alpha: float = 1.702,
                          glu_linear_offset: float = 1.0, glu_interleave_size: int = 0) -> Any:
    layout = _Layout("scaled_clamped_swiglu", input, act_scales, True, glu_interleave_size)
    return _scaled(ops.clamped_swiglu, layout, input.dtype, quantizer, limit=limit, alpha=alpha, glu_linear_offset=glu_linear_offset)


def scaled_clamped_dswiglu(grad: torch.Tensor, fwd_input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any, limit: float = 7.0,
                           alpha: float = 1.702, glu_linear_offset: float = 1.0, glu_interleave_size: int = 0,
                           compute_scale_grad: bool = True) -> tuple:
    layout = _Layout("scaled_clamped_dswiglu", fwd_input, act_scales, True, glu_interleave_size)
    return _scaled_gradients(ops.clamped_swiglu, ops.clamped_dswiglu, layout, grad, act_scales, fwd_input.dtype, quantizer, compute_scale_grad,
                             limit=limit, alpha=alpha, glu_linear_offset=glu_linear_offset)


def scaled_srelu(input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any) -> Any:
    return _scaled(ops.srelu, _Layout("scaled_srelu", input, act_scales, False), input.dtype, quantizer)


def scaled_dsrelu(grad: torch.Tensor, fwd_input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any, compute_scale_grad: bool = True) -> tuple:
    layout = _Layout("scaled_dsrelu", fwd_input, act_scales, False)
    return _scaled_gradients(ops.srelu, ops.dsrelu, layout, grad, act_scales, fwd_input.dtype, quantizer, compute_scale_grad)


def _group(name: str, input_2h: torch.Tensor, prob: torch.Tensor, quantizer: Any, values: Callable, num_tensors: int,
           dims: Tuple[Optional[torch.Tensor], ...]) -> Any:
    if not any(c.__name__ == "MXFP8Quantizer" for c in type(quantizer).__mro__):
        raise Unsupported(f"{name}: a quantizer of class {type(quantizer).__name__} is not served by te-fl; it serves MXFP8Quantizer")
    if input_2h.dim() != 2 or prob.dim() != 1 or prob.dtype != input_2h.dtype:
        raise InvalidArgument(f"{name}: input_2h is {input_2h.dtype} of {input_2h.dim()} dimensions and prob {prob.dtype} of {prob.dim()}; "
                              "they are of one dtype, of 2 and 1")
    return group_quantize(values(), quantizer, num_tensors, *dims)


def group_scaled_swiglu(input_2h: torch.Tensor, prob: torch.Tensor, quantizer: Any, num_tensors: int, first_dims: Optional[torch.Tensor] = None,
                        last_dims: Optional[torch.Tensor] = None, tensor_offsets: Optional[torch.Tensor] = None) -> Any:
    """scaled_swiglu, by groups of rows quantised to MXFP8."""
    return _group("group_scaled_swiglu", input_2h, prob, quantizer, lambda: scaled_swiglu(input_2h, prob, None), num_tensors,
                  (first_dims, last_dims, tensor_offsets))


def group_scaled_clamped_swiglu(input_2h: torch.Tensor, prob: torch.Tensor, quantizer: Any, num_tensors: int, limit: float, alpha: float = 1.702,
                                glu_linear_offset: float = 1.0, first_dims: Optional[torch.Tensor] = None,
                                last_dims: Optional[torch.Tensor] = None, tensor_offsets: Optional[torch.Tensor] = None) -> Any:
    """scaled_clamped_swiglu, by groups of rows quantised to MXFP8."""
    if not 0 < limit < float("inf"):
        raise InvalidArgument(f"group_scaled_clamped_swiglu: limit is {limit}; it is finite and greater than 0")
    return _group("group_scaled_clamped_swiglu", input_2h, prob, quantizer,
                  lambda: scaled_clamped_swiglu(input_2h, prob, None, limit, alpha, glu_linear_offset), num_tensors,
                  (first_dims, last_dims, tensor_offsets))
