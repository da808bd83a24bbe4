"""Attention over sequences that the devices of a mesh axis divide (context parallelism): by a ring, or by gathered keys.

Each device's program is the same, so a device's place in the sequence is a traced number. The numbers of queries and keys that see each other are
therefore lengths of sequences, which the attention op reads as data, and shapes do not depend on the place.
"""

from __future__ import annotations

import functools
from enum import Enum
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from te_fl.errors import InvalidArgument, Unsupported
from te_fl.jax import ops, sharding
from te_fl.jax._attention_parts import split_mesh


class ReorderStrategy(Enum):
    """The order of tokens that gives all devices equally much work under a causal mask: two chunks of each sequence for a device, or stripes."""

    DualChunkSwap = 0
    Striped = 1


def _check_reorder(tensor: jax.Array, strategy: ReorderStrategy, cp_size: int, seq_dim: int, stripe_size: Optional[int]) -> int:
    where = "reorder_causal_load_balancing"
    if strategy not in tuple(ReorderStrategy):
        raise InvalidArgument(f"{where}: strategy is {strategy!r}; it is one of ReorderStrategy")
    if strategy is ReorderStrategy.DualChunkSwap and stripe_size is not None:
        raise InvalidArgument(f"{where}: stripe_size is {stripe_size} with DualChunkSwap, which has no stripes; leave it None")
    stripe = 1 if stripe_size is None else stripe_size
    if cp_size < 1 or stripe < 1:
        raise InvalidArgument(f"{where}: cp_size is {cp_size} and stripe_size {stripe_size}; both are 1 or more")
    pieces = 2 * cp_size if strategy is ReorderStrategy.DualChunkSwap else cp_size * stripe
    if tensor.shape[seq_dim] % pieces:
        raise InvalidArgument(f"{where}: dimension {seq_dim} of {tensor.shape} is not a multiple of {pieces}; pad the sequences")
    return stripe


def _chunks_of_ranks(ranks: int) -> List[int]:
    return [number for rank in range(ranks) for number in (rank, 2 * ranks - 1 - rank)]


