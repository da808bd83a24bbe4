"""Fused attention with gradients."""

from __future__ import annotations

import functools
from enum import Enum
from typing import Any, NamedTuple, Optional, Tuple, Union

import jax
import jax.numpy as jnp

from te_fl.errors import InvalidArgument, Unsupported
from te_fl.jax import _context_parallel, ops
from te_fl.jax._attention_parts import Parts, split_mesh
from te_fl.jax._context_parallel import ReorderStrategy, inverse_reorder_causal_load_balancing, reorder_causal_load_balancing  # noqa: F401
from te_fl.jax._partition import Layout
from te_fl.jax._varying import align
from te_fl.jax.quantize import random_state


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


class CPStrategy(Enum):
    """The ways in which devices that divide sequences exchange keys. DEFAULT is ALL_GATHER."""

    DEFAULT = 0
    ALL_GATHER = 1
    RING = 2


class QKVFormat(Enum):
    SBHD = "sbhd"
    BSHD = "bshd"
    THD = "thd"


class AttnSoftmaxType(Enum):
    VANILLA_SOFTMAX = "vanilla"
    OFF_BY_ONE_SOFTMAX = "off_by_one"
    LEARNABLE_SOFTMAX = "learnable"

    @classmethod
    def from_str(cls, softmax_type: str) -> "AttnSoftmaxType":
        name = softmax_type.replace("-", "_").lower()
        if name not in [kind.value for kind in cls]:
            raise InvalidArgument(f"softmax_type is {softmax_type!r}; it is one of 'vanilla', 'off-by-one', 'learnable'")
        return cls(name)


class QKVLayout(Enum):
    BS3HD = "bs3hd"
    BSHD_BS2HD = "bshd_bs2hd"
    BSHD_BSHD_BSHD = "bshd_bshd_bshd"
    T3HD = "t3hd"
    THD_T2HD = "thd_t2hd"
    THD_THD_THD = "thd_thd_thd"

    def get_qkv_format(self) -> QKVFormat:
        return QKVFormat.THD if self.is_thd() else QKVFormat.BSHD

    def is_qkvpacked(self) -> bool:
        return self in (QKVLayout.BS3HD, QKVLayout.T3HD)

    def is_kvpacked(self) -> bool:
        return self in (QKVLayout.BSHD_BS2HD, QKVLayout.THD_T2HD)

    def is_separate(self) -> bool:
        return self in (QKVLayout.BSHD_BSHD_BSHD, QKVLayout.THD_THD_THD)

    def is_thd(self) -> bool:
        return self.value.startswith("t")

    def to_qkvpacked(self) -> "QKVLayout":
        return QKVLayout.T3HD if self.is_thd() else QKVLayout.BS3HD

    def to_kvpacked(self) -> "QKVLayout":
        return QKVLayout.THD_T2HD if self.is_thd() else QKVLayout.BSHD_BS2HD

    def to_separate(self) -> "QKVLayout":
        return QKVLayout.THD_THD_THD if self.is_thd() else QKVLayout.BSHD_BSHD_BSHD


_MASK_NAMES = {
    "no_mask": AttnMaskType.NO_MASK, "padding": AttnMaskType.PADDING_MASK, "causal": AttnMaskType.CAUSAL_MASK,
    "causal_padding": AttnMaskType.PADDING_CAUSAL_MASK, "padding_causal": AttnMaskType.PADDING_CAUSAL_MASK,
    "causal_bottom_right": AttnMaskType.CAUSAL_BOTTOM_RIGHT_MASK, "bottom_right_causal": AttnMaskType.CAUSAL_BOTTOM_RIGHT_MASK,
    **dict.fromkeys(("padding_causal_bottom_right", "causal_padding_bottom_right", "bottom_right_causal_padding", "bottom_right_padding_causal",
                     "causal_bottom_right_padding"), AttnMaskType.PADDING_CAUSAL_BOTTOM_RIGHT_MASK),
}


