"""Scaled dot-product attention."""

from __future__ import annotations

import math
import numbers
import warnings
from typing import Any, Callable, Dict, List, NoReturn, Optional, Tuple, Union

import torch
from torch.utils.weak import WeakIdKeyDictionary

from te_fl import _native
from te_fl.attention_logits import max_logits
from te_fl.common.recipe import attends
from te_fl.errors import InvalidArgument
from te_fl.pytorch.autograd import torch_checkpoint
from te_fl.pytorch.autograd.checkpoint import checkpoint
from te_fl.pytorch.fp8 import extra_state, quantization
from te_fl.pytorch.distributed import collectives
from te_fl.pytorch.modules import cached_attention, context_parallel
from te_fl.pytorch.modules.base import TransformerEngineBaseModule
from te_fl.pytorch.modules.layers import NativeLayer
from te_fl.pytorch.modules.parallel import divided
from te_fl.pytorch.runtime import random as generator
from te_fl.pytorch.runtime import refuse as rules
from te_fl.pytorch.runtime import traced
from te_fl.pytorch.runtime.constants import CPLoadBalancingStrategy
from te_fl.pytorch.runtime.device import default_device
from te_fl.pytorch.runtime.dtypes import LIKE
from te_fl.pytorch.runtime.refuse import checks_keywords, hides_misspelt, misspelling, only, refuse

MASKS = ("no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right", "arbitrary")
FORMATS = ("sbhd", "bshd", "thd")
# In the packed layout (thd) each sequence has its own length; te-fl's names for masks with such lengths begin with "padding".
THD_MASKS = {"no_mask": "padding", "causal": "padding_causal", "causal_bottom_right": "padding_causal_bottom_right"}
_OWN_KERNEL = "te-fl's attention has no such term"


def mask_type(where: str, name: str) -> str:
    """Validates and normalises the name of a mask. As in Transformer Engine, the name of a causal mask determines its diagonal;
    bottom_right_diagonal has no effect on causal masks.
    """
    name = {"causal,padding": "padding_causal", "padding,causal": "padding_causal"}.get(name, name)
    rules.choice(where, "attn_mask_type", name, MASKS)
    return name


def checked_mask(where: str, mask: str, size: Optional[Tuple[int, int]], softcap: Optional[float] = None) -> None:
    """Validates the mask, window and softcap given to a module's constructor, as for a call."""
    window(where, size, mask_type(where, mask))
    score_cap(where, softcap)


def score_cap(where: str, softcap: Optional[float], default: float = 0.0) -> float:
    """The softcap, which maps scaled scores x to softcap tanh(x / softcap); 0: no cap. None: the default."""
    softcap = float(default if softcap is None else softcap)
    if not 0.0 <= softcap < math.inf:
        raise InvalidArgument(f"{where}: softcap is {softcap}; it must be finite and at least 0 (0: scores have no cap)")
    return softcap


def distances(queries: int, keys: int, device: torch.device, lengths: Optional[Tuple[torch.Tensor, torch.Tensor]] = None,
              bottom_right: bool = False) -> torch.Tensor:
    """For each query and key, the key's distance behind the query's aligned key, [1 or batch, 1, queries, keys]. lengths: cumulative lengths of
    queries and of keys, if sequences have their own lengths. bottom_right: the last query is aligned with the last key; otherwise, the first with the
    first.
    """
    behind = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
    if not bottom_right:
        return behind[None, None]
    if lengths is None:
        return behind[None, None] - (keys - queries)
    return behind[None, None] - (lengths[1].diff() - lengths[0].diff())[:, None, None, None]


def windowed(size: Tuple[int, int], behind: torch.Tensor) -> torch.Tensor:
    """A mask of the keys outside of the window, bool with the shape of distances()."""
    hidden = torch.zeros_like(behind, dtype=torch.bool)
    if size[0] >= 0:
        hidden = hidden | (behind < -size[0])
    if size[1] >= 0:
        hidden = hidden | (behind > size[1])
    return hidden


def padded(cumulative: torch.Tensor, length: int) -> torch.Tensor:
    """A mask of padding positions, bool [batch, length], from the sequences' cumulative lengths."""
    return torch.arange(length, device=cumulative.device) >= cumulative.diff()[:, None]


