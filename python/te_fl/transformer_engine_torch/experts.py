"""Mixture of experts: token permutation by index maps, the router, its auxiliary loss, and padding of groups."""

from __future__ import annotations

import math
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch

from te_fl.errors import InvalidArgument
from te_fl.transformer_engine_torch import matrix_ops as ops
from te_fl.transformer_engine_torch.dtypes import torch_dtype
from te_fl.transformer_engine_torch.enums import NVTEQBHistogramMode, NVTERoutingMapFormat

__all__ = ["fused_moe_aux_loss_bwd", "fused_moe_aux_loss_fwd", "fused_moe_aux_loss_fwd_graph_safe", "fused_multi_row_padding",
           "fused_multi_row_unpadding", "fused_score_for_moe_aux_loss_bwd", "fused_score_for_moe_aux_loss_fwd",
           "fused_topk_with_score_function_bwd", "fused_topk_with_score_function_fwd", "fused_topk_with_score_function_qb_fwd", "moe_permute_bwd",
           "moe_permute_fwd", "moe_unpermute_bwd", "moe_unpermute_fwd"]


def _check_dtype(name: str, tensor: torch.Tensor, dtype: Any) -> None:
    if tensor.dtype not in (torch_dtype(dtype), torch.uint8):
        raise InvalidArgument(f"{name}: the input is {tensor.dtype}; dtype says {torch_dtype(dtype)}")


def _factors(prob: torch.Tensor) -> Optional[torch.Tensor]:
    """Converts probabilities for the ops; an empty tensor means none."""
    return prob.float().contiguous() if prob.numel() else None


def moe_permute_fwd(input: torch.Tensor, dtype: Any, indices: torch.Tensor, num_out_tokens: int, workspace: List[torch.Tensor],
                    max_expanded_token_num: int) -> Tuple[torch.Tensor, torch.Tensor, List[torch.Tensor]]:
    """Returns (the rows grouped by expert, the output row of each (token, place) pair INT32 [topK * tokens], the workspace argument unchanged).

    num_out_tokens: the number of output rows, beyond which pairs are dropped; 0 means the number of pairs.
    """
    _check_dtype("moe_permute_fwd", input, dtype)
    tokens, top_k = indices.shape
    rows = num_out_tokens if num_out_tokens > 0 else tokens * top_k
    output = torch.empty((rows, input.shape[1]), dtype=input.dtype, device=input.device)
    row_id_map = torch.empty(tokens * top_k, dtype=torch.int32, device=input.device)
    ops.moe_permute_fwd(input, indices, output=output, row_id_map=row_id_map.view(top_k, tokens))
    return output, row_id_map, workspace


def moe_unpermute_fwd(input: torch.Tensor, dtype: Any, row_id_map: torch.Tensor, prob: torch.Tensor, num_tokens: int, topK: int) -> torch.Tensor:
    """Sums the rows of each token, weighted by the probabilities if given."""
    _check_dtype("moe_unpermute_fwd", input, dtype)
    return ops.moe_unpermute_fwd(input, _map(row_id_map, topK, num_tokens), _factors(prob))


def moe_permute_bwd(input: torch.Tensor, dtype: Any, row_id_map: torch.Tensor, prob: torch.Tensor, num_tokens: int, topK: int) -> torch.Tensor:
    _check_dtype("moe_permute_bwd", input, dtype)
    return ops.moe_permute_bwd(input, _map(row_id_map, topK, num_tokens), _factors(prob))


def _map(row_id_map: torch.Tensor, top_k: int, tokens: int) -> torch.Tensor:
    if row_id_map.numel() != top_k * tokens:
        raise InvalidArgument(f"row_id_map has {row_id_map.numel()} elements; {tokens} tokens of {top_k} experts have {top_k * tokens}")
    return row_id_map.view(top_k, tokens)


