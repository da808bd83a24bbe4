"""Adapters of the router, its auxiliary loss, permutation by indices, and padding of groups."""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch

from te_fl.transformer_engine_torch.enums import NVTERoutingMapFormat
from te_fl.transformer_engine_torch.typed_function import VendorFunction, adapter, dtype_of, needs, results, write

_TOPK = """num_tokens num_experts logits expert_bias topk use_pre_softmax num_groups group_topk scaling_factor score_function routing_map_format topk_indices
    routing_map intermediate_output grad_probs grad_logits use_dense_indices""".split()
_SCORES = "num_tokens num_experts logits topk score_function routing_map_format intermediate_output grad_scores grad_logits".split()


def _reason(function: VendorFunction, score_function: str, bits: Any, indices: Any) -> Any:
    """The reason for which a router's function cannot run a call; True without one."""
    if bits is not None or indices is not None:
        return "it has the choice as a map of bytes, and the call has bits or indices"
    if score_function == "sqrtsoftplus" and not function.takes("routing_map_format"):
        return "score_function sqrtsoftplus is newer than its form of arguments"
    return True


def _choice_limits(known: list) -> Callable[[VendorFunction], Callable[..., Any]]:
    def of(function: VendorFunction) -> Callable[..., Any]:
        lacking = needs(known)(function)()

        def limits(score_function, routing_bits):
            return _reason(function, score_function, routing_bits, None) if lacking is True else lacking
        return limits
    return of


def _topk_limits(function: VendorFunction) -> Callable[..., Any]:
    lacking = needs(_TOPK)(function)()

    def limits(score_function, routing_bits, topk_indices):
        return _reason(function, score_function, routing_bits, topk_indices) if lacking is True else lacking
    return limits


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


@adapter("fused_topk_with_score_function_fwd", limits=_topk_limits)
def _topk(run: VendorFunction) -> Callable[..., None]:
    def fwd(logits, expert_bias, probs, routing_map, routing_bits, topk_indices, intermediate_output, topk, use_pre_softmax, num_groups, group_topk,
            scaling_factor, score_function):
        made = results(run.by_name({
            "logits": _rows(logits), "topk": topk, "use_pre_softmax": use_pre_softmax, "num_groups": num_groups or None, "group_topk": group_topk or None,
            "scaling_factor": scaling_factor, "score_function": score_function, "expert_bias": expert_bias,
            "routing_map_format": NVTERoutingMapFormat.BYTEMAP, "topk_indices": None}), 3)
        for output, value in zip((probs, routing_map, intermediate_output), made):
            write(output, value)
    return fwd


def _gradient_of_rows(run: VendorFunction, grad_logits: torch.Tensor, values: dict) -> None:
    """Writes the gradient of logits, which a function returns if it has no parameter for it."""
    rows = torch.empty_like(_rows(grad_logits))
    made = run.by_name({"num_tokens": rows.shape[0], "num_experts": rows.shape[1], "grad_logits": rows, **values})
    write(grad_logits, rows if run.takes("grad_logits") else made)


@adapter("fused_topk_with_score_function_bwd", limits=_topk_limits)
def _topk_gradient(run: VendorFunction) -> Callable[..., None]:
    def bwd(routing_map, routing_bits, topk_indices, intermediate_output, grad_probs, grad_logits, topk, use_pre_softmax, scaling_factor, score_function):
        _gradient_of_rows(run, grad_logits, {
            "routing_map": _rows(routing_map).view(torch.bool), "intermediate_output": _rows(intermediate_output), "grad_probs": _rows(grad_probs),
            "topk": topk, "use_pre_softmax": use_pre_softmax, "scaling_factor": scaling_factor, "score_function": score_function,
            "use_dense_indices": False, "routing_map_format": NVTERoutingMapFormat.BYTEMAP})
    return bwd


@adapter("fused_score_for_moe_aux_loss_fwd", limits=_choice_limits(_SCORES))
def _scores(run: VendorFunction) -> Callable[..., None]:
    def fwd(logits, scores, routing_map, routing_bits, intermediate_output, topk, score_function):
        made = results(run.by_name({"logits": _rows(logits), "topk": topk, "score_function": score_function,
                                    "routing_map_format": NVTERoutingMapFormat.BYTEMAP}), 3)
        for output, value in zip((scores, routing_map, intermediate_output), made):
            write(output, value)
    return fwd


def _scores_gradient_limits(function: VendorFunction) -> Callable[..., Any]:
    lacking = needs(_SCORES)(function)()
    # The function's parameters do not tell whether it has the newer score function.
    return lambda score_function: lacking if lacking is not True else "it has sigmoid and softmax" if score_function == "sqrtsoftplus" else True


