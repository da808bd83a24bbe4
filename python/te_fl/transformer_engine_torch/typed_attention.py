"""Adapters of attention and its gradient."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from te_fl.transformer_engine_torch.attention_problem import LENGTH_DIMS
from te_fl.transformer_engine_torch.enums import NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Format, NVTE_QKV_Layout, NVTE_Softmax_Type
from te_fl.tex_results import WrongResult
from te_fl.transformer_engine_torch.typed_function import VendorFunction, adapter, dtype_of, results, write

_MASKS = {"none": "NO", "padding": "PADDING", "causal": "CAUSAL", "padding_causal": "PADDING_CAUSAL", "causal_bottom_right": "CAUSAL_BOTTOM_RIGHT",
          "padding_causal_bottom_right": "PADDING_CAUSAL_BOTTOM_RIGHT"}
_KNOWN = frozenset("""max_seqlen_q max_seqlen_kv attn_scale p_dropout set_zero qkv_layout o_format do_format dqkv_layout qkv_scale_inv_format
    do_scale_inv_format bias_type attn_mask_type softmax_type window_size bottom_right_diagonal cu_seqlens_q cu_seqlens_kv Q K V fake_dtype
    cu_seqlens_q_padded cu_seqlens_kv_padded s_quantizer cuda_graph""".split())
_FORWARD = _KNOWN | frozenset("is_training page_table_k page_table_v o_quantizer Bias SoftmaxOffset rng_gen rng_elts_per_thread return_max_logit".split())
_BACKWARD = _KNOWN | frozenset("deterministic O dO dqkv_type Aux_CTX_Tensors dp_quantizer dqkv_quantizer".split())
_NUMBERS_OF_A_THREAD = 16  # random numbers, which Transformer Engine passes though no dropout draws them


def _limits(known: frozenset) -> Callable[[VendorFunction], Callable[..., Any]]:
    def of(function: VendorFunction) -> Callable[..., Any]:
        lacking = function.lacks(known)

        def limits(alibi_slopes, attn_mask, dropout_p):
            if lacking:
                return lacking
            if dropout_p:
                return "it draws other random numbers than the op's"
            return True if alibi_slopes is None and attn_mask is None else "it has no slopes of ALiBi and no mask as a tensor"
        return limits
    return of


def _ends(tensor: torch.Tensor, layout: str, ends: Optional[torch.Tensor]) -> torch.Tensor:
    """The prefix sums of the sequences' lengths, which Transformer Engine passes for equal lengths too."""
    if ends is not None:
        return ends
    length, batch = tensor.shape[LENGTH_DIMS[layout]], tensor.shape[1 - LENGTH_DIMS[layout]]
    return torch.arange(batch + 1, dtype=torch.int32, device=tensor.device) * length


def _longest(tensor: torch.Tensor, layout: str, longest: int, ends: torch.Tensor) -> int:
    return tensor.shape[LENGTH_DIMS[layout]] if layout != "thd" else longest or int(ends.diff().max())


def _arguments(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str, mask_type: str, softmax_type: str, scale: float, window: Tuple[int, int],
               longest: Tuple[int, int], ends: Tuple[Optional[torch.Tensor], ...], bias: Optional[torch.Tensor]) -> Dict[str, Any]:
    """The arguments of forward and backward. ends: the prefix sums of the lengths of queries and keys, and their starts."""
    kind, form = layout.upper(), NVTE_QKV_Format[f"NVTE_{layout.upper()}"]
    together, causal = NVTE_QKV_Layout[f"NVTE_{kind}_{kind}_{kind}"], "causal" in mask_type
    ends_q, ends_kv = _ends(q, layout, ends[0]), _ends(k, layout, ends[1])
    return {"Q": q.contiguous(), "K": k.contiguous(), "V": v.contiguous(), "qkv_layout": together, "dqkv_layout": together, "o_format": form, "do_format": form,
            "qkv_scale_inv_format": NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET, "do_scale_inv_format": NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET,
            "attn_mask_type": NVTE_Mask_Type[f"NVTE_{_MASKS[mask_type]}_MASK"], "softmax_type": NVTE_Softmax_Type[f"NVTE_{softmax_type.upper()}_SOFTMAX"],
            "bias_type": NVTE_Bias_Type.NVTE_NO_BIAS if bias is None else NVTE_Bias_Type.NVTE_POST_SCALE_BIAS,
            # A causal mask bounds the right side already; its window is aligned to its own diagonal, others to the bottom-right corner.
            "window_size": [window[0], 0 if causal else window[1]], "bottom_right_diagonal": mask_type not in ("causal", "padding_causal"),
            "cu_seqlens_q": ends_q, "cu_seqlens_kv": ends_kv, "cu_seqlens_q_padded": ends[2], "cu_seqlens_kv_padded": ends[3],
            "max_seqlen_q": _longest(q, layout, longest[0], ends_q), "max_seqlen_kv": _longest(k, layout, longest[1], ends_kv), "attn_scale": scale,
            "p_dropout": 0.0, "set_zero": True, "fake_dtype": q.dtype, "s_quantizer": None, "cuda_graph": False}


