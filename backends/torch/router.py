"""Routers of experts, scores of the auxiliary loss, and the loss, by PyTorch's operations in FP32."""

from __future__ import annotations

from typing import Optional

import torch

from te_fl.reference_torch.checks import within
from te_fl.reference_torch.random import packed
from te_fl.reference_torch.values import matrix, values

_EPSILON = 1e-20


# Below this softplus(x) is exp(x) in FP32. Its square root is normal where exp(x) itself would be a denormal, which PyTorch may flush to zero.
_SMALL = -20.0


def _sqrt_softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x < _SMALL, torch.exp(x * 0.5), (x.clamp_min(0) + torch.log1p(torch.exp(-x.abs()))).sqrt())


def _sqrt_softplus_slope(x: torch.Tensor) -> torch.Tensor:
    """sigmoid(x) / (2 f + 1e-20), f = _sqrt_softplus(x)."""
    f = _sqrt_softplus(x)
    small = f * (f / (2 * f + _EPSILON))
    return torch.where(x < _SMALL, small, torch.sigmoid(x) / (2 * f + _EPSILON))


def _scores(x: torch.Tensor, function: str) -> torch.Tensor:
    return torch.softmax(x, -1) if function == "softmax" else torch.sigmoid(x) if function == "sigmoid" else _sqrt_softplus(x)


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """The indices of each row's elements from the largest on, NaN first; of equal ones the lower index comes first."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices


def _chosen(x: torch.Tensor, topk: int, groups: int, group_topk: int) -> torch.Tensor:
    """The experts of the topk largest scores [T, topk], with groups only those of the best groups."""
    order = _ordered(x)
    if groups:
        parts = x.unflatten(-1, (groups, -1))
        best = parts.gather(-1, _ordered(parts)[..., :topk // group_topk])
        total = best.new_zeros(best.shape[:-1])
        for i in range(best.shape[-1]):
            total = total + best[..., i]
        allowed = torch.zeros_like(total, dtype=torch.bool).scatter_(-1, _ordered(total)[..., :group_topk], True)
        left_out = ~allowed.repeat_interleave(parts.shape[-1], -1).gather(-1, order)
        order = order.gather(-1, torch.sort(left_out.to(torch.uint8), dim=-1, stable=True).indices)
    return order[..., :topk]


def _write_choice(chosen: torch.Tensor, experts: int, routing_map: Optional[torch.Tensor], routing_bits: Optional[torch.Tensor]) -> None:
    mask = torch.zeros(chosen.shape[0], experts, dtype=torch.bool, device=chosen.device).scatter_(-1, chosen, True)
    if routing_map is not None:
        routing_map.copy_(mask.reshape(routing_map.shape))
    if routing_bits is not None:
        padded = torch.nn.functional.pad(mask, (0, -experts % 8))
        routing_bits.copy_(packed(padded.reshape(-1)).reshape(routing_bits.shape))


def fused_topk_with_score_function_fwd(logits: torch.Tensor, expert_bias: Optional[torch.Tensor], probs: torch.Tensor,
                                       routing_map: Optional[torch.Tensor], routing_bits: Optional[torch.Tensor],
                                       topk_indices: Optional[torch.Tensor], intermediate_output: torch.Tensor, topk: int, use_pre_softmax: bool,
                                       num_groups: int, group_topk: int, scaling_factor: float, score_function: str) -> None:
    x = matrix(values(logits))
    after = score_function == "softmax" and not use_pre_softmax
    scores = x if after else _scores(x, score_function)
    chosen = _chosen(scores if expert_bias is None else scores + expert_bias, topk, num_groups, group_topk)
    p = scores.gather(-1, chosen)
    if after:
        p = torch.softmax(p, -1)
    saved = torch.full_like(x, -torch.inf).scatter_(-1, chosen, p) if after else x if score_function == "sqrtsoftplus" else scores
    if score_function != "softmax" and topk > 1:
        p = p / (p.sum(-1, keepdim=True) + _EPSILON)
    probs.copy_(torch.zeros_like(x).scatter_(-1, chosen, scaling_factor * p).reshape(probs.shape))
    intermediate_output.copy_(saved.reshape(intermediate_output.shape))
    _write_choice(chosen, x.shape[-1], routing_map, routing_bits)
    if topk_indices is not None:
        topk_indices.copy_(chosen.reshape(topk_indices.shape))


def _choice(routing_map: Optional[torch.Tensor], routing_bits: Optional[torch.Tensor], topk_indices: Optional[torch.Tensor], rows: int,
            experts: int) -> torch.Tensor:
    """Returns which experts were chosen, bool [T, E]."""
    if routing_map is not None:
        return (routing_map != 0).reshape(rows, experts)
    if routing_bits is not None:
        each = (matrix(routing_bits)[..., None] >> torch.arange(8, dtype=torch.uint8, device=routing_bits.device)) & 1
        return each.flatten(-2)[:, :experts] != 0
    right = matrix(within("topk_indices", topk_indices, 0, experts, ", the experts"))
    at = torch.where(right, matrix(topk_indices).long(), experts)
    return torch.zeros(rows, experts + 1, dtype=torch.bool, device=at.device).scatter_(-1, at, True)[:, :experts]


# In the functions below, `counts` says which experts are part of the sums.

def _softmax_gradient(g: torch.Tensor, y: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    dot = torch.where(counts, g * y, 0.0).sum(-1, keepdim=True)
    return torch.where(counts, y * (g - dot), 0.0)


def _score_gradient(g: torch.Tensor, saved: torch.Tensor, function: str, divides: bool, counts: torch.Tensor) -> torch.Tensor:
    """The gradient of the logits from g, that of the scores. divides: the scores were divided by their sum."""
    f = saved if function == "sigmoid" else _sqrt_softplus(saved)
    if divides:
        total = torch.where(counts, f, 0.0).sum(-1, keepdim=True) + _EPSILON
        dot = torch.where(counts, g * f, 0.0).sum(-1, keepdim=True)
        g = torch.where(counts, (g - dot / total) / total, 0.0)
    return g * f * (1 - f) if function == "sigmoid" else g * _sqrt_softplus_slope(saved)


def fused_topk_with_score_function_bwd(routing_map: Optional[torch.Tensor], routing_bits: Optional[torch.Tensor],
                                       topk_indices: Optional[torch.Tensor], intermediate_output: torch.Tensor, grad_probs: torch.Tensor,
                                       grad_logits: torch.Tensor, topk: int, use_pre_softmax: bool, scaling_factor: float, score_function: str) -> None:
    grads, saved = matrix(values(grad_probs)), matrix(intermediate_output)
    chosen = _choice(routing_map, routing_bits, topk_indices, *grads.shape)
    g = torch.where(chosen, grads * scaling_factor, 0.0)
    if score_function == "softmax":
        result = _softmax_gradient(g, saved, torch.ones_like(chosen) if use_pre_softmax else chosen)
    else:
        result = torch.where(chosen, _score_gradient(g, saved, score_function, topk > 1, chosen), 0.0)
    grad_logits.copy_(result.reshape(grad_logits.shape))


def fused_score_for_moe_aux_loss_fwd(logits: torch.Tensor, scores: torch.Tensor, routing_map: Optional[torch.Tensor],
                                     routing_bits: Optional[torch.Tensor], intermediate_output: torch.Tensor, topk: int, score_function: str) -> None:
    x = matrix(values(logits))
    s = _scores(x, score_function)
    intermediate_output.copy_((x if score_function == "sqrtsoftplus" else s).reshape(intermediate_output.shape))
    if score_function != "softmax":
        s = s / (s.sum(-1, keepdim=True) + _EPSILON)
    scores.copy_(s.reshape(scores.shape))
    _write_choice(_chosen(s, topk, 0, 0), x.shape[-1], routing_map, routing_bits)


def fused_score_for_moe_aux_loss_bwd(intermediate_output: torch.Tensor, grad_scores: torch.Tensor, grad_logits: torch.Tensor, topk: int,
                                     score_function: str) -> None:
    del topk  # the scores of all experts have gradients
    g, saved = values(grad_scores), intermediate_output
    every = torch.ones(g.shape, dtype=torch.bool, device=g.device)
    grad_logits.copy_(_softmax_gradient(g, saved, every) if score_function == "softmax" else _score_gradient(g, saved, score_function, True, every))


def fused_moe_aux_loss_fwd(probs: torch.Tensor, tokens_per_expert: torch.Tensor, total_num_tokens_tensor: Optional[torch.Tensor], aux_loss: torch.Tensor,
                           const_buf: torch.Tensor, total_num_tokens: int, num_experts: int, topk: int, coeff: float) -> None:
    factor = coeff * num_experts / topk
    if total_num_tokens_tensor is None:
        c = torch.full((), factor / total_num_tokens / total_num_tokens, dtype=torch.float32, device=probs.device)
    else:
        total = total_num_tokens_tensor.reshape(()).float()
        c = torch.full_like(total, factor) / total / total
    const_buf.fill_(c)
    aux_loss.fill_(c * (values(probs).sum(0) * tokens_per_expert.float()).sum())


def fused_moe_aux_loss_bwd(const_buf: torch.Tensor, tokens_per_expert: torch.Tensor, grad_aux_loss: torch.Tensor, grad_probs: torch.Tensor) -> None:
    grad_probs.copy_((tokens_per_expert.float() * (const_buf.reshape(()) * values(grad_aux_loss).reshape(()))).expand(grad_probs.shape))


OPS = {f.__name__: f for f in (fused_topk_with_score_function_fwd, fused_topk_with_score_function_bwd, fused_score_for_moe_aux_loss_fwd,
                               fused_score_for_moe_aux_loss_bwd, fused_moe_aux_loss_fwd, fused_moe_aux_loss_bwd)}
