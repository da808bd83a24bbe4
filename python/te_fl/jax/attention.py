"""Fused attention with its gradients, on te-fl's attention op."""

from __future__ import annotations

import functools
from enum import Enum
from typing import Any, NamedTuple, Optional, Tuple, Union

import jax
import jax.numpy as jnp

from te_fl.jax import ops
from te_fl.jax._attention_parts import Parts, parts_of
from te_fl.jax._partition import Layout
from te_fl.jax._varying import align


class AttnBiasType(Enum):
    NO_BIAS = "no_bias"
    PRE_SCALE_BIAS = "pre_scale_bias"
    POST_SCALE_BIAS = "post_scale_bias"


class AttnMaskType(Enum):
    NO_MASK = "none"
    PADDING_MASK = "padding"
    CAUSAL_MASK = "causal"
    PADDING_CAUSAL_MASK = "padding_causal"
    CAUSAL_BOTTOM_RIGHT_MASK = "causal_bottom_right"
    PADDING_CAUSAL_BOTTOM_RIGHT_MASK = "padding_causal_bottom_right"

    def is_causal(self) -> bool:
        return "causal" in self.value

    def is_padding(self) -> bool:
        return "padding" in self.value

    def is_bottom_right(self) -> bool:
        return "bottom_right" in self.value


class AttnSoftmaxType(Enum):
    VANILLA_SOFTMAX = "vanilla"
    OFF_BY_ONE_SOFTMAX = "off_by_one"
    LEARNABLE_SOFTMAX = "learnable"

    @classmethod
    def from_str(cls, softmax_type: str) -> "AttnSoftmaxType":
        name = softmax_type.replace("-", "_").lower()
        if name not in [kind.value for kind in cls]:
            raise ValueError(f"softmax_type is {softmax_type!r}; it is one of 'vanilla', 'off-by-one', 'learnable'")
        return cls(name)


class QKVLayout(Enum):
    BS3HD = "bs3hd"
    BSHD_BS2HD = "bshd_bs2hd"
    BSHD_BSHD_BSHD = "bshd_bshd_bshd"
    T3HD = "t3hd"
    THD_T2HD = "thd_t2hd"
    THD_THD_THD = "thd_thd_thd"

    def is_thd(self) -> bool:
        return self.value.startswith("t")


_MASK_NAMES = {
    "no_mask": AttnMaskType.NO_MASK, "padding": AttnMaskType.PADDING_MASK, "causal": AttnMaskType.CAUSAL_MASK,
    "causal_padding": AttnMaskType.PADDING_CAUSAL_MASK, "padding_causal": AttnMaskType.PADDING_CAUSAL_MASK,
    "causal_bottom_right": AttnMaskType.CAUSAL_BOTTOM_RIGHT_MASK,
    "causal_bottom_right_padding": AttnMaskType.PADDING_CAUSAL_BOTTOM_RIGHT_MASK,
    "padding_causal_bottom_right": AttnMaskType.PADDING_CAUSAL_BOTTOM_RIGHT_MASK,
}


def canonicalize_attn_mask_type(attn_mask_type: str) -> AttnMaskType:
    if attn_mask_type not in _MASK_NAMES:
        raise ValueError(f"attn_mask_type is {attn_mask_type!r}; it is one of {', '.join(_MASK_NAMES)}")
    return _MASK_NAMES[attn_mask_type]


def _pair(value) -> Tuple[jax.Array, jax.Array]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value, value)


class SequenceDescriptor(NamedTuple):
    """The true lengths of the sequences of a padded batch: seqlens are int32 [batch] of queries and of keys."""

    seqlens: Tuple[jax.Array, jax.Array]

    @classmethod
    def from_seqlens(cls, seqlens: Union[jax.Array, Tuple[jax.Array, jax.Array]]) -> "SequenceDescriptor":
        return cls(_pair(seqlens))

    @classmethod
    def from_seqlens_and_offsets(cls, seqlens, seq_offsets) -> "SequenceDescriptor":
        raise NotImplementedError("te_fl.jax: sequences packed into rows (offsets, thd) are not served; pad them and give from_seqlens()")

    @classmethod
    def from_segment_ids_and_pos(cls, segment_ids, segment_pos=None) -> "SequenceDescriptor":
        raise NotImplementedError("te_fl.jax: segment ids are not served; pad the sequences and give from_seqlens(), or a mask")


class _Settings(NamedTuple):
    layout: str
    mask_type: str
    softmax_type: str
    scale: float
    dropout_p: float
    window: Tuple[int, int]

    def scalars(self) -> dict:
        return {"layout": self.layout, "mask_type": self.mask_type, "softmax_type": self.softmax_type, "scale": self.scale,
                "dropout_p": self.dropout_p, "window_left": self.window[0], "window_right": self.window[1]}


class _Extras(NamedTuple):
    """The arguments that some calls have besides q, k and v."""

    bias: Optional[jax.Array] = None
    softmax_sink: Optional[jax.Array] = None
    attn_mask: Optional[jax.Array] = None
    cu_seqlens_q: Optional[jax.Array] = None  # int32 [batch] lengths, which the call cumulates
    cu_seqlens_kv: Optional[jax.Array] = None
    rng: Optional[jax.Array] = None

    def arguments(self) -> dict:
        return {name: value for name, value in self._asdict().items() if value is not None}


