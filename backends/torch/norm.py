"""Layer and RMS normalisation by PyTorch's operations, computed in FP32."""

from __future__ import annotations

from typing import Any, Optional

import torch

from te_fl.reference_torch.values import matrix, store, values


def weight(gamma: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    """The factor of each column in FP32."""
    return values(gamma) + 1 if zero_centered else values(gamma)


def _of_rows(numbers: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One number for each row of x, such that it broadcasts over the row."""
    return numbers.reshape(*x.shape[:-1], 1)


def _plain(zero_centered: bool, *tensors: Any) -> bool:
    """True if PyTorch's own layer normalisation computes this: tensors of one dtype, with statistics in FP32 and one rounding."""
    first = tensors[0]
    return (not zero_centered and first.is_cuda and first.numel() > 0 and first.is_contiguous()
            and all(isinstance(t, torch.Tensor) and t.dtype == first.dtype for t in tensors))


def summed(x: torch.Tensor, residual: Optional[torch.Tensor], total: Optional[torch.Tensor]) -> torch.Tensor:
    """The norm's input: x, or the sum of x and residual, which is written to total."""
    if residual is None:
        return x
    total.copy_(values(x) + values(residual))
    return total


def layernorm_fwd(x: torch.Tensor, gamma: torch.Tensor, beta: Optional[torch.Tensor], z: Any, mu: torch.Tensor, rsigma: torch.Tensor, epsilon: float,
                  zero_centered_gamma: bool, residual: Optional[torch.Tensor] = None, sum: Optional[torch.Tensor] = None) -> None:
    x = summed(x, residual, sum)
    if _plain(zero_centered_gamma, x, z, gamma, *([] if beta is None else [beta])):
        result, mean, inverse = torch.native_layer_norm(x, x.shape[-1:], gamma, beta, epsilon)
        mu.copy_(mean.reshape(mu.shape))
        rsigma.copy_(inverse.reshape(rsigma.shape))
        z.copy_(result)
        return
    v = values(x)
    mean = v.mean(-1, keepdim=True)
    centred = v - mean
    inverse = (centred.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    result = centred * inverse * weight(gamma, zero_centered_gamma)
    mu.copy_(mean.reshape(mu.shape))
    rsigma.copy_(inverse.reshape(rsigma.shape))
    store(z, result if beta is None else result + values(beta), x.dtype)


def layernorm_bwd(dz: torch.Tensor, x: torch.Tensor, mu: torch.Tensor, rsigma: torch.Tensor, gamma: torch.Tensor, dx: torch.Tensor, dgamma: torch.Tensor,
                  dbeta: Optional[torch.Tensor], zero_centered_gamma: bool, add: Optional[torch.Tensor] = None) -> None:
    if add is None and _plain(zero_centered_gamma, x, dz, dx, gamma, dgamma):
        found = torch.ops.aten.native_layer_norm_backward(dz, x, x.shape[-1:], _of_rows(mu, x), _of_rows(rsigma, x), gamma, gamma,
                                                          [True, True, dbeta is not None])
        for out, gradient in zip((dx, dgamma, dbeta), found):
            if out is not None:
                out.copy_(gradient)
        return
    dy, inverse = values(dz), _of_rows(rsigma, x)
    normed = (values(x) - _of_rows(mu, x)) * inverse
    d = dy * weight(gamma, zero_centered_gamma)
    result = inverse * (d - d.mean(-1, keepdim=True) - normed * (d * normed).mean(-1, keepdim=True))
    dgamma.copy_(matrix(dy * normed).sum(0))
    if dbeta is not None:
        dbeta.copy_(matrix(dy).sum(0))
    store(dx, result if add is None else result + values(add))


def rmsnorm_fwd(x: torch.Tensor, gamma: torch.Tensor, z: Any, rsigma: torch.Tensor, epsilon: float, zero_centered_gamma: bool,
                residual: Optional[torch.Tensor] = None, sum: Optional[torch.Tensor] = None) -> None:
    x = summed(x, residual, sum)
    v = values(x)
    inverse = (v.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    rsigma.copy_(inverse.reshape(rsigma.shape))
    store(z, v * inverse * weight(gamma, zero_centered_gamma), x.dtype)


def rmsnorm_bwd(dz: torch.Tensor, x: torch.Tensor, rsigma: torch.Tensor, gamma: torch.Tensor, dx: torch.Tensor, dgamma: torch.Tensor,
                zero_centered_gamma: bool) -> None:
    _rmsnorm_bwd(dz, x, None, rsigma, gamma, dx, dgamma, zero_centered_gamma)


def rmsnorm_bwd_add(dz: torch.Tensor, x: torch.Tensor, add: torch.Tensor, rsigma: torch.Tensor, gamma: torch.Tensor, dx: torch.Tensor,
                    dgamma: torch.Tensor, zero_centered_gamma: bool) -> None:
    _rmsnorm_bwd(dz, x, add, rsigma, gamma, dx, dgamma, zero_centered_gamma)


def _rmsnorm_bwd(dz, x, add, rsigma, gamma, dx, dgamma, zero_centered_gamma) -> None:
    dy, inverse = values(dz), _of_rows(rsigma, x)
    normed = values(x) * inverse
    d = dy * weight(gamma, zero_centered_gamma)
    result = inverse * (d - normed * (d * normed).mean(-1, keepdim=True))
    dgamma.copy_(matrix(dy * normed).sum(0))
    store(dx, result if add is None else result + values(add))


OPS = {f.__name__: f for f in (layernorm_fwd, layernorm_bwd, rmsnorm_fwd, rmsnorm_bwd, rmsnorm_bwd_add)}
