"""Optimisers and helpers over lists of tensors by PyTorch's operations, computed in FP32. No value is read on the host."""

from __future__ import annotations

from typing import Any, List, Optional

import torch

from te_fl.reference_torch.values import quotient, store, values


def multi_tensor_scale(inputs: List[torch.Tensor], outputs: List[torch.Tensor], noop_flag: torch.Tensor, scale: float,
                       norm: Optional[torch.Tensor] = None, max_norm: float = 0.0) -> None:
    factor: Any = scale
    if norm is not None:
        clip = torch.where(norm.isfinite() & (norm > max_norm), quotient(max_norm, norm), 1.0)
        noop_flag.copy_(torch.where(norm.isfinite(), noop_flag, 1))
        factor = scale * clip
    for x, out in zip(inputs, outputs):
        v = values(x)
        result = v * factor
        finite = (v.isfinite() & result.isfinite()).all()
        out.copy_(result)
        noop_flag.copy_(torch.where(finite, noop_flag, 1))


def _norms(inputs: List[torch.Tensor], factor: Any, norm: torch.Tensor, per_tensor_norms: Optional[torch.Tensor]) -> None:
    squares = [(values(x) * factor).double().square().sum() for x in inputs]
    total = torch.stack(squares) if squares else torch.zeros(0, dtype=torch.float64, device=norm.device)
    norm.fill_(total.sum().sqrt())
    if per_tensor_norms is not None:
        per_tensor_norms.copy_(total.sqrt())


def multi_tensor_l2norm(inputs: List[torch.Tensor], norm: torch.Tensor, per_tensor_norms: Optional[torch.Tensor]) -> None:
    _norms(inputs, 1.0, norm, per_tensor_norms)


def multi_tensor_unscale_l2norm(inputs: List[torch.Tensor], inv_scale: torch.Tensor, norm: torch.Tensor,
                                per_tensor_norms: Optional[torch.Tensor]) -> None:
    _norms(inputs, inv_scale, norm, per_tensor_norms)


def _kept(skips: Optional[torch.Tensor], old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return new if skips is None else torch.where(skips, old, new)


def multi_tensor_adam(grads: List[torch.Tensor], params: List[torch.Tensor], exp_avgs: List[torch.Tensor], exp_avg_sqs: List[torch.Tensor],
                      master_params: Optional[List[torch.Tensor]], noop_flag: Optional[torch.Tensor], lr: float, beta1: float, beta2: float, epsilon: float,
                      weight_decay: float, step: int, mode: str, bias_correction: bool, lr_tensor: Optional[torch.Tensor] = None,
                      step_tensor: Optional[torch.Tensor] = None, fp8_params: Optional[List[Any]] = None) -> None:
    skips = None if noop_flag is None else noop_flag.reshape(()) != 0
    rate: Any = lr if lr_tensor is None else lr_tensor.reshape(())
    t: Any = float(step) if step_tensor is None else step_tensor.reshape(()).double()
    first, second = (1 - beta1 ** t, 1 - beta2 ** t) if bias_correction else (1.0, 1.0)
    for i, (grad, param, m, v) in enumerate(zip(grads, params, exp_avgs, exp_avg_sqs)):
        held = master_params[i] if master_params else param
        p, g = values(held), values(grad)
        if mode == "l2" and weight_decay:
            g = g + weight_decay * p
        new_m, new_v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        update = (new_m / first).float() / ((new_v / second).float().sqrt() + epsilon)
        if mode == "adamw" and weight_decay:
            update = update + weight_decay * p
        new_p = p - rate * update
        m.copy_(_kept(skips, m, new_m))
        v.copy_(_kept(skips, v, new_v))
        if master_params:
            param.copy_(_kept(skips, param, new_p.to(param.dtype)))
            held.copy_(_kept(skips, held, new_p))
        else:
            param.copy_(_kept(skips, param, new_p.to(param.dtype)))
        if fp8_params:
            store(fp8_params[i], values(param), param.dtype)


def multi_tensor_sgd(grads: List[torch.Tensor], params: List[torch.Tensor], momentums: List[torch.Tensor], param_copies: Optional[List[torch.Tensor]],
                     noop_flag: Optional[torch.Tensor], lr: float, weight_decay: float, momentum: float, dampening: float, scale: float, nesterov: bool,
                     first_run: bool, wd_after_momentum: bool, lr_tensor: Optional[torch.Tensor] = None) -> None:
    skips = None if noop_flag is None else noop_flag.reshape(()) != 0
    rate: Any = lr if lr_tensor is None else lr_tensor.reshape(())
    for i, (grad, param, buffer) in enumerate(zip(grads, params, momentums)):
        p, g = values(param), values(grad) * scale
        if weight_decay and not wd_after_momentum:
            g = g + weight_decay * p
        if momentum:
            m = g if first_run else momentum * buffer + (1 - dampening) * g
            buffer.copy_(_kept(skips, buffer, m))
            g = g + momentum * m if nesterov else m
        if weight_decay and wd_after_momentum:
            g = g + weight_decay * p
        new_p = (p - rate * g).to(param.dtype)
        param.copy_(_kept(skips, param, new_p))
        if param_copies:
            param_copies[i].copy_(_kept(skips, param_copies[i], new_p.to(param_copies[i].dtype)))


OPS = {f.__name__: f for f in (multi_tensor_scale, multi_tensor_l2norm, multi_tensor_unscale_l2norm, multi_tensor_adam, multi_tensor_sgd)}
