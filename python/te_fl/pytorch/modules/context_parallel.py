"""Attention over sequences that the ranks of cp_group divide (context parallelism), with Transformer Engine's four ways of communication.

'p2p': keys and values go from rank to rank (ring_attention.py). 'all_gather': each rank gathers all keys. 'a2a': an all-to-all gives each rank all
tokens of its share of the heads. 'a2a+p2p': an all-to-all in cp_group[0], then p2p in cp_group[1].
"""

from __future__ import annotations

import math
from typing import Any, Callable, List, NamedTuple, NoReturn, Optional, Tuple

import torch

from te_fl.errors import FailedPrecondition, InvalidArgument
from te_fl.common.recipe import attends
from te_fl.pytorch.autograd.checkpoint import checkpoint
from te_fl.pytorch.distributed import collectives
from te_fl.pytorch.distributed.agreement import agree, agree_over
from te_fl.pytorch.autograd.sequence_chunks import Order, gathered_sequences, own_heads, whole_heads, whole_sequences
from te_fl.pytorch.fp8 import quantization
from te_fl.pytorch.modules.ring_attention import WHERE, Lengths, Ring, Scales, ring_attention, sums
from te_fl.pytorch.runtime import random as generator
from te_fl.pytorch.runtime import refuse as rules
from te_fl.pytorch.runtime.constants import CPLoadBalancingStrategy
from te_fl.pytorch.runtime.dtypes import DTYPE_NAMES
from te_fl.pytorch.runtime.refuse import refuse

_DUAL = CPLoadBalancingStrategy.DUAL_CHUNK_SWAP


class LostGroup:
    """The cp_group of a copied or unpickled module: process groups cannot be copied."""

    def __init__(self, ranks: int):
        self.ranks = ranks

    def refuse(self) -> NoReturn:
        raise FailedPrecondition(f"{WHERE}: it is a copy of a module whose cp_group had {self.ranks} ranks, and process groups are not copied; call "
                                 "set_context_parallel_group(group, ranks, stream, kind) before the first forward")


class Context(NamedTuple):
    """The groups of context parallelism: of the all-to-all of heads and of the exchange of keys; None for one rank."""

    heads: Optional[Any]
    keys: Optional[Any]
    gathers: bool
    stream: Optional[Any]
    chunked: bool

    @property
    def kind(self) -> str:
        if self.heads is not None:
            return "a2a" if self.keys is None else "a2a+p2p"
        return "all_gather" if self.gathers else "p2p"

    @property
    def of_heads(self) -> int:
        return 1 if self.heads is None else collectives.size_of(self.heads)

    @property
    def of_keys(self) -> int:
        return 1 if self.keys is None else collectives.size_of(self.keys)

    @property
    def size(self) -> int:
        return self.of_heads * self.of_keys

    @property
    def rank(self) -> int:
        """This rank's number in the sequence."""
        return (0 if self.keys is None else collectives.rank_in(self.keys)) * self.of_heads + (0 if self.heads is None else collectives.rank_in(self.heads))

    @property
    def groups(self) -> Tuple[Any, ...]:
        """The groups in which the ranks agree on a call."""
        return tuple(group for group in (self.heads, self.keys) if group is not None)


def find_context(group: Any, kind: str, stream: Optional[Any], strategy: Any) -> Optional[Context]:
    """The groups for a module's attributes; None if only one rank has the sequence."""
    if group is None:
        return None
    if isinstance(group, LostGroup):
        group.refuse()
    rules.context_parallel(WHERE, group, None, kind)
    chunked = strategy is _DUAL
    if kind == "a2a+p2p":
        of_heads, of_keys = (None if one.size() == 1 else one for one in group)
        found = Context(of_heads, of_keys, False, stream, chunked)
    elif group.size() == 1:
        return None
    else:
        found = Context(group, None, False, stream, chunked) if kind == "a2a" else Context(None, group, kind == "all_gather", stream, chunked)
    return None if found.heads is None and found.keys is None else found


