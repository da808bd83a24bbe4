"""Scaled dot-product attention and its gradient."""

from __future__ import annotations

import contextlib
from typing import Any, List, Optional, Sequence, Tuple

import torch

from te_fl import ops
from te_fl.attention_logits import max_logits
from te_fl.policy import policy
from te_fl.errors import Error, InvalidArgument, Unsupported
from te_fl.transformer_engine_torch import schemes
from te_fl.transformer_engine_torch.attention_problem import (FORMATS, LAYOUTS, LENGTH_DIMS, Layout, Problem, alibi_slopes, operands, packed,
                                                              problem, seen_as, shape_as)
from te_fl.transformer_engine_torch.dropout import draw
from te_fl.transformer_engine_torch.dtypes import FP8, fp8_dtype, torch_dtype
from te_fl.transformer_engine_torch.enums import NVTE_Fused_Attn_Backend, NVTE_Mask_Type, NVTEScalingMode
from te_fl.tensors import Quantized

__all__ = ["fused_attn_bwd", "fused_attn_fwd", "get_fused_attn_backend"]


_CODES = frozenset(FP8.values())


def _check_max_logit(asked: bool, alibi: bool, dtype: torch.dtype) -> None:
    if asked and (alibi or dtype in _CODES):
        raise Unsupported(f"attention: return_max_logit {'with ALiBi' if alibi else 'in FP8'}; te-fl has the largest score of plain queries and keys, and "
                          "of a bias")


# -- Selection of the backend ---------------------------------------------------------------------------------------------------------------

def _operand_like(layout: Layout, dtype: torch.dtype, length: int, heads: int, dim: int) -> Any:
    """A tensor of one sequence for a support query, which reads only its metadata."""
    shape = {"thd": (length, heads, dim), "bshd": (1, length, heads, dim), "sbhd": (length, 1, heads, dim)}[layout.op]
    tensor = torch.empty(shape, dtype=dtype, device="cuda")
    if dtype not in _CODES:
        return tensor
    return Quantized(tensor, scale_inv=torch.empty(1, dtype=torch.float32, device="cuda"))


def _check_fp8(p: Any, dtype: torch.dtype) -> None:
    if dtype not in _CODES:
        return
    if int(p.scaling_mode) != NVTEScalingMode.NVTE_DELAYED_TENSOR_SCALING:
        raise Unsupported(f"attention: FP8 with {NVTEScalingMode(int(p.scaling_mode)).name}; te-fl takes one scale for a tensor")
    wanted = [("o", p.o_dtype)] + ([("do", p.do_dtype), ("dqkv", p.dqkv_dtype)] if p.is_training else [])
    for name, each in wanted:
        if int(each) not in FP8:
            raise Unsupported(f"attention: FP8 with {name} in {torch_dtype(each)}; te-fl's FP8 attention has a given scale for P and dS, and FP8 "
                              "results (delayed scaling)")


def _check_heads(p: Any) -> None:
    if min(p.num_attn_heads, p.num_gqa_groups, p.head_dim_qk, p.head_dim_v) < 1 or p.num_attn_heads % p.num_gqa_groups:
        raise InvalidArgument(f"attention: {p.num_attn_heads} heads of {p.head_dim_qk} and {p.head_dim_v} elements in {p.num_gqa_groups} groups; the "
                              "groups divide the heads")


def _own_diagonal(p: Any) -> bool:
    """True for the bottom-right diagonal. In Transformer Engine's calls, the window of a causal mask is aligned to the mask's own diagonal, and
    bottom_right_diagonal of the support query is ignored.
    """
    masks, mask = NVTE_Mask_Type, int(p.attn_mask_type)
    bottom_right = mask in (masks.NVTE_CAUSAL_BOTTOM_RIGHT_MASK, masks.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK)
    return bottom_right or (p.bottom_right_diagonal and mask not in (masks.NVTE_CAUSAL_MASK, masks.NVTE_PADDING_CAUSAL_MASK))