def _split(qkv: Tuple[jax.Array, ...], layout: QKVLayout) -> Tuple[jax.Array, jax.Array, jax.Array]:
    arrays = [a for a in qkv if a is not None]
    wanted = {QKVLayout.BS3HD: 1, QKVLayout.BSHD_BS2HD: 2, QKVLayout.BSHD_BSHD_BSHD: 3}[layout]
    if len(arrays) != wanted:
        raise ValueError(f"qkv_layout {layout.name} takes {wanted} arrays, not {len(arrays)}")
    if wanted == 3:
        return tuple(arrays)
    packed = arrays[-1]
    if packed.ndim != 5 or packed.shape[2] != 4 - wanted:
        raise ValueError(f"qkv_layout {layout.name} packs {4 - wanted} arrays in dimension 2 of [.., .., {4 - wanted}, heads, size], and the "
                         f"array has shape {packed.shape}")
    return (*arrays[:-1], *[packed[:, :, i] for i in range(packed.shape[2])])


def mask_out(mask: Optional[jax.Array], mask_type: AttnMaskType, window: Tuple[int, int], queries: int, keys: int) -> jax.Array:
    """The positions that an arbitrary mask (not 0: masked out), the mask type and the window mask out together: uint8 [batch,
    heads, queries, keys]."""
    top_left = mask_type.is_causal() and not mask_type.is_bottom_right()  # the others line up the last query with the last key
    where = jnp.arange(keys)[None, :] - jnp.arange(queries)[:, None] - (0 if top_left else keys - queries)
    out = where > 0 if mask_type.is_causal() else jnp.zeros((queries, keys), bool)
    if window[0] >= 0:
        out = out | (where < -window[0])
    if window[1] >= 0:
        out = out | (where > window[1])
    mask = mask.astype(bool)
    return (jnp.broadcast_to(mask, (*mask.shape[:2], queries, keys)) | out).astype(jnp.uint8)


def _cumulated(lengths: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])


_PREPARE = {"cu_seqlens_q": _cumulated, "cu_seqlens_kv": _cumulated}


def _refuse(**options: Any) -> None:
    for name, (value, default, way_out) in options.items():
        if value is not default and value != default:
            raise NotImplementedError(f"te_fl.jax: fused_attn({name}={value!r}) is not served; {way_out}")


