"""Multi-head attention with its input and output projections."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NoReturn, Optional, Tuple, Union

import torch

from te_fl.errors import InvalidArgument
from te_fl.pytorch.functions.rope import apply_rotary_pos_emb
from te_fl.pytorch.modules import cached_attention, context_parallel
from te_fl.pytorch.modules.attention import DotProductAttention, checked_mask
from te_fl.pytorch.modules.inference import InferenceParams
from te_fl.pytorch.modules.layers import NativeLayer
from te_fl.pytorch.modules.linear import LayerNormLinear, Linear
from te_fl.pytorch.modules.norm import LayerNorm, RMSNorm
from te_fl.pytorch.modules.parameters import part_name
from te_fl.pytorch.modules.parallel import divided, size_of
from te_fl.pytorch.runtime import refuse as rules
from te_fl.pytorch.runtime import registry, traced
from te_fl.pytorch.runtime.constants import CPLoadBalancingStrategy
from te_fl.pytorch.runtime.refuse import checks_keywords, hides_misspelt, misspelling


class _NormOfItsInput(RMSNorm):
    """An RMSNorm whose output has the input's dtype."""

    def _output_dtype(self) -> int:
        return -1


class L2Normalization(torch.nn.Module):
    """x / sqrt(sum(x^2) + eps) over the last dimension, computed by te-fl's RMSNorm with weight 1 / sqrt(n) and epsilon eps / n."""

    _sites = _recipe_parts = ()

    def __init__(self, *, eps: float = 1e-6, seq_length: Optional[int] = None, micro_batch_size: Optional[int] = None) -> None:
        super().__init__()
        rules.epsilon("L2Normalization", "eps", eps)
        self.eps = eps
        self._recipe, self._in_fp8 = None, False  # see quantization.notice()
        self._norms: Dict[Any, RMSNorm] = {}
        self._number = registry.enter(self)

    def _norm(self, n: int, device: torch.device) -> RMSNorm:
        norm = self._norms.get((n, device))
        if norm is None:
            with torch.inference_mode(False):  # the module is also used by training forwards, which cannot save inference tensors
                norm = _NormOfItsInput(n, eps=self.eps / n, device=device, dtype=torch.float32)
                norm.weight.requires_grad_(False).fill_(n ** -0.5)
            self._norms[n, device] = norm
        return norm

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        n = input.shape[-1]
        if torch.compiler.is_compiling():
            traced.graph.check_device("L2Normalization", input.device)
            weight = torch.full((n,), n ** -0.5, dtype=torch.float32, device=input.device)
            return traced.graph.forward(self, "rmsnorm", (n,), -1, -1, None, (input,), (), (weight,), None, None)
        return self._norm(n, input.device)(input)

    # Called by a graph through the module's number; see te_fl.pytorch.compile.compiled.

    def _in_graph(self, device: torch.device, kind: str, key: tuple) -> Tuple[NativeLayer, None]:
        return self._norm(key[0], device)._layer(device, kind), None

    def __getstate__(self) -> dict:
        state = {**self.__dict__, "_norms": {}}
        del state["_number"]
        return state

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._number = registry.enter(self)