def window(where: str, size: Optional[Tuple[int, int]], mask: str) -> Tuple[int, int]:
    """The numbers of keys before and after its aligned key that a query attends to; -1: all. A causal mask allows no keys after it. With other masks,
    (-1, 0) means no window, as in Transformer Engine.
    """
    if size is not None and (isinstance(size, (str, numbers.Number)) or len(size) != 2):
        raise InvalidArgument(f"{where}: window_size is {size!r}; it is a pair, the numbers of keys before and after a query's own, or None")
    for number in size or ():
        if isinstance(number, (float, str)):
            raise TypeError(f"{where}: window_size is {size!r}; its numbers are integers")
    left, right = (-1, -1) if size is None else (int(size[0]), int(size[1]))
    if left < -1 or right < -1:
        raise InvalidArgument(f"{where}: window_size is {size}; its numbers are -1 (no bound) or more")
    if "causal" in mask:
        if right not in (-1, 0):
            if left < 0:
                raise InvalidArgument(f"{where}: window_size is {size} with mask {mask!r}, which shows no keys after a query's own; give 0 or -1 there")
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


_found = WeakIdKeyDictionary()  # masks on CUDA devices -> (the mask's version counter, the property) -> whether the mask had the property


def _is_so(mask: torch.Tensor, asked: Any, so: torch.Tensor) -> bool:
    """Returns bool(so), where `so` is a one-element tensor that tells if the mask has a property. asked: the property's name.

    PyTorch's version counter misses some writes to masks (`data`, NumPy views), so each call checks again. For a CUDA mask, the host waits for the
    device only the first time, and must not wait during graph capture: while the version counter of a mask that had the property is unchanged, the
    check runs as an assertion on the device.
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
    """Cumulative lengths of the sequences, int32 [batch + 1], from a mask [batch, 1, 1, length] that is true for padding.

    Padding must be at the end of each sequence. Other masks are refused, since they would attend to the wrong keys.
    """
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1:3] != (1, 1):
        raise InvalidArgument(f"{where}: the padding mask is {mask.dtype} {tuple(mask.shape)}; it must be bool [batch, 1, 1, length]")
    if torch.compiler.is_compiling():
        return traced.graph.cumulative_lengths(mask)
    return sums_of_lengths(where, mask)


def sums_of_lengths(where: str, mask: torch.Tensor) -> torch.Tensor:
    """cumulative_lengths() outside of a graph, for a mask of the right dtype and shape."""
    hidden = mask[:, 0, 0, :]
    # Every token after a masked token must be masked too.
    if not _is_so(mask, "padding at the end", (hidden[:, 1:] >= hidden[:, :-1]).all()):
        raise InvalidArgument(f"{where}: the padding mask hides tokens that are not at the end of their sequence; give that as "
                         "attn_mask_type='arbitrary' with a mask [batch, 1, queries, keys]")
    sums = torch.zeros(mask.shape[0] + 1, dtype=torch.int32, device=mask.device)
    torch.cumsum((~hidden).sum(1, dtype=torch.int32), 0, dtype=torch.int32, out=sums[1:])
    return sums


def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """ALiBi's slopes (Press et al., 2022): 2^(-8 i / n) for n heads if n is a power of two; otherwise interleaved with the slopes of 2n heads."""
    n = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / n) for i in range(heads - n)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