def fused_attn(qkv: Tuple[jax.Array, ...], bias: Optional[jax.Array], sequence_descriptor: Union[SequenceDescriptor, jax.Array, None],
               seed: Optional[jax.Array], attn_bias_type: AttnBiasType, attn_mask_type: AttnMaskType, qkv_layout: QKVLayout,
               softmax_type: AttnSoftmaxType, scaling_factor: float, dropout_probability: float, is_training: bool,
               max_segments_per_seq: int = 1, window_size: Optional[Tuple[int, int]] = None, context_parallel_strategy: Any = None,
               context_parallel_causal_load_balanced: bool = False, context_parallel_axis: str = "", context_checkpoint_name: str = "context",
               softmax_offset: Optional[jax.Array] = None, stripe_size: Optional[int] = None, score_mod=None, score_mod_bprop=None,
               score_mod_tensors=None, score_mod_bprop_tensors=None, return_max_logit: bool = False,
               transpose_batch_sequence: bool = False) -> jax.Array:
    """softmax(scaling_factor q k^T + bias, masked) v, with dropout of the probabilities while training.

    sequence_descriptor: for the padding masks the lengths (SequenceDescriptor), or a mask [batch or 1, heads or 1, queries, keys], not 0
    where masked out; the other masks do not read it, as in Transformer Engine. seed: uint32 [4] as of te_fl.jax.quantize.random_state().
    softmax_offset: [heads] logits of a learnable softmax.
    transpose_batch_sequence: arrays are [sequence, batch, ..].
    """
    _refuse(max_segments_per_seq=(max_segments_per_seq, 1, "one sequence per row: leave it 1"),
            context_parallel_strategy=(getattr(context_parallel_strategy, "name", context_parallel_strategy), None, "leave it None")
            if getattr(context_parallel_strategy, "name", None) != "DEFAULT" else (None, None, ""),
            context_parallel_causal_load_balanced=(context_parallel_causal_load_balanced, False, "leave it False"),
            context_parallel_axis=(context_parallel_axis, "", "leave it ''"), stripe_size=(stripe_size, None, "leave it None"),
            score_mod=(score_mod, None, "leave it None"), score_mod_bprop=(score_mod_bprop, None, "leave it None"),
            score_mod_tensors=(score_mod_tensors, None, "leave it None"),
            score_mod_bprop_tensors=(score_mod_bprop_tensors, None, "leave it None"),
            return_max_logit=(return_max_logit, False, "leave it False"))
    if qkv_layout.is_thd():
        raise NotImplementedError(f"te_fl.jax: qkv_layout {qkv_layout.name} is not served; pad the sequences and take a BSHD layout")
    if attn_bias_type is AttnBiasType.PRE_SCALE_BIAS:
        raise NotImplementedError("te_fl.jax: attn_bias_type PRE_SCALE_BIAS is not served; multiply by the scale and take POST_SCALE_BIAS")
    if (bias is not None) != (attn_bias_type is AttnBiasType.POST_SCALE_BIAS):
        raise ValueError(f"attn_bias_type {attn_bias_type.name} goes {'without' if bias is not None else 'with'} a bias")
    if (softmax_offset is not None) != (softmax_type is AttnSoftmaxType.LEARNABLE_SOFTMAX):
        raise ValueError(f"softmax_type {softmax_type.name} goes {'without' if softmax_offset is not None else 'with'} softmax_offset")
    q, k, v = _split(qkv, qkv_layout)
    sequence = 0 if transpose_batch_sequence else 1
    if window_size is not None and (isinstance(window_size, (str, int, float)) or len(window_size) != 2):
        raise ValueError(f"window_size is {window_size!r}; it is a pair, the numbers of keys before and after a query's own, or None")
    window = (-1, -1) if window_size is None else tuple(int(w) for w in window_size)
    dropout = float(dropout_probability) if is_training else 0.0
    if dropout > 0 and seed is None:
        raise ValueError(f"dropout_probability is {dropout_probability}; give seed=te_fl.jax.quantize.random_state(key)")
    mask_type = attn_mask_type.value
    lengths, mask = (None, None), None
    if attn_mask_type.is_padding() and isinstance(sequence_descriptor, SequenceDescriptor):
        lengths = tuple(one.astype(jnp.int32) for one in sequence_descriptor.seqlens)
    elif attn_mask_type.is_padding():
        if sequence_descriptor is None:
            raise ValueError(f"attn_mask_type {attn_mask_type.name} needs a SequenceDescriptor or a mask")
        mask_type, mask = "arbitrary", mask_out(sequence_descriptor, attn_mask_type, window, q.shape[sequence], k.shape[sequence])
        window = (-1, -1)
    sink = None if softmax_offset is None else softmax_offset.astype(jnp.float32).reshape(-1)
    settings = _Settings("sbhd" if transpose_batch_sequence else "bshd", mask_type, softmax_type.value, float(scaling_factor), dropout, window)
    if bias is not None:
        bias = bias.astype(q.dtype)
        if jax.default_backend() == "cpu":  # whose fast implementation has no gradient of a bias that sequences share
            bias = jnp.broadcast_to(bias, (q.shape[1 - sequence], q.shape[2], q.shape[sequence], k.shape[sequence]))
    q, k, v, bias, sink = align((q, k, v, bias, sink))
    parts = parts_of(q.shape[1 - sequence], q.shape[2], k.shape[2]) if dropout > 0 else None
    return _attention(q, k, v, bias, sink, _Extras(None, None, mask, *lengths, seed if dropout > 0 else None), settings, parts)


def _call(op: str, parts: Optional[Parts], settings: _Settings, results: dict, **arrays):
    if parts is not None:
        return parts.run(op, _PREPARE, arrays, results, settings.scalars())
    made = ops.run(op, {}, _PREPARE, **arrays, **results, **settings.scalars())
    return tuple(value for value in made if value is not None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attention(q, k, v, bias, sink, extras, settings, parts):
    return _attention_fwd(q, k, v, bias, sink, extras, settings, parts)[0]


def _attention_fwd(q, k, v, bias, sink, extras, settings, parts):
    sequence, batch = (0, 1) if settings.layout == "sbhd" else (1, 0)
    present = extras._replace(bias=bias, softmax_sink=sink)
    results = {"o": jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype),
               "softmax_lse": jax.ShapeDtypeStruct((q.shape[batch], q.shape[2], q.shape[sequence]), jnp.float32)}
    o, lse = _call("fused_attn_fwd", parts, settings, results, q=q, k=k, v=v, **present.arguments())
    return o, (q, k, v, o, lse, present)


def _like(array: Optional[jax.Array]) -> Any:
    return False if array is None else jax.ShapeDtypeStruct(array.shape, array.dtype)


def _no_gradient(array: jax.Array) -> Any:
    return jnp.zeros(array.shape, jax.dtypes.float0)


def _attention_bwd(settings, parts, kept, grad):
    q, k, v, o, lse, present = kept
    results = {"dq": _like(q), "dk": _like(k), "dv": _like(v), "dbias": _like(present.bias), "dsink": _like(present.softmax_sink)}
    made = _call("fused_attn_bwd", parts, settings, results, d_o=grad, q=q, k=k, v=v, o=o, softmax_lse=lse, **present.arguments())
    rest = iter(made[3:])
    dbias = None if present.bias is None else next(rest)
    dsink = None if present.softmax_sink is None else next(rest)
    extras = present._replace(bias=None, softmax_sink=None)
    grads = Layout.of((q, k, v, present.bias, present.softmax_sink)).put((*made[:3], dbias, dsink))
    return (*grads, jax.tree.map(_no_gradient, extras))


_attention.defvjp(_attention_fwd, _attention_bwd)
