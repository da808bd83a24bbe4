"""Scaled dot-product attention."""

from __future__ import annotations

import math
import numbers
import warnings
from typing import Any, Callable, Dict, List, NoReturn, Optional, Tuple, Union

import torch
from torch.utils.weak import WeakIdKeyDictionary

from te_fl.attention_logits import max_logits
from te_fl.common.recipe import attends
from te_fl.pytorch.autograd import torch_checkpoint
from te_fl.pytorch.autograd.checkpoint import checkpoint
from te_fl.pytorch.fp8 import extra_state, quantization
from te_fl.pytorch.distributed import collectives
from te_fl.pytorch.modules import cached_attention
from te_fl.pytorch.modules.base import TransformerEngineBaseModule
from te_fl.pytorch.modules.layers import NativeLayer
from te_fl.pytorch.modules.parallel import divided
from te_fl.pytorch.runtime import random as generator
from te_fl.pytorch.runtime import refuse as rules
from te_fl.pytorch.runtime import traced
from te_fl.pytorch.runtime.device import default_device
from te_fl.pytorch.runtime.refuse import checks_keywords, hides_misspelt, misspelling, only, refuse

MASKS = ("no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right", "arbitrary")
FORMATS = ("sbhd", "bshd", "thd")
# Sequences of a packed layout have lengths of their own, which te-fl's masks say by name.
THD_MASKS = {"no_mask": "padding", "causal": "padding_causal", "causal_bottom_right": "padding_causal_bottom_right"}
_OWN_KERNEL = "te-fl's attention has no such term"


def mask_type(where: str, name: str) -> str:
    """The mask's name. A causal one says by it which diagonal it has, whatever bottom_right_diagonal says, as in Transformer Engine."""
    name = {"causal,padding": "padding_causal", "padding,causal": "padding_causal"}.get(name, name)
    rules.choice(where, "attn_mask_type", name, MASKS)
    return name


def checked_mask(where: str, mask: str, size: Optional[Tuple[int, int]], softcap: Optional[float] = None) -> None:
    """Refuses a module's own mask, window and cap where they are given, as a call would."""
    window(where, size, mask_type(where, mask))
    score_cap(where, softcap)


def score_cap(where: str, softcap: Optional[float], default: float = 0.0) -> float:
    """The bound of the scaled products, x -> softcap tanh(x / softcap); 0: none. None: the default."""
    softcap = float(default if softcap is None else softcap)
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"{where}: softcap is {softcap}; it must be finite and at least 0 (0: scores have no cap)")
    return softcap


def distances(queries: int, keys: int, device: torch.device, lengths: Optional[Tuple[torch.Tensor, torch.Tensor]] = None,
              bottom_right: bool = False) -> torch.Tensor:
    """The distance by which each key is behind the one that its query is level with, [1 or batch, 1, queries, keys]. lengths:
    cumulative ones of queries and of keys, where sequences have lengths of their own. bottom_right: the last query is level with
    the last key, else the first with the first."""
    behind = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
    if not bottom_right:
        return behind[None, None]
    if lengths is None:
        return behind[None, None] - (keys - queries)
    return behind[None, None] - (lengths[1].diff() - lengths[0].diff())[:, None, None, None]


def windowed(size: Tuple[int, int], behind: torch.Tensor) -> torch.Tensor:
    """The keys that are outside the window, bool of the shape of distances()."""
    hidden = torch.zeros_like(behind, dtype=torch.bool)
    if size[0] >= 0:
        hidden = hidden | (behind < -size[0])
    if size[1] >= 0:
        hidden = hidden | (behind > size[1])
    return hidden


def padded(cumulative: torch.Tensor, length: int) -> torch.Tensor:
    """The places of sequences of these cumulative lengths that are padding, bool [batch, length]."""
    return torch.arange(length, device=cumulative.device) >= cumulative.diff()[:, None]