def canonicalize_attn_mask_type(attn_mask_type: str) -> AttnMaskType:
    if attn_mask_type not in _MASK_NAMES:
        raise InvalidArgument(f"attn_mask_type is {attn_mask_type!r}; it is one of {', '.join(_MASK_NAMES)}")
    return _MASK_NAMES[attn_mask_type]


def _pair(value) -> Tuple[jax.Array, jax.Array]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value, value)


class SequenceDescriptor(NamedTuple):
    """The sequence lengths of a padded batch: seqlens are int32 [batch], of queries and of keys."""

    seqlens: Tuple[jax.Array, jax.Array]

    @classmethod
    def from_seqlens(cls, seqlens: Union[jax.Array, Tuple[jax.Array, jax.Array]]) -> "SequenceDescriptor":
        return cls(_pair(seqlens))

    @classmethod
    def from_seqlens_and_offsets(cls, seqlens, seq_offsets) -> "SequenceDescriptor":
        raise Unsupported("te_fl.jax: sequences packed into rows (offsets, thd) are not supported; pad them and give from_seqlens()")

    @classmethod
    def from_segment_ids_and_pos(cls, segment_ids, segment_pos=None) -> "SequenceDescriptor":
        raise Unsupported("te_fl.jax: segment ids are not supported; pad the sequences and give from_seqlens(), or a mask")


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
    """Optional arguments besides q, k and v."""

    bias: Optional[jax.Array] = None
    softmax_sink: Optional[jax.Array] = None
    attn_mask: Optional[jax.Array] = None
    cu_seqlens_q: Optional[jax.Array] = None  # int32 [batch], lengths; the op call is given their cumulative sums
    cu_seqlens_kv: Optional[jax.Array] = None
    rng: Optional[jax.Array] = None

    def arguments(self) -> dict:
        return {name: value for name, value in self._asdict().items() if value is not None}


def _split(qkv: Tuple[jax.Array, ...], layout: QKVLayout) -> Tuple[jax.Array, jax.Array, jax.Array]:
    arrays = [a for a in qkv if a is not None]
    wanted = {QKVLayout.BS3HD: 1, QKVLayout.BSHD_BS2HD: 2, QKVLayout.BSHD_BSHD_BSHD: 3}[layout]
    if len(arrays) != wanted:
        raise InvalidArgument(f"qkv_layout {layout.name} takes {wanted} arrays, not {len(arrays)}")
    if wanted == 3:
        return tuple(arrays)
    packed = arrays[-1]
    if packed.ndim != 5 or packed.shape[2] != 4 - wanted:
        raise InvalidArgument(f"qkv_layout {layout.name} packs {4 - wanted} arrays in dimension 2 of [.., .., {4 - wanted}, heads, size], and the "
                         f"array has shape {packed.shape}")
    return (*arrays[:-1], *[packed[:, :, i] for i in range(packed.shape[2])])


def mask_out(mask: Optional[jax.Array], mask_type: AttnMaskType, window: Tuple[int, int], queries: int, keys: int) -> jax.Array:
    """Combines an arbitrary mask (nonzero: masked out; None: no mask), the mask type and the window into a mask uint8 [batch, heads, queries, keys].
    The bottom-right mask types align the last query with the last unmasked key; others align the first ones.
    """
    if mask is not None:
        if mask.ndim == 5:  # heads given as (groups, heads per group)
            mask = mask.reshape(mask.shape[0], mask.shape[1] * mask.shape[2], *mask.shape[3:])
        if mask.ndim != 4:
            raise InvalidArgument(f"the mask has shape {mask.shape}; it is [batch or 1, heads or 1, queries, keys], or has the heads in two dimensions")
        mask = jnp.broadcast_to(mask.astype(bool), (*mask.shape[:2], queries, keys))
    shift = 0
    if mask_type.is_bottom_right():
        counts = (queries, keys) if mask is None else [_last(~mask.all(axis))[..., None, None] for axis in (-1, -2)]
        shift = counts[1] - counts[0]
    where = jnp.arange(keys)[None, :] - jnp.arange(queries)[:, None] - shift
    out = where > 0 if mask_type.is_causal() else jnp.zeros((queries, keys), bool)
    if window[0] >= 0:
        out = out | (where < -window[0])
    if window[1] >= 0:
        out = out | (where > window[1])
    return out.astype(jnp.uint8)[None, None] if mask is None else (mask | out).astype(jnp.uint8)