def _sink(softmax_type: str, sink: Optional[torch.Tensor], q: torch.Tensor) -> Optional[torch.Tensor]:
    """The softmax offset [1, H, 1, 1]; Transformer Engine passes zeros for off_by_one."""
    if softmax_type == "vanilla":
        return None
    return (q.new_zeros(q.shape[-2], dtype=torch.float32) if sink is None else sink).view(1, -1, 1, 1)


@adapter("fused_attn_fwd", limits=_limits(_FORWARD))
def _attention(run: VendorFunction) -> Callable[..., None]:
    def fwd(q, k, v, o, softmax_lse, bias, alibi_slopes, attn_mask, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, softmax_sink,
            s_quant, layout, mask_type, softmax_type, scale, dropout_p, window_left, window_right, max_seqlen_q, max_seqlen_kv):
        dtype_of(q)
        common = _arguments(q, k, v, layout, mask_type, softmax_type, scale, (window_left, window_right), (max_seqlen_q, max_seqlen_kv),
                            (cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded), bias)
        made = results(run.by_name({
            **common, "is_training": softmax_lse is not None, "page_table_k": None, "page_table_v": None, "o_quantizer": None, "Bias": bias,
            "SoftmaxOffset": _sink(softmax_type, softmax_sink, q), "rng_gen": None, "rng_elts_per_thread": _NUMBERS_OF_A_THREAD,
            "return_max_logit": False}), 1 if softmax_lse is None else 2)
        if softmax_lse is not None:
            lse = made[1]
            if lse.dim() != softmax_lse.dim() + 1 or lse.shape[:-1] != softmax_lse.shape or lse.shape[-1] != 1:
                raise WrongResult(f"its second result has shape {tuple(lse.shape)}; the log-sum-exp has {(*softmax_lse.shape, 1)}")
            write(softmax_lse, lse)
        write(o, made[0])
    return fwd


@adapter("fused_attn_bwd", limits=_limits(_BACKWARD))
def _attention_gradient(run: VendorFunction) -> Callable[..., None]:
    def bwd(d_o, q, k, v, o, softmax_lse, dq, dk, dv, dbias, dsink, bias, alibi_slopes, attn_mask, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded,
            cu_seqlens_kv_padded, softmax_sink, s_quant, dp_quant, layout, mask_type, softmax_type, scale, dropout_p, window_left, window_right, max_seqlen_q,
            max_seqlen_kv, deterministic):
        common = _arguments(q, k, v, layout, mask_type, softmax_type, scale, (window_left, window_right), (max_seqlen_q, max_seqlen_kv),
                            (cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded), bias)
        auxiliary: List[Optional[torch.Tensor]] = [softmax_lse.unsqueeze(-1), torch.zeros(2, dtype=torch.int64, device=q.device), bias,
                                                   _sink(softmax_type, softmax_sink, q)]
        made = results(run.by_name({
            **common, "O": o.contiguous(), "dO": d_o.contiguous(), "dqkv_type": dtype_of(q), "deterministic": deterministic,
            "Aux_CTX_Tensors": [each for each in auxiliary if each is not None], "dp_quantizer": None, "dqkv_quantizer": None}),
            5 if dsink is not None else 4 if dbias is not None else 3)
        for output, value in zip((dq, dk, dv, dbias, dsink), made):
            write(output, value)
    return bwd