class MultiheadAttention(torch.nn.Module):
    """proj(attention(split(norm(x) A^T + b))): self-attention of one input, or cross-attention with keys and values from another input.

    input_layernorm: the input is normalised before the projections. attention_type: 'self', or 'cross' for attention to encoder_output.
    fuse_qkv_params: one weight for queries, keys and values instead of three weights. qkv_weight_interleaved: True orders the fused weight
    by group (its query heads, key, value); False: all queries, all keys, all values. qk_norm_type: the normalisation of queries and keys:
    None, 'L2Normalization', 'RMSNorm' or 'LayerNorm'. return_bias: proj's bias is returned instead of added. return_layernorm_output: the
    normalised input is returned as well. seq_length, micro_batch_size: accepted for compatibility; Transformer Engine uses them to warm up
    a compiler. The other arguments are those of DotProductAttention and LayerNormLinear.
    """

    @checks_keywords()
    def __init__(self, hidden_size: int, num_attention_heads: int, kv_channels: Optional[int] = None, attention_dropout: float = 0.1,
                 layernorm_epsilon: float = 1e-5, init_method: Optional[Callable] = None,
                 output_layer_init_method: Optional[Callable] = None, layer_number: Optional[int] = None, attn_mask_type: str = "causal",
                 window_size: Optional[Tuple[int, int]] = None, bottom_right_diagonal: Optional[bool] = None, softcap: float = 0.0,
                 tp_group: Optional[Any] = None, tp_size: int = 1, num_gqa_groups: Optional[int] = None,
                 fuse_wgrad_accumulation: bool = False, get_rng_state_tracker: Optional[Callable] = None, sequence_parallel: bool = False,
                 params_dtype: Optional[torch.dtype] = None, return_bias: bool = False, return_layernorm_output: bool = False,
                 input_layernorm: bool = False, attention_type: str = "self", set_parallel_mode: bool = False,
                 fuse_qkv_params: bool = False, zero_centered_gamma: bool = False, qkv_weight_interleaved: bool = True,
                 rotary_pos_interleaved: bool = False, ub_overlap_ag: bool = False, ub_overlap_rs: bool = False,
                 ub_overlap_rs_dgrad: bool = False, ub_bulk_dgrad: bool = False, ub_bulk_wgrad: bool = False, bias: bool = True,
                 normalization: str = "LayerNorm", device: Union[torch.device, str, None] = None, qkv_format: str = "sbhd",
                 name: Optional[str] = None, qk_norm_type: Optional[str] = None, qk_norm_eps: float = 1e-6,
                 qk_norm_before_rope: bool = False, seq_length: Optional[int] = None, micro_batch_size: Optional[int] = None,
                 softmax_type: str = "vanilla") -> None:
        super().__init__()
        where = "MultiheadAttention"
        rules.check(where, locals())
        if layer_number is not None and layer_number < 1:
            raise InvalidArgument(f"{where}: layer_number is {layer_number}; layers count from 1")
        if kv_channels is not None:
            rules.size(where, "kv_channels", kv_channels, least=0)  # 0 means unset, as in Transformer Engine
        if not kv_channels and hidden_size % num_attention_heads != 0:
            raise InvalidArgument(f"{where}: hidden_size is {hidden_size} and num_attention_heads {num_attention_heads}, which does not divide it; give "
                             "kv_channels, the size of a head")
        checked_mask(where, attn_mask_type, window_size, softcap)
        self.hidden_size, self.num_attention_heads = int(hidden_size), int(num_attention_heads)
        self.kv_channels = int(kv_channels or hidden_size // num_attention_heads)
        self.num_gqa_groups = int(num_attention_heads if num_gqa_groups is None else num_gqa_groups)
        self.hidden_size_per_attention_head = self.kv_channels
        self.hidden_size_q, self.hidden_size_kv = self.kv_channels * self.num_attention_heads, self.kv_channels * self.num_gqa_groups
        self.params_dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        self.get_rng_state_tracker, self.softmax_type = get_rng_state_tracker, softmax_type
        self.cp_size, self.cp_rank = 1, 0
        self.attn_mask_type, self.window_size, self.bottom_right_diagonal = attn_mask_type, window_size, bottom_right_diagonal
        self.softcap, self.layer_number, self.name = softcap, 1 if layer_number is None else layer_number, name
        self.input_layernorm, self.attention_type, self.qkv_format = bool(input_layernorm), attention_type, qkv_format
        self.return_bias, self.return_layernorm_output = bool(return_bias), bool(return_layernorm_output)
        self.qkv_weight_interleaved = bool(qkv_weight_interleaved and fuse_qkv_params)
        self.rotary_pos_interleaved, self.qk_norm_before_rope = bool(rotary_pos_interleaved), bool(qk_norm_before_rope)
        self.fuse_qkv_params, self.qk_norm_type, self.qk_norm_eps = bool(fuse_qkv_params), qk_norm_type, qk_norm_eps
        if self.return_layernorm_output and not self.input_layernorm:
            raise InvalidArgument(f"{where}: return_layernorm_output needs input_layernorm=True")
        self.tp_size = size_of(tp_group, tp_size)
        self.sequence_parallel = self.tp_size > 1 and bool(sequence_parallel)
        if self.tp_size > 1 and not set_parallel_mode:
            raise InvalidArgument(f"{where}: tp_size is {self.tp_size}, so attention has this rank's heads alone, and set_parallel_mode is False, so the "
                             "projections would have all; give set_parallel_mode=True")
        self.num_attention_heads_per_partition = divided(where, "num_attention_heads", self.num_attention_heads, self.tp_size)
        self.num_gqa_groups_per_partition = divided(where, "num_gqa_groups", self.num_gqa_groups, self.tp_size)
        q, kv = self.hidden_size_q, self.hidden_size_kv
        product = dict(fuse_wgrad_accumulation=fuse_wgrad_accumulation, get_rng_state_tracker=get_rng_state_tracker,
                       params_dtype=params_dtype, device=device, init_method=init_method, bias=bias, tp_group=tp_group, tp_size=tp_size,
                       sequence_parallel=sequence_parallel, parallel_mode="column" if set_parallel_mode else None)
        into = dict(ub_overlap_ag=ub_overlap_ag, ub_overlap_rs_dgrad=ub_overlap_rs_dgrad, ub_bulk_dgrad=ub_bulk_dgrad, ub_bulk_wgrad=ub_bulk_wgrad)
        norm = dict(into, eps=layernorm_epsilon, normalization=normalization, zero_centered_gamma=zero_centered_gamma,
                    return_layernorm_output=return_layernorm_output)
        self._add_qk_norms(qk_norm_type, qk_norm_eps, device, params_dtype)
        if attention_type == "self":
            split = None if fuse_qkv_params else {"query": q, "key": kv, "value": kv}
            if self.input_layernorm:
                self.layernorm_qkv = LayerNormLinear(hidden_size, q + 2 * kv, parameters_split=split, name=part_name(name, "layernorm_linear_qkv"), **norm,
                                                     **product)
            else:
                self.qkv = Linear(hidden_size, q + 2 * kv, parameters_split=split, name=part_name(name, "linear_qkv"), **product)
        else:
            if self.input_layernorm:
                self.layernorm_query = LayerNormLinear(hidden_size, q, parameters_split=None if fuse_qkv_params else ("query",),
                                                       name=part_name(name, "layernorm_linear_q"), **norm, **product)
            else:
                self.query_layer = Linear(hidden_size, q, name=part_name(name, "linear_q"), **product)
            self.key_value = Linear(hidden_size, 2 * kv, parameters_split=None if fuse_qkv_params else ("key", "value"),
                                    name=part_name(name, "linear_kv"), **product)
        self.core_attention = DotProductAttention(self.num_attention_heads, self.kv_channels, num_gqa_groups=self.num_gqa_groups,
                                                  attention_dropout=attention_dropout, qkv_format=qkv_format,
                                                  get_rng_state_tracker=get_rng_state_tracker, layer_number=self.layer_number,
                                                  attention_type=attention_type, softmax_type=softmax_type, tp_group=tp_group,
                                                  tp_size=tp_size, sequence_parallel=sequence_parallel)
        product.update(init_method=output_layer_init_method, parallel_mode="row" if set_parallel_mode else None)
        self.proj = Linear(q, hidden_size, return_bias=return_bias, ub_overlap_rs=ub_overlap_rs, ub_overlap_ag=ub_overlap_ag,
                           name=part_name(name, "proj"), **product)

    def _add_qk_norms(self, kind: Optional[str], eps: float, device, dtype) -> None:
        if kind is None:
            self.q_norm = self.k_norm = None
        elif kind == "L2Normalization":
            self.q_norm = self.k_norm = L2Normalization(eps=eps)
        else:
            make = RMSNorm if kind == "RMSNorm" else LayerNorm
            self.q_norm, self.k_norm = (make(self.kv_channels, eps=eps, device=device, params_dtype=dtype) for _ in range(2))

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Sets the group of all parts; see TensorParallel."""
        for part in self.children():
            if hasattr(part, "set_tensor_parallel_group"):
                part.set_tensor_parallel_group(tp_group)

    @property
    def tp_group(self) -> Any:
        return self.proj.tp_group

    @tp_group.setter
    def tp_group(self, tp_group: Any) -> None:
        if "proj" in self.__dict__.get("_modules", ()):  # false while the constructor runs, which overwrites values set earlier
            self.set_tensor_parallel_group(tp_group)

    def fast_setattr(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def set_context_parallel_group(self, cp_group: Any, cp_global_ranks: Optional[List[int]] = None, cp_stream: Optional[Any] = None,
                                   cp_comm_type: str = "p2p",
                                   load_balancing_strategy: CPLoadBalancingStrategy = CPLoadBalancingStrategy.DUAL_CHUNK_SWAP) -> None:
        """Sets the ranks that divide the sequences; see DotProductAttention. Inputs and outputs are those of this rank's tokens, and rotary_pos_emb
        has the angles of whole sequences.
        """
        for part in self.children():
            if hasattr(part, "set_context_parallel_group"):
                part.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type, load_balancing_strategy)
        self.cp_rank, self.cp_size = context_parallel.rank_and_size(cp_group, cp_comm_type)

    def _projected(self, x: torch.Tensor, encoder_output: Optional[torch.Tensor], first) -> Tuple[torch.Tensor, ...]:
        """Returns q, k and v [.., heads, channels], and the normalised input if requested."""
        heads, groups = self.num_attention_heads_per_partition, self.num_gqa_groups_per_partition
        per_group = heads // groups
        normed = None
        if self.attention_type == "self":
            mixed = (self.layernorm_qkv if self.input_layernorm else self.qkv)(x, is_first_microbatch=first)
            if self.return_layernorm_output:
                mixed, normed = mixed
            lead = mixed.shape[:-1]
            if self.qkv_weight_interleaved:
                q, k, v = mixed.view(*lead, groups, per_group + 2, self.kv_channels).split((per_group, 1, 1), -2)
                return q.reshape(*lead, heads, self.kv_channels), k.squeeze(-2), v.squeeze(-2), normed
            q, k, v = mixed.view(*lead, heads + 2 * groups, self.kv_channels).split((heads, groups, groups), -2)
            return q, k, v, normed
        if encoder_output is None:
            raise InvalidArgument("MultiheadAttention: attention_type is 'cross'; give encoder_output")
        mixed = self.key_value(encoder_output, is_first_microbatch=first)
        lead = mixed.shape[:-1]
        if self.qkv_weight_interleaved:
            k, v = mixed.view(*lead, groups, 2 * self.kv_channels).chunk(2, -1)
        else:
            k, v = mixed.view(*lead, 2 * groups, self.kv_channels).chunk(2, -2)
        q = (self.layernorm_query if self.input_layernorm else self.query_layer)(x, is_first_microbatch=first)
        if self.return_layernorm_output:
            q, normed = q
        return q.view(*q.shape[:-1], heads, self.kv_channels), k, v, normed

    def _rotate(self, t: torch.Tensor, angles: torch.Tensor, cu_seqlens: Optional[torch.Tensor]) -> torch.Tensor:
        return apply_rotary_pos_emb(t, angles, self.qkv_format, fused=True, cu_seqlens=cu_seqlens if self.qkv_format == "thd" else None,
                                    interleaved=self.rotary_pos_interleaved, cp_size=self.cp_size, cp_rank=self.cp_rank)

    def _rotate_over_cache(self, t: torch.Tensor, angles: torch.Tensor, params: InferenceParams) -> torch.Tensor:
        thd = self.qkv_format == "thd"
        starts, angles = cached_attention.rotary_places(params, angles, 0 if thd else t.shape[self.qkv_format.index("s")])
        return apply_rotary_pos_emb(t, angles, self.qkv_format, start_positions=starts, fused=True, interleaved=self.rotary_pos_interleaved,
                                    cu_seqlens=params.cu_seqlens_q[:params.batch_size + 1] if thd else None)

    @hides_misspelt
    def forward(self, hidden_states: torch.Tensor, attention_mask: Optional[Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]] = None,
                encoder_output: Optional[torch.Tensor] = None, attn_mask_type: Optional[str] = None,
                window_size: Optional[Tuple[int, int]] = None, bottom_right_diagonal: Optional[bool] = None,
                is_first_microbatch: Optional[bool] = None, checkpoint_core_attention: bool = False,
                inference_params: Optional[Any] = None,
                rotary_pos_emb: Optional[Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]] = None,
                core_attention_bias_type: str = "no_bias", core_attention_bias: Optional[torch.Tensor] = None,
                alibi_slopes: Optional[torch.Tensor] = None, cu_seqlens_q: Optional[torch.Tensor] = None,
                cu_seqlens_kv: Optional[torch.Tensor] = None, cu_seqlens_q_padded: Optional[torch.Tensor] = None,
                cu_seqlens_kv_padded: Optional[torch.Tensor] = None, max_seqlen_q: Optional[int] = None,
                max_seqlen_kv: Optional[int] = None, fast_zero_fill: bool = True, pad_between_seqs: Optional[bool] = None,
                thd_attention_policies: Optional[List[Dict[str, Any]]] = None, thd_attention_policy_dispatch: str = "auto",
                softcap: Optional[float] = None, **misspelt: NoReturn):
        """Maps hidden_states in qkv_format, with heads and channels as one dimension, to the same shape; also returns the bias and the normalised
        input if requested.

        rotary_pos_emb: angles [positions, 1, 1, rotated channels] for queries and keys, or a pair. Other arguments as for DotProductAttention.
        """
        if misspelt:
            raise misspelling(MultiheadAttention.forward, misspelt)
        params = None
        if inference_params is not None:
            params = cached_attention.check("MultiheadAttention", inference_params, self.attention_type == "cross")
        q, k, v, normed = self._projected(hidden_states, encoder_output, is_first_microbatch)
        if self.q_norm is not None and self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary_pos_emb is not None:
            for_q, for_k = rotary_pos_emb if isinstance(rotary_pos_emb, (tuple, list)) else (rotary_pos_emb, rotary_pos_emb)
        if rotary_pos_emb is not None and params is not None:
            q, k = self._rotate_over_cache(q, for_q, params), self._rotate_over_cache(k, for_k, params)
        elif rotary_pos_emb is not None:
            padded = pad_between_seqs is not False and cu_seqlens_q_padded is not None
            q = self._rotate(q, for_q, cu_seqlens_q_padded if padded else cu_seqlens_q)
            k = self._rotate(k, for_k, cu_seqlens_kv_padded if padded else (cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv))
        if self.q_norm is not None and not self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        context = self.core_attention(
            q, k, v, attention_mask=attention_mask, qkv_format=self.qkv_format, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded, cu_seqlens_kv_padded=cu_seqlens_kv_padded, max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv, attn_mask_type=attn_mask_type or self.attn_mask_type,
            window_size=self.window_size if window_size is None else window_size,
            bottom_right_diagonal=self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal,
            softcap=self.softcap if softcap is None else softcap, checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type, core_attention_bias=core_attention_bias, alibi_slopes=alibi_slopes,
            fast_zero_fill=fast_zero_fill, pad_between_seqs=pad_between_seqs, thd_attention_policies=thd_attention_policies,
            thd_attention_policy_dispatch=thd_attention_policy_dispatch, **({} if params is None else {"inference_params": params}))
        out = self.proj(context, is_first_microbatch=is_first_microbatch)
        result = out if self.return_bias else (out,)
        if self.return_layernorm_output:
            result = (*result, normed)
        return result if len(result) > 1 else result[0]