def _last(left: jax.Array) -> jax.Array:
    """One more than the index of the last true element along the last dimension; 0 if there is none."""
    return jnp.max(jnp.where(left, jnp.arange(1, left.shape[-1] + 1), 0), axis=-1)


def _padding(lengths: Tuple[jax.Array, jax.Array], queries: int, keys: int) -> jax.Array:
    """The mask of sequences with these lengths, [batch, 1, queries, keys]. Queries in the padding have all keys masked out, so their results are
    zeros.
    """
    rows, columns = (jnp.arange(count) >= one[:, None] for count, one in zip((queries, keys), lengths))
    return (rows[:, :, None] | columns[:, None, :])[:, None]


def _from_top_left(window: Tuple[int, int], queries: int, keys: int) -> Optional[Tuple[int, int]]:
    """Converts a window aligned to the first query and key to one aligned to the last ones, as the op's is without a causal mask; None if the op has
    no such window.
    """
    shift = keys - queries
    left, right = (one if one < 0 else one + by for one, by in zip(window, (shift, -shift)))
    return None if window[0] >= 0 > left or window[1] >= 0 > right else (left, right)


def _random_state(seed: jax.Array) -> jax.Array:
    """Converts a seed to the op's random state, uint32 [4]. The seed is a Transformer Engine seed, a jax.random key of either kind (of several keys
    the first), or a random state.
    """
    if jax.dtypes.issubdtype(seed.dtype, jax.dtypes.prng_key):
        return random_state(seed.reshape(-1)[0])
    if not jnp.issubdtype(seed.dtype, jnp.integer) or seed.size < 2:
        raise InvalidArgument(f"seed is {seed.dtype}{list(seed.shape)}; it is a key of jax.random, two numbers of uint32, or te_fl.jax.quantize.random_state(key)")
    words = seed.astype(jnp.uint32)
    return words if words.shape == (4,) else jnp.concatenate([words.reshape(-1)[:2], jnp.zeros((2,), jnp.uint32)])


def make_swa_mask(segment_pos_q: jax.Array, segment_pos_kv: jax.Array, window_size: Optional[Tuple[int, int]] = None,
                  dtype: Any = jnp.float32, segment_ids_q: Optional[jax.Array] = None, segment_ids_kv: Optional[jax.Array] = None) -> jax.Array:
    """A window mask from positions [.., queries] and [.., keys], as a factor [.., 1, queries, keys] that is 1 where a query attends. With segment
    ids, the left bound is aligned to the last query and key of each segment, and there is no right bound.
    """
    left, right = (jnp.inf if one < 0 else one for one in (window_size or (-1, -1)))
    where = segment_pos_kv[..., None, :] - segment_pos_q[..., :, None]
    if segment_ids_q is not None and segment_ids_kv is not None:
        counts = [jnp.where(ids != 0, (ids[..., :, None] == ids[..., None, :]).sum(-1), 0) for ids in (segment_ids_q, segment_ids_kv)]
        inside = where - counts[1][..., None, :] + counts[0][..., :, None] >= -left
    else:
        inside = (where >= -left) & (where <= right)
    return inside[..., None, :, :].astype(dtype)


def _cumulated(lengths: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])


_PREPARE = {"cu_seqlens_q": _cumulated, "cu_seqlens_kv": _cumulated}