class AttentionCall(NamedTuple):
    """The arguments of an attention's forward, for this rank's tokens. lengths: cumulative lengths of queries and keys, then those with padding, then
    the longest lengths, all of whole sequences.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    layout: str
    mask: str
    window: Tuple[int, int]
    bottom_right: bool
    cap: float
    masks: Any
    lengths: tuple
    bias_kind: str
    bias: Optional[torch.Tensor]
    slopes: Optional[torch.Tensor]
    sink: Optional[torch.Tensor]

    @property
    def dim(self) -> int:
        return 1 if self.layout == "bshd" else 0

    @property
    def causal(self) -> bool:
        return "causal" in self.mask

    @property
    def dense(self) -> bool:
        return self.layout != "thd"


def _words(context: Context, module: Any, call: AttentionCall) -> str:
    """A text that describes the call, equal on all ranks of a correct program."""
    def of(t: Optional[torch.Tensor]) -> str:
        return type(t).__name__ if not isinstance(t, torch.Tensor) else f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
    text = (f"cp_comm_type {context.kind!r} over {context.size} ranks, {call.layout} q {of(call.q)} k {of(call.k)} v {of(call.v)}, mask {call.mask!r}, "
            f"window {call.window}, softcap {call.cap}, softmax {module.softmax_type!r}, {call.bias_kind} {of(call.bias)}, dropout "
            f"{module.attention_dropout if module.training else 0.0}, cu_seqlens {of(call.lengths[0])}")
    trains = torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in (call.q, call.k, call.v, call.bias, call.sink))
    return text + (", FP8" if _in_fp8() else "") + (", with gradients" if trains else "")


def _in_fp8() -> bool:
    return quantization.enabled() and attends(quantization.active_recipe())


def _check(context: Context, module: Any, call: AttentionCall) -> AttentionCall:
    """Refuses what no form of context parallelism computes; returns the call with the dtype of torch.autocast."""
    for name, t in (("query_layer", call.q), ("key_layer", call.k), ("value_layer", call.v)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{WHERE}: {name} is a {type(t).__name__}; it must be a torch.Tensor")
    kind = call.q.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        call = call._replace(q=call.q.to(dtype), k=call.k.to(dtype), v=call.v.to(dtype))
    _check_tensors(module, call)
    _check_lengths(context, call)
    if call.mask == "arbitrary" or (call.masks is not None and "padding" not in call.mask):
        if context.kind != "a2a":
            raise refuse(WHERE, "attn_mask_type", call.mask, f"with cp_comm_type {context.kind!r} no rank has the rows of an attention_mask; give "
                         "cp_comm_type='a2a', where each rank has whole sequences, or a mask type that needs no tensor")
    if call.bias is not None and context.heads is not None:
        raise refuse(WHERE, "core_attention_bias_type", call.bias_kind, f"with cp_comm_type {context.kind!r} a rank has other heads in attention than "
                     "outside; give 'p2p' or 'all_gather'")
    return call


def _check_tensors(module: Any, call: AttentionCall) -> None:
    rank = 4 if call.dense else 3
    heads, groups = module.num_attention_heads_per_partition, module.num_gqa_groups_per_partition
    lead = {"bshd": "[batch, sequence, ", "sbhd": "[sequence, batch, ", "thd": "[tokens, "}[call.layout]
    for name, t, n, d in (("query_layer", call.q, heads, module.kv_channels), ("key_layer", call.k, groups, module.kv_channels),
                          ("value_layer", call.v, groups, module.value_channels)):
        if t.dtype not in DTYPE_NAMES or t.dtype != call.q.dtype:
            raise refuse(WHERE, name, f"a tensor of {t.dtype}", "give torch.float32, torch.bfloat16 or torch.float16, the same for all three")
        if t.dim() != rank or tuple(t.shape[-2:]) != (n, d):
            raise InvalidArgument(f"{WHERE}: {name} is {tuple(t.shape)}; it must be {lead}{n}, {d}]")
        if t.device != call.q.device:
            raise InvalidArgument(f"{WHERE}: {name} is on {t.device} and query_layer on {call.q.device}; they have one device")
    if call.k.shape[:-2] != call.v.shape[:-2]:
        raise InvalidArgument(f"{WHERE}: key_layer is {tuple(call.k.shape)} and value_layer {tuple(call.v.shape)}; they have the same tokens")
    if call.dense and call.q.shape[1 - call.dim] != call.k.shape[1 - call.dim]:
        raise InvalidArgument(f"{WHERE}: query_layer is {tuple(call.q.shape)} and key_layer {tuple(call.k.shape)}; they have one batch size")


def _check_group(context: Context, call: AttentionCall) -> None:
    """Refuses tensors that the group cannot send, before the ranks agree on the call by such tensors."""
    for group in (context.heads, context.keys):
        kinds = [d.type for d in getattr(group, "_device_types", [])] if group is not None else []
        if kinds and call.q.device.type not in kinds:
            raise InvalidArgument(f"{WHERE}: query_layer is on {call.q.device}, and cp_group communicates between tensors on {', '.join(sorted(kinds))}; make "
                                  f"the group with a backend for {call.q.device.type}, or move the tensors")


def _check_lengths(context: Context, call: AttentionCall) -> None:
    if not context.chunked and (context.kind != "all_gather" or call.dense or not call.causal or call.window != (-1, -1) or _in_fp8()):
        raise refuse(WHERE, "load_balancing_strategy", "NO_LOAD_BALANCE", "it goes with cp_comm_type='all_gather', qkv_format='thd' and a causal mask "
                     "without a window; give DUAL_CHUNK_SWAP")
    if call.dense:
        for name, t in (("query_layer", call.q), ("key_layer", call.k)):
            if t.shape[call.dim] % 2 or t.shape[call.dim] == 0:
                raise InvalidArgument(f"{WHERE}: {name} has {t.shape[call.dim]} tokens of each sequence on this rank; a rank of cp_group holds two chunks of "
                                      f"equal length: pad the sequences to a multiple of {2 * context.size} tokens, and give each rank "
                                      f"1 / {context.size} of them")
        if call.causal and call.q.shape[call.dim] != call.k.shape[call.dim] and context.kind != "a2a":
            raise refuse(WHERE, "attn_mask_type", call.mask, f"with cp_comm_type {context.kind!r} a causal mask needs as many keys as queries; there are "
                         f"{call.q.shape[call.dim] * context.size} queries and {call.k.shape[call.dim] * context.size} keys: give cp_comm_type='a2a'")
        return
    if call.lengths[0] is None:
        raise InvalidArgument(f"{WHERE}: qkv_format is 'thd'; give cu_seqlens_q, and cu_seqlens_kv where they differ, of the whole sequences")
    for name, cu, padded, t in (("cu_seqlens_q", call.lengths[0], call.lengths[2], call.q), ("cu_seqlens_kv", call.lengths[1], call.lengths[3], call.k)):
        _check_packed(context, name if padded is None else f"{name}_padded", cu if padded is None else padded, t.shape[0])


def _check_packed(context: Context, name: str, cu: torch.Tensor, tokens: int) -> None:
    if cu.dtype != torch.int32 or cu.dim() != 1 or cu.shape[0] < 2:
        raise InvalidArgument(f"{WHERE}: {name} is {cu.dtype} {tuple(cu.shape)}; it is int32 [batch + 1]")
    if cu.device.type != "cpu":  # its values are on the device, where reading them would wait
        return
    pieces = 2 * context.size if context.chunked else 1
    lengths, total = cu.diff(), int(cu[-1])
    wrong = ((lengths % pieces != 0) | (lengths < 0)).nonzero()
    if wrong.numel():
        at = int(wrong[0])
        raise InvalidArgument(f"{WHERE}: sequence {at} of {name} has {int(lengths[at])} tokens; the {context.size} ranks of cp_group hold two chunks of equal "
                              f"length each: pad every sequence to a multiple of {pieces}, and give the padded boundaries as cu_seqlens_q_padded")
    if total != tokens * context.size:
        raise InvalidArgument(f"{WHERE}: {name} ends at {total}, and this rank has {tokens} tokens; cu_seqlens are those of the whole sequences, of which each "
                              f"of the {context.size} ranks of cp_group has 1 / {context.size}: {total} / {context.size} tokens")


def _with_lengths(context: Context, call: AttentionCall, cumulative: Callable) -> AttentionCall:
    """The call with cumulative lengths in place of a padding mask, and keys' lengths in place of None."""
    cu_q, cu_kv, padded_q, padded_kv, max_q, max_kv = call.lengths
    masks = call.masks
    if call.dense and "padding" in call.mask and (cu_q is None or cu_kv is None):
        if masks is None:
            raise InvalidArgument(f"{WHERE}: attn_mask_type is {call.mask!r}; give cu_seqlens_q and cu_seqlens_kv, or attention_mask, of the whole sequences")
        of_q, of_kv = (masks, masks) if isinstance(masks, torch.Tensor) else tuple(masks)
        for of, t in ((of_q, call.q), (of_kv, call.k)):
            if of.dim() != 4 or of.shape[3] != t.shape[call.dim] * context.size:
                raise InvalidArgument(f"{WHERE}: the padding mask is {tuple(of.shape)}; it must be bool [batch, 1, 1, length] with the length of whole "
                                      f"sequences, {t.shape[call.dim] * context.size} over the {context.size} ranks of cp_group")
        cu_q = cumulative(WHERE, of_q)
        cu_kv = cu_q if of_kv is of_q else cumulative(WHERE, of_kv)
        masks = None
    elif call.layout == "thd":
        cu_kv = cu_q if cu_kv is None else cu_kv
        padded_kv = padded_q if padded_kv is None else padded_kv
        max_kv = max_q if max_kv is None else max_kv
    return call._replace(masks=masks, lengths=(cu_q, cu_kv, padded_q, padded_kv, max_q, max_kv))