class DotProductAttention(TransformerEngineBaseModule):
    """softmax(cap(scale q k^T) + bias, masked) v; cap(x) = softcap tanh(x / softcap), or x if softcap is 0.

    num_attention_heads, num_gqa_groups: the number of heads of q, and the number of heads of k and v. kv_channels: the head size; a pair
    gives the head size of q and k, and that of v. qkv_format: 'sbhd', 'bshd' or 'thd'. attn_mask_type, window_size, bottom_right_diagonal,
    softcap: the defaults of the call's arguments with these names. softmax_type: 'vanilla', 'off-by-one' or 'learnable'. cp_group,
    cp_global_ranks, cp_stream, cp_comm_type: the ranks that divide the sequences, their global ranks, a stream for their messages, and how
    they communicate ('p2p', 'all_gather', 'a2a', or 'a2a+p2p' with a list of two groups); docs/ranks-pytorch.md. layer_number: selects the
    layer's cache in inference_params. attention_type: accepted for compatibility; the mask and the shapes of a call determine the
    computation. The heads of q and of k and v are sharded over the ranks of tp_group, or over tp_size ranks, and inputs contain only this
    rank's heads. With sequence_parallel, dropout does not use get_rng_state_tracker.
    """

    _kind = "attention"
    _sites = ("fp8",)  # FP8 attention, with a recipe that has fp8_dpa
    _places = extra_state.ATTENTION
    _attends = True
    _remade = frozenset(("softmax_scale",))
    _device: Optional[torch.device] = None  # the device of the current layers

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
            raise InvalidArgument(f"{where}: kv_channels is {kv_channels!r}; it is the head size, or a pair: that of q and k, and that of v")
        for size in channels:
            rules.size(where, "kv_channels", size)
        self.kv_channels, self.value_channels = int(channels[0]), int(channels[1])
        self.num_attention_heads = int(num_attention_heads)
        self.num_gqa_groups = int(num_attention_heads if num_gqa_groups is None else num_gqa_groups)
        if self.num_gqa_groups < 1 or self.num_attention_heads % self.num_gqa_groups != 0:
            raise InvalidArgument(f"{where}: {num_attention_heads} attention heads do not divide into {num_gqa_groups} groups")
        self._divide(tp_group, tp_size, False)
        # Inputs contain only this rank's heads.
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
        self.cp_group, self.cp_global_ranks, self.cp_stream, self.cp_comm_type = cp_group, cp_global_ranks, cp_stream, cp_comm_type
        self.load_balancing_strategy = CPLoadBalancingStrategy.DUAL_CHUNK_SWAP
        # With sequence_parallel the program itself forks the RNG tracker around the layer; ranks then draw different numbers.
        self.get_rng_state_tracker = None if sequence_parallel else get_rng_state_tracker
        if softmax_type == "learnable":
            self._add_parameter("softmax_offset", torch.empty(
                self.num_attention_heads_per_partition, dtype=torch.float32, device=default_device()), torch.nn.init.zeros_)
            self.reset_parameters()
        else:
            self.softmax_offset = None

    def set_context_parallel_group(self, cp_group: Any, cp_global_ranks: Optional[List[int]] = None, cp_stream: Optional[Any] = None,
                                   cp_comm_type: str = "p2p",
                                   load_balancing_strategy: CPLoadBalancingStrategy = CPLoadBalancingStrategy.DUAL_CHUNK_SWAP) -> None:
        """Sets the ranks that divide the sequences, from the next forward on; the arguments are the constructor's. None: no ranks.

        load_balancing_strategy: how each rank's tokens lie in the sequences: two chunks of each sequence, or, with 'all_gather' and 'thd', one
        contiguous piece of all tokens.
        """
        rules.context_parallel("DotProductAttention", cp_group, cp_global_ranks, cp_comm_type)
        if not isinstance(load_balancing_strategy, CPLoadBalancingStrategy):
            raise TypeError(f"DotProductAttention: load_balancing_strategy is {load_balancing_strategy!r}; it is a CPLoadBalancingStrategy")
        self.cp_group, self.cp_global_ranks, self.cp_stream, self.cp_comm_type = cp_group, cp_global_ranks, cp_stream, cp_comm_type
        self.load_balancing_strategy = load_balancing_strategy

    def __getstate__(self) -> dict:
        state = super().__getstate__()
        context = None if isinstance(self.cp_group, context_parallel.LostGroup) else self._context()
        if context is not None:
            state["cp_group"] = context_parallel.LostGroup(context.size)
        elif not isinstance(self.cp_group, context_parallel.LostGroup):
            state["cp_group"] = None
        state["cp_stream"] = None
        return state

    def _context(self) -> Optional[context_parallel.Context]:
        """The groups that divide the sequences; None if one rank has them."""
        if self.cp_group is None:
            return None
        return context_parallel.find_context(self.cp_group, self.cp_comm_type, self.cp_stream, self.load_balancing_strategy)

    def _key(self, device: torch.device, layout: str, mask: str, size: Tuple[int, int], softcap: float, share: int = 1) -> tuple:
        """The key of a call's layer: in a graph the arguments of _native_key(), as words and integers."""
        # A forward without gradients never applies dropout, so only a forward with gradients in eval() needs a separate layer without dropout.
        drops = self.training or not (torch.is_grad_enabled() or torch_checkpoint.repeated())
        if torch.compiler.is_compiling():
            return layout, mask, softcap.hex(), *size, drops
        return self._native_key(device, layout, mask, size, softcap, drops, share)

    def _native_key(self, device: torch.device, layout: str, mask: str, size: Tuple[int, int], softcap: float, drops: bool, share: int = 1) -> tuple:
        """share: over how many ranks of cp_group the heads are divided."""
        if device != self._device:  # without parameters, Module.to() does not report a change of device
            if self._device is not None:
                self._forget(self._fp8_state())
            self._device = device
        return device, layout, mask, size, softcap, self.attention_dropout if drops else 0.0, share

    def _in_graph(self, device: torch.device, kind: str, key: tuple) -> Tuple[NativeLayer, None]:
        layout, mask, softcap, left, right, drops = key
        return self._layer(device, kind, self._native_key(device, layout, mask, (left, right), float.fromhex(softcap), bool(drops))), None

    def _make_options(self, kind: str, key: Any) -> dict:
        _, layout, mask, size, softcap, dropout, share = key
        chosen = {"num_attention_heads": self.num_attention_heads_per_partition // share, "head_dim": self.kv_channels, "value_head_dim": self.value_channels,
                  "num_gqa_groups": self.num_gqa_groups_per_partition // share, "layout": layout, "mask_type": mask, "window_left": size[0], "window_right": size[1],
                  "softmax_type": self.softmax_type, "attention_dropout": dropout, "softcap": softcap}
        return chosen if self.softmax_scale is None else {**chosen, "softmax_scale": float(self.softmax_scale)}

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs) -> None:
        # Checkpoints of Transformer Engine before 1.6 have no attention state, and those of 1.6 and 1.7 use another name.
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
        # Transformer Engine saves attention state with any FP8 recipe, and in a different form if several recipes were used.
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
        """Maps q [.., heads, channels], k and v [.., groups, channels] in qkv_format to [.., heads * channels], with v's channels.

        attention_mask: true where masked out. With padding masks bool [batch, 1, 1, length], for cross-attention a pair; with 'arbitrary' [1 or
        batch, 1 or heads, queries, keys], broadcast. cu_seqlens: int32 [batch + 1]. window_size: numbers of keys before and after a query's aligned
        key. bottom_right_diagonal: for non-causal masks, aligns the last query with the last key (None and True) or the first with the first.
        core_attention_bias_type: 'no_bias', 'pre_scale_bias' or 'post_scale_bias' with core_attention_bias, or 'alibi', optionally with alibi_slopes
        [heads] or [batch, heads]. fast_zero_fill: no effect; te-fl always writes the rows of padding. max_seqlen: at least the longest sequence's
        length, for 'thd'. inference_params: an InferenceParams. Its cache for this layer_number receives the new keys and values and provides those
        of all tokens; the cache's lengths and masks are used, and there are no gradients.
        """
        if misspelt:
            raise misspelling(DotProductAttention.forward, misspelt)
        where = "DotProductAttention"
        if pad_between_seqs is False:  # sequences are contiguous, so cumulative lengths with padding are ignored
            cu_seqlens_q_padded = cu_seqlens_kv_padded = None
        elif pad_between_seqs and cu_seqlens_q_padded is None:
            raise InvalidArgument(f"{where}: pad_between_seqs is True; give cu_seqlens_q_padded, where each sequence starts")
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
        context = None if self.cp_group is None else self._context()
        if context is not None:
            only(where, ("inference_params", inference_params, None, "over several ranks of cp_group there is no cache; leave one of the two out"))
            call = context_parallel.AttentionCall(query_layer, key_layer, value_layer, layout, mask, self._own_window() if window_size is None else window_size,
                                         bottom_right is not False, cap, attention_mask, lengths, core_attention_bias_type, core_attention_bias,
                                         alibi_slopes, own[0] if own else None)
            return self._over_ranks(context, call, checkpoint_core_attention)
        if inference_params is not None:
            params = cached_attention.check(where, inference_params)
            sources = (query_layer, key_layer, value_layer, core_attention_bias, *own)
            cached = cached_attention.over_cache(where, self, params, query_layer, key_layer, value_layer, layout, mask, attention_mask, lengths)
            (query_layer, key_layer, value_layer), layout, mask, lengths = cached[:3], *cached[3:]
        mask, size, inputs, extras = self._prepared(
            where, layout, mask, self._own_window() if window_size is None else window_size, bottom_right, cap,
            query_layer, key_layer, attention_mask, lengths, core_attention_bias_type, core_attention_bias, alibi_slopes)

        def compute(q, k, v, *biases):
            return self._attend(q, k, v, layout, mask, size, cap, inputs, biases, own)

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

    def _attend(self, q, k, v, layout: str, mask: str, size: Tuple[int, int], cap: float, inputs: dict, biases: Tuple[torch.Tensor, ...],
                own: Tuple[torch.Tensor, ...], share: int = 1) -> torch.Tensor:
        """Runs the layer for this mask, window and softcap. inputs, biases: from _prepared(). own: the layer's parameters."""
        key = self._key(q.device, layout, mask, size, cap, share)
        dropped = generator.draw_for(self, q.device) if self.training and self.attention_dropout > 0 else None
        return self._run((q, k, v), own, key=key, attention=inputs, random=dropped, extras=biases)

    def _over_ranks(self, context: context_parallel.Context, call: context_parallel.AttentionCall, recompute: bool):
        """The forward over the ranks of cp_group."""
        where = "DotProductAttention"
        if torch.compiler.is_compiling():
            raise refuse(where, "cp_group", self.cp_group, "graphs of torch.compile hold no collectives of te-fl's; leave fullgraph=True out, or give one rank")
        call = call._replace(window=window(where, call.window, call.mask))
        rules.choice(where, "core_attention_bias_type", call.bias_kind, ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi"))
        self._biased(where, call.bias_kind, call.bias, call.slopes, call.cap, {})

        def prepared(whole: context_parallel.AttentionCall, slopes: Optional[torch.Tensor]):
            return self._prepared(where, whole.layout, whole.mask, whole.window, whole.bottom_right, whole.cap, whole.q, whole.k, whole.masks, whole.lengths,
                                  whole.bias_kind, whole.bias, slopes)

        def run(q, k, v, layout, mask, size, cap, inputs, extras, sink, share):
            mask = THD_MASKS.get(mask, mask) if layout == "thd" else mask
            return self._attend(q, k, v, layout, mask, size, cap, inputs, extras, () if sink is None else (sink,), share)

        out, largest = context_parallel.attend(context, self, call, cumulative_lengths, prepared, run, recompute)
        out = out.flatten(-2)
        return (out, largest.to(out.dtype)) if self.return_max_logit else out

    def _live_fp8_state(self) -> Dict[str, torch.Tensor]:
        """The scales and amax histories themselves, by te_fl::nn's names."""
        return dict(_native.fp8_state(self._states.native, LIKE))

    def _max_logit(self, q: torch.Tensor, k: torch.Tensor, layout: str, mask: str, size: Tuple[int, int], cap: float, inputs: dict) -> torch.Tensor:
        """The largest score of each head, [heads] in q's dtype, after scaling, cap, bias and mask, without the sink. No gradient."""
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
        """Derives the layer's mask, window and attention inputs from a forward's arguments; also returns the inputs that may need a gradient.

        q and k provide extents and device. lengths: cumulative lengths, cumulative lengths with padding, and longest lengths, each for q and for k.
        """
        mask = mask_type(where, mask)
        size = window(where, size, mask)
        causal = "causal" in mask
        bottom_right = mask.endswith("bottom_right") if causal else bottom_right is not False
        inputs = self._masked(where, layout, mask, q, k, masks_of_call, *lengths)
        sums = (inputs["cu_seqlens_q"], inputs["cu_seqlens_kv"]) if "cu_seqlens_q" in inputs else None
        dense = layout != "thd"
        extents = (self._length(q, layout), self._length(k, layout)) if dense else (0, 0)
        level = sums[0] is sums[1] if sums else extents[0] == extents[1]  # each sequence has equally many queries and keys

        def behind(from_bottom_right: bool) -> torch.Tensor:
            return distances(*extents, q.device, sums, from_bottom_right)

        mask_or_none = masks_of_call if mask in ("no_mask", "causal", "causal_bottom_right") and masks_of_call is not None else None
        if mask_or_none is not None and not dense:
            raise InvalidArgument(f"{where}: attention_mask is given with qkv_format='thd', whose cu_seqlens say what a query sees; leave it out")
        own = mask
        if mask_or_none is not None and _hides_more(where, mask_or_none, behind(bottom_right) if causal else None, (mask, *extents)):
            hidden = windowed((size[0], 0) if causal else size, behind(bottom_right)) | mask_or_none.bool()
            inputs, mask, size = {"attn_mask": hidden}, "arbitrary", (-1, -1)
        elif size != (-1, -1) and not causal and not bottom_right and not level:
            # The layer's window for such a mask is aligned to the bottom right.
            if not dense:
                raise refuse(where, "bottom_right_diagonal", False, f"with qkv_format='thd' the window of mask {mask!r} ends at the last query and "
                             "key of a sequence; give bottom_right_diagonal=None, or the same cu_seqlens for queries and keys")
            hidden = windowed(size, behind(False))
            if sums:
                hidden = hidden | padded(sums[0], extents[0])[:, None, :, None] | padded(sums[1], extents[1])[:, None, None]
            if "attn_mask" in inputs:
                hidden = hidden | inputs["attn_mask"].bool()
            inputs, mask, size = {"attn_mask": hidden}, "arbitrary", (-1, -1)
        if dense and isinstance(bias, torch.Tensor) and bias.dim() == 4 and bias.shape[2] == 1 != extents[0]:  # one row for all queries
            bias = bias.expand(-1, -1, extents[0], -1).contiguous()
        extras = self._biased(where, bias_kind, bias, slopes, cap, inputs)
        if bias_kind == "alibi":
            chosen = self._own_slopes(q.device) if slopes is None else slopes
            # The layer adds slope * (distance from the bottom right), without an absolute value. Under a causal mask no key is ahead of its query, so
            # the sign is constant. Another diagonal adds a constant to each row, which softmax cancels unless there is a sink.
            if causal and (bottom_right or level or self.softmax_type == "vanilla"):
                inputs["alibi_slopes"] = chosen
            elif not dense:
                raise refuse(where, "core_attention_bias_type", bias_kind, f"with qkv_format='thd', mask {own!r} and softmax_type "
                             f"{self.softmax_type!r} te-fl has no such addend; take a padded format, or a causal mask and the vanilla softmax")
            else:
                inputs["bias"] = -behind(bottom_right).abs() * chosen.float().view(-1, chosen.shape[-1], 1, 1)
        return (THD_MASKS.get(mask, mask) if not dense else mask), size, inputs, extras

    def _own_slopes(self, device: torch.device) -> torch.Tensor:
        """The ALiBi slopes of this rank's heads, which follow those of the lower ranks."""
        slopes = _slopes(self.num_attention_heads, device)
        if self.tp_size == 1:
            return slopes
        begin = collectives.rank_in(self._group()) * self.num_attention_heads_per_partition
        return slopes[begin:begin + self.num_attention_heads_per_partition].contiguous()

    def _masked(self, where, layout, mask, q, k, masks_of_call, cu_q, cu_kv, cu_q_padded, cu_kv_padded, max_q, max_kv) -> dict:
        """The layer's inputs that define the mask."""
        inputs: dict = {}
        if mask == "arbitrary":
            if not isinstance(masks_of_call, torch.Tensor):
                raise InvalidArgument(f"{where}: attn_mask_type is 'arbitrary'; give attention_mask, one tensor")
            inputs["attn_mask"] = masks_of_call.contiguous()
            return inputs
        if layout == "thd":
            if cu_q is None:
                raise InvalidArgument(f"{where}: qkv_format is 'thd'; give cu_seqlens_q, and cu_seqlens_kv where they differ")
            inputs.update(cu_seqlens_q=cu_q, cu_seqlens_kv=cu_q if cu_kv is None else cu_kv, cu_seqlens_q_padded=cu_q_padded,
                          cu_seqlens_kv_padded=cu_q_padded if cu_kv_padded is None else cu_kv_padded, max_seqlen_q=max_q,
                          max_seqlen_kv=max_kv if max_kv is not None else max_q)
        elif "padding" in mask:
            if cu_q is None or cu_kv is None:
                if masks_of_call is None:
                    raise InvalidArgument(f"{where}: attn_mask_type is {mask!r}; give attention_mask, or cu_seqlens_q and cu_seqlens_kv")
                masks = (masks_of_call, masks_of_call) if isinstance(masks_of_call, torch.Tensor) else tuple(masks_of_call)
                if isinstance(masks_of_call, torch.Tensor) and self._length(q, layout) != self._length(k, layout):
                    raise InvalidArgument(f"{where}: queries and keys differ in length; give attention_mask as a pair, of queries and of keys")
                of_q, of_kv = masks
                for of, t, whose in ((of_q, q, "queries"), (of_kv, k, "keys")):
                    if of.dim() == 4 and of.shape[3] != self._length(t, layout):
                        raise InvalidArgument(f"{where}: the padding mask is {tuple(of.shape)}; it must be bool [batch, 1, 1, length], and the {whose} have "
                                         f"length {self._length(t, layout)}")
                cu_q = cumulative_lengths(where, of_q)
                cu_kv = cu_q if of_kv is of_q else cumulative_lengths(where, of_kv)
            inputs.update(cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
        return inputs

    @staticmethod
    def _length(t: torch.Tensor, layout: str) -> int:
        return t.shape[0 if layout == "sbhd" else 1]

    def _biased(self, where, kind, bias, slopes, cap, inputs) -> Tuple[torch.Tensor, ...]:
        """Adds the bias or the ALiBi slopes to the inputs; returns the tensors among them that may need a gradient."""
        rules.choice(where, "core_attention_bias_type", kind, ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi"))
        if slopes is not None and kind != "alibi":
            raise InvalidArgument(f"{where}: alibi_slopes are given with core_attention_bias_type {kind!r}; give 'alibi', or leave them out")
        if kind not in ("pre_scale_bias", "post_scale_bias"):
            if bias is not None:
                raise InvalidArgument(f"{where}: core_attention_bias is given with core_attention_bias_type {kind!r}; give 'post_scale_bias', or leave "
                                 "it out")
            return ()
        if bias is None:
            raise InvalidArgument(f"{where}: core_attention_bias_type is {kind!r}; give core_attention_bias")
        if kind == "pre_scale_bias":
            if cap:
                raise refuse(where, "core_attention_bias_type", kind, "with softcap te-fl adds a bias after the cap; give 'post_scale_bias'")
            bias = bias * (1 / math.sqrt(self.kv_channels) if self.softmax_scale is None else self.softmax_scale)
        inputs["bias"] = bias
        return (bias,)


def _hides_more(where: str, mask: Any, behind: Optional[torch.Tensor], rule: tuple) -> bool:
    """True if a mask hides more keys than those ahead of their query. behind: distances(), or None if no other rule hides keys. `rule` names the
    cached result.
    """
    if not isinstance(mask, torch.Tensor) or mask.dtype not in (torch.bool, torch.uint8):
        raise InvalidArgument(f"{where}: attention_mask is {mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__}; it is one tensor of "
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
    """Splits packed qkv (extent 3 along dim) into q, k and v, or packed kv (extent 2) into k and v."""
    if qkv is not None:
        if q is not None or k is not None or v is not None or kv is not None:
            raise InvalidArgument(f"{where}: give qkv_layer alone")
        return qkv.unbind(dim)
    if k is not None or v is not None or q is None:
        raise InvalidArgument(f"{where}: give query_layer with kv_layer, and neither key_layer nor value_layer")
    return (q, *kv.unbind(dim))
