"""The router of a mixture of experts: top-k selection of experts, and the auxiliary load-balancing loss."""

from __future__ import annotations

import enum
from typing import Any, Callable, Optional, Tuple, Union

import torch

from te_fl._native import positional_op
from te_fl.errors import InvalidArgument
from te_fl.pytorch.functions.function import Op, differentiable
from te_fl.pytorch.runtime.refuse import choice, only

__all__ = ["RoutingMapFormat", "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function"]


class RoutingMapFormat(enum.IntEnum):
    """Formats of a routing map. BYTEMAP: bool [.., experts]. BITMAP_U8: one bit per expert, uint8 [.., ceil(experts / 8)], least significant bit
    first.
    """
    BYTEMAP = 0
    BITMAP_U8 = 1


_FORMATS = {"bytemap": RoutingMapFormat.BYTEMAP, "bitmap_u8": RoutingMapFormat.BITMAP_U8}
_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
_INDICES = {torch.int16: 2, torch.int32: 3, torch.int64: 4}  # formats of the selection as topk_indices, by dtype


def _form(where: str, routing_map_format: Union[str, RoutingMapFormat, int]) -> int:
    if isinstance(routing_map_format, str) and routing_map_format in _FORMATS:
        return int(_FORMATS[routing_map_format])
    if isinstance(routing_map_format, int) and routing_map_format in (0, 1):
        return int(routing_map_format)
    raise InvalidArgument(f"{where}: routing_map_format is {routing_map_format!r}; it is 'bytemap', 'bitmap_u8' or one of RoutingMapFormat")