def _check_aligned(context: Context, call: AttentionCall) -> None:
    """Refuses causal masks over queries and keys of other lengths where a rank computes by the positions of its chunks."""
    if not call.causal or context.kind == "a2a":
        return
    cu_q, cu_kv, padded_q, padded_kv = call.lengths[:4]
    pairs = [(cu_q if padded_q is None else padded_q, cu_kv if padded_kv is None else padded_kv)] if not call.dense else []
    if cu_q is not None and (context.kind == "all_gather" or call.mask.endswith("bottom_right")):
        pairs.append((cu_q, cu_kv))
    for of_q, of_kv in pairs:
        if of_q is of_kv or of_q is None or of_kv is None:
            continue
        if of_q.is_cuda and of_q.shape == of_kv.shape:  # compared there, without a wait of the host
            torch._assert_async((of_q == of_kv).all(), f"{WHERE}: with cp_comm_type {context.kind!r} and mask {call.mask!r} the sequences of queries and of keys "
                                "have equal lengths; give the same cu_seqlens for both, or cp_comm_type='a2a'")
        elif not torch.equal(of_q, of_kv):
            raise refuse(WHERE, "attn_mask_type", call.mask, f"with cp_comm_type {context.kind!r} it needs sequences with as many keys as queries, and cu_seqlens are "
                         f"{of_q.tolist()} and {of_kv.tolist()}; give cp_comm_type='a2a'")


