"""Adapters for versions of Transformer Engine before 2.20, whose calls have other argument lists.

Transformer Engine passes arguments by position, so an argument inserted in the middle would shift the others. Each function whose argument list
changed has its former versions here, under the version that changed it. tests/python/transformer_engine_torch_versions.json records the argument
lists of all versions, and inside_versions_test.py checks this module against it.
"""

from __future__ import annotations

import enum
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch

from te_fl.errors import InvalidArgument, Unsupported
from te_fl.transformer_engine_torch import attention, context_parallel, experts, grouped, grouped_gemm, schemes
from te_fl.transformer_engine_torch.attention_problem import LAYOUTS
from te_fl.transformer_engine_torch.dtypes import FP8, torch_dtype
from te_fl.transformer_engine_torch.enums import NVTE_Fused_Attn_Backend, NVTE_Mask_Type, NVTE_QKV_Format, NVTEScalingMode

__all__ = ["adopt", "list_forms"]


# -- Attention -----------------------------------------------------------------------------------------------------------------------------

def _recipe_is_delayed() -> bool:
    """True if the FP8 recipe is delayed scaling, where attention's scales are inputs. Before 2.20 the arguments of the backend query lack the recipe.
    """
    state = getattr(sys.modules.get("transformer_engine.pytorch.quantization"), "FP8GlobalStateManager", None)
    recipe = None if state is None else state.get_fp8_recipe()
    return recipe is None or recipe.delayed()


def get_fused_attn_backend(is_training: bool, q_dtype: Any, kv_dtype: Any, qkv_layout: Any, bias_type: Any, attn_mask_type: Any, softmax_type: Any,
                           p_dropout: float, num_attn_heads: int, num_gqa_groups: int, max_seqlen_q: int, max_seqlen_kv: int, head_dim_qk: int,
                           head_dim_v: int, window_size_left: int, window_size_right: int, return_max_logit: bool, cuda_graph: bool,
                           deterministic: bool) -> NVTE_Fused_Attn_Backend:
    """Returns only the backend. The arguments lack the corner to which a window is aligned. Therefore both alignments must be supported, unless the
    mask determines the alignment.

    With return_max_logit, returns no backend, so that Transformer Engine uses its unfused attention: versions expect the largest scores at different
    positions in the results.
    """
    none = NVTE_Fused_Attn_Backend.NVTE_No_Backend
    if return_max_logit or int(q_dtype) != int(kv_dtype) or (int(q_dtype) in FP8 and not _recipe_is_delayed()):
        return none
    mask = NVTE_Mask_Type(int(attn_mask_type)).name
    corners = (mask.endswith("BOTTOM_RIGHT_MASK"),) if "CAUSAL" in mask else (True, False)
    for bottom_right in corners:
        params = SimpleNamespace(
            is_training=is_training, qkv_dtype=q_dtype, o_dtype=q_dtype, do_dtype=q_dtype, dqkv_dtype=q_dtype, qkv_layout=qkv_layout,
            bias_type=bias_type, attn_mask_type=attn_mask_type, softmax_type=softmax_type, dropout=p_dropout, num_attn_heads=num_attn_heads,
            num_gqa_groups=num_gqa_groups, max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv, head_dim_qk=head_dim_qk, head_dim_v=head_dim_v,
            window_size_left=window_size_left, window_size_right=window_size_right, bottom_right_diagonal=bottom_right,
            return_max_logit=False, scaling_mode=NVTEScalingMode.NVTE_DELAYED_TENSOR_SCALING)
        backend, _ = attention.get_fused_attn_backend(params)
        if backend is none:
            break
    return backend


def _formats(qkv_layout: Any) -> Tuple[NVTE_QKV_Format, NVTE_QKV_Format]:
    """Returns (the format of queries, outputs and gradients; the value for scales without a format). Versions since 2.15 pass both as arguments."""
    layout = LAYOUTS.get(int(qkv_layout))
    if layout is None:
        raise InvalidArgument(f"attention: qkv_layout is {int(qkv_layout)}; it is one of NVTE_QKV_Layout, and set")
    return NVTE_QKV_Format[f"NVTE_{layout.q.upper()}"], NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET


