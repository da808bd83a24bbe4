"""Sharding of op calls over a mesh: rules for XLA's partitioner, derived from the specification's shape rules.

Rows (the leading dimensions) may be sharded if an op treats them independently; GEMMs also along N and, followed by a sum over devices, along K;
attention, rotary embedding and softmax along batch and heads. Results that sum over rows are summed over devices, and amaxes are reduced by maximum.
Block scales are sharded with their blocks, provided that the scales of each shard have the layout that a separate matrix of its size would have. All
other calls are replicated: every device executes the whole call. Ops with random numbers are among them, since their random counters are indices into the
whole call; attention is the exception (_attention_parts). Inside shard_map none of this applies: each device calls the op on its shard.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, Callable, Collection, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import jax
from jax.custom_batching import sequential_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from te_fl import _native
from te_fl.jax._shape_rule import terms
from te_fl.jax._tensors import BlockLayout, block_layout, spread_scale_inv
from te_fl.jax.sharding import flat_axes, global_mesh_resource

Factors = Tuple[str, ...]  # one name per dimension
Spread = Mapping[str, Tuple[int, int]]  # the numbers of dimensions of an argument's rows and columns; see te_fl.jax._call.call

_ROWWISE = ("layernorm_fwd", "layernorm_bwd", "rmsnorm_fwd", "rmsnorm_bwd", "quantize", "dequantize")
_ROPE = ("fused_rope_forward", "fused_rope_backward")
_SUMMED = ("dgamma", "dbeta", "dbias", "bias_grad", "dsink")  # results that are summed over rows or sequences


@functools.cache
def _rules(op: str) -> Dict[str, Tuple[str, str]]:
    return {arg["name"]: (arg["shape"], arg["same_as"]) for arg in _native.schema(op)["args"]}


@functools.cache
def _rowwise(op: str) -> bool:
    names = set(_rules(op))
    return op in _ROWWISE or names in ({"input", "output"}, {"grad", "input", "output"}, {"grad", "input", "output", "dbias"},
                                       {"input", "output", "limit", "alpha"}, {"grad", "input", "output", "limit", "alpha"})


def attention_factors(name: str, shape: Tuple[int, ...], layout: str) -> Optional[Factors]:
    """The names of the dimensions of attention's argument: "b" for sequences, "h" for heads. None: every device has the whole argument."""
    if name == "softmax_lse":
        return ("b", "h", "sq")
    if name in ("softmax_sink", "dsink"):
        return ("h",)
    if name in ("cu_seqlens_q", "cu_seqlens_kv"):  # per-sequence lengths; each device computes cumulative lengths from its own shard
        return ("b",)
    if len(shape) == 4 and name in ("bias", "dbias", "attn_mask"):
        return ("b" if shape[0] != 1 else "", "h" if shape[1] != 1 else "", "", "")
    if len(shape) != 4 or name not in ("q", "k", "v", "o", "d_o", "dq", "dk", "dv"):
        return None
    length = "sk" if name in ("k", "v", "dk", "dv") else "sq"
    size = "dv" if name in ("v", "o", "d_o", "dv") else "dk"
    return ("b", length, "h", size) if layout == "bshd" else (length, "b", "h", size)


def _spread_out(rule: Sequence[str], rows: int, columns: int) -> Tuple[Factors, Factors]:
    """The names of a matrix's rows and columns, which consist of several dimensions each. Of columns [n, N], a mesh shards N, so both halves of a
    gated activation are sharded along H.
    """
    first, *rest = rule
    last = rest[0] if rest else first if first != "..." else "h"
    leading = "row" if "..." in first else first.lower()
    names = (leading,) if rows == 1 and leading != "row" else tuple(f"{leading}{i}" for i in range(rows))
    return names, ("",) * (columns - 1) + ((last[2:] if last.startswith("2*") else last).lower(),) * (columns > 0)


def _by_rule(rule: Sequence[str], rank: int) -> Optional[Factors]:
    words: List[str] = []
    for word in rule:
        if word == "...":
            words += [f"row{i}" for i in range(rank - len(rule) + 1)]
        elif word == "@...":
            words.append("row0")
        else:
            words.append(word.lower() if word.isalpha() else "")  # unnamed: a dimension of this array only
    return tuple(words) if len(words) == rank else None


