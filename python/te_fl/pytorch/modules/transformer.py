"""A Transformer layer."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NoReturn, Optional, Sequence, Tuple, Union

import torch

from te_fl.errors import FailedPrecondition, InvalidArgument
from te_fl.pytorch.modules import cached_attention
from te_fl.pytorch.modules.attention import checked_mask
from te_fl.pytorch.modules.fused_layer import FusedLayer
from te_fl.pytorch.modules.layer_in_parts import TransformerCall, run_in_parts
from te_fl.pytorch.modules.layers import NativeLayer
from te_fl.pytorch.modules.mlp import LayerNormMLP
from te_fl.pytorch.modules.multihead_attention import MultiheadAttention
from te_fl.pytorch.modules.norm import LayerNorm, RMSNorm
from te_fl.pytorch.modules.parameters import part_name
from te_fl.pytorch.modules.parallel import size_of
from te_fl.pytorch.runtime import refuse as rules
from te_fl.pytorch.runtime import registry
from te_fl.pytorch.runtime.dtypes import DTYPE_NAMES
from te_fl.pytorch.runtime.refuse import checks_keywords, hides_misspelt, misspelling


class DropPath(torch.nn.Module):
    """Zeroes the residual branch of a whole sample with probability drop_prob, and scales the other samples."""

    @checks_keywords()
    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        rules.number("DropPath", "drop_prob", drop_prob, "a probability, 0 or more and less than 1", lambda v: 0.0 <= v < 1.0)
        self.drop_prob = drop_prob

    def forward(self, hidden_state: torch.Tensor) -> torch.Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return hidden_state
        keep = 1 - self.drop_prob
        shape = (hidden_state.shape[0],) + (1,) * (hidden_state.dim() - 1)
        kept = torch.rand(shape, dtype=hidden_state.dtype, device=hidden_state.device) < keep
        return hidden_state / keep * kept


class TransformerLayer(torch.nn.Module):
    """h = x + dropout(attention(x)), then y = h + dropout(mlp(h)); a decoder layer attends to encoder_output in between.

    layer_type: 'encoder' or 'decoder'. output_layernorm: the normalisation moves from before self-attention to the end of the layer.
    apply_residual_connection_post_layernorm: residual connections add the normalised inputs instead of the inputs. parallel_attention_mlp:
    y = x + dropout(attention(x) + mlp(x)). drop_path_rate: see DropPath. seq_length, micro_batch_size: accepted for compatibility;
    Transformer Engine uses them to warm up a compiler. The ub_ arguments have no effect unless ub_tp_comm_overlap is True. The other
    arguments are those of MultiheadAttention and LayerNormMLP.

    An encoder layer normally runs as one fused te-fl call per direction. It runs part by part with drop_path_rate or fuse_wgrad_accumulation, or if
    a part was replaced or has hooks; a decoder layer always runs part by part. Parameters and FP8 state are the same in both cases. Results differ by
    the order of summation (the fused call adds residuals before it rounds), and dropout draws other numbers.
    """

    @checks_keywords()
    def __init__(self, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, num_gqa_groups: Optional[int] = None,
                 layernorm_epsilon: float = 1e-5, hidden_dropout: float = 0.1, attention_dropout: float = 0.1,
                 init_method: Optional[Callable] = None, output_layer_init_method: Optional[Callable] = None,
                 layer_number: Optional[int] = None, kv_channels: Optional[int] = None, self_attn_mask_type: str = "causal",
                 window_size: Optional[Tuple[int, int]] = None, bottom_right_diagonal: Optional[bool] = None, softcap: float = 0.0,
                 enc_dec_attn_mask_type: str = "no_mask", enc_dec_bottom_right_diagonal: Optional[bool] = None,
                 enc_dec_window_size: Optional[Tuple[int, int]] = None, tp_group: Optional[Any] = None, tp_size: int = 1,
                 params_dtype: Optional[torch.dtype] = None, get_rng_state_tracker: Optional[Callable] = None,
                 fuse_wgrad_accumulation: bool = False, seq_length: Optional[int] = None, micro_batch_size: Optional[int] = None,
                 sequence_parallel: bool = False, apply_residual_connection_post_layernorm: bool = False, output_layernorm: bool = False,
                 parallel_attention_mlp: bool = False, layer_type: str = "encoder", drop_path_rate: float = 0.0,
                 set_parallel_mode: bool = False, fuse_qkv_params: bool = False, rotary_pos_interleaved: bool = False,
                 zero_centered_gamma: bool = False, qkv_weight_interleaved: bool = True, ub_tp_comm_overlap: bool = False,
                 ub_overlap_ag: bool = True, ub_overlap_rs: bool = True, ub_overlap_rs_dgrad: bool = False, ub_bulk_dgrad: bool = True,
                 ub_bulk_wgrad: bool = True, bias: bool = True, activation: str = "gelu", activation_params: Optional[dict] = None,
                 normalization: str = "LayerNorm", device: Union[torch.device, str, None] = None, attn_input_format: str = "sbhd",
                 name: Optional[str] = None, qk_norm_type: Optional[str] = None, qk_norm_eps: float = 1e-6,
                 qk_norm_before_rope: bool = False, softmax_type: str = "vanilla") -> None:
        super().__init__()
        where = "TransformerLayer"
        rules.check(where, locals())
        checked_mask(where, self_attn_mask_type, window_size, softcap)
        checked_mask(where, enc_dec_attn_mask_type, enc_dec_window_size)
        if parallel_attention_mlp:
            for other, value in (("layer_type='decoder'", layer_type == "decoder"), ("output_layernorm", output_layernorm),
                                 ("apply_residual_connection_post_layernorm", apply_residual_connection_post_layernorm)):
                if value:
                    raise InvalidArgument(f"{where}: parallel_attention_mlp does not go with {other}")
        if fuse_wgrad_accumulation and not fuse_qkv_params:
            raise InvalidArgument(f"{where}: fuse_wgrad_accumulation needs fuse_qkv_params=True")
        self.self_attn_mask_type, self.window_size, self.bottom_right_diagonal = self_attn_mask_type, window_size, bottom_right_diagonal
        self.enc_dec_attn_mask_type, self.enc_dec_window_size = enc_dec_attn_mask_type, enc_dec_window_size
        self.enc_dec_bottom_right_diagonal, self.softcap = enc_dec_bottom_right_diagonal, softcap
        self.layer_number, self.layer_type, self.name = layer_number, layer_type, name
        self.apply_residual_connection_post_layernorm = bool(apply_residual_connection_post_layernorm)
        self.output_layernorm, self.parallel_attention_mlp = bool(output_layernorm), bool(parallel_attention_mlp)
        self.attn_input_format, self.hidden_dropout, self.softmax_type = attn_input_format, float(hidden_dropout), softmax_type
        self.get_rng_state_tracker, self.kv_channels = get_rng_state_tracker, kv_channels or hidden_size // num_attention_heads
        post = self.apply_residual_connection_post_layernorm
        self.tp_size = size_of(tp_group, tp_size)
        self.sequence_parallel, self.seq_length = self.tp_size > 1 and bool(sequence_parallel), seq_length
        overlap = dict(ub_overlap_ag=ub_overlap_ag, ub_overlap_rs=ub_overlap_rs, ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
                       ub_bulk_dgrad=ub_bulk_dgrad, ub_bulk_wgrad=ub_bulk_wgrad) if ub_tp_comm_overlap else {}
        common = dict(overlap, tp_group=tp_group, tp_size=self.tp_size, sequence_parallel=self.sequence_parallel,
                      fuse_wgrad_accumulation=fuse_wgrad_accumulation, get_rng_state_tracker=get_rng_state_tracker,
                      params_dtype=params_dtype, return_layernorm_output=post, set_parallel_mode=set_parallel_mode,
                      zero_centered_gamma=zero_centered_gamma, init_method=init_method,
                      output_layer_init_method=output_layer_init_method, bias=bias, normalization=normalization, device=device)
        attention = dict(common, kv_channels=kv_channels, attention_dropout=attention_dropout, layernorm_epsilon=layernorm_epsilon,
                         layer_number=layer_number, num_gqa_groups=num_gqa_groups, fuse_qkv_params=fuse_qkv_params,
                         qkv_weight_interleaved=qkv_weight_interleaved, rotary_pos_interleaved=rotary_pos_interleaved,
                         qkv_format=attn_input_format, softmax_type=softmax_type, qk_norm_type=qk_norm_type, qk_norm_eps=qk_norm_eps,
                         qk_norm_before_rope=qk_norm_before_rope)
        # With the normalisation at the end, there is no normalised input that could be self-attention's residual.
        own = dict(attention, return_layernorm_output=post and not output_layernorm)
        self.self_attention = MultiheadAttention(hidden_size, num_attention_heads, input_layernorm=not output_layernorm,
                                                 attention_type="self", name=part_name(name, "self_attention"), **own)
        if layer_type == "decoder":
            self.inter_attention = MultiheadAttention(hidden_size, num_attention_heads, input_layernorm=True, attention_type="cross",
                                                      attn_mask_type=enc_dec_attn_mask_type, name=part_name(name, "inter_attention"), **attention)
        self.layernorm_mlp = LayerNormMLP(hidden_size, ffn_hidden_size, eps=layernorm_epsilon, activation=activation,
                                          activation_params=activation_params, name=part_name(name, "layernorm_mlp"), **common)
        self.drop_path = DropPath(drop_path_rate) if drop_path_rate > 0.0 else None
        if self.output_layernorm:
            norm = LayerNorm if normalization == "LayerNorm" else RMSNorm
            self.layernorm = norm(hidden_size, eps=layernorm_epsilon, params_dtype=params_dtype, zero_centered_gamma=zero_centered_gamma,
                                  device=device, sequence_parallel=self.sequence_parallel)
        usual = layer_type == "encoder" and drop_path_rate == 0.0 and not fuse_wgrad_accumulation
        self._fused = FusedLayer(self) if usual else None  # runs the calls that it supports; run_in_parts() runs the others
        self._recipe, self._in_fp8 = None, False  # see quantization.notice()
        self._number = registry.enter(self)

    def __getstate__(self) -> dict:
        state = {**self.__dict__, "_fused": self._fused is not None}
        del state["_number"]
        return state

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._fused = FusedLayer(self) if state["_fused"] else None
        self._number = registry.enter(self)

    def _replicate_for_data_parallel(self) -> "TransformerLayer":
        """torch.nn.DataParallel's replica, which calls its own parts."""
        replica = super()._replicate_for_data_parallel()
        replica.__dict__.update(_fused=None, _number=registry.enter(replica))
        return replica

    # Called by layers on their module (modules/layers.py), and by graphs, which find the module by its number (compile/compiled.py).

    def _in_graph(self, device: torch.device, kind: str, key: Any) -> Tuple[NativeLayer, List[int]]:
        if not self._fused.usable():
            raise FailedPrecondition("TransformerLayer: one of its parts was replaced or given a hook after torch.compile had "
                                     "compiled it, which PyTorch does not notice; call torch._dynamo.reset() to have it compiled anew")
        layer = self._fused.layer(self, device, key)
        return layer, self._fused.order()

    @property
    def _recipe_parts(self) -> List[torch.nn.Module]:
        return [part for _, part in self._fused._parts]

    def _check_devices(self, device: torch.device, others: Sequence[torch.Tensor] = ()) -> None:
        self._fused.check_devices(device)

    def fast_setattr(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Sets the group of all parts; see TensorParallel."""
        for part in self.children():
            if hasattr(part, "set_tensor_parallel_group"):
                part.set_tensor_parallel_group(tp_group)

    def _check_rows(self, hidden_states: torch.Tensor) -> None:
        """Refuses an input that is not sharded along the sequence, if seq_length is known."""
        if self.seq_length is not None and hidden_states.shape[0] != self.seq_length // self.tp_size:
            raise InvalidArgument(f"TransformerLayer: hidden_states has {hidden_states.shape[0]} rows; with sequence_parallel each of the {self.tp_size} ranks "
                             f"has {self.seq_length // self.tp_size} of seq_length = {self.seq_length}")

    def set_context_parallel_group(self, cp_group: Any, cp_global_ranks: Optional[List[int]] = None, cp_stream: Optional[Any] = None,
                                   cp_comm_type: str = "p2p") -> None:
        """Sets the ranks that divide the sequences in all parts; see MultiheadAttention."""
        for part in self.children():
            if hasattr(part, "set_context_parallel_group"):
                part.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def reset_fp8_meta_tensors(self) -> None:
        """Resets all scales to 1 and clears the amax histories, in all parts."""
        for child in self.modules():
            if child is not self and hasattr(child, "reset_fp8_meta_tensors"):
                child.reset_fp8_meta_tensors()

    @hides_misspelt
    def forward(self, hidden_states: torch.Tensor, attention_mask: Optional[torch.Tensor] = None, self_attn_mask_type: Optional[str] = None,
                window_size: Optional[Tuple[int, int]] = None, bottom_right_diagonal: Optional[bool] = None,
                encoder_output: Optional[torch.Tensor] = None,
                enc_dec_attn_mask: Optional[Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]] = None,
                enc_dec_attn_mask_type: Optional[str] = None, enc_dec_window_size: Optional[Tuple[int, int]] = None,
                enc_dec_bottom_right_diagonal: Optional[bool] = None, is_first_microbatch: Optional[bool] = None,
                checkpoint_core_attention: bool = False, inference_params: Optional[Any] = None,
                rotary_pos_emb: Optional[Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]] = None,
                core_attention_bias_type: str = "no_bias", core_attention_bias: Optional[torch.Tensor] = None,
                alibi_slopes: Optional[torch.Tensor] = None, cu_seqlens_q: Optional[torch.Tensor] = None,
                cu_seqlens_kv: Optional[torch.Tensor] = None, cu_seqlens_q_padded: Optional[torch.Tensor] = None,
                cu_seqlens_kv_padded: Optional[torch.Tensor] = None, max_seqlen_q: Optional[int] = None,
                max_seqlen_kv: Optional[int] = None, fast_zero_fill: bool = True, pad_between_seqs: Optional[bool] = None,
                thd_attention_policies: Optional[List[Dict[str, Any]]] = None, thd_attention_policy_dispatch: str = "auto",
                softcap: Optional[float] = None, **misspelt: NoReturn) -> torch.Tensor:
        """Maps hidden_states in attn_input_format, with heads and channels as one dimension, to the same shape. Arguments as for MultiheadAttention.
        """
        if misspelt:
            raise misspelling(TransformerLayer.forward, misspelt)
        if inference_params is not None:
            cached_attention.check("TransformerLayer", inference_params, self.layer_type == "decoder")
        if self.layer_type == "encoder" and encoder_output is not None:
            raise InvalidArgument("TransformerLayer: encoder_output is for layer_type='decoder'")
        if pad_between_seqs is False:  # sequences are contiguous, so cumulative lengths with padding are ignored
            cu_seqlens_q_padded = cu_seqlens_kv_padded = None
        hidden_states = _checked(hidden_states)
        if self.sequence_parallel:
            self._check_rows(hidden_states)
        call = TransformerCall(
            hidden_states, attention_mask, self_attn_mask_type or self.self_attn_mask_type,
            self.window_size if window_size is None else window_size,
            self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal, encoder_output, enc_dec_attn_mask,
            enc_dec_attn_mask_type or self.enc_dec_attn_mask_type, self.enc_dec_window_size if enc_dec_window_size is None else enc_dec_window_size,
            self.enc_dec_bottom_right_diagonal if enc_dec_bottom_right_diagonal is None else enc_dec_bottom_right_diagonal, is_first_microbatch,
            checkpoint_core_attention, rotary_pos_emb, core_attention_bias_type, core_attention_bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv,
            cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, fast_zero_fill, pad_between_seqs, thd_attention_policies,
            thd_attention_policy_dispatch, self.softcap if softcap is None else softcap, inference_params)
        return self._fused.forward(self, call) if self._fused is not None and self._fused.serves(self, call) else run_in_parts(self, call)


def _checked(hidden_states: Any) -> torch.Tensor:
    """The input in the dtype that the layer computes in. Raises an error for objects that are not tensors, and for meta tensors."""
    if not isinstance(hidden_states, torch.Tensor) or hidden_states.is_meta:
        found = "a tensor on meta" if isinstance(hidden_states, torch.Tensor) else f"a {type(hidden_states).__name__}"
        raise TypeError(f"TransformerLayer: hidden_states is {found}; it must be a torch.Tensor with memory")
    if torch.is_autocast_enabled(hidden_states.device.type):
        hidden_states = hidden_states.to(torch.get_autocast_dtype(hidden_states.device.type))
    if hidden_states.dtype not in DTYPE_NAMES:
        raise rules.refuse("TransformerLayer", "hidden_states", f"a tensor of {hidden_states.dtype}",
                           "give torch.float32, torch.bfloat16 or torch.float16")
    return hidden_states