def fused_attn_fwd(max_seqlen_q: int, max_seqlen_kv: int, is_training: bool, attn_scale: float, p_dropout: float, set_zero: bool, qkv_layout: Any,
                   bias_type: Any, attn_mask_type: Any, softmax_type: Any, window_size: Sequence[int], bottom_right_diagonal: bool,
                   cu_seqlens_q: torch.Tensor, cu_seqlens_kv: torch.Tensor, Q: Any, K: Any, V: Any, fake_dtype: torch.dtype,
                   cu_seqlens_q_padded: Optional[torch.Tensor], cu_seqlens_kv_padded: Optional[torch.Tensor],
                   page_table_k: Optional[torch.Tensor], page_table_v: Optional[torch.Tensor], s_quantizer: Any, o_quantizer: Any,
                   Bias: Optional[torch.Tensor], SoftmaxOffset: Optional[torch.Tensor], rng_gen: Optional[torch.Generator],
                   rng_elts_per_thread: int, return_max_logit: bool, cuda_graph: bool) -> List[Any]:
    """fused_attn_fwd for versions up to 2.14. In FP8 these expect two softmax statistics, and te-fl provides the first."""
    if return_max_logit:
        raise Unsupported("fused_attn_fwd: return_max_logit before 2.15; the package's unfused attention has it")
    result = attention.fused_attn_fwd(
        max_seqlen_q, max_seqlen_kv, is_training, attn_scale, p_dropout, set_zero, qkv_layout, *_formats(qkv_layout), bias_type, attn_mask_type,
        softmax_type, window_size, bottom_right_diagonal, cu_seqlens_q, cu_seqlens_kv, Q, K, V, fake_dtype, cu_seqlens_q_padded, cu_seqlens_kv_padded,
        page_table_k, page_table_v, s_quantizer, o_quantizer, Bias, SoftmaxOffset, rng_gen, rng_elts_per_thread, return_max_logit, cuda_graph)
    if schemes.is_quantised(Q):
        result.insert(2, torch.empty(0, dtype=torch.float32, device=result[1].device))
    return result


def fused_attn_bwd(max_seqlen_q: int, max_seqlen_kv: int, attn_scale: float, p_dropout: float, set_zero: bool, qkv_layout: Any, bias_type: Any,
                   attn_mask_type: Any, softmax_type: Any, window_size: Sequence[int], bottom_right_diagonal: bool, deterministic: bool,
                   cu_seqlens_q: torch.Tensor, cu_seqlens_kv: torch.Tensor, Q: Any, K: Any, V: Any, O: Any, dO: Any, fake_dtype: torch.dtype,
                   dqkv_type: Any, Aux_CTX_Tensors: Sequence[torch.Tensor], cu_seqlens_q_padded: Optional[torch.Tensor],
                   cu_seqlens_kv_padded: Optional[torch.Tensor], s_quantizer: Any, dp_quantizer: Any, dqkv_quantizer: Any,
                   cuda_graph: bool) -> List[Any]:
    """fused_attn_bwd for versions up to 2.14. dqkv_type: the gradients' dtype, which must agree with the quantizer or fake_dtype."""
    wanted = torch_dtype(dqkv_type)
    if wanted != (fake_dtype if dqkv_quantizer is None else torch_dtype(dqkv_quantizer.dtype)):
        raise InvalidArgument(f"fused_attn_bwd: dqkv_type is {wanted}; dqkv_quantizer, or without one fake_dtype {fake_dtype}, says otherwise")
    auxiliary = list(Aux_CTX_Tensors)
    if schemes.is_quantised(Q):
        del auxiliary[1]
    format_, unset = _formats(qkv_layout)
    return attention.fused_attn_bwd(
        max_seqlen_q, max_seqlen_kv, attn_scale, p_dropout, set_zero, qkv_layout, format_, format_, qkv_layout, unset, unset, bias_type, attn_mask_type,
        softmax_type, window_size, bottom_right_diagonal, deterministic, cu_seqlens_q, cu_seqlens_kv, Q, K, V, O, dO, fake_dtype, auxiliary,
        cu_seqlens_q_padded, cu_seqlens_kv_padded, s_quantizer, dp_quantizer, dqkv_quantizer, cuda_graph)


def thd_out_correction(out: torch.Tensor, out_per_step: torch.Tensor, lse: torch.Tensor, lse_per_step: torch.Tensor, cu_seqlens: torch.Tensor,
                       only_second_half: bool, lse_packed: bool) -> None:
    """thd_out_correction for versions up to 2.19: adds a step's contribution; earlier contributions are already relative to the final lse."""
    context_parallel.thd_out_correction(out, out_per_step, lse, lse, lse_per_step, cu_seqlens, only_second_half, lse_packed)


# -- Experts and groups --------------------------------------------------------------------------------------------------------------------

def _topk_bwd_2_17(routing_map: torch.Tensor, intermediate_output: torch.Tensor, grad_probs: torch.Tensor, grad_logits: torch.Tensor, topk: int,
                   use_pre_softmax: bool, scaling_factor: Optional[float], score_function: str, routing_map_format: int = 0) -> None:
    experts.fused_topk_with_score_function_bwd(routing_map, intermediate_output, grad_probs, grad_logits, topk, use_pre_softmax, scaling_factor,
                                               score_function, False, routing_map_format)