def _routing(logits: torch.Tensor, form: int, topk: int) -> Tuple[str, Any]:
    """Returns the op's argument for the selection in this format, and a new tensor for it, or the dtype in which the op is to allocate it."""
    *leading, experts = logits.shape
    if form == RoutingMapFormat.BYTEMAP:
        return "routing_map", torch.bool
    if form == RoutingMapFormat.BITMAP_U8:
        return "routing_bits", logits.new_empty((*leading, (experts + 7) // 8), dtype=torch.uint8)
    dtype = next(d for d, number in _INDICES.items() if number == form)
    return "topk_indices", logits.new_empty((*leading, topk), dtype=dtype)


def _run(run: Callable, form: int, topk: int, logits: torch.Tensor, *inputs: Any) -> tuple:
    """Runs an op that selects experts. Returns its first output, the selection and the data for the backward."""
    name, routing = _routing(logits, form, topk)
    first, *maps, intermediate = run(logits, *inputs, **{name: routing})
    return first, *(maps or (routing,)), intermediate


def _fake(form: int, topk: int, logits: torch.Tensor, dtype: torch.dtype) -> tuple:
    routing = _routing(logits, form, topk)[1]
    return (logits.new_empty(logits.shape, dtype=dtype), routing if form != RoutingMapFormat.BYTEMAP else logits.new_empty(logits.shape, dtype=routing),
            logits.new_empty(logits.shape, dtype=torch.float32))


_topk_fwd, _topk_bwd, _score_fwd, _aux_loss_fwd, _aux_loss_bwd = map(positional_op, (
    "fused_topk_with_score_function_fwd", "fused_topk_with_score_function_bwd", "fused_score_for_moe_aux_loss_fwd", "fused_moe_aux_loss_fwd",
    "fused_moe_aux_loss_bwd"))


def _choose(logits, expert_bias, *options):
    return _run(_topk_fwd, options[-1], options[0], logits, expert_bias, *options[:-1])


def _choose_backward(grad, routing, intermediate, *options):
    maps = [None] * 3
    maps[min(options[-1], 2)] = routing
    return _topk_bwd(*maps, intermediate, grad, *options[:-1])


def _choose_save(ctx, inputs, output):
    _, _, topk, use_pre_softmax, _, _, scaling_factor, score_function, form = inputs
    ctx.settings = topk, use_pre_softmax, scaling_factor, score_function, form
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _choose_gradient(op, ctx, grad, *_others):
    return None if grad is None else op(grad, *ctx.saved_tensors, *ctx.settings), *(None,) * 8


_topk = differentiable(
    Op("moe_topk(Tensor logits, Tensor? expert_bias, int topk, bool use_pre_softmax, int num_groups, int group_topk, float scaling_factor, "
       "str score_function, int form) -> (Tensor, Tensor, Tensor)", _choose,
       lambda logits, expert_bias, topk, *options: _fake(options[-1], topk, logits, logits.dtype)),
    Op("moe_topk_bwd(Tensor grad, Tensor routing, Tensor intermediate, int topk, bool use_pre_softmax, float scaling_factor, str score_function, "
       "int form) -> Tensor", _choose_backward, lambda grad, *rest: grad.new_empty(grad.shape)),
    _choose_save, _choose_gradient)


def fused_topk_with_score_function(logits: torch.Tensor, topk: int, use_pre_softmax: bool, num_groups: Optional[int], group_topk: Optional[int],
                                   scaling_factor: Optional[float], score_function: str, expert_bias: Optional[torch.Tensor],
                                   routing_map_format: Union[str, RoutingMapFormat, int] = RoutingMapFormat.BYTEMAP,
                                   topk_indices: Optional[torch.Tensor] = None, qb_histogram: Optional[torch.Tensor] = None,
                                   qb_bin_bounds: Optional[torch.Tensor] = None,
                                   qb_histogram_mode: Optional[str] = None) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns (probabilities with the dtype and shape of logits [.., experts], the selected topk experts of each token).

    score_function: softmax (before the selection with use_pre_softmax), sigmoid or sqrtsoftplus. With the latter two, expert_bias FP32 [experts] is
    added for the selection only. num_groups and group_topk: selects among the experts of the best groups. The selection is a map in
    routing_map_format; if topk_indices [.., topk] is given, the selection is written there and returned.
    """
    where = "fused_topk_with_score_function"
    only(where, *((name, value, None, "te-fl counts no histogram for quantile balancing; leave it out") for name, value in
                  (("qb_histogram", qb_histogram), ("qb_bin_bounds", qb_bin_bounds), ("qb_histogram_mode", qb_histogram_mode))))
    choice(where, "score_function", score_function, _FUNCTIONS)
    form = _form(where, routing_map_format)
    if topk_indices is not None:
        if form != RoutingMapFormat.BYTEMAP:
            raise InvalidArgument(f"{where}: topk_indices hold the choice in place of a routing map; leave routing_map_format out")
        if topk_indices.dtype not in _INDICES or topk_indices.shape != (*logits.shape[:-1], topk):
            raise InvalidArgument(f"{where}: topk_indices is {topk_indices.dtype} {tuple(topk_indices.shape)}; it is int16, int32 or int64 "
                                  f"{(*logits.shape[:-1], topk)}")
        form = _INDICES[topk_indices.dtype]
    probs, routing, _ = _topk(logits, expert_bias, topk, bool(use_pre_softmax) and score_function == "softmax", num_groups or 0, group_topk or 0,
                              1.0 if scaling_factor is None else float(scaling_factor), score_function, form)
    return probs, routing if topk_indices is None else topk_indices.copy_(routing)


def _score(logits, topk, score_function, form):
    scores, routing, intermediate = _run(_score_fwd, form, topk, logits, topk, score_function)
    return routing, scores, intermediate


def _score_fake(logits, topk, score_function, form):
    scores, routing, intermediate = _fake(form, topk, logits, torch.float32)
    return routing, scores, intermediate


def _score_backward(grad, intermediate, dtype, topk, score_function):
    return _score_bwd(intermediate, grad, topk, score_function, grad_logits=dtype)


_score_bwd = positional_op("fused_score_for_moe_aux_loss_bwd")


def _score_save(ctx, inputs, output):
    logits, topk, score_function, _ = inputs
    ctx.settings = logits.dtype, topk, score_function
    ctx.save_for_backward(output[2])
    ctx.mark_non_differentiable(output[0], output[2])
    ctx.set_materialize_grads(False)


def _score_gradient(op, ctx, _grad_routing, grad, _grad_intermediate=None):
    return None if grad is None else op(grad, ctx.saved_tensors[0], *ctx.settings), None, None, None


_scores = differentiable(
    Op("moe_scores(Tensor logits, int topk, str score_function, int form) -> (Tensor, Tensor, Tensor)", _score, _score_fake),
    Op("moe_scores_bwd(Tensor grad, Tensor intermediate, ScalarType dtype, int topk, str score_function) -> Tensor", _score_backward,
       lambda grad, intermediate, dtype, *rest: grad.new_empty(grad.shape, dtype=dtype)),
    _score_save, _score_gradient)


def fused_compute_score_for_moe_aux_loss(logits: torch.Tensor, topk: int, score_function: str,
                                         routing_map_format: Union[str, RoutingMapFormat, int] = RoutingMapFormat.BYTEMAP
                                         ) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns (a map of the topk largest scores in routing_map_format, the FP32 scores of all experts) for logits [.., experts]."""
    where = "fused_compute_score_for_moe_aux_loss"
    choice(where, "score_function", score_function, _FUNCTIONS)
    return _scores(logits, topk, score_function, _form(where, routing_map_format))[:2]


def _loss(probs, tokens_per_expert, total, total_tensor, num_experts, topk, coeff):
    loss = probs.new_empty(())
    return loss, _aux_loss_fwd(probs, tokens_per_expert, total_tensor, total, num_experts, topk, coeff, aux_loss=loss)


def _loss_backward(grad, factor, tokens_per_expert, rows):
    grad_probs = grad.new_empty((rows, tokens_per_expert.shape[0]))
    _aux_loss_bwd(factor, tokens_per_expert, grad, grad_probs=grad_probs)
    return grad_probs


def _loss_save(ctx, inputs, output):
    ctx.rows = inputs[0].shape[0]
    ctx.save_for_backward(output[1], inputs[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _loss_gradient(op, ctx, grad, _grad_factor=None):
    return None if grad is None else op(grad, *ctx.saved_tensors, ctx.rows), *(None,) * 6


_aux_loss = differentiable(
    Op("moe_aux_loss(Tensor probs, Tensor tokens_per_expert, int total, Tensor? total_tensor, int num_experts, int topk, float coeff) -> "
       "(Tensor, Tensor)", _loss, lambda probs, *rest: (probs.new_empty(()), probs.new_empty(1, dtype=torch.float32))),
    Op("moe_aux_loss_bwd(Tensor grad, Tensor factor, Tensor tokens_per_expert, SymInt rows) -> Tensor", _loss_backward,
       lambda grad, factor, tokens_per_expert, rows: grad.new_empty((rows, tokens_per_expert.shape[0]))),
    _loss_save, _loss_gradient)


def fused_moe_aux_loss(probs: torch.Tensor, tokens_per_expert: torch.Tensor, total_num_tokens: Union[int, torch.Tensor], num_experts: int, topk: int,
                       coeff: float) -> torch.Tensor:
    """The auxiliary loss, a scalar in the dtype of probs [tokens, experts]: coeff * num_experts / (topk * total_num_tokens^2) * sum over experts of
    (tokens_per_expert * the expert's sum of probs). total_num_tokens may be an INT64 tensor, which a replayed CUDA graph reads anew.
    """
    if probs.dim() != 2:
        raise InvalidArgument(f"fused_moe_aux_loss: probs has shape {tuple(probs.shape)}; it is [tokens, experts]")
    tensor = total_num_tokens if isinstance(total_num_tokens, torch.Tensor) else None
    return _aux_loss(probs, tokens_per_expert, 0 if tensor is not None else int(total_num_tokens), tensor, num_experts, topk, float(coeff))[0]