@adapter("fused_score_for_moe_aux_loss_bwd", limits=_scores_gradient_limits)
def _scores_gradient(run: VendorFunction) -> Callable[..., None]:
    def bwd(intermediate_output, grad_scores, grad_logits, topk, score_function):
        _gradient_of_rows(run, grad_logits, {"intermediate_output": _rows(intermediate_output), "grad_scores": _rows(grad_scores), "topk": topk,
                                             "score_function": score_function})
    return bwd


def _loss_limits(function: VendorFunction) -> Callable[..., Any]:
    return lambda total_num_tokens_tensor: "it takes total_num_tokens as a number" if total_num_tokens_tensor is not None else True


@adapter("fused_moe_aux_loss_fwd", limits=_loss_limits)
def _loss(run: VendorFunction) -> Callable[..., None]:
    def fwd(probs, tokens_per_expert, total_num_tokens_tensor, aux_loss, const_buf, total_num_tokens, num_experts, topk, coeff):
        made = results(run(probs, tokens_per_expert, total_num_tokens, num_experts, probs.shape[0], probs.shape[1], topk, coeff), 2)
        for output, value in zip((aux_loss, const_buf), made):
            write(output, value)
    return fwd


@adapter("fused_moe_aux_loss_bwd")
def _loss_gradient(run: VendorFunction) -> Callable[..., None]:
    def bwd(const_buf, tokens_per_expert, grad_aux_loss, grad_probs):
        write(grad_probs, run(const_buf, tokens_per_expert, grad_probs.shape[0], grad_probs.shape[1], grad_aux_loss.reshape(())))
    return bwd


# ---- permutation by indices

def _permute_limits(function: VendorFunction) -> Callable[..., Any]:
    def limits(input, indices, output, num_experts):
        rows, pairs = output.shape[0], indices.shape[0] * indices.shape[1]
        if num_experts:
            return "it does not check the indices against num_experts"
        return True if 0 < rows <= pairs else f"it makes 1 to {pairs} rows, and the output has {rows}"
    return limits


@adapter("moe_permute_fwd", limits=_permute_limits)
def _permute(run: VendorFunction) -> Callable[..., None]:
    def fwd(input, indices, output, row_id_map, num_experts):
        made, places, _ = results(run(input, dtype_of(input), indices.to(torch.int32), output.shape[0], [], indices.numel()), 3)
        write(output, made)
        write(row_id_map, places)
    return fwd


def _factors(like: torch.Tensor, probs: Optional[torch.Tensor]) -> torch.Tensor:
    return like.new_empty(0, dtype=torch.float32) if probs is None else probs


@adapter("moe_unpermute_fwd")
def _unpermute(run: VendorFunction) -> Callable[..., None]:
    def fwd(input, row_id_map, probs, output):
        write(output, run(input, dtype_of(input), row_id_map.view(-1), _factors(input, probs), row_id_map.shape[1], row_id_map.shape[0]))
    return fwd


@adapter("moe_permute_bwd")
def _permute_gradient(run: VendorFunction) -> Callable[..., None]:
    def bwd(grad_output, row_id_map, probs, grad_input):
        write(grad_input, run(grad_output, dtype_of(grad_output), row_id_map.view(-1), _factors(grad_output, probs), row_id_map.shape[1], row_id_map.shape[0]))
    return bwd


@adapter("moe_unpermute_bwd")
def _unpermute_gradient(run: VendorFunction) -> Callable[..., None]:
    def bwd(grad_output, fwd_input, row_id_map, probs, grad_input, grad_probs):
        if probs is None:  # the function reads the number of experts of a token from the shape of the probabilities
            probs = torch.ones(row_id_map.shape[::-1], dtype=torch.float32, device=grad_output.device)
        made = results(run(grad_output, fwd_input, dtype_of(grad_output), row_id_map.view(-1), probs), 2)
        write(grad_input, made[0])
        write(grad_probs, made[1])
    return bwd


# ---- padding of groups

def _check_plain(input: torch.Tensor) -> None:
    if input.dtype != torch.uint8:
        dtype_of(input)


@adapter("fused_multi_row_padding")
def _pad(run: VendorFunction) -> Callable[..., None]:
    def pad(input, output, input_rows, padded_rows):
        _check_plain(input)
        run(input, output, list(input_rows), list(padded_rows))
    return pad


@adapter("fused_multi_row_unpadding")
def _unpad(run: VendorFunction) -> Callable[..., None]:
    def unpad(input, output, input_rows, unpadded_rows):
        _check_plain(input)
        run(input, output, list(input_rows), list(unpadded_rows))
    return unpad