def _check_tokens(name: str, num_tokens: int, num_experts: int, grad_logits: torch.Tensor) -> None:
    if grad_logits.numel() != num_tokens * num_experts or grad_logits.shape[-1] != num_experts:
        raise InvalidArgument(f"{name}: grad_logits has shape {tuple(grad_logits.shape)}; num_tokens and num_experts say {(num_tokens, num_experts)}")


def _topk_bwd_2_16(num_tokens: int, num_experts: int, routing_map: torch.Tensor, intermediate_output: torch.Tensor, grad_probs: torch.Tensor,
                   grad_logits: torch.Tensor, topk: int, use_pre_softmax: bool, scaling_factor: Optional[float], score_function: str) -> None:
    _check_tokens("fused_topk_with_score_function_bwd", num_tokens, num_experts, grad_logits)
    experts.fused_topk_with_score_function_bwd(routing_map, intermediate_output, grad_probs, grad_logits, topk, use_pre_softmax, scaling_factor,
                                               score_function)


def _score_bwd_2_16(num_tokens: int, num_experts: int, intermediate_output: torch.Tensor, grad_scores: torch.Tensor, grad_logits: torch.Tensor,
                    topk: int, score_function: str) -> None:
    _check_tokens("fused_score_for_moe_aux_loss_bwd", num_tokens, num_experts, grad_logits)
    experts.fused_score_for_moe_aux_loss_bwd(intermediate_output, grad_scores, grad_logits, topk, score_function)


def _group_quantize_2_17(tensor: torch.Tensor, quantizer: Any, num_tensors: int, first_dims: Optional[torch.Tensor],
                         tensor_offsets: Optional[torch.Tensor] = None) -> Any:
    return grouped.group_quantize(tensor, quantizer, num_tensors, first_dims, tensor_offsets=tensor_offsets)


def _bgrad_group_quantize_2_17(tensor: torch.Tensor, quantizer: Any, num_tensors: int, first_dims: Optional[torch.Tensor],
                               tensor_offsets: Optional[torch.Tensor] = None) -> tuple:
    return grouped.bgrad_group_quantize(tensor, quantizer, num_tensors, first_dims, tensor_offsets=tensor_offsets)


def _without_bias_scale(function: Callable) -> Callable:
    """Adapts a grouped GEMM to version 2.15, which has no argument bias_scale; later versions insert bias_scale after the bias."""
    def product(A: Any, transa: bool, B: Any, transb: bool, D: Any, bias: Any, alpha: torch.Tensor, beta: torch.Tensor, workspace_setup: torch.Tensor,
                workspace_cublas: torch.Tensor, use_split_accumulator: bool, math_sm_count: int) -> Any:
        return function(A, transa, B, transb, D, bias, None, alpha, beta, workspace_setup, workspace_cublas, use_split_accumulator, math_sm_count)

    product.__name__ = product.__qualname__ = function.__name__
    return product


_PRODUCTS = ("te_general_grouped_gemm_for_discrete_in", "te_general_grouped_gemm_for_discrete_out", "te_general_grouped_gemm_for_grouped_tensor")
_BACKENDS_2_15 = enum.IntEnum("NVTE_Fused_Attn_Backend", {"NVTE_F16_max512_seqlen": 0, **NVTE_Fused_Attn_Backend.__members__},
                              module=NVTE_Fused_Attn_Backend.__module__)

# (the version that changed the functions, their forms before it), the newest version first.
_FORMS: Tuple[Tuple[tuple, dict], ...] = (
    ((2, 20), {"get_fused_attn_backend": get_fused_attn_backend, "thd_out_correction": thd_out_correction}),
    ((2, 18), {"group_quantize": _group_quantize_2_17, "bgrad_group_quantize": _bgrad_group_quantize_2_17,
               "fused_topk_with_score_function_bwd": _topk_bwd_2_17}),
    ((2, 17), {"fused_topk_with_score_function_bwd": _topk_bwd_2_16, "fused_score_for_moe_aux_loss_bwd": _score_bwd_2_16}),
    ((2, 16), {**{name: _without_bias_scale(getattr(grouped_gemm, name)) for name in _PRODUCTS}, "NVTE_Fused_Attn_Backend": _BACKENDS_2_15}),
    ((2, 15), {"fused_attn_fwd": fused_attn_fwd, "fused_attn_bwd": fused_attn_bwd}),
)


def list_forms(version: tuple) -> dict:
    """{name: adapter} for the functions that this version calls differently from 2.20."""
    forms: dict = {}
    for changed, former in _FORMS:
        if version < changed:
            forms.update(former)
    return forms


def adopt(module: ModuleType, version: tuple) -> None:
    """Installs a version's adapters in the module, for the whole process."""
    vars(module).update(list_forms(version))
