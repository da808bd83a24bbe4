"""LayerNorm and RMSNorm."""

from __future__ import annotations

from typing import Any, Optional

import torch

from te_fl.transformer_engine_torch import matrix_ops as ops
from te_fl.transformer_engine_torch import schemes
from te_fl.transformer_engine_torch.dtypes import torch_dtype
from te_fl.transformer_engine_torch.quantize import quantize_into

__all__ = ["layernorm_bwd", "layernorm_fwd", "rmsnorm_bwd", "rmsnorm_bwd_add", "rmsnorm_fwd"]


def _forward(op: Any, inputs: tuple, ln_out: Any, quantizer: Any, otype: Any, zero_centered_gamma: bool) -> list:
    """Returns [the result, *statistics]. The result is quantised from FP32 values if Transformer Engine does so for this quantizer, else rounded to
    otype first.
    """
    input, dtype, out = inputs[0], torch_dtype(otype), ln_out
    target = dtype if out is None else out  # the op allocates a result that is given as its dtype
    if quantizer is not None:
        scheme = schemes.of_quantizer(quantizer)
        out = scheme.create(quantizer, input.shape, dtype, input.device) if out is None else scheme.adapt(quantizer, out)
        target = scheme.target(quantizer, out) if scheme.is_fused(quantizer) else dtype
    made = op(*inputs, zero_centered_gamma, z=target)
    if target is not dtype:
        return [out, *made] if type(made) is tuple else [out, made]
    return [made[0] if quantizer is None else quantize_into(made[0], quantizer, out), *made[1:]]


def layernorm_fwd(input: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], eps: float, ln_out: Any, quantizer: Any, otype: Any,
                  sm_margin: int, zero_centered_gamma: bool) -> list:
    """Returns [the result, mean, reciprocal standard deviation]. sm_margin has no effect."""
    return _forward(ops.layernorm_fwd, (input, weight, bias, eps), ln_out, quantizer, otype, zero_centered_gamma)


def rmsnorm_fwd(input: torch.Tensor, weight: torch.Tensor, eps: float, ln_out: Any, quantizer: Any, otype: Any, sm_margin: int,
                zero_centered_gamma: bool) -> list:
    """Returns [the result, None, reciprocal root mean square]."""
    out, rsigma = _forward(ops.rmsnorm_fwd, (input, weight, eps), ln_out, quantizer, otype, zero_centered_gamma)
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