def _take_chunks(tensor: jax.Array, dim: int, numbers: List[int]) -> jax.Array:
    """Reorders the equal chunks along a dimension."""
    shape = tensor.shape
    cut = tensor.reshape(*shape[:dim], len(numbers), shape[dim] // len(numbers), *shape[dim + 1:])
    return jnp.take(cut, jnp.array(numbers), axis=dim).reshape(shape)


def _inverse(numbers: List[int]) -> List[int]:
    return sorted(range(len(numbers)), key=numbers.__getitem__)


def _striped(tensor: jax.Array, dim: int, outer: int, inner: int, stripe: int) -> jax.Array:
    shape = tensor.shape
    cut = tensor.reshape(*shape[:dim], outer, inner, stripe, *shape[dim + 1:])
    return jnp.swapaxes(cut, dim, dim + 1).reshape(shape)


def reorder_causal_load_balancing(tensor: jax.Array, strategy: ReorderStrategy, cp_size: int, seq_dim: int,
                                  stripe_size: Optional[int] = None) -> jax.Array:
    """Reorders tokens so that contiguous pieces of the result give cp_size devices equally much work under a causal mask."""
    stripe = _check_reorder(tensor, strategy, cp_size, seq_dim, stripe_size)
    if strategy is ReorderStrategy.DualChunkSwap:
        return _take_chunks(tensor, seq_dim, _chunks_of_ranks(cp_size))
    return _striped(tensor, seq_dim, tensor.shape[seq_dim] // (cp_size * stripe), cp_size, stripe)


def inverse_reorder_causal_load_balancing(tensor: jax.Array, strategy: ReorderStrategy, cp_size: int, seq_dim: int,
                                          stripe_size: Optional[int] = None) -> jax.Array:
    """The inverse of reorder_causal_load_balancing()."""
    stripe = _check_reorder(tensor, strategy, cp_size, seq_dim, stripe_size)
    if strategy is ReorderStrategy.DualChunkSwap:
        return _take_chunks(tensor, seq_dim, _inverse(_chunks_of_ranks(cp_size)))
    return _striped(tensor, seq_dim, cp_size, tensor.shape[seq_dim] // (cp_size * stripe), stripe)


class Settings(NamedTuple):
    """The settings of one attention and of its division; hashable. batch_axes, head_axes: mesh axes that divide batches and heads. balanced: a device has two chunks of each
    sequence instead of one.
    """

    mesh: Any
    axis: str
    batch_axes: Tuple[str, ...]
    head_axes: Tuple[str, ...]
    ring: bool
    balanced: bool
    layout: str
    causal: bool
    scale: float
    left: int

    @property
    def ranks(self) -> int:
        return self.mesh.shape[self.axis]

    @property
    def dim(self) -> int:
        return 0 if self.layout == "sbhd" else 1

    def specs(self) -> Tuple[PartitionSpec, PartitionSpec]:
        """The sharding of q, k, v and the output, and that of the log-sum-exp."""
        batch, heads = self.batch_axes or None, self.head_axes or None
        lead = (self.axis, batch) if self.layout == "sbhd" else (batch, self.axis)
        return PartitionSpec(*lead, heads, None), PartitionSpec(batch, heads, self.axis)


def _cumulated(lengths: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])


_PREPARE = {"cu_seqlens_q": _cumulated, "cu_seqlens_kv": _cumulated}


class _Device:
    """The computation of one device on its shards, inside shard_map."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.rank = jax.lax.axis_index(settings.axis)

    def _arguments(self, q: jax.Array, mask: str, queries: Any, keys: Any) -> Dict[str, Any]:
        s = self.settings
        found: Dict[str, Any] = dict(layout=s.layout, mask_type=mask, softmax_type="vanilla", scale=s.scale, dropout_p=0.0, window_left=s.left, window_right=-1)
        if mask.startswith("padding"):
            batch = q.shape[1 - s.dim]
            found.update({name: jnp.broadcast_to(jnp.asarray(n, jnp.int32), (batch,)) for name, n in (("cu_seqlens_q", queries), ("cu_seqlens_kv", keys))})
        return found

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: str, queries: Any = 0, keys: Any = 0) -> Tuple[jax.Array, jax.Array]:
        dim = self.settings.dim
        o = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype)
        lse = jax.ShapeDtypeStruct((q.shape[1 - dim], q.shape[2], q.shape[dim]), jnp.float32)
        made = ops.run("fused_attn_fwd", {}, _PREPARE, q=q, k=k, v=v, o=o, softmax_lse=lse, **self._arguments(q, mask, queries, keys))
        found = [value for value in made if value is not None]
        return found[0], found[1]

    def backward(self, d_o, q, k, v, o, lse, mask: str, queries: Any = 0, keys: Any = 0) -> Tuple[jax.Array, jax.Array, jax.Array]:
        like = {name: jax.ShapeDtypeStruct(t.shape, t.dtype) for name, t in (("dq", q), ("dk", k), ("dv", v))}
        made = ops.run("fused_attn_bwd", {}, _PREPARE, d_o=d_o, q=q, k=k, v=v, o=o, softmax_lse=lse, dbias=False, dsink=False, **like,
                       **self._arguments(q, mask, queries, keys))
        dq, dk, dv = [value for value in made if value is not None][:3]
        return dq, dk, dv

    # -- gathered keys

    def gather(self, t: jax.Array) -> jax.Array:
        """All devices' tokens, in the sequence's order."""
        s = self.settings
        whole = jax.lax.all_gather(t, s.axis, axis=s.dim, tiled=True)
        return _take_chunks(whole, s.dim, _inverse(_chunks_of_ranks(s.ranks))) if s.balanced else whole

    def scatter(self, t: jax.Array) -> jax.Array:
        """This device's tokens of the sum over the devices."""
        s = self.settings
        if s.balanced:
            t = _take_chunks(t, s.dim, _chunks_of_ranks(s.ranks))
        return jax.lax.psum_scatter(t, s.axis, scatter_dimension=s.dim, tiled=True)

    def pieces(self, length: int) -> List[Tuple[int, int, Any]]:
        """(first row, rows, the position of the first row in the sequence) of this device's pieces of contiguous queries."""
        s = self.settings
        if not s.balanced:
            return [(0, length, self.rank * length)]
        half = length // 2
        return [(0, half, self.rank * half), (half, half, (2 * s.ranks - 1 - self.rank) * half)]

    # -- the ring

    def onward(self, *tensors: jax.Array) -> Tuple[jax.Array, ...]:
        ranks = self.settings.ranks
        return tuple(jax.lax.ppermute(t, self.settings.axis, [(i, (i + 1) % ranks) for i in range(ranks)]) for t in tensors)

    def step(self, number: int, length: int, keys: int) -> Tuple[str, Any, Any, Any]:
        """(mask, number of queries, number of keys, whether the queries are the second half) of the step with the keys of device rank - number."""
        s = self.settings
        if not s.causal:
            return "none", length, keys, False
        if number == 0:
            return "causal", length, keys, False
        lower = self.rank >= number
        if s.balanced:
            return "padding", jnp.where(lower, length, length // 2), jnp.where(lower, keys // 2, keys), ~lower
        return "padding", jnp.where(lower, length, 0), keys, False

    def rolled(self, t: jax.Array, half: Any, dim: int) -> jax.Array:
        """Exchanges the halves of the queries where only the second ones are used, which an op then reads as the first ones."""
        return t if half is False else jnp.where(half, jnp.roll(t, t.shape[dim] // 2, dim), t)

    def by_row(self, lse: jax.Array) -> jax.Array:
        return (lse.transpose(2, 0, 1) if self.settings.layout == "sbhd" else lse.transpose(0, 2, 1))[..., None]


def _gathered_forward(settings: Settings, q, k, v):
    device, dim = _Device(settings), settings.dim
    k, v = device.gather(k), device.gather(v)
    if not settings.causal:
        return device.forward(q, k, v, "none")
    outs, statistics = [], []
    for row, rows, begin in device.pieces(q.shape[dim]):
        own = jax.lax.slice_in_dim(q, row, row + rows, axis=dim)
        o, lse = device.forward(own, k, v, "padding_causal_bottom_right", rows, begin + rows)
        outs.append(o)
        statistics.append(lse)
    return jnp.concatenate(outs, dim), jnp.concatenate(statistics, 2)


def _gathered_backward(settings: Settings, q, k, v, o, lse, d_o):
    device, dim = _Device(settings), settings.dim
    whole_k, whole_v = device.gather(k), device.gather(v)
    if not settings.causal:
        dq, dk, dv = device.backward(d_o, q, whole_k, whole_v, o, lse, "none")
        sums = [dk.astype(jnp.float32), dv.astype(jnp.float32)]
    else:
        parts, sums = [], [jnp.zeros(t.shape, jnp.float32) for t in (whole_k, whole_v)]
        for row, rows, begin in device.pieces(q.shape[dim]):
            own_d_o, own, own_o = (jax.lax.slice_in_dim(t, row, row + rows, axis=dim) for t in (d_o, q, o))
            own_lse = jax.lax.slice_in_dim(lse, row, row + rows, axis=2)
            dq, dk, dv = device.backward(own_d_o, own, whole_k, whole_v, own_o, own_lse, "padding_causal_bottom_right", rows, begin + rows)
            parts.append(dq)
            sums = [total + part for total, part in zip(sums, (dk, dv))]
        dq = jnp.concatenate(parts, dim)
    return dq, *(device.scatter(total).astype(t.dtype) for total, t in zip(sums, (k, v)))


def _ring_forward(settings: Settings, q, k, v):
    device, dim = _Device(settings), settings.dim
    total = jnp.zeros((*q.shape[:3], v.shape[3]), jnp.float32)
    total_lse = jnp.full((q.shape[1 - dim], q.shape[2], q.shape[dim]), -jnp.inf, jnp.float32)
    for number in range(settings.ranks):
        following = device.onward(k, v) if number + 1 < settings.ranks else (k, v)
        mask, queries, keys, half = device.step(number, q.shape[dim], k.shape[dim])
        o, lse = device.forward(device.rolled(q, half, dim), k, v, mask, queries, keys)
        o, lse = device.rolled(o, half, dim), device.rolled(lse, half, 2)
        both = jnp.logaddexp(total_lse, lse)
        old, new = (device.by_row(jnp.where(both == -jnp.inf, 0.0, jnp.exp(one - both))) for one in (total_lse, lse))
        total, total_lse = total * old + o.astype(jnp.float32) * new, both
        k, v = following
    return total.astype(q.dtype), total_lse


def _ring_backward(settings: Settings, q, k, v, o, lse, d_o):
    device, dim = _Device(settings), settings.dim
    dq = jnp.zeros(q.shape, jnp.float32)
    sums = tuple(jnp.zeros(t.shape, jnp.float32) for t in (k, v))  # of the keys that this device has in the step; they go on with the keys
    for number in range(settings.ranks):
        mask, queries, keys, half = device.step(number, q.shape[dim], k.shape[dim])
        of_step = [device.rolled(t, half, d) for t, d in ((d_o, dim), (q, dim), (o, dim), (lse, 2))]
        part, dk, dv = device.backward(of_step[0], of_step[1], k, v, of_step[2], of_step[3], mask, queries, keys)
        dq = dq + device.rolled(part, half, dim)
        sums = device.onward(sums[0] + dk, sums[1] + dv)
        k, v = device.onward(k, v) if number + 1 < settings.ranks else (k, v)
    return (dq.astype(q.dtype), *(total.astype(t.dtype) for total, t in zip(sums, (k, v))))


def _on_devices(settings: Settings, function: Callable, ins: Tuple[PartitionSpec, ...], outs: Tuple[PartitionSpec, ...], *arrays: jax.Array):
    if AxisType.Explicit in settings.mesh.axis_types:
        arrays = tuple(jax.sharding.reshard(a, NamedSharding(settings.mesh, spec)) for a, spec in zip(arrays, ins))
    return jax.shard_map(functools.partial(function, settings), mesh=settings.mesh, in_specs=ins, out_specs=outs, check_vma=False)(*arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(settings: Settings, q, k, v):
    return _attention_fwd(settings, q, k, v)[0]


def _attention_fwd(settings: Settings, q, k, v):
    heads, statistics = settings.specs()
    function = _ring_forward if settings.ring else _gathered_forward
    o, lse = _on_devices(settings, function, (heads,) * 3, (heads, statistics), q, k, v)
    return o, (q, k, v, o, lse)


def _attention_bwd(settings: Settings, kept, d_o):
    q, k, v, o, lse = kept
    heads, statistics = settings.specs()
    function = _ring_backward if settings.ring else _gathered_backward
    return _on_devices(settings, function, (heads, heads, heads, heads, statistics, heads), (heads,) * 3, q, k, v, o, lse, d_o)


_attention.defvjp(_attention_fwd, _attention_bwd)


def axis_of(axis: str) -> Tuple[str, int]:
    """The mesh axis that divides the sequences, that of the mesh resource if none is named, and its number of devices; ("", 1) without one."""
    if not axis:
        resource = sharding.global_mesh_resource()
        axis = "" if resource is None or sharding.current_mesh() is None else resource.cp_resource or ""
    return axis, sharding.axis_size("context_parallel_axis", axis) if axis else 1


def attend(axis: str, ring: bool, balanced: bool, q: jax.Array, k: jax.Array, v: jax.Array, layout: str, mask_type: str, softmax_type: str, scale: float,
           window: Tuple[int, int], extras: Dict[str, Any]) -> jax.Array:
    """Attention with the sequences divided over the devices of a mesh axis. extras: further arguments, refused unless None."""
    for name, value in extras.items():
        if value is not None:
            raise Unsupported(f"te_fl.jax: fused_attn(context_parallel_axis={axis!r}) is not supported over several devices with {name}; leave {name} out, or "
                              "context_parallel_axis '', and XLA gathers sequences that are cut")
    mesh, dim = sharding.current_mesh(), 0 if layout == "sbhd" else 1
    ranks = mesh.shape[axis]
    if mask_type not in ("none", "causal", "causal_bottom_right") or softmax_type != "vanilla":
        raise Unsupported(f"te_fl.jax: fused_attn(context_parallel_axis={axis!r}) is not supported over {ranks} devices with mask {mask_type!r} and softmax "
                          f"{softmax_type!r}; take NO_MASK or CAUSAL_MASK and the vanilla softmax, or leave context_parallel_axis ''")
    causal = mask_type != "none"
    if window[1] not in (-1, 0) or (window[0] >= 0 and (ring or not causal)):
        raise Unsupported(f"te_fl.jax: fused_attn(window_size={window}) is not supported over {ranks} devices of context_parallel_axis={axis!r} with strategy "
                          f"{'RING' if ring else 'ALL_GATHER'}; take ALL_GATHER, a causal mask and a window (n, 0)")
    if causal and q.shape[dim] != k.shape[dim]:
        raise Unsupported(f"te_fl.jax: fused_attn over {ranks} devices of context_parallel_axis={axis!r} takes as many keys as queries under a causal mask; there "
                          f"are {q.shape[dim]} queries and {k.shape[dim]} keys")
    pieces = ranks * (2 if balanced else 1)
    for name, t in (("queries", q), ("keys", k)):
        if t.shape[dim] % pieces:
            raise InvalidArgument(f"te_fl.jax: fused_attn has {t.shape[dim]} {name}, which the {ranks} devices of context_parallel_axis={axis!r} do not divide into "
                                  f"{'two chunks each' if balanced else 'pieces'}; pad the sequences to a multiple of {pieces}")
    parts = split_mesh(q.shape[1 - dim], q.shape[2], k.shape[2])
    axes = {} if parts is None else parts.axes
    batch, heads = (tuple(one for one in axes.get(name, ()) if one != axis) for name in ("b", "h"))
    return _attention(Settings(mesh, axis, batch, heads, ring, balanced, layout, causal, scale, window[0]), q, k, v)