def _layout(name: str, settings: Mapping[str, Any]) -> Optional[BlockLayout]:
    """The layout of a block scale array; None for other arrays."""
    arg, _, part = name.partition(".")
    return block_layout(settings.get(f"{arg}.scaling", "tensor"), part == "columnwise_scale_inv") if part.endswith("scale_inv") else None


def _factors(op: str, name: str, struct: Any, settings: Mapping[str, Any], spread: Spread) -> Optional[Factors]:
    """The dimensions' names; None: every device has the whole array."""
    arg, _, part = name.partition(".")
    rank = len(struct.shape)
    layout = _layout(name, settings)
    if part not in ("", "columnwise_data") and (layout is None or arg not in spread) or arg not in _rules(op):
        return None
    if op.startswith("fused_attn"):
        return attention_factors(name, struct.shape, settings.get("layout", "sbhd"))
    if op in _ROPE:
        lead = ("b", "s") if settings.get("layout") == "bshd" else ("s", "b")
        return (*lead, "h", "") if rank == 4 and arg != "freqs" else None
    rule = terms(op, _rules(op)[arg][0], settings)
    if arg in spread:
        rows, columns = _spread_out(rule, *spread[arg])
        if layout is not None:
            found = columns + rows if layout.columns_first else rows + columns
            return found if len(found) == rank else None
        return columns + rows if part and settings.get(f"{arg}.scaling") != "mxfp8" else rows + columns
    found = _by_rule(rule, rank)
    return found[::-1] if part and found is not None else found


def _numbered(*names: str) -> Set[str]:
    return {f"{name}{i}" for name in names for i in ("", *range(8))}


def _may_cut(op: str, operands: Sequence, settings: Mapping[str, Any], spread: Spread, prepared: Collection[str]) -> Set[str]:
    """The names of dimensions along which the op may be sharded."""
    names = {name for name, _ in operands}
    if "rng" in names or not spread and any(key.endswith(".scaling") and value != "tensor" for key, value in settings.items()):
        return set()
    if any(key.endswith(".compute_scale") for key in settings):
        return set()
    if op == "generic_gemm":
        plain = {name.partition(".")[0] for name in names} == {"a", "b"}
        return _numbered("m", "n", "k") if plain else _numbered("m", "n")
    if op.startswith("fused_attn"):
        rest = names - {"d_o", "q", "k", "v", "o", "softmax_lse", "bias", "attn_mask", "softmax_sink", *prepared}
        return set() if rest else {"b", "h"}
    if op in _ROPE:
        return {"b", "h"} if names == {"input", "freqs"} else set()
    if op.startswith("scaled_") and "softmax" in op:
        return {"b"} if "mask" in names else {"b", "h"}
    if _rowwise(op):
        per_row = any("@..." in rule for rule, _ in _rules(op).values())
        return _numbered("row") | ({"h"} if spread and not per_row else set())
    return set()


def _spec(factors: Optional[Factors], rank: int, axes: Mapping[str, Any]) -> PartitionSpec:
    return PartitionSpec(*([None] * rank if factors is None else [axes.get(f) for f in factors]))


def _laid(infos: Sequence, factors: Sequence[Optional[Factors]]) -> List[Tuple[str, Any]]:
    """The dimensions of these arrays that are sharded, with their mesh axes, in the arrays' order."""
    specs = [getattr(info.sharding, "spec", None) for info in infos]
    return [pair for spec, names in zip(specs, factors) if names is not None and spec is not None for pair in zip(names, tuple(spec)) if pair[1]]


def _chosen(laid: Sequence[Tuple[str, Any]], cut: Set[str], fits: Callable[[Mapping[str, Any]], bool]) -> Dict[str, Any]:
    """Assigns mesh axes to each sharded dimension: the first proposal wins, and each axis is used once. A dimension that the axes do not divide stays
    unsharded.
    """
    axes: Dict[str, Any] = {}
    used: Set[str] = set()
    for name, axis in laid:
        flat = flat_axes([axis])
        if name in cut and name not in axes and not used & set(flat) and fits({**axes, name: axis}):
            axes[name] = axis
            used |= set(flat)
    return axes