def _strategy(strategy: Any) -> CPStrategy:
    name = getattr(strategy, "name", strategy)
    if name is None:
        return CPStrategy.DEFAULT
    found = name.upper().replace("ALLGATHER", "ALL_GATHER") if isinstance(name, str) else ""
    if found not in CPStrategy.__members__:
        raise InvalidArgument(f"context_parallel_strategy is {strategy!r}; it is one of {', '.join(CPStrategy.__members__)}")
    return CPStrategy[found]


def _refuse(**options: Any) -> None:
    for name, (value, default, way_out) in options.items():
        if value is not default and value != default:
            raise Unsupported(f"te_fl.jax: fused_attn({name}={value!r}) is not supported; {way_out}")


def fused_attn(qkv: Tuple[jax.Array, ...], bias: Optional[jax.Array], sequence_descriptor: Union[SequenceDescriptor, jax.Array, None],
               seed: Optional[jax.Array], attn_bias_type: AttnBiasType, attn_mask_type: AttnMaskType, qkv_layout: QKVLayout,
               softmax_type: AttnSoftmaxType, scaling_factor: float, dropout_probability: float, is_training: bool,
               max_segments_per_seq: int = 1, window_size: Optional[Tuple[int, int]] = None,
               context_parallel_strategy: Union[CPStrategy, str, None] = CPStrategy.DEFAULT,
               context_parallel_causal_load_balanced: bool = False, context_parallel_axis: str = "", context_checkpoint_name: str = "context",
               softmax_offset: Optional[jax.Array] = None, stripe_size: Optional[int] = None, score_mod=None, score_mod_bprop=None,
               score_mod_tensors=None, score_mod_bprop_tensors=None, return_max_logit: bool = False,
               transpose_batch_sequence: bool = False) -> jax.Array:
    """softmax(scaling_factor q k^T + bias, masked) v, with dropout of the probabilities during training.

    sequence_descriptor: for padding masks, the lengths (SequenceDescriptor), or a mask [batch or 1, heads or 1, queries, keys], nonzero where masked
    out, whose last unmasked query and key define the lengths. Other mask types ignore it, as in Transformer Engine.
    seed: a jax.random key, or uint32 [4] from te_fl.jax.quantize.random_state().
    window_size: numbers of keys before and after a query's aligned key. Bottom-right mask types align the last query and key, others the first.
    context_parallel_axis: the mesh axis that divides the sequences; '': the mesh resource's cp_resource. context_parallel_strategy: how the devices exchange
    keys. context_parallel_causal_load_balanced: the tokens are in the order of reorder_causal_load_balancing(DualChunkSwap).
    softmax_offset: [heads] logits of a learnable softmax.
    transpose_batch_sequence: arrays are [sequence, batch, ..].
    """
    _refuse(max_segments_per_seq=(max_segments_per_seq, 1, "one sequence per row: leave it 1"),
            stripe_size=(stripe_size, None, "leave it None"), score_mod=(score_mod, None, "leave it None"),
            score_mod_bprop=(score_mod_bprop, None, "leave it None"),
            score_mod_tensors=(score_mod_tensors, None, "leave it None"),
            score_mod_bprop_tensors=(score_mod_bprop_tensors, None, "leave it None"),
            return_max_logit=(return_max_logit, False, "leave it False"))
    strategy = _strategy(context_parallel_strategy)
    axis, devices = _context_parallel.axis_of(context_parallel_axis)
    if qkv_layout.is_thd():
        raise Unsupported(f"te_fl.jax: qkv_layout {qkv_layout.name} is not supported; pad the sequences and take a BSHD layout")
    if attn_bias_type is AttnBiasType.PRE_SCALE_BIAS:
        raise Unsupported("te_fl.jax: attn_bias_type PRE_SCALE_BIAS is not supported; multiply by the scale and take POST_SCALE_BIAS")
    if (bias is not None) != (attn_bias_type is AttnBiasType.POST_SCALE_BIAS):
        raise InvalidArgument(f"attn_bias_type {attn_bias_type.name} goes {'without' if bias is not None else 'with'} a bias")
    if (softmax_offset is not None) != (softmax_type is AttnSoftmaxType.LEARNABLE_SOFTMAX):
        raise InvalidArgument(f"softmax_type {softmax_type.name} goes {'without' if softmax_offset is not None else 'with'} softmax_offset")
    q, k, v = _split(qkv, qkv_layout)
    sequence = 0 if transpose_batch_sequence else 1
    if window_size is not None and (isinstance(window_size, (str, int, float)) or len(window_size) != 2):
        raise InvalidArgument(f"window_size is {window_size!r}; it is a pair, the numbers of keys before and after a query's own, or None")
    if window_size is not None and not all(hasattr(w, "__index__") for w in window_size):
        raise InvalidArgument(f"window_size is {window_size!r}; its numbers of keys are integers, -1 for all of them")
    window = (-1, -1) if window_size is None else tuple(int(w) for w in window_size)
    dropout = float(dropout_probability) if is_training else 0.0
    if dropout > 0 and seed is None:
        raise InvalidArgument(f"dropout_probability is {dropout_probability}; give seed=key, of jax.random")
    mask_type = attn_mask_type.value
    if devices > 1:
        return _context_parallel.attend(axis, strategy is CPStrategy.RING, bool(context_parallel_causal_load_balanced), q, k, v,
                                        "sbhd" if transpose_batch_sequence else "bshd", mask_type, softmax_type.value, float(scaling_factor), window,
                                        {"bias": bias, "dropout_probability": dropout or None, "softmax_offset": softmax_offset})
    lengths, mask = (None, None), None
    extents = (q.shape[sequence], k.shape[sequence])
    free = not attn_mask_type.is_causal() and window != (-1, -1)  # the op aligns such a window to the bottom right
    if attn_mask_type.is_padding() and isinstance(sequence_descriptor, SequenceDescriptor):
        lengths = tuple(one.astype(jnp.int32) for one in sequence_descriptor.seqlens)
        if free and sequence_descriptor.seqlens[0] is not sequence_descriptor.seqlens[1]:
            mask_type, mask = "arbitrary", mask_out(_padding(lengths, *extents), attn_mask_type, window, *extents)
            lengths, window = (None, None), (-1, -1)
    elif attn_mask_type.is_padding():
        if sequence_descriptor is None:
            raise InvalidArgument(f"attn_mask_type {attn_mask_type.name} needs a SequenceDescriptor or a mask")
        mask_type, mask = "arbitrary", mask_out(sequence_descriptor, attn_mask_type, window, *extents)
        window = (-1, -1)
    elif free and _from_top_left(window, *extents) is None:
        mask_type, mask, window = "arbitrary", mask_out(None, attn_mask_type, window, *extents), (-1, -1)
    elif free:
        window = _from_top_left(window, *extents)
    sink = None if softmax_offset is None else softmax_offset.astype(jnp.float32).reshape(-1)
    settings = _Settings("sbhd" if transpose_batch_sequence else "bshd", mask_type, softmax_type.value, float(scaling_factor), dropout, window)
    if bias is not None:
        bias = bias.astype(q.dtype)
        if jax.default_backend() == "cpu":  # the fast CPU implementation has no gradient of a bias shared by sequences
            bias = jnp.broadcast_to(bias, (q.shape[1 - sequence], q.shape[2], q.shape[sequence], k.shape[sequence]))
    q, k, v, bias, sink = align((q, k, v, bias, sink))
    rng = _random_state(seed) if dropout > 0 else None
    parts = split_mesh(q.shape[1 - sequence], q.shape[2], k.shape[2]) if dropout > 0 else None
    return _attention(q, k, v, bias, sink, _Extras(None, None, mask, *lengths, rng), settings, parts)


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