def moe_unpermute_bwd(input_bwd: torch.Tensor, input_fwd: torch.Tensor, dtype: Any, row_id_map: torch.Tensor,
                      prob: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns (the gradient of the rows, the gradient of the probabilities FP32 [tokens, topK], zeros if there were none)."""
    _check_dtype("moe_unpermute_bwd", input_bwd, dtype)
    tokens, top_k = prob.shape if prob.numel() else (row_id_map.numel(), 1)
    inputs = input_bwd, input_fwd, _map(row_id_map, top_k, tokens), _factors(prob)
    if prob.numel():
        return ops.moe_unpermute_bwd(*inputs, grad_probs=True)
    return ops.moe_unpermute_bwd(*inputs), torch.zeros((tokens, top_k), dtype=torch.float32, device=input_bwd.device)


def _is_bits(routing_map_format: int) -> bool:
    return NVTERoutingMapFormat(int(routing_map_format)).name == "BITMAP_U8"


def _choose(op: Callable, inputs: tuple, routing_map_format: int, topk_indices: Optional[torch.Tensor] = None) -> tuple:
    """Runs an op that chooses experts. Returns its first output, the routing map or topk_indices, and the data for the backward."""
    logits = inputs[0]
    if topk_indices is None and not _is_bits(routing_map_format):
        return op(*inputs, routing_map=torch.bool)
    if topk_indices is not None:
        first, intermediate = op(*inputs, topk_indices=topk_indices)
        return first, topk_indices, intermediate
    bits = torch.empty((*logits.shape[:-1], -(-logits.shape[-1] // 8)), dtype=torch.uint8, device=logits.device)
    first, intermediate = op(*inputs, routing_bits=bits)
    return first, bits, intermediate


def _check_indices(name: str, routing_map_format: int) -> None:
    if _is_bits(routing_map_format):
        raise InvalidArgument(f"{name}: topk_indices say the choice in place of a routing map; leave routing_map_format at BYTEMAP")


def fused_topk_with_score_function_fwd(logits: torch.Tensor, topk: int, use_pre_softmax: bool, num_groups: Optional[int],
                                       group_topk: Optional[int], scaling_factor: Optional[float], score_function: str,
                                       expert_bias: Optional[torch.Tensor], routing_map_format: int = 0,
                                       topk_indices: Optional[torch.Tensor] = None) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (probabilities in logits' dtype, the routing map or topk_indices, FP32 data for the backward)."""
    if topk_indices is not None:
        _check_indices("fused_topk_with_score_function_fwd", routing_map_format)
    inputs = (logits, expert_bias, topk, use_pre_softmax and score_function == "softmax", num_groups or 0, group_topk or 0,
              1.0 if scaling_factor is None else scaling_factor, score_function)
    return _choose(ops.fused_topk_with_score_function_fwd, inputs, routing_map_format, topk_indices)


def _check_bounds(bin_bounds: torch.Tensor) -> None:
    lower, upper = bin_bounds.tolist()
    if not (math.isfinite(lower) and math.isfinite(upper) and lower < upper):
        raise InvalidArgument(f"fused_topk_with_score_function_qb_fwd: bin_bounds are {lower} and {upper}; they are finite with lower < upper")


def fused_topk_with_score_function_qb_fwd(logits: torch.Tensor, topk: int, scaling_factor: Optional[float], expert_bias: torch.Tensor,
                                          routing_map_format: int, topk_indices: Optional[torch.Tensor], histogram: torch.Tensor,
                                          bin_bounds: torch.Tensor, histogram_mode: int, bin_bounds_validated: bool = False) -> tuple:
    """The sigmoid router with expert bias. Also counts, per expert, a histogram of the bias that would just select the expert (for quantile
    balancing).

    histogram: INT32 [experts, bins]. Each token adds one to each expert, in the bin of (cutoff - the expert's score); the cutoff is the largest
    biased score that is not selected. bin_bounds: FP32 [2], the range of the bins; values outside count in the first or last bin. The host reads
    bin_bounds unless bin_bounds_validated. Both histogram_modes behave equally. Returns (probabilities, the routing map or topk_indices, FP32 data
    for the backward, FP32 cutoffs with the leading shape of logits, histogram).
    """
    experts, bins = histogram.shape
    if logits.shape[-1] != experts or not 0 < topk < experts:
        raise InvalidArgument(f"fused_topk_with_score_function_qb_fwd: histogram has rows for {experts} experts, logits {logits.shape[-1]} and topk is "
                              f"{topk}; topk is at least 1, and smaller than the number of experts")
    NVTEQBHistogramMode(int(histogram_mode))  # raises for unknown modes
    if not bin_bounds_validated:
        _check_bounds(bin_bounds)
    probs, routing, intermediate = fused_topk_with_score_function_fwd(logits, topk, False, None, None, scaling_factor, "sigmoid", expert_bias,
                                                                      routing_map_format, topk_indices)
    scores = torch.sigmoid(logits.float()).view(-1, experts)
    cutoff = (scores + expert_bias).topk(topk + 1).values[:, -1]
    lower, upper = bin_bounds.unbind()
    places = ((cutoff.unsqueeze(1) - scores - lower) * (bins / (upper - lower))).floor().clamp(0, bins - 1).to(torch.int64)
    places += torch.arange(0, experts * bins, bins, device=logits.device)
    flat = places.view(-1)
    histogram.view(-1).scatter_add_(0, flat, torch.ones((), dtype=histogram.dtype, device=logits.device).expand(flat.shape))
    return probs, routing, intermediate, cutoff.view(logits.shape[:-1]), histogram


def fused_topk_with_score_function_bwd(routing_map: torch.Tensor, intermediate_output: torch.Tensor, grad_probs: torch.Tensor,
                                       grad_logits: torch.Tensor, topk: int, use_pre_softmax: bool, scaling_factor: Optional[float],
                                       score_function: str, use_dense_indices: bool = False, routing_map_format: int = 0) -> None:
    """Writes grad_logits."""
    if use_dense_indices:
        _check_indices("fused_topk_with_score_function_bwd", routing_map_format)
    name = "topk_indices" if use_dense_indices else "routing_bits" if _is_bits(routing_map_format) else "routing_map"
    ops.fused_topk_with_score_function_bwd(
        intermediate_output=intermediate_output, grad_probs=grad_probs, grad_logits=grad_logits, topk=topk,
        use_pre_softmax=use_pre_softmax and score_function == "softmax", scaling_factor=1.0 if scaling_factor is None else scaling_factor,
        score_function=score_function, **{name: routing_map})


def fused_score_for_moe_aux_loss_fwd(logits: torch.Tensor, topk: int, score_function: str,
                                     routing_map_format: int = 0) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (scores FP32, the routing map, FP32 data for the backward)."""
    return _choose(ops.fused_score_for_moe_aux_loss_fwd, (logits, topk, score_function), routing_map_format)


def fused_score_for_moe_aux_loss_bwd(intermediate_output: torch.Tensor, grad_scores: torch.Tensor, grad_logits: torch.Tensor, topk: int,
                                     score_function: str) -> None:
    """Writes grad_logits."""
    ops.fused_score_for_moe_aux_loss_bwd(intermediate_output=intermediate_output, grad_scores=grad_scores, grad_logits=grad_logits, topk=topk,
                                         score_function=score_function)


def _aux_loss(name: str, probs: torch.Tensor, tokens_per_expert: torch.Tensor, num_rows: int, num_cols: int, **options: Any) -> tuple:
    if tuple(probs.shape) != (num_rows, num_cols):
        raise InvalidArgument(f"{name}: probs has shape {tuple(probs.shape)}; num_rows and num_cols say {(num_rows, num_cols)}")
    aux_loss = torch.empty((), dtype=probs.dtype, device=probs.device)
    return aux_loss, ops.fused_moe_aux_loss_fwd(probs, tokens_per_expert, aux_loss=aux_loss, **options)


def fused_moe_aux_loss_fwd(probs: torch.Tensor, tokens_per_expert: torch.Tensor, total_num_tokens: int, num_experts: int, num_rows: int,
                           num_cols: int, topk: int, coeff: float) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns (the loss in probs' dtype, data for the backward)."""
    return _aux_loss("fused_moe_aux_loss_fwd", probs, tokens_per_expert, num_rows, num_cols, total_num_tokens=int(total_num_tokens),
                     num_experts=num_experts, topk=topk, coeff=coeff)


def fused_moe_aux_loss_fwd_graph_safe(probs: torch.Tensor, tokens_per_expert: torch.Tensor, total_num_tokens: torch.Tensor, num_experts: int,
                                      num_rows: int, num_cols: int, topk: int, coeff: float) -> Tuple[torch.Tensor, torch.Tensor]:
    """As fused_moe_aux_loss_fwd, with the number of tokens in device memory."""
    return _aux_loss("fused_moe_aux_loss_fwd_graph_safe", probs, tokens_per_expert, num_rows, num_cols, total_num_tokens_tensor=total_num_tokens,
                     num_experts=num_experts, topk=topk, coeff=coeff)


def fused_moe_aux_loss_bwd(Const_buf: torch.Tensor, tokens_per_expert: torch.Tensor, num_rows: int, num_cols: int,
                           grad_aux_loss: torch.Tensor) -> torch.Tensor:
    grad = torch.empty((num_rows, num_cols), dtype=grad_aux_loss.dtype, device=grad_aux_loss.device)
    ops.fused_moe_aux_loss_bwd(Const_buf, tokens_per_expert, grad_aux_loss, grad_probs=grad)
    return grad


def fused_multi_row_padding(input: torch.Tensor, output: torch.Tensor, input_row_list: Sequence[int], padded_input_row_list: Sequence[int]) -> None:
    """Writes the rows of each group to output, followed by zero rows."""
    ops.fused_multi_row_padding(input=input, output=output, input_rows=list(input_row_list), padded_rows=list(padded_input_row_list))


def fused_multi_row_unpadding(input: torch.Tensor, output: torch.Tensor, input_row_list: Sequence[int],
                              unpadded_input_row_list: Sequence[int]) -> None:
    """Writes the first rows of each group (without padding) to output."""
    ops.fused_multi_row_unpadding(input=input, output=output, input_rows=list(input_row_list),
                                  unpadded_rows=list(unpadded_input_row_list))