class _Plan:
    """The sharding plan of one call: the dimension names of its arrays, and the names along which it may be sharded."""

    def __init__(self, op: str, operands: Sequence, results: Sequence, settings: Mapping[str, Any], spread: Spread, prepared: Collection[str]):
        self.op, self.operands, self.results = op, list(operands), list(results)
        self.settings, self.spread = settings, spread
        resource = global_mesh_resource()
        self.columns = ("h", "n", "m") if settings.get("trans_a") else ("h", "n", "k")
        self.tensor = {axis for axis in (resource.tp_resource, resource.tpsp_resource) if axis is not None}
        both = self.operands + self.results
        self.factors = [None if name.startswith("cu_seqlens") and name not in prepared else _factors(op, name, struct, settings, spread)
                        for name, struct in both]
        self.cut = _may_cut(op, operands, settings, spread, prepared)
        norm = op.startswith(("layernorm", "rmsnorm"))
        columns = any(name.endswith(".columnwise_data") for name, _ in both)
        if not spread and (norm or columns) and max(len(struct.shape) for name, struct in both if "." not in name) > 2:
            # Per-row statistics and column-wise FP8 data have a single dimension for all rows, which cannot be sharded per dimension.
            self.cut = set()
        if any(_layout(name, settings) is not None and f is None for (name, _), f in zip(both, self.factors)):
            self.cut = set()  # block scales with padding
        self.extents: Dict[str, List[int]] = {}
        for names, (_, struct) in zip(self.factors, both):
            for name, extent in zip(names or (), struct.shape):
                self.extents[name] = sorted({*self.extents.get(name, ()), extent})
        self.cut = {name for name in self.cut if all(a > 1 and b % a == 0 for a, b in itertools.pairwise(self.extents.get(name, [])))}

    def rule(self) -> Dict[str, Any]:
        """The rule for XLA's partitioner. Every dimension needs a name, in the order of first appearance."""
        unique = iter(range(10**6))
        both = self.operands + self.results

        sizes = {f"{name}_{i}": b // a for name in self.cut for i, (a, b) in enumerate(itertools.pairwise(self.extents.get(name, [])))}

        def word(name: str, extent: int) -> str:
            if name not in self.cut:
                return f"only{next(unique)}"
            inner = [f"{name}_{i}" for i in range(self.extents[name].index(extent))]  # for heads that share keys, or elements that share a scale
            return f"({' '.join([name, *inner])})" if inner else name

        words = [" ".join(word(*dim) for dim in zip(f if f is not None else ("",) * len(struct.shape), struct.shape))
                 for f, (_, struct) in zip(self.factors, both)]
        count = len(self.operands)
        names = dict.fromkeys(w.strip("()") for text in words for w in text.split())
        return {**sizes, "sharding_rule": ", ".join(words[:count]) + " -> " + ", ".join(words[count:]),
                "reduction_factors": tuple(w for w in names if self._summed(w) and w in self.cut),
                "need_replication_factors": tuple(w for w in names if w not in self.cut)}

    def _summed(self, name: str) -> bool:
        return self.op == "generic_gemm" and name.startswith("k")

    def shardings(self, mesh: Any, axes: Mapping[str, Any]) -> List[NamedSharding]:
        both = self.operands + self.results
        return [NamedSharding(mesh, _spec(f, len(struct.shape), axes)) for f, (_, struct) in zip(self.factors, both)]

    def _summed_over(self, name: str, factors: Optional[Factors], axes: Mapping[str, Any]) -> Tuple[str, ...]:
        """The mesh axes over which this result must be summed."""
        if self.op == "generic_gemm" and name == "d":
            return flat_axes([axis for factor, axis in axes.items() if self._summed(factor)])
        return flat_axes([axis for factor, axis in axes.items() if factor not in (factors or ())]) if name in _SUMMED else ()

    def scattered(self, mesh: Any, axes: Mapping[str, Any], infos: Sequence) -> List[Dict[int, Tuple[str, ...]]]:
        """For each result: the dimensions that may stay sharded after a sum over devices, as the program requests, with their mesh axes. The sum is
        then a reduce-scatter instead of an all-reduce.
        """
        found: List[Dict[int, Tuple[str, ...]]] = []
        for (name, struct), factors, info in zip(self.results, self.factors[len(self.operands):], infos):
            rest, dims = list(self._summed_over(name, factors, axes)), {}
            spec = getattr(info.sharding, "spec", None)
            for i, wanted in enumerate(() if spec is None or factors is None else spec):
                flat = flat_axes([wanted])
                fits = struct.shape[i] % math.prod(mesh.shape[axis] for axis in flat) == 0
                if flat and factors[i] not in axes and fits and set(flat) <= set(rest):
                    dims[i] = flat
                    rest = [axis for axis in rest if axis not in flat]
            found.append(dims)
        return found

    def whole(self, name: str, value: jax.Array, factors: Optional[Factors], axes: Mapping[str, Any], dims: Mapping[int, Tuple[str, ...]]):
        """Combines this device's result with those of the other devices (sum or maximum), or selects this device's shard of a replicated result."""
        if name.endswith("amax"):
            everywhere = flat_axes(list(axes.values()))
            return jax.lax.pmax(value, everywhere) if everywhere else value
        over = self._summed_over(name, factors, axes)
        for dim, flat in dims.items():
            value = jax.lax.psum_scatter(value, flat, scatter_dimension=dim, tiled=True)
        rest = tuple(axis for axis in over if not any(axis in flat for flat in dims.values()))
        return jax.lax.psum(value, rest) if rest else value

    def of_a_device(self, run: Callable, mesh: Any, axes: Mapping[str, Any],
                    infos: Sequence = ()) -> Tuple[Callable, List[NamedSharding], List[NamedSharding]]:
        """Returns one device's function on its shards, and the shardings of operands and results. infos: the shardings that the program requests for
        results.
        """
        shardings, count = self.shardings(mesh, axes), len(self.operands)
        local = [sharding.shard_shape(struct.shape) for sharding, (_, struct) in zip(shardings[count:], self.results)]
        dims = self.scattered(mesh, axes, infos) if infos else [{} for _ in self.results]

        def lower(*arrays):
            results = zip(self.results, run(local, *arrays), self.factors[count:], dims)
            return tuple(self.whole(name, value, factors, axes, cut) for (name, _), value, factors, cut in results)

        made = [NamedSharding(mesh, PartitionSpec(*[cut.get(i, axis) for i, axis in enumerate(sharding.spec)])) if cut else sharding
                for sharding, cut in zip(shardings[count:], dims)]
        return lower, shardings[:count], made

    def chosen(self, mesh: Any, infos: Sequence) -> Dict[str, Any]:
        def fits(axes: Mapping[str, Any]) -> bool:
            devices = {name: math.prod(mesh.shape[a] for a in flat_axes([axis])) for name, axis in axes.items()}
            return all(extent % devices[name] == 0 for name in axes for extent in self.extents[name]) and self._blocks_fit(devices)

        laid = _laid(infos, self.factors)
        # On tensor axes, columns take precedence: another array's rows that use the same axes (for example sequence dimensions) are gathered.
        columns = [pair for pair in laid if pair[0] in self.columns and set(flat_axes([pair[1]])) <= self.tensor]
        return _chosen(columns + laid, self.cut, fits)

    def _blocks_fit(self, devices: Mapping[str, int]) -> bool:
        """True if the block scales of each shard, with dimensions divided by these numbers of devices, have the layout of a separate matrix."""
        both = self.operands + self.results
        data = {arg: (names, struct.shape) for (arg, struct), names in zip(both, self.factors)}

        def local(names: Optional[Factors], shape: Tuple[int, ...]) -> Tuple[int, ...]:
            return tuple(extent // devices.get(name, 1) for name, extent in zip(names or (), shape))

        for (arg, struct), names in zip(both, self.factors):
            layout = _layout(arg, self.settings)
            if layout is None:
                continue
            of = arg.partition(".")[0]
            columnwise = arg.endswith("columnwise_scale_inv")
            shape = local(*data[f"{of}.columnwise_data" if columnwise else of])
            rows, columns = self.spread[of]
            turned = columnwise and self.settings[f"{of}.scaling"] != "mxfp8"
            first = (shape[columns:], shape[:columns]) if turned else (shape[:rows], shape[rows:])
            if spread_scale_inv(self.settings[f"{of}.scaling"], columnwise, *first) != local(names, struct.shape):
                return False
        return True

    def partition(self, run: Callable) -> Callable:
        def partition(mesh, arg_infos, result_infos):
            axes = self.chosen(mesh, list(arg_infos) + list(result_infos))
            lower, operands, results = self.of_a_device(run, mesh, axes, result_infos)
            return mesh, lower, tuple(results), tuple(operands)

        return partition

    def by_types(self, run: Callable, mesh: Any, arrays: Sequence[jax.Array]) -> List[jax.Array]:
        """The call on a mesh with explicit axes, where array types determine shardings and XLA's partitioner decides nothing."""
        axes = self.chosen(mesh, [jax.typeof(array) for array in arrays])
        lower, operands, results = self.of_a_device(run, mesh, axes)
        arrays = [jax.sharding.reshard(array, sharding) for array, sharding in zip(arrays, operands)]
        cut = jax.shard_map(lower, mesh=mesh, in_specs=tuple(s.spec for s in operands), out_specs=tuple(s.spec for s in results),
                            axis_names=set(_explicit_axes(mesh)), check_vma=False)
        return list(cut(*arrays))


def _explicit_axes(mesh: Any) -> List[str]:
    return [name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind is AxisType.Explicit]


def _mesh_of_types(arrays: Sequence[jax.Array]) -> Any:
    """The mesh with explicit axes over which any of these arrays is sharded; None if there is none."""
    for array in arrays:
        sharding = jax.typeof(array).sharding
        if any(axis is not None for axis in sharding.spec):
            return sharding.mesh
    return None


def in_one(x: jax.Array, first: int, count: int) -> jax.Array:
    """Merges `count` dimensions of x from `first` on. Over explicit axes JAX allows that only if just the first of them is sharded, so the others are
    gathered.
    """
    last = first + count
    shape = (*x.shape[:first], math.prod(x.shape[first:last]), *x.shape[last:])
    sharding = jax.typeof(x).sharding
    spec = list(sharding.spec) + [None] * (x.ndim - len(sharding.spec))
    leading = [d for d in range(first, last) if x.shape[d] != 1][:1]
    whole = [axis if d in leading or not first <= d < last else None for d, axis in enumerate(spec)]
    return (x if spec == whole else jax.sharding.reshard(x, sharding.update(spec=PartitionSpec(*whole)))).reshape(shape)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Layout:
    """The shardings over explicit axes of a tree's arrays. May be saved from a forward for its backward."""

    shardings: Tuple[Any, ...]

    @classmethod
    def of(cls, tree: Any) -> "Layout":
        return cls(tuple(jax.typeof(array).sharding for array in jax.tree.leaves(tree)))

    def put(self, tree: Any) -> Any:
        """Applies the shardings to a tree of the same structure: JAX requires that a gradient has the sharding of its primal."""
        def put(array, wanted):
            now = jax.typeof(array).sharding
            to = now.update(spec=wanted.spec) if wanted.mesh.empty else wanted  # an array made before the mesh was set has an empty mesh
            return array if now == to else jax.sharding.reshard(array, to)

        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, [put(array, wanted) for array, wanted in zip(leaves, self.shardings, strict=True)])


def call(run: Callable, op: str, arrays: Sequence[jax.Array], operands: Sequence, results: Sequence, settings: Mapping[str, Any],
         spread: Spread, prepared: Collection[str]) -> List[jax.Array]:
    """run(result shapes, *arrays), sharded by XLA's partitioner if the program runs on several devices."""
    plan = _Plan(op, operands, results, settings, spread, prepared)
    mesh = _mesh_of_types(arrays)
    if mesh is not None:
        return plan.by_types(run, mesh, arrays)
    shapes = [struct.shape for _, struct in results]
    wrapped = custom_partitioning(lambda *arrays: tuple(run(shapes, *arrays)))
    wrapped.def_partition(plan.partition(run), **plan.rule())
    return list(sequential_vmap(wrapped)(*arrays))


def may_cut_programs() -> bool:
    """True if XLA may shard the program that is being traced. Inside shard_map each device sees only its shard."""
    return jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes
