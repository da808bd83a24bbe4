"""Ops whose main part is one function of FlagGems: norms, gradients of softmaxes, gated activations and attention."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Optional, Union

import flag_gems
import torch

from te_fl._native import LentTensor
from te_fl.reference_torch import activation, norm, softmax
from te_fl.reference_torch.norm import summed, weight
from te_fl.reference_torch.values import matrix, store, values

from te_fl.flaggems.kernels import Kernels

_MOST_COLUMNS = 65536  # FlagGems' gradient of an RMS norm holds a row in one block


def composed(function: Callable) -> Callable:
    """The function of te_fl.reference_torch with FlagGems' kernels for PyTorch's operations."""
    @functools.wraps(function)
    def run(**arguments: Any) -> None:
        with Kernels():
            function(**arguments)
    return run


def _plain(x: torch.Tensor, *results: Any) -> bool:
    """True if the results are tensors of x's dtype, so that a kernel that computes in FP32 and returns x's dtype rounds once."""
    return all(isinstance(t, torch.Tensor) and t.dtype == x.dtype for t in results)


def layernorm_fwd(x, gamma, beta, z, mu, rsigma, epsilon, zero_centered_gamma, residual=None, sum=None) -> None:
    """In FP32, because FlagGems returns the statistics in the input's dtype."""
    x = summed(x, residual, sum)
    result, mean, inverse = flag_gems.layer_norm(values(x), x.shape[-1:], weight(gamma, zero_centered_gamma), None if beta is None else values(beta), epsilon)
    mu.copy_(mean.reshape(mu.shape))
    rsigma.copy_(inverse.reshape(rsigma.shape))
    store(z, result, x.dtype)


def layernorm_bwd(dz, x, mu, rsigma, gamma, dx, dgamma, dbeta, zero_centered_gamma, add=None) -> None:
    """As matrices, because FlagGems takes the first dimension for the rows."""
    factors = weight(gamma, zero_centered_gamma)
    rows = x if add is None and _plain(x, dx) else values(x)
    result, dweight, dbias = flag_gems.layer_norm_backward(matrix(dz), matrix(rows), x.shape[-1:], mu.reshape(-1), rsigma.reshape(-1), factors, factors,
                                                           [True, True, dbeta is not None])
    dgamma.copy_(dweight)
    if dbeta is not None:
        dbeta.copy_(dbias)
    result = result.reshape(x.shape)
    store(dx, result if add is None else result + values(add))


def rmsnorm_fwd(x, gamma, z, rsigma, epsilon, zero_centered_gamma, residual=None, sum=None) -> None:
    x = summed(x, residual, sum)
    result, inverse = flag_gems.rms_norm_forward(x if _plain(x, z) else values(x), x.shape[-1:], weight(gamma, zero_centered_gamma), epsilon)
    rsigma.copy_(inverse.reshape(rsigma.shape))
    store(z, result, x.dtype)


def rmsnorm_bwd(dz, x, rsigma, gamma, dx, dgamma, zero_centered_gamma) -> None:
    _rmsnorm_bwd(dz, x, None, rsigma, gamma, dx, dgamma, zero_centered_gamma)


def rmsnorm_bwd_add(dz, x, add, rsigma, gamma, dx, dgamma, zero_centered_gamma) -> None:
    _rmsnorm_bwd(dz, x, add, rsigma, gamma, dx, dgamma, zero_centered_gamma)


def _rmsnorm_bwd(dz, x, add, rsigma, gamma, dx, dgamma, zero_centered_gamma) -> None:
    rows = x if add is None and _plain(x, dx, dgamma) else values(x)
    result, dweight = flag_gems.rms_norm_backward(dz, rows, rsigma.reshape(-1), x.shape[-1:], weight(gamma, zero_centered_gamma))
    dgamma.copy_(dweight)
    store(dx, result if add is None else result + values(add))


def _softmax_backward(output_grad, softmax_results, input_grad, scale) -> None:
    """On contiguous copies, because FlagGems reads the second operand as if it was contiguous."""
    grad, results = values(output_grad).contiguous(), values(softmax_results).contiguous()
    input_grad.copy_(flag_gems.softmax_backward(grad, results, -1, torch.float32) * scale)


def _gated(function: Callable, composition: Callable) -> Callable:
    """A gated activation or its gradient; its last argument but the output is the input. FlagGems' functions are for CUDA alone."""
    otherwise = composed(composition)

    @functools.wraps(composition)
    def run(input: torch.Tensor, output: Any, grad: Optional[torch.Tensor] = None) -> None:
        found = {"input": input} if grad is None else {"grad": grad, "input": input}
        if input.is_cuda and _plain(input, output):
            output.copy_(function(*found.values()))
        else:
            otherwise(**found, output=output)
    return run


def fused_attn_fwd(q, k, v, o, softmax_lse, layout, mask_type, scale, **_: Any) -> None:
    """Without FlagGems' division of the keys among blocks, whose last step takes the stride of an element for that of a head."""
    q, k, v = ((t.transpose(0, 1) if layout == "sbhd" else t) for t in (q, k, v))
    result, lse, *_others = flag_gems.flash_attention_forward(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, mask_type != "none", False, scale=scale,
                                                              disable_splitkv=True)
    o.copy_(result.transpose(0, 1) if layout == "sbhd" else result)
    if softmax_lse is not None:
        softmax_lse.copy_(lse)


def supports_attention(q, k, v, layout, mask_type, softmax_type, scale, dropout_p, window_left, window_right, bias=None, alibi_slopes=None,
                       attn_mask=None, cu_seqlens_q=None, cu_seqlens_kv=None, s_quant=None) -> Union[bool, str]:
    others = (bias, alibi_slopes, attn_mask, cu_seqlens_q, cu_seqlens_kv, s_quant)
    if flag_gems.device != "cuda":
        return "FlagGems' attention asks PyTorch for a CUDA device"
    if q.dtype not in ("f16", "bf16") or any(t is not None for t in others) or layout == "thd" or softmax_type != "vanilla":
        return "only F16 and BF16 in sbhd or bshd, without bias, ALiBi, mask tensors, padding and sinks"
    if dropout_p != 0:
        return "dropout: FlagGems draws by a seed of its own"
    if window_left >= 0 or (window_right >= 0 and mask_type == "none") or scale <= 0:
        return "windows and a scale that is not positive are not implemented"
    rows = 0 if layout == "sbhd" else 1
    if q.shape[rows] < 2 or (mask_type != "none" and q.shape[rows] != k.shape[rows]):
        return "one query, or a causal mask with as many queries as keys only, is not implemented"
    if mask_type != "none" and q.shape[rows] > 128 and q.shape[rows] % 128:  # seen on an H200 for 129 to 257 rows
        return "FlagGems' causal attention is wrong for more than 128 rows that are no multiple of 128"
    if q.shape[3] != v.shape[3] or q.shape[3] % 8 or q.shape[3] > 256:
        return "heads of one size for queries and values, a multiple of 8 and at most 256"
    return True if all(t.strides[3] == 1 for t in (q, k, v)) else "the elements of a head must be contiguous"


def supports_row(x: LentTensor) -> Union[bool, str]:
    return True if x.shape[-1] <= _MOST_COLUMNS else f"rows of more than {_MOST_COLUMNS} columns are not implemented"


def _ops() -> Dict[str, Callable]:
    found: Dict[str, Callable] = {f.__name__: f for f in (layernorm_fwd, layernorm_bwd, rmsnorm_fwd, rmsnorm_bwd, rmsnorm_bwd_add, fused_attn_fwd)}
    found.update({name: _softmax_backward for name in softmax.OPS if name.endswith("_backward")})
    found.update({name: _gated(getattr(flag_gems, name), activation.OPS[name]) for name in ("swiglu", "dswiglu", "geglu", "dgeglu")})
    return found


OPS = _ops()
SUPPORTS: Dict[str, Callable] = {"fused_attn_fwd": supports_attention, "rmsnorm_bwd": supports_row, "rmsnorm_bwd_add": supports_row}
assert not set(OPS) - {*norm.OPS, *softmax.OPS, *activation.OPS, "fused_attn_fwd"}