class _Spread:
    """This rank's heads of all tokens, and the way back."""

    def __init__(self, context: Context, call: AttentionCall):
        self.group, self.ranks = context.heads, context.of_heads
        for name, t in (("attention heads", call.q), ("groups of keys", call.k)):
            if t.shape[-2] % self.ranks:
                raise InvalidArgument(f"{WHERE}: {t.shape[-2]} {name} do not divide over the {self.ranks} ranks of cp_comm_type {context.kind!r}; give "
                                      "cp_comm_type='p2p' or 'all_gather', or a group whose size divides them")
        self.orders = [Order(call.layout, self.ranks, self._bounds(context, call, i), t.shape[0]) for i, t in enumerate((call.q, call.k, call.k))]

    @staticmethod
    def _bounds(context: Context, call: AttentionCall, i: int) -> Optional[torch.Tensor]:
        if call.dense:
            return None
        own, padded = call.lengths[min(i, 1)], call.lengths[2 + min(i, 1)]
        return (own if padded is None else padded) // context.of_keys

    def heads_of(self, values: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        """This rank's share of values [heads] or [batch, heads] that are not trained."""
        return None if values is None else values.chunk(self.ranks, -1)[collectives.rank_in(self.group)].contiguous()


def _seeds(context: Context, module: Any, device: torch.device) -> Optional[torch.Tensor]:
    """Seed and offset of the dropout of each step, int64 [ranks, 2], other ones on each rank."""
    if not (module.training and module.attention_dropout > 0):
        return None
    drawn = generator.draw_for(module, device)
    ranks = context.of_keys
    numbers = torch.arange(ranks, device=device, dtype=torch.int64) + ranks * context.rank
    return torch.stack([drawn[0] + numbers * 0x9E3779B97F4A7C1 % 2 ** 62, drawn[1].expand(ranks)], 1) % 2 ** 62


def _sink(module: Any, call: AttentionCall) -> Optional[torch.Tensor]:
    if module.softmax_type == "off-by-one":
        return torch.zeros(call.q.shape[-2], dtype=torch.float32, device=call.q.device)
    return call.sink


def _lengths_over(context: Context, call: AttentionCall, i: int) -> Lengths:
    """Lengths of queries (0) or keys (1) over the ranks that exchange keys."""
    cu, padded, longest = call.lengths[i], call.lengths[2 + i], call.lengths[4 + i]
    ranks = context.of_keys
    if not call.dense:
        bounds = cu if padded is None else padded
        return Lengths(cu.diff(), bounds.diff() // (2 * ranks), bounds // ranks, 0 if not longest else -(-int(longest) // (2 * ranks)))
    t = (call.q, call.k)[i]
    return Lengths(cu.diff(), torch.full_like(cu[1:], t.shape[call.dim] // 2), None, 0)


_LARGEST = {448: torch.float8_e4m3fn, 57344: torch.float8_e5m2}


def _begin_fp8(context: Context, module: Any, call: AttentionCall, run: Callable) -> Tuple[Optional[tuple], Optional[torch.Tensor]]:
    """The scales and amaxes of FP8 attention, and an attention without tokens by the module's own layer. That layer creates the scales, and its forward
    and backward have autocast update them after the steps of this attention have collected their amaxes.
    """
    if not _in_fp8():
        return None, None
    q, k, v = (t.new_zeros((1, *t.shape[-2:])).requires_grad_(torch.is_grad_enabled()) for t in (call.q, call.k, call.v))
    none = torch.zeros(2, dtype=torch.int32, device=q.device)
    anchor = run(q, k, v, "thd", "padding", (-1, -1), call.cap, dict(
        cu_seqlens_q=none, cu_seqlens_kv=none, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=1, max_seqlen_kv=1), (), call.sink,
        context.of_heads)
    state = module._live_fp8_state()
    if not state:  # a calibrating autocast computes in high precision
        return None, None
    recipe = quantization.active_recipe()
    found = []
    for direction, largest in (("fwd", recipe.fp8_format.value.max_fwd), ("bwd", recipe.fp8_format.value.max_bwd)):
        found.append(Scales(_LARGEST[int(largest)], state[f"fp8.{direction}.scale"], state[f"fp8.{direction}.amax_history"][0]))
    return tuple(found), anchor


def _ring(context: Context, module: Any, call: AttentionCall, words: str, run: Callable) -> Tuple[torch.Tensor, torch.Tensor]:
    scale = 1 / math.sqrt(module.kv_channels) if module.softmax_scale is None else float(module.softmax_scale)
    variable = not call.dense or "padding" in call.mask
    lengths = (_lengths_over(context, call, 0), _lengths_over(context, call, 1)) if variable else None
    dropout = module.attention_dropout if module.training else 0.0
    fp8, anchor = _begin_fp8(context, module, call, run)
    ring = Ring(context.groups, context.stream, call.layout, call.causal, lengths, scale, call.cap, dropout, words, fp8)
    bias = call.bias
    if bias is not None:
        _check_bias(context, call)
        bias = bias.expand(*bias.shape[:2], call.q.shape[call.dim], bias.shape[3])
        if call.bias_kind == "pre_scale_bias":
            bias = bias * scale
    return ring_attention(ring, *(t.contiguous() for t in (call.q, call.k, call.v)), bias, _sink(module, call), _seeds(context, module, call.q.device),
                          module.return_max_logit, anchor)


def _check_ring(context: Context, module: Any, call: AttentionCall) -> None:
    other = "give cp_comm_type='all_gather' or 'a2a'"
    if call.window != (-1, -1):
        raise refuse(WHERE, "window_size", call.window, f"with cp_comm_type {context.kind!r} every rank's keys go to every rank, whatever the window; {other}")
    if call.bias_kind == "alibi":
        raise refuse(WHERE, "core_attention_bias_type", "alibi", f"with cp_comm_type {context.kind!r} te-fl has no such addend; {other}")


def _check_bias(context: Context, call: AttentionCall) -> None:
    assert call.bias is not None
    if call.bias.dim() != 4 or call.bias.shape[2] not in (1, call.q.shape[call.dim]) or call.bias.shape[3] != call.k.shape[call.dim] * context.size:
        raise InvalidArgument(f"{WHERE}: core_attention_bias is {tuple(call.bias.shape)}; over {context.size} ranks it is [1 or batch, 1 or heads, "
                              f"{call.q.shape[call.dim]} queries of this rank, {call.k.shape[call.dim] * context.size} keys in the sequence's order]")


class _Piece(NamedTuple):
    """Queries whose aligned keys are contiguous: a chunk of each sequence. begin: where it begins in its sequence, a number or int [B]. tokens: int
    [B] without padding, or None. starts: where it begins among this rank's tokens, in the packed layout.
    """

    q: torch.Tensor
    begin: Any
    tokens: Optional[torch.Tensor]
    starts: Optional[torch.Tensor]
    rows: slice


def _pieces(context: Context, call: AttentionCall) -> List[_Piece]:
    """This rank's queries, divided where their positions jump. Without a causal mask and window all keys serve all queries, so one piece remains."""
    rank, ranks = context.rank, context.size
    jumps = call.causal or call.window != (-1, -1)
    if call.dense:
        chunk = call.q.shape[call.dim] // 2
        tokens = call.lengths[0].diff() if "padding" in call.mask else None
        found = []
        for i, number in enumerate((rank, 2 * ranks - 1 - rank)):
            begin = number * chunk
            own = None if tokens is None else (tokens - begin).clamp(0, chunk)
            found.append(_Piece(call.q.narrow(call.dim, i * chunk, chunk), begin, own, None, slice(i * chunk, (i + 1) * chunk)))
        if jumps:
            return found
        both = None if tokens is None else found[0].tokens + found[1].tokens
        return [_Piece(call.q, 0, both, None, slice(None))]
    lengths, bounds = call.lengths[0].diff(), call.lengths[0] if call.lengths[2] is None else call.lengths[2]
    if not context.chunked:
        own = call.q.shape[0]
        begin = (rank * own - bounds[:-1]).clamp(min=0)
        end = torch.minimum(lengths, ((rank + 1) * own - bounds[:-1]).clamp(min=0))
        starts = (bounds - rank * own).clamp(0, own)
        return [_Piece(call.q, begin, (end - begin).clamp(min=0), starts, slice(None))]
    chunk, starts = bounds.diff() // (2 * ranks), bounds // ranks
    found = []
    for i, number in enumerate((rank, 2 * ranks - 1 - rank)):
        own = torch.minimum((lengths - number * chunk).clamp(min=0), chunk)
        found.append(_Piece(call.q, number * chunk, own, starts + i * torch.nn.functional.pad(chunk, (0, 1)), slice(None)))
    if jumps:
        return found
    return [_Piece(call.q, 0, found[0].tokens + found[1].tokens, starts, slice(None))]


class _Gather:
    """Attention of this rank's queries to all keys, piece by piece."""

    def __init__(self, context: Context, module: Any, call: AttentionCall, run: Callable):
        self.context, self.module, self.call, self.run = context, module, call, run
        self.logits: Optional[torch.Tensor] = None  # the largest scores of the pieces so far
        bounds = None if call.dense else (call.lengths[1] if call.lengths[3] is None else call.lengths[3])
        self.order = Order(call.layout, context.size, bounds, call.k.shape[0], context.chunked)
        if call.dense and "padding" in call.mask and not call.causal and call.window != (-1, -1):
            raise refuse(WHERE, "window_size", call.window, f"with cp_comm_type 'all_gather' and mask {call.mask!r} the window ends at another key in each "
                         "sequence; give cp_comm_type='a2a'")
        if not call.dense and not call.causal and call.window != (-1, -1):
            raise refuse(WHERE, "window_size", call.window, "with cp_comm_type 'all_gather', qkv_format='thd' and no causal mask the window ends at another "
                         "key in each sequence; give cp_comm_type='a2a'")
        if call.bias_kind == "alibi" and not (call.causal and call.dense):
            raise refuse(WHERE, "core_attention_bias_type", "alibi", "with cp_comm_type 'all_gather' it needs a causal mask and a padded layout; give "
                         "cp_comm_type='a2a'")
        if call.bias is not None:
            _check_bias(context, call)

    def attend(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not self.call.dense:
            return self._packed(k, v)
        outs = [self._dense(piece, k, v) for piece in _pieces(self.context, self.call)]
        return outs[0] if len(outs) == 1 else torch.cat(outs, self.call.dim)

    def _dense(self, piece: _Piece, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        call, dim = self.call, self.call.dim
        length, keys = piece.q.shape[dim], k.shape[dim]
        left, right = call.window
        begin, end, mask = 0, keys, call.mask
        if call.causal or call.window != (-1, -1):
            begin = max(0, piece.begin - left) if left >= 0 and piece.tokens is None else 0
            end = min(keys, piece.begin + length + (0 if call.causal else keys if right < 0 else right))
        if call.causal:
            mask = "padding_causal_bottom_right" if piece.tokens is not None else "causal_bottom_right"
        elif call.window != (-1, -1):
            # The layer's window counts from the bottom right, which is `ahead` keys behind the piece's last aligned key.
            ahead = end - (piece.begin + length)
            left, right = left + ahead if left >= 0 else -1, right - ahead if right >= 0 else -1
        inputs: dict = {}
        if piece.tokens is not None:
            visible = call.lengths[1].diff()
            inputs.update(cu_seqlens_q=sums(piece.tokens), cu_seqlens_kv=sums(visible.clamp(max=end)))
        biases: Tuple[torch.Tensor, ...] = ()
        if call.bias is not None:
            bias = call.bias.expand(*call.bias.shape[:2], call.q.shape[dim], keys)[:, :, piece.rows, begin:end]
            scale = 1 / math.sqrt(self.module.kv_channels) if self.module.softmax_scale is None else float(self.module.softmax_scale)
            biases = ((bias * scale if call.bias_kind == "pre_scale_bias" else bias).contiguous(),)
            inputs["bias"] = biases[0]
        if call.bias_kind == "alibi":
            inputs["alibi_slopes"] = self.module._own_slopes(call.q.device) if call.slopes is None else call.slopes
        return self._run(piece.q, k.narrow(dim, begin, end - begin), v.narrow(dim, begin, end - begin), mask, (left, right), inputs, biases)

    def _run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str, window: Tuple[int, int], inputs: dict, biases: tuple) -> torch.Tensor:
        if self.module.return_max_logit:
            largest = self.module._max_logit(q, k, self.call.layout, mask, window, self.call.cap, inputs).float()
            self.logits = largest if self.logits is None else torch.maximum(self.logits, largest)
        return self.run(q, k, v, mask, window, inputs, biases)

    def _packed(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        call, out = self.call, None
        mask = "padding_causal_bottom_right" if call.causal else "padding"
        visible = call.lengths[1].diff()
        starts_kv = call.lengths[1] if call.lengths[3] is None else call.lengths[3]
        for piece in _pieces(self.context, call):
            # A causal query sees no key after its own position, so keys after the piece's last query are left out.
            shown = torch.minimum(visible, piece.begin + piece.tokens) if call.causal else visible
            # Sequences of which the piece has no query keep no key either.
            shown = torch.where(piece.tokens > 0, shown, 0)
            part = self._run(call.q, k, v, mask, call.window, dict(
                cu_seqlens_q=sums(piece.tokens), cu_seqlens_kv=sums(shown), cu_seqlens_q_padded=piece.starts.to(torch.int32), cu_seqlens_kv_padded=starts_kv,
                max_seqlen_q=call.lengths[4], max_seqlen_kv=call.lengths[5]), ())
            out = part if out is None else out + part
        assert out is not None
        return out


def attend(context: Context, module: Any, call: AttentionCall, cumulative: Callable, prepared: Callable, run: Callable, recompute: bool) -> Any:
    """The attention of this rank's queries, [.., heads, channels], and the largest scores if the module returns them.

    cumulative: derives cumulative lengths from a padding mask. prepared: the module's layer mask, window, inputs and extras for a call of whole
    sequences. run: (q, k, v, layout, mask, window, cap, inputs, extras, sink, ranks of heads) -> the module's layer on them. recompute:
    checkpoint_core_attention.
    """
    if isinstance(call.q, torch.Tensor):
        _check_group(context, call)
    words = _words(context, module, call)

    def prepare() -> Tuple[AttentionCall, Optional[_Spread], Optional[_Gather]]:
        checked = _with_lengths(context, _check(context, module, call), cumulative)
        _check_aligned(context, checked)
        if context.kind in ("p2p", "a2a+p2p"):
            _check_ring(context, module, checked)
        if module.return_max_logit and _in_fp8():
            raise refuse(WHERE, "return_max_logit", True, "in FP8 attention nothing keeps the scores; leave fp8_dpa and fp8_mha out of the recipe, or "
                         "return_max_logit")
        gather = None
        if context.kind == "all_gather":
            gather = _Gather(context, module, checked, lambda q, k, v, mask, window, inputs, extras: run(
                q, k, v, checked.layout, mask, window, checked.cap, inputs, extras, checked.sink, 1))
        return checked, None if context.heads is None else _Spread(context, checked), gather

    device = call.q.device if isinstance(call.q, torch.Tensor) else torch.device("cpu")
    checked, spread, gather = agree_over(WHERE, context.groups, device, words, prepare)

    def compute(q, k, v, bias, sink):
        return _computed(context, module, checked._replace(q=q, k=k, v=v, bias=bias, sink=sink), words, spread, gather, prepared, run)

    tensors = (checked.q, checked.k, checked.v, checked.bias, checked.sink)
    if recompute and torch.is_grad_enabled():
        return checkpoint(compute, *tensors, use_reentrant=False)
    return compute(*tensors)


def _computed(context: Context, module: Any, call: AttentionCall, words: str, spread: Optional[_Spread], gather: Optional[_Gather], prepared: Callable,
              run: Callable) -> Any:
    logits = None
    if gather is not None:
        gather.call, gather.logits = call, None
        k, v = gathered_sequences(context.keys, gather.order, call.k, call.v)
        out = gather.attend(k, v)
        return out, None if gather.logits is None else _largest(gather.logits, context.keys)
    if spread is None:
        out, logits = _ring(context, module, call, words, run)
        return out, _largest(logits, context.keys) if module.return_max_logit else None
    q, k, v = whole_sequences(spread.group, spread.orders, call.q, call.k, call.v)
    sink = None if call.sink is None else own_heads(spread.group, call.sink)
    whole = call._replace(q=q, k=k, v=v, sink=sink)
    if context.keys is not None:
        out, logits = _ring(context, module, whole, words, run)
        logits = _largest(logits, context.keys) if module.return_max_logit else None
    else:
        slopes = spread.heads_of(module._own_slopes(q.device) if call.slopes is None else call.slopes) if call.bias_kind == "alibi" else None
        mask, window, inputs, extras = prepared(whole, slopes)

        def compute() -> torch.Tensor:
            return run(q, k, v, call.layout, mask, window, call.cap, inputs, extras, sink, spread.ranks)

        # The other ranks wait for this one's output: a failure here is reported to them instead.
        out = agree(WHERE, spread.group, q.device, f"forward of {words}", compute)
        if module.return_max_logit:
            logits = module._max_logit(q, k, call.layout, mask, window, call.cap, inputs).float()
    if logits is not None:
        every = logits.new_empty(logits.shape[0] * spread.ranks)
        collectives.all_gather_into(every, logits.contiguous(), spread.group)
        logits = every
    return whole_heads(spread.group, spread.orders[0], out), logits


def _largest(logits: torch.Tensor, group: Any) -> torch.Tensor:
    logits = logits.clone()
    collectives.all_reduce(logits, group, "max")
    return logits


def rank_and_size(group: Any, kind: str) -> Tuple[int, int]:
    """This rank's number in cp_group, in the order of the sequence's chunks, and the number of ranks."""
    found = find_context(group, kind, None, _DUAL)
    return (0, 1) if found is None else (found.rank, found.size)