def _enquire(p: Any) -> int:
    known = problem(p.qkv_layout, p.bias_type, p.attn_mask_type, p.softmax_type, (p.window_size_left, p.window_size_right), _own_diagonal(p),
                    p.max_seqlen_q == p.max_seqlen_kv)
    layout, mask, dtype = known.layout, known.mask, torch_dtype(p.qkv_dtype)
    _check_max_logit(p.return_max_logit, known.alibi, dtype)
    _check_heads(p)
    _check_fp8(p, dtype)
    # One group of heads and one sequence suffice: the dispatch depends on neither number.
    heads, answer = p.num_attn_heads // p.num_gqa_groups, torch.empty(1, dtype=torch.int32, device="cpu")
    k_dim, v_dim = p.head_dim_qk, p.head_dim_v
    ops.get_fused_attn_backend(q=_operand_like(layout, dtype, p.max_seqlen_q, heads, k_dim), k=_operand_like(layout, dtype, p.max_seqlen_kv, 1, k_dim),
                               v=_operand_like(layout, dtype, p.max_seqlen_kv, 1, v_dim), backend=answer, layout=layout.op, mask_type=mask.type,
                               softmax_type=known.softmax, dropout_p=p.dropout, window_left=mask.left, window_right=mask.right,
                               is_training=p.is_training)
    return int(answer)


def get_fused_attn_backend(fused_attn_params: Any) -> Tuple[NVTE_Fused_Attn_Backend, str]:
    """Returns (the backend, the reason if there is none). Without a backend, Transformer Engine uses its unfused attention, which calls te-fl's other
    ops.
    """
    try:
        found = _enquire(fused_attn_params)
    except Error as error:
        return NVTE_Fused_Attn_Backend.NVTE_No_Backend, str(error)
    return NVTE_Fused_Attn_Backend(found), "" if found >= 0 else "no implementation of fused_attn_fwd takes this problem"


# -- Operands ------------------------------------------------------------------------------------------------------------------------------

def _values(tensor: Any) -> torch.Tensor:
    """The data of a plain tensor, or the codes of an FP8 tensor."""
    if type(tensor) is torch.Tensor or not schemes.is_quantised(tensor):
        return tensor
    if not hasattr(tensor, "_transpose_invalid"):
        raise Unsupported(f"attention: a tensor of class {type(tensor).__name__}; te-fl takes Float8Tensor, of one scale")
    if tensor._data is None:
        raise InvalidArgument("attention: a Float8Tensor has no row-wise data")
    return tensor._data.view(fp8_dtype(tensor._fp8_dtype)) if tensor._data.dtype == torch.uint8 else tensor._data


def _of_pages(cache: torch.Tensor, table: Optional[torch.Tensor], batch: int, layout: Layout) -> torch.Tensor:
    """Gathers the sequences of a paged cache [pages, page size, G, D] to [batch, S, G, D]; the table [batch or more, pages] lists each sequence's
    pages.
    """
    if table is None or layout.kv != "bshd":
        raise InvalidArgument(f"fused_attn_fwd: layout {layout.name} with pages; give page_table_k and page_table_v, and keys and values as bshd")
    return cache.index_select(0, table[:batch].reshape(-1)).view(batch, -1, *cache.shape[2:])


def _operand(values: torch.Tensor, tensor: Any) -> Any:
    if type(tensor) is torch.Tensor or not schemes.is_quantised(tensor):
        return values
    return Quantized(values, scale_inv=tensor._scale_inv)


def _inner_scale(quantizer: Any, values: torch.Tensor, name: str) -> Optional[Quantized]:
    """Scale and amax of the probabilities or of their gradient, which have no tensor in Transformer Engine. values: the queries."""
    if values.dtype not in _CODES:
        return None
    if quantizer is None or not hasattr(quantizer, "scale") or not hasattr(quantizer, "amax"):
        raise Unsupported(f"attention: FP8 with {name} of class {type(quantizer).__name__}; te-fl needs a given scale (Float8Quantizer)")
    return Quantized(torch.empty(1, dtype=fp8_dtype(quantizer.dtype), device=values.device), scale=quantizer.scale, amax=quantizer.amax,
                     scale_inv=torch.empty(1, dtype=torch.float32, device=values.device))


def _result(quantizer: Any, codes: torch.Tensor, dtype: torch.dtype) -> tuple:
    """Returns (Transformer Engine's tensor that holds the codes, the op's output argument for them)."""
    scheme = schemes.of_quantizer(quantizer)
    if not isinstance(scheme, schemes.Float8) or isinstance(scheme, schemes.CurrentFloat8):
        raise Unsupported(f"attention: an FP8 result by a {type(quantizer).__name__}; te-fl needs a given scale (Float8Quantizer)")
    scale_inv = torch.empty(1, dtype=torch.float32, device=codes.device)
    parts = dict(data=codes.view(torch.uint8), fp8_scale_inv=scale_inv, data_transpose=None, quantizer=quantizer, **scheme.constructor_arguments(quantizer))
    if quantizer.internal:
        tensor = scheme.storage_class(quantizer)(fake_dtype=dtype, **parts)
    else:
        tensor = scheme.storage_class(quantizer)(shape=codes.shape, dtype=dtype, device=codes.device, **parts)
    return tensor, scale_inv


