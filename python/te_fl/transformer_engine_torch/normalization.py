"""LayerNorm and RMSNorm."""

from __future__ import annotations

from typing import Any, Optional

import torch

from te_fl.transformer_engine_torch import matrix_ops as ops
from te_fl.transformer_engine_torch import schemes
from te_fl.transformer_engine_torch.dtypes import torch_dtype
from te_fl.transformer_engine_torch.quantize import quantize_into

__all__ = ["layernorm_bwd", "layernorm_fwd", "rmsnorm_bwd", "rmsnorm_bwd_add", "rmsnorm_fwd"]


def _forward(op: Any, input: torch.Tensor, ln_out: Any, quantizer: Any, otype: Any, **arguments: Any) -> Any:
    """Returns the result, quantised from FP32 values if Transformer Engine does so for this quantizer, else rounded to otype first."""
    if quantizer is None:
        out = torch.empty(input.shape, dtype=torch_dtype(otype), device=input.device) if ln_out is None else ln_out
        op(x=input, z=out, **arguments)
        return out
    scheme = schemes.of_quantizer(quantizer)
    out = scheme.create(quantizer, input.shape, torch_dtype(otype), input.device) if ln_out is None else scheme.adapt(quantizer, ln_out)
    if scheme.is_fused(quantizer):
        op(x=input, z=scheme.target(quantizer, out), **arguments)
        return out
    values = torch.empty(input.shape, dtype=torch_dtype(otype), device=input.device)
    op(x=input, z=values, **arguments)
    return quantize_into(values, quantizer, out)


def _statistics(x: torch.Tensor) -> torch.Tensor:
    """A new FP32 tensor [tokens], for one statistic of each token."""
    return torch.empty(schemes.rows_and_columns(x.shape)[0], dtype=torch.float32, device=x.device)


def layernorm_fwd(input: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], eps: float, ln_out: Any, quantizer: Any, otype: Any,
                  sm_margin: int, zero_centered_gamma: bool) -> list:
    """Returns [the result, mean, reciprocal standard deviation]. sm_margin has no effect."""
    mu, rsigma = _statistics(input), _statistics(input)
    out = _forward(ops.layernorm_fwd, input, ln_out, quantizer, otype, gamma=weight, beta=bias, mu=mu, rsigma=rsigma, epsilon=eps,
                   zero_centered_gamma=zero_centered_gamma)
    return [out, mu, rsigma]


def rmsnorm_fwd(input: torch.Tensor, weight: torch.Tensor, eps: float, ln_out: Any, quantizer: Any, otype: Any, sm_margin: int,
                zero_centered_gamma: bool) -> list:
    """Returns [the result, None, reciprocal root mean square]."""
    rsigma = _statistics(input)
    out = _forward(ops.rmsnorm_fwd, input, ln_out, quantizer, otype, gamma=weight, rsigma=rsigma, epsilon=eps, zero_centered_gamma=zero_centered_gamma)
    return [out, None, rsigma]


def layernorm_bwd(dz: torch.Tensor, x: torch.Tensor, mu: torch.Tensor, rsigma: torch.Tensor, gamma: torch.Tensor, sm_margin: int,
                  zero_centered_gamma: bool) -> list:
    """Returns [dx, dgamma, dbeta]."""
    gamma = gamma.contiguous()
    dx, dgamma, dbeta = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(gamma), torch.empty_like(gamma)
    ops.layernorm_bwd(dz=dz, x=x, mu=mu, rsigma=rsigma, gamma=gamma, dx=dx, dgamma=dgamma,
                      dbeta=dbeta, zero_centered_gamma=zero_centered_gamma)
    return [dx, dgamma, dbeta]


def rmsnorm_bwd(dz: torch.Tensor, x: torch.Tensor, rsigma: torch.Tensor, gamma: torch.Tensor, sm_margin: int, zero_centered_gamma: bool) -> list:
    """Returns [dx, dgamma]."""
    gamma = gamma.contiguous()
    dx, dgamma = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(gamma)
    ops.rmsnorm_bwd(dz=dz, x=x, rsigma=rsigma, gamma=gamma, dx=dx, dgamma=dgamma,
                    zero_centered_gamma=zero_centered_gamma)
    return [dx, dgamma]


def rmsnorm_bwd_add(dz: torch.Tensor, x: torch.Tensor, add: torch.Tensor, rsigma: torch.Tensor, gamma: torch.Tensor, sm_margin: int,
                    zero_centered_gamma: bool) -> list:
    """Returns [dx plus the gradient of the residual branch, dgamma]."""
    gamma = gamma.contiguous()
    dx, dgamma = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(gamma)
    ops.rmsnorm_bwd_add(dz=dz, x=x, add=add, rsigma=rsigma, gamma=gamma, dx=dx, dgamma=dgamma,
                        zero_centered_gamma=zero_centered_gamma)
    return [dx, dgamma]