def window(where: str, size: Optional[Tuple[int, int]], mask: str) -> Tuple[int, int]:
    """The numbers of keys before and after its own that a query sees; -1: all. A causal mask has none after, and (-1, 0) with
    another mask is what Transformer Engine takes for no window."""
    if size is not None and (isinstance(size, (str, numbers.Number)) or len(size) != 2):
        raise ValueError(f"{where}: window_size is {size!r}; it is a pair, the numbers of keys before and after a query's own, or None")
    for number in size or ():
        if isinstance(number, (float, str)):
            raise TypeError(f"{where}: window_size is {size!r}; its numbers are integers")
    left, right = (-1, -1) if size is None else (int(size[0]), int(size[1]))
    if left < -1 or right < -1:
        raise ValueError(f"{where}: window_size is {size}; its numbers are -1 (no bound) or more")
    if "causal" in mask:
        if right not in (-1, 0):
            if left < 0:
                raise ValueError(f"{where}: window_size is {size} with mask {mask!r}, which shows no keys after a query's own; give 0 or -1 there")
            _warn(f"{where}: window_size is {size} with mask {mask!r}, which shows no keys after a query's own; ({left}, 0) is taken")
        return left, -1
    if (left, right) == (-1, 0):
        _warn(f"{where}: window_size is (-1, 0) with mask {mask!r}, which is no window; (-1, -1) is taken. For a causal mask give "
              "attn_mask_type='causal', for keys up to the query's own (n, 0) with n the number of keys")
        return -1, -1
    return left, right


def _warn(text: str) -> None:
    if not torch.compiler.is_compiling():
        warnings.warn(text, stacklevel=4)


_found = WeakIdKeyDictionary()  # masks on CUDA devices -> (the count of writes to it, what was asked) -> whether it was so


def _is_so(mask: torch.Tensor, asked: Any, so: torch.Tensor) -> bool:
    """True if `so`, of one element, which is computed from the mask, is true. asked: names what is asked of the mask.

    Masks are written in ways that PyTorch does not count (`data`, views of NumPy's), so each call looks anew. On a CUDA device that waits for
    the device the first time alone, and capturing a CUDA graph allows none of it: while PyTorch counts no write to a mask that was as asked,
    the device holds against it.
    """
    if not mask.is_cuda or mask.is_inference():  # a tensor made in PyTorch's inference mode does not count writes to it
        return bool(so)
    known = _found.get(mask)
    if known is None or known[0] != (mask._version, asked):
        known = _found[mask] = ((mask._version, asked), bool(so))
    elif known[1]:
        torch._assert_async(so, "an attention mask of te_fl.pytorch was written in a way that PyTorch does not count, as through .data, and is of "
                            "another form now; write it with PyTorch's functions in place, or give a new tensor")
    return known[1]


def cumulative_lengths(where: str, mask: torch.Tensor) -> torch.Tensor:
    """Prefix sums of the sequences' lengths, int32 [batch + 1], of a mask [batch, 1, 1, length] that is true in the padding.

    The padding is at the end: any other mask would attend to the wrong keys, so it is refused.
    """
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1:3] != (1, 1):
        raise ValueError(f"{where}: the padding mask is {mask.dtype} {tuple(mask.shape)}; it must be bool [batch, 1, 1, length]")
    if torch.compiler.is_compiling():
        return traced.graph.cumulative_lengths(mask)
    return sums_of_lengths(where, mask)


def sums_of_lengths(where: str, mask: torch.Tensor) -> torch.Tensor:
    """The result of cumulative_lengths(), outside of a graph."""
    hidden = mask[:, 0, 0, :]
    # No token is seen after one that is hidden.
    if not _is_so(mask, "padding at the end", (hidden[:, 1:] >= hidden[:, :-1]).all()):
        raise ValueError(f"{where}: the padding mask hides tokens that are not at the end of their sequence; give that as "
                         "attn_mask_type='arbitrary' with a mask [batch, 1, queries, keys]")
    sums = torch.zeros(mask.shape[0] + 1, dtype=torch.int32, device=mask.device)
    torch.cumsum((~hidden).sum(1, dtype=torch.int32), 0, dtype=torch.int32, out=sums[1:])
    return sums


def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """The slopes of ALiBi's paper (Press et al., 2022): 2^(-8 i / n) for n heads, n a power of two, else interleaved with those of 2n."""
    n = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / n) for i in range(heads - n)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