class _Call:
    """Arguments common to forward and backward."""

    def __init__(self, known: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_scale: float, p_dropout: float,
                 max_seqlen: Tuple[int, int], cu_seqlens: tuple, cu_seqlens_padded: tuple):
        layout, mask = known.layout, known.mask
        self.known = known
        self.q, self.k, self.v, starts = operands(layout, q, k, v)
        self.arguments = dict(layout=layout.op, mask_type=mask.type, softmax_type=known.softmax, scale=attn_scale, dropout_p=p_dropout,
                              window_left=mask.left, window_right=mask.right)
        if known.variable:
            self.arguments.update(cu_seqlens_q=cu_seqlens[0], cu_seqlens_kv=cu_seqlens[1])
        if layout.op == "thd":
            # Transformer Engine passes padded offsets for both or for neither.
            padded = cu_seqlens_padded if None not in cu_seqlens_padded else (None, None)
            self.arguments.update(max_seqlen_q=max_seqlen[0], max_seqlen_kv=max_seqlen[1], cu_seqlens_q_padded=padded[0],
                                  cu_seqlens_kv_padded=padded[1] if starts is None else starts[:cu_seqlens[1].shape[0]])
        if known.alibi:
            self.arguments.update(alibi_slopes=alibi_slopes(self.q.shape[-2], self.q.device))

    def bias(self, bias: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        """The bias as [1 or B, 1 or H, Sq, Sk]; a bias with one query row is expanded."""
        if not self.known.bias or bias is None:
            return None
        at = LENGTH_DIMS[self.known.layout.op]
        queries, keys = self.q.shape[at], self.k.shape[at]
        if bias.dim() == 4 and bias.shape[2] == 1 and queries != 1:
            bias = bias.expand(-1, -1, queries, keys)
        return bias.contiguous()

    def add_sink(self, offset: Optional[torch.Tensor]) -> None:
        """Adds the softmax offset. For "off-by-one", Transformer Engine also passes an offset of zeros and expects its gradient."""
        if self.known.softmax == "learnable" and offset is None:
            raise InvalidArgument("attention: softmax_type learnable without softmax_offset, float32 [1, H, 1, 1]")
        if self.known.softmax != "vanilla" and offset is not None:
            self.arguments.update(softmax_type="learnable", softmax_sink=offset.reshape(-1))

    def lse_shape(self) -> Tuple[int, ...]:
        shape = self.q.shape
        op = self.known.layout.op
        return (shape[0], shape[1]) if op == "thd" else (shape[1], shape[2], shape[0]) if op == "sbhd" else (shape[0], shape[2], shape[1])


def _is_square(qkv_layout: Any, q: torch.Tensor, k: torch.Tensor) -> bool:
    """True if the numbers of keys and queries are equal, by the tensors' shapes."""
    layout = LAYOUTS.get(int(qkv_layout))
    return layout is not None and q.shape[LENGTH_DIMS[layout.q]] == k.shape[LENGTH_DIMS[layout.kv]]


def _window(window_size: Optional[Sequence[int]]) -> Optional[Tuple[int, int]]:
    return None if window_size is None else (window_size[0], window_size[1])


# -- Forward -------------------------------------------------------------------------------------------------------------------------------

_NO_DROPOUT: dict = {}


def _random_state(p_dropout: float, device: torch.device, generator: Optional[torch.Generator]) -> torch.Tensor:
    """Seed and offset, int64 [2] on the device. Without dropout returns a cached tensor of zeros, and does not advance the generator."""
    if p_dropout > 0:
        return draw(device, generator)
    state = _NO_DROPOUT.get(device)
    if state is None:
        with torch.inference_mode(False):  # autograd saves the cached tensor, and autograd cannot save inference tensors
            state = _NO_DROPOUT[device] = torch.zeros(2, dtype=torch.int64, device=device)
    return state


def fused_attn_fwd(max_seqlen_q: int, max_seqlen_kv: int, is_training: bool, attn_scale: float, p_dropout: float, set_zero: bool, qkv_layout: Any,
                   o_format: Any, qkv_scale_inv_format: Any, bias_type: Any, attn_mask_type: Any, softmax_type: Any, window_size: Sequence[int],
                   bottom_right_diagonal: bool, cu_seqlens_q: torch.Tensor, cu_seqlens_kv: torch.Tensor, Q: Any, K: Any, V: Any,
                   fake_dtype: torch.dtype, cu_seqlens_q_padded: Optional[torch.Tensor], cu_seqlens_kv_padded: Optional[torch.Tensor],
                   page_table_k: Optional[torch.Tensor], page_table_v: Optional[torch.Tensor], s_quantizer: Any, o_quantizer: Any,
                   Bias: Optional[torch.Tensor], SoftmaxOffset: Optional[torch.Tensor], rng_gen: Optional[torch.Generator],
                   rng_elts_per_thread: int, return_max_logit: bool, cuda_graph: bool) -> List[Any]:
    """Returns [O, log-sum-exp, the largest scores if requested, seed and offset of dropout, the bias if given, the softmax offset if given].

    The log-sum-exp is float32 [B, H, Sq, 1], with thd [T, H, 1]; the largest scores are always [B, H, Sq, 1]. set_zero, rng_elts_per_thread and
    cuda_graph refer to NVIDIA's kernels and have no effect: te-fl always writes zeros for padding, draws two random numbers per call, and runs the
    same ops under capture.
    """
    q, k, v = _values(Q), _values(K), _values(V)
    known = problem(qkv_layout, bias_type, attn_mask_type, softmax_type, _window(window_size), bottom_right_diagonal, _is_square(qkv_layout, q, k))
    layout = known.layout
    _check_max_logit(return_max_logit, known.alibi, q.dtype)
    if layout.paged:
        k, v = (_of_pages(x, table, cu_seqlens_kv.shape[0] - 1, layout) for x, table in ((k, page_table_k), (v, page_table_v)))
    elif page_table_k is not None or page_table_v is not None:
        raise InvalidArgument(f"fused_attn_fwd: page tables with layout {layout.name}, whose keys and values are in no pages")
    call = _Call(known, q, k, v, attn_scale, p_dropout, (max_seqlen_q, max_seqlen_kv), (cu_seqlens_q, cu_seqlens_kv),
                 (cu_seqlens_q_padded, cu_seqlens_kv_padded))
    call.add_sink(SoftmaxOffset)
    form = FORMATS[int(o_format)]
    shape = shape_as((*call.q.shape[:-1], call.v.shape[-1]), layout.op, form)
    if o_quantizer is None:
        o = values = torch.empty(shape, dtype=fake_dtype if call.q.dtype in _CODES else call.q.dtype, device=call.q.device)
        target: Any = seen_as(values, form, layout.op)
    else:
        codes = torch.empty(shape, dtype=fp8_dtype(o_quantizer.dtype), device=call.q.device)
        o, scale_inv = _result(o_quantizer, codes, fake_dtype)
        target = Quantized(seen_as(codes, form, layout.op), scale_inv=scale_inv, scale=o_quantizer.scale, amax=o_quantizer.amax)
    lse = torch.empty(call.lse_shape(), dtype=torch.float32, device=call.q.device)
    random, bias = _random_state(p_dropout, call.q.device, rng_gen), call.bias(Bias)
    ops.fused_attn_fwd(q=_operand(call.q, Q), k=_operand(call.k, K), v=_operand(call.v, V), o=target, softmax_lse=lse, bias=bias,
                       s_quant=_inner_scale(s_quantizer, call.q, "s_quantizer"), seed=random if p_dropout > 0 else 0, **call.arguments)
    auxiliary = [lse.unsqueeze(-1), *([max_logits(call.q, call.k, bias, **call.arguments)] if return_max_logit else []), random]
    if known.bias and Bias is not None:
        auxiliary.append(Bias)
    if known.softmax != "vanilla" and SoftmaxOffset is not None:
        auxiliary.append(SoftmaxOffset)
    return [o, *auxiliary]


# -- Backward ------------------------------------------------------------------------------------------------------------------------------

def _gradients(layout: Layout, dqkv_layout: Layout, shapes: tuple, quantizer: Any, fake_dtype: torch.dtype, device: torch.device) -> tuple:
    """Returns ([dq, dk, dv] for Transformer Engine, the same memory as the op's outputs)."""
    wanted = [shape_as(shape, have, want) for shape, have, want in zip(shapes, (layout.q, layout.kv, layout.kv),
                                                                       (dqkv_layout.q, dqkv_layout.kv, dqkv_layout.kv))]
    dtype = fake_dtype if quantizer is None else fp8_dtype(quantizer.dtype)
    values = packed(dqkv_layout, *wanted, dtype, device)
    views = [seen_as(each, have, layout.op) for each, have in zip(values, (dqkv_layout.q, dqkv_layout.kv, dqkv_layout.kv))]
    if quantizer is None:
        return list(values), views
    results = [_result(quantizer, each, fake_dtype) for each in values]
    targets = [Quantized(view, scale_inv=scale_inv, scale=quantizer.scale, amax=quantizer.amax) for view, (_, scale_inv) in zip(views, results)]
    return [tensor for tensor, _ in results], targets


def _deterministically(asked: bool) -> Any:
    return policy(deterministic=True) if asked else contextlib.nullcontext()


def fused_attn_bwd(max_seqlen_q: int, max_seqlen_kv: int, attn_scale: float, p_dropout: float, set_zero: bool, qkv_layout: Any, o_format: Any,
                   do_format: Any, dqkv_layout: Any, qkv_scale_inv_format: Any, do_scale_inv_format: Any, bias_type: Any, attn_mask_type: Any,
                   softmax_type: Any, window_size: Sequence[int], bottom_right_diagonal: bool, deterministic: bool, cu_seqlens_q: torch.Tensor,
                   cu_seqlens_kv: torch.Tensor, Q: Any, K: Any, V: Any, O: Any, dO: Any, fake_dtype: torch.dtype,
                   Aux_CTX_Tensors: Sequence[torch.Tensor], cu_seqlens_q_padded: Optional[torch.Tensor],
                   cu_seqlens_kv_padded: Optional[torch.Tensor], s_quantizer: Any, dp_quantizer: Any, dqkv_quantizer: Any,
                   cuda_graph: bool) -> List[Any]:
    """Returns [dQ, dK, dV, the gradient of the bias or None, the gradient of the softmax offset, float32 [1, H, 1, 1], or None]."""
    q, k, v = _values(Q), _values(K), _values(V)
    known = problem(qkv_layout, bias_type, attn_mask_type, softmax_type, _window(window_size), bottom_right_diagonal, _is_square(qkv_layout, q, k))
    layout, gradient_layout = known.layout, LAYOUTS.get(int(dqkv_layout))
    if gradient_layout is None or layout.paged or gradient_layout.paged or (layout.op == "thd" and layout.kv != "thd"):
        raise Unsupported(f"fused_attn_bwd: qkv_layout {layout.name}, dqkv_layout {int(dqkv_layout)}; layouts of caches have no gradient")
    call = _Call(known, q, k, v, attn_scale, p_dropout, (max_seqlen_q, max_seqlen_kv), (cu_seqlens_q, cu_seqlens_kv),
                 (cu_seqlens_q_padded, cu_seqlens_kv_padded))
    lse, random, *rest = Aux_CTX_Tensors
    given_bias, dbias = rest[0] if known.bias and rest else None, None
    if known.bias and given_bias is None:
        raise InvalidArgument("fused_attn_bwd: bias_type says that there is a bias; Aux_CTX_Tensors has none")
    call.add_sink(rest[-1] if len(rest) > known.bias else None)
    bias = call.bias(given_bias)
    if bias is not None:
        dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    heads = call.q.shape[-2]
    dsink = torch.empty(heads, dtype=torch.float32, device=call.q.device) if call.arguments["softmax_type"] == "learnable" else None
    results, targets = _gradients(layout, gradient_layout, (q.shape, k.shape, v.shape), dqkv_quantizer, fake_dtype,
                                  call.q.device)
    o, d_o = (_operand(seen_as(_values(t), FORMATS[int(form)], layout.op), t) for t, form in ((O, o_format), (dO, do_format)))
    with _deterministically(deterministic):
        ops.fused_attn_bwd(d_o=d_o, q=_operand(call.q, Q), k=_operand(call.k, K), v=_operand(call.v, V), o=o,
                           softmax_lse=lse.reshape(call.lse_shape()), dq=targets[0], dk=targets[1], dv=targets[2], bias=bias, dbias=dbias, dsink=dsink,
                           s_quant=_inner_scale(s_quantizer, call.q, "s_quantizer"), dp_quant=_inner_scale(dp_quantizer, call.q, "dp_quantizer"),
                           seed=random if p_dropout > 0 else 0, **call.arguments)
    if dbias is not None and dbias.shape != given_bias.shape:
        dbias = dbias.sum(2, keepdim=True)
    if call.arguments["softmax_type"] == "off_by_one":
        dsink = torch.zeros(heads, dtype=torch.float32, device=call.q.device)
    return [*results, dbias, None if dsink is None else dsink.view(1, -1, 1, 1)]