class DotProductAttention(TransformerEngineBaseModule):
    """softmax(cap(scale q k^T) + bias, masked) v; cap(x) = softcap tanh(x / softcap), or x where softcap is 0.

    num_attention_heads, num_gqa_groups: heads of q and of k and v. kv_channels: the head size, or a pair, of q and k and of v. qkv_format:
    'sbhd', 'bshd' or 'thd'. attn_mask_type, window_size, bottom_right_diagonal, softcap: also per call. softmax_type: 'vanilla',
    'off-by-one' or 'learnable'. layer_number and attention_type are taken for compatibility: the mask and the extents of a call say all
    that te-fl needs. The ranks of tp_group, or tp_size, divide heads and groups, and inputs have this rank's; with sequence_parallel
    dropout draws outside of get_rng_state_tracker's stream. cp_group has one rank, and the other cp_ arguments no effect.
    """

    _kind = "attention"
    _sites = ("fp8",)  # of FP8 attention: a recipe with fp8_dpa
    _places = extra_state.ATTENTION
    _attends = True
    _remade = frozenset(("softmax_scale",))
    _device: Optional[torch.device] = None  # of the layers

    @checks_keywords()
    def __init__(self, num_attention_heads: int, kv_channels: Union[int, Tuple[int, int]], num_gqa_groups: Optional[int] = None,
                 attention_dropout: float = 0.0, qkv_format: str = "sbhd", attn_mask_type: str = "causal",
                 window_size: Optional[Tuple[int, int]] = None, bottom_right_diagonal: Optional[bool] = None, softcap: float = 0.0,
                 sequence_parallel: bool = False, tp_size: int = 1, get_rng_state_tracker: Optional[Callable] = None,
                 tp_group: Optional[Any] = None, layer_number: Optional[int] = None, attention_type: str = "self",
                 cp_group: Optional[Any] = None, cp_global_ranks: Optional[List[int]] = None, cp_stream: Optional[Any] = None,
                 cp_comm_type: str = "p2p", softmax_scale: Optional[float] = None, softmax_type: str = "vanilla",
                 return_max_logit: Optional[bool] = False, name: Optional[str] = None) -> None:
        super().__init__(name)
        where = "DotProductAttention"
        rules.check(where, locals())
        channels = tuple(kv_channels) if isinstance(kv_channels, (list, tuple)) else (kv_channels, kv_channels)
        if len(channels) != 2:
            raise ValueError(f"{where}: kv_channels is {kv_channels!r}; it is the head size, or a pair: that of q and k, and that of v")
        for size in channels:
            rules.size(where, "kv_channels", size)
        self.kv_channels, self.value_channels = int(channels[0]), int(channels[1])
        self.num_attention_heads = int(num_attention_heads)
        self.num_gqa_groups = int(num_attention_heads if num_gqa_groups is None else num_gqa_groups)
        if self.num_gqa_groups < 1 or self.num_attention_heads % self.num_gqa_groups != 0:
            raise ValueError(f"{where}: {num_attention_heads} attention heads do not divide into {num_gqa_groups} groups")
        self._divide(tp_group, tp_size, False)
        # Inputs have this rank's heads alone.
        self.num_attention_heads_per_partition = divided(where, "num_attention_heads", self.num_attention_heads, self.tp_size)
        self.num_gqa_groups_per_partition = divided(where, "num_gqa_groups", self.num_gqa_groups, self.tp_size)
        self.attention_dropout, self.qkv_format, self.attn_mask_type = float(attention_dropout), qkv_format, mask_type(where, attn_mask_type)
        self.softcap = score_cap(where, softcap)
        left, right = window(where, window_size, self.attn_mask_type)
        self.window_size = left, 0 if "causal" in self.attn_mask_type else right
        self.bottom_right_diagonal = bottom_right_diagonal
        self.attention_type, self.layer_number = attention_type, layer_number
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = self.kv_channels, self.value_channels
        self.return_max_logit = bool(return_max_logit)
        self.softmax_scale, self.softmax_type = softmax_scale, softmax_type
        # With sequence_parallel the program forks the tracker around the layer, whose ranks draw different numbers throughout.
        self.get_rng_state_tracker = None if sequence_parallel else get_rng_state_tracker
        if softmax_type == "learnable":
            self._add_parameter("softmax_offset", torch.empty(
                self.num_attention_heads_per_partition, dtype=torch.float32, device=default_device()), torch.nn.init.zeros_)
            self.reset_parameters()
        else:
            self.softmax_offset = None

    def set_context_parallel_group(self, cp_group: Any, cp_global_ranks: Optional[List[int]] = None, cp_stream: Optional[Any] = None,
                                   cp_comm_type: str = "p2p", **load_balancing: Any) -> None:
        """Takes a group of one rank, for which the other arguments say nothing, and refuses a larger one."""
        rules.group_of_one("DotProductAttention", "cp_group", cp_group)

    def _layer_for(self, device: torch.device, layout: str, mask: str, size: Tuple[int, int], softcap: float):
        # A forward without gradients drops nothing by itself, so only one in eval() whose backward follows needs a layer of its own.
        drops = self.training or not (torch.is_grad_enabled() or torch_checkpoint.repeated())
        if torch.compiler.is_compiling():
            return self._layer(device, key=(layout, mask, softcap.hex(), *size, drops))
        return self._dropping(device, layout, mask, size, softcap, drops)

    def _dropping(self, device: torch.device, layout: str, mask: str, size: Tuple[int, int], softcap: float, drops: bool):
        if device != self._device:  # without parameters no .to() says that it changes
            if self._device is not None:
                self._forget(self._fp8_state())
            self._device = device
        return self._layer(device, key=(device, layout, mask, size, softcap, self.attention_dropout if drops else 0.0))

    def _in_graph(self, device: torch.device, kind: str, key: tuple) -> Tuple[NativeLayer, None]:
        layout, mask, softcap, left, right, drops = key
        return self._dropping(device, layout, mask, (left, right), float.fromhex(softcap), bool(drops)), None

    def _options_of(self, kind: str, key: Any) -> dict:
        _, layout, mask, size, softcap, dropout = key
        chosen = {"num_attention_heads": self.num_attention_heads_per_partition, "head_dim": self.kv_channels, "value_head_dim": self.value_channels,
                  "num_gqa_groups": self.num_gqa_groups_per_partition, "layout": layout, "mask_type": mask, "window_left": size[0], "window_right": size[1],
                  "softmax_type": self.softmax_type, "attention_dropout": dropout, "softcap": softcap}
        return chosen if self.softmax_scale is None else {**chosen, "softmax_scale": float(self.softmax_scale)}

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs) -> None:
        # Checkpoints of Transformer Engine before 1.6 have no state of attention, those of 1.6 and 1.7 have it under another name.
        own, older = prefix + "_extra_state", prefix + "fused_attention._extra_state"
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if own in missing_keys:
            missing_keys.remove(own)
        if older in state_dict:
            if older in unexpected_keys:
                unexpected_keys.remove(older)
            if own not in state_dict:
                self.set_extra_state(state_dict[older])

    def set_extra_state(self, state: Any) -> None:
        # Transformer Engine saves places for attention under any FP8 recipe, and others under several recipes at a time.
        read = extra_state.read(state, "DotProductAttention")
        if not attends(read.get("recipe")):
            return
        if getattr(read.get("scale_fwd"), "shape", None) != (self._places.kept[0],):
            warnings.warn("DotProductAttention: the scales of FP8 attention in the checkpoint are those of a recipe of several parts; te-fl's "
                          "start anew")
            return
        super().set_extra_state(state)

    def _own_window(self) -> Optional[Tuple[int, int]]:
        """The module's window; None without one, whatever the mask of a call is."""
        return None if self.window_size in ((-1, 0), (-1, -1)) else self.window_size

    @hides_misspelt
    def forward(self, query_layer: Optional[torch.Tensor] = None, key_layer: Optional[torch.Tensor] = None,
                value_layer: Optional[torch.Tensor] = None,
                attention_mask: Optional[Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]] = None, qkv_format: Optional[str] = None,
                cu_seqlens_q: Optional[torch.Tensor] = None, cu_seqlens_kv: Optional[torch.Tensor] = None,
                cu_seqlens_q_padded: Optional[torch.Tensor] = None, cu_seqlens_kv_padded: Optional[torch.Tensor] = None,
                max_seqlen_q: Optional[int] = None, max_seqlen_kv: Optional[int] = None, attn_mask_type: Optional[str] = None,
                window_size: Optional[Tuple[int, int]] = None, bottom_right_diagonal: Optional[bool] = None,
                softcap: Optional[float] = None, checkpoint_core_attention: bool = False, core_attention_bias_type: str = "no_bias",
                core_attention_bias: Optional[torch.Tensor] = None, alibi_slopes: Optional[torch.Tensor] = None,
                fast_zero_fill: bool = True, inference_params: Optional[Any] = None, pad_between_seqs: Optional[bool] = None,
                fp8_output: Optional[bool] = False, bf16_backward: Optional[bool] = False, num_splits: Optional[int] = 1,
                score_mod: Optional[Callable] = None, score_mod_bprop: Optional[Callable] = None,
                score_mod_tensors: Optional[Dict[str, torch.Tensor]] = None,
                score_mod_bprop_tensors: Optional[Dict[str, torch.Tensor]] = None, qkv_layer: Optional[torch.Tensor] = None,
                kv_layer: Optional[torch.Tensor] = None, qkv_interleave_dim: int = -3,
                thd_attention_policies: Optional[List[Dict[str, Any]]] = None, thd_attention_policy_dispatch: str = "auto", **misspelt: NoReturn):
        """q [.., heads, channels], k and v [.., groups, channels] in qkv_format -> [.., heads * channels], those of v.

        attention_mask: true where masked out; with the padding masks bool [batch, 1, 1, length], for cross-attention a pair; with
        'arbitrary' [1 or batch, 1 or heads, queries, keys], which broadcasts with the other masks too. cu_seqlens: int32 [batch + 1].
        window_size: keys before and after the one that a query is level with. bottom_right_diagonal: with masks that are not causal, whether
        the last query is level with the last key (None and True) or the first with the first. core_attention_bias_type: 'no_bias',
        'pre_scale_bias' or 'post_scale_bias' with core_attention_bias, or 'alibi', with alibi_slopes [heads] or [batch, heads] of one's own.
        fast_zero_fill: taken for compatibility, te-fl writes the rows of padding anyway. max_seqlen: at least the longest sequence, for 'thd'.
        inference_params: an InferenceParams, whose cache of this layer_number gets the keys and values and gives those of all tokens; lengths and
        masks are its own then, and nothing has a gradient.
        """
        if misspelt:
            raise misspelling(DotProductAttention.forward, misspelt)
        where = "DotProductAttention"
        if pad_between_seqs is False:  # the tokens of all sequences follow one another, whatever lengths with padding are given
            cu_seqlens_q_padded = cu_seqlens_kv_padded = None
        elif pad_between_seqs and cu_seqlens_q_padded is None:
            raise ValueError(f"{where}: pad_between_seqs is True; give cu_seqlens_q_padded, where each sequence starts")
        cap = score_cap(where, softcap, self.softcap)
        only(where, ("fp8_output", bool(fp8_output), False, "outputs are of the inputs' dtype"),
             ("bf16_backward", bool(bf16_backward), False, "the backward is of the forward's dtype"),
             ("num_splits", num_splits, 1, _OWN_KERNEL), ("score_mod", score_mod, None, _OWN_KERNEL),
             ("score_mod_bprop", score_mod_bprop, None, _OWN_KERNEL), ("score_mod_tensors", score_mod_tensors, None, _OWN_KERNEL),
             ("score_mod_bprop_tensors", score_mod_bprop_tensors, None, _OWN_KERNEL),
             ("thd_attention_policies", thd_attention_policies, None, "give one mask for all sequences"))
        if qkv_layer is not None or kv_layer is not None:
            query_layer, key_layer, value_layer = _unpack(where, query_layer, key_layer, value_layer, qkv_layer, kv_layer,
                                                          qkv_interleave_dim)
        layout = qkv_format or self.qkv_format
        rules.choice(where, "qkv_format", layout, FORMATS)
        bottom_right = self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
        lengths = (cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv)
        mask = mask_type(where, attn_mask_type or self.attn_mask_type)
        own = (self.softmax_offset.float(),) if self.softmax_type == "learnable" else ()
        if inference_params is not None:
            params = cached_attention.check(where, inference_params)
            sources = (query_layer, key_layer, value_layer, core_attention_bias, *own)
            cached = cached_attention.over_cache(where, self, params, query_layer, key_layer, value_layer, layout, mask, attention_mask, lengths)
            (query_layer, key_layer, value_layer), layout, mask, lengths = cached[:3], *cached[3:]
        mask, size, inputs, extras = self._prepared(
            where, layout, mask, self._own_window() if window_size is None else window_size, bottom_right, cap,
            query_layer, key_layer, attention_mask, lengths, core_attention_bias_type, core_attention_bias, alibi_slopes)

        def compute(q, k, v, *biases):
            layer = self._layer_for(q.device, layout, mask, size, cap)
            dropped = generator.draw_for(self, q.device) if self.training and self.attention_dropout > 0 else None
            return self._run(layer, (q, k, v), own, attention=inputs, random=dropped, extras=biases)

        if inference_params is not None:
            with torch.no_grad():
                out = compute(query_layer, key_layer, value_layer, *extras)
            out = cached.output(out, qkv_format or self.qkv_format, *sources)
        elif checkpoint_core_attention and torch.is_grad_enabled():
            out = checkpoint(compute, query_layer, key_layer, value_layer, *extras, use_reentrant=False)
        else:
            out = compute(query_layer, key_layer, value_layer, *extras)
        out = out.flatten(-2)
        return (out, self._max_logit(query_layer, key_layer, layout, mask, size, cap, inputs)) if self.return_max_logit else out

    def _max_logit(self, q: torch.Tensor, k: torch.Tensor, layout: str, mask: str, size: Tuple[int, int], cap: float, inputs: dict) -> torch.Tensor:
        """The largest score of each head, [heads] of q's dtype: of the scaled, capped, biased and masked products, without a sink. It has no gradient."""
        if quantization.enabled() and attends(quantization.active_recipe()):
            raise refuse("DotProductAttention", "return_max_logit", True, "in FP8 attention nothing keeps the scores; leave fp8_dpa and fp8_mha out of the "
                         "recipe, or return_max_logit")
        scale = 1 / math.sqrt(self.kv_channels) if self.softmax_scale is None else float(self.softmax_scale)
        masks = {name: value for name, value in inputs.items() if value is not None and name != "bias"}
        scores = max_logits(q.detach(), k.detach(), inputs.get("bias"), layout=layout, mask_type=mask, scale=scale, window_left=size[0],
                            window_right=size[1], softcap=cap, **masks)
        return scores.amax(dim=(0, 2, 3)).to(q.dtype)

    def _prepared(self, where, layout, mask, size, bottom_right, cap, q, k, masks_of_call, lengths, bias_kind, bias,
                  slopes) -> Tuple[str, Tuple[int, int], dict, Tuple[torch.Tensor, ...]]:
        """The layer's mask and window that follow from a forward's arguments, its inputs, and those of them that may need a
        gradient.

        q and k: for their extents and their device. lengths: the cumulative ones, those with padding, and the longest, each of q and of k.
        """
        mask = mask_type(where, mask)
        size = window(where, size, mask)
        causal = "causal" in mask
        bottom_right = mask.endswith("bottom_right") if causal else bottom_right is not False
        inputs = self._masked(where, layout, mask, q, k, masks_of_call, *lengths)
        sums = (inputs["cu_seqlens_q"], inputs["cu_seqlens_kv"]) if "cu_seqlens_q" in inputs else None
        dense = layout != "thd"
        extents = (self._length(q, layout), self._length(k, layout)) if dense else (0, 0)
        level = sums[0] is sums[1] if sums else extents[0] == extents[1]  # each sequence has as many queries as keys

        def behind(from_bottom_right: bool) -> torch.Tensor:
            return distances(*extents, q.device, sums, from_bottom_right)

        mask_or_none = masks_of_call if mask in ("no_mask", "causal", "causal_bottom_right") and masks_of_call is not None else None
        if mask_or_none is not None and not dense:
            raise ValueError(f"{where}: attention_mask is given with qkv_format='thd', whose cu_seqlens say what a query sees; leave it out")
        own = mask
        if mask_or_none is not None and _hides_more(where, mask_or_none, behind(bottom_right) if causal else None, (mask, *extents)):
            hidden = windowed((size[0], 0) if causal else size, behind(bottom_right)) | mask_or_none.bool()
            inputs, mask, size = {"attn_mask": hidden}, "arbitrary", (-1, -1)
        elif size != (-1, -1) and not causal and not bottom_right and not level:
            # The window of such a mask counts from the bottom right.
            if not dense:
                raise refuse(where, "bottom_right_diagonal", False, f"with qkv_format='thd' the window of mask {mask!r} ends at the last query and "
                             "key of a sequence; give bottom_right_diagonal=None, or the same cu_seqlens for queries and keys")
            hidden = windowed(size, behind(False))
            if sums:
                hidden = hidden | padded(sums[0], extents[0])[:, None, :, None] | padded(sums[1], extents[1])[:, None, None]
            if "attn_mask" in inputs:
                hidden = hidden | inputs["attn_mask"].bool()
            inputs, mask, size = {"attn_mask": hidden}, "arbitrary", (-1, -1)
        extras = self._biased(where, bias_kind, bias, slopes, cap, inputs)
        if bias_kind == "alibi":
            chosen = self._own_slopes(q.device) if slopes is None else slopes
            # The layer's addend is slope * distance from the bottom right, not made absolute. Under a causal mask no key is ahead, and another
            # diagonal adds one number to each row, which a sink alone can tell.
            if causal and (bottom_right or level or self.softmax_type == "vanilla"):
                inputs["alibi_slopes"] = chosen
            elif not dense:
                raise refuse(where, "core_attention_bias_type", bias_kind, f"with qkv_format='thd', mask {own!r} and softmax_type "
                             f"{self.softmax_type!r} te-fl has no such addend; take a padded format, or a causal mask and the vanilla softmax")
            else:
                inputs["bias"] = -behind(bottom_right).abs() * chosen.float().view(-1, self.num_attention_heads_per_partition, 1, 1)
        return (THD_MASKS.get(mask, mask) if not dense else mask), size, inputs, extras

    def _own_slopes(self, device: torch.device) -> torch.Tensor:
        """ALiBi's slopes of this rank's heads, which are those that follow the lower ranks'."""
        slopes = _slopes(self.num_attention_heads, device)
        if self.tp_size == 1:
            return slopes
        begin = collectives.rank_in(self._group()) * self.num_attention_heads_per_partition
        return slopes[begin:begin + self.num_attention_heads_per_partition].contiguous()

    def _masked(self, where, layout, mask, q, k, masks_of_call, cu_q, cu_kv, cu_q_padded, cu_kv_padded, max_q, max_kv) -> dict:
        """The layer's inputs that say which keys a query sees."""
        inputs: dict = {}
        if mask == "arbitrary":
            if not isinstance(masks_of_call, torch.Tensor):
                raise ValueError(f"{where}: attn_mask_type is 'arbitrary'; give attention_mask, one tensor")
            inputs["attn_mask"] = masks_of_call.contiguous()
            return inputs
        if layout == "thd":
            if cu_q is None:
                raise ValueError(f"{where}: qkv_format is 'thd'; give cu_seqlens_q, and cu_seqlens_kv where they differ")
            inputs.update(cu_seqlens_q=cu_q, cu_seqlens_kv=cu_q if cu_kv is None else cu_kv, cu_seqlens_q_padded=cu_q_padded,
                          cu_seqlens_kv_padded=cu_q_padded if cu_kv_padded is None else cu_kv_padded, max_seqlen_q=max_q,
                          max_seqlen_kv=max_kv if max_kv is not None else max_q)
        elif "padding" in mask:
            if cu_q is None or cu_kv is None:
                if masks_of_call is None:
                    raise ValueError(f"{where}: attn_mask_type is {mask!r}; give attention_mask, or cu_seqlens_q and cu_seqlens_kv")
                masks = (masks_of_call, masks_of_call) if isinstance(masks_of_call, torch.Tensor) else tuple(masks_of_call)
                if isinstance(masks_of_call, torch.Tensor) and self._length(q, layout) != self._length(k, layout):
                    raise ValueError(f"{where}: queries and keys differ in length; give attention_mask as a pair, of queries and of keys")
                of_q, of_kv = masks
                for of, t, whose in ((of_q, q, "queries"), (of_kv, k, "keys")):
                    if of.dim() == 4 and of.shape[3] != self._length(t, layout):
                        raise ValueError(f"{where}: the padding mask is {tuple(of.shape)}; it must be bool [batch, 1, 1, length], and the {whose} have "
                                         f"length {self._length(t, layout)}")
                cu_q = cumulative_lengths(where, of_q)
                cu_kv = cu_q if of_kv is of_q else cumulative_lengths(where, of_kv)
            inputs.update(cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
        return inputs

    @staticmethod
    def _length(t: torch.Tensor, layout: str) -> int:
        return t.shape[0 if layout == "sbhd" else 1]

    def _biased(self, where, kind, bias, slopes, cap, inputs) -> Tuple[torch.Tensor, ...]:
        """Adds a given addend of the scores to the inputs; what of it may need a gradient."""
        rules.choice(where, "core_attention_bias_type", kind, ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi"))
        if slopes is not None and kind != "alibi":
            raise ValueError(f"{where}: alibi_slopes are given with core_attention_bias_type {kind!r}; give 'alibi', or leave them out")
        if kind not in ("pre_scale_bias", "post_scale_bias"):
            if bias is not None:
                raise ValueError(f"{where}: core_attention_bias is given with core_attention_bias_type {kind!r}; give 'post_scale_bias', or leave "
                                 "it out")
            return ()
        if bias is None:
            raise ValueError(f"{where}: core_attention_bias_type is {kind!r}; give core_attention_bias")
        if kind == "pre_scale_bias":
            if cap:
                raise refuse(where, "core_attention_bias_type", kind, "with softcap te-fl adds a bias after the cap; give 'post_scale_bias'")
            bias = bias * (1 / math.sqrt(self.kv_channels) if self.softmax_scale is None else self.softmax_scale)
        inputs["bias"] = bias
        return (bias,)


def _hides_more(where: str, mask: Any, behind: Optional[torch.Tensor], rule: tuple) -> bool:
    """True if a mask hides more keys than those ahead of their query; behind: distances(), or None where no key is hidden
    otherwise. `rule` names what it is held against."""
    if not isinstance(mask, torch.Tensor) or mask.dtype not in (torch.bool, torch.uint8):
        raise ValueError(f"{where}: attention_mask is {mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__}; it is one tensor of "
                         "bool or uint8, true where masked out")
    if torch.compiler.is_compiling():
        return True
    return not _is_so(mask, rule, ~(mask.bool() if behind is None else mask.bool() & (behind <= 0)).any())


_known_slopes: Dict[Tuple[int, torch.device], torch.Tensor] = {}


def _slopes(heads: int, device: torch.device) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return alibi_slopes(heads, device)
    key = (heads, device)
    if key not in _known_slopes:
        _known_slopes[key] = alibi_slopes(heads, device)
    return _known_slopes[key]


def _unpack(where, q, k, v, qkv, kv, dim):
    """q, k and v of tensors that hold them along a dimension of extent 3, or k and v of extent 2."""
    if qkv is not None:
        if q is not None or k is not None or v is not None or kv is not None:
            raise ValueError(f"{where}: give qkv_layer alone")
        return qkv.unbind(dim)
    if k is not None or v is not None or q is None:
        raise ValueError(f"{where}: give query_layer with kv_layer, and neither key_layer nor value_layer")
    return (q, *kv.unbind(dim))
