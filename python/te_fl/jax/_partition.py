"""Cuts the calls of ops over the devices of a mesh: rules for XLA's partitioner, from the shape rules of the specification.

Rows (the leading dimensions) may be cut wherever an op treats them one by one; products also along N and, with a sum over the devices, along
K; attention and softmax along batch and heads. What is summed over rows is summed over the devices, an amax is the largest of theirs. Other
calls run whole on every device: those with random numbers, whose counters number the elements of the whole, and block scales. Inside
shard_map nothing of this applies: there each device calls the op on its part.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Callable, Dict, FrozenSet, List, Mapping, Optional, Sequence, Set, Tuple

import jax
from jax.custom_batching import sequential_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from te_fl import _native
from te_fl.jax._shape_rule import terms

Factors = Tuple[str, ...]  # one name per dimension

_ROWWISE = ("layernorm_fwd", "layernorm_bwd", "rmsnorm_fwd", "rmsnorm_bwd", "quantize", "dequantize")
_SUMMED = ("dgamma", "dbeta", "dbias", "bias_grad")  # over rows


@functools.cache
def _rules(op: str) -> Dict[str, Tuple[str, str]]:
    return {arg["name"]: (arg["shape"], arg["same_as"]) for arg in _native.schema(op)["args"]}


@functools.cache
def _rowwise(op: str) -> bool:
    names = set(_rules(op))
    return op in _ROWWISE or names in ({"input", "output"}, {"grad", "input", "output"}, {"grad", "input", "output", "dbias"},
                                       {"input", "output", "limit", "alpha"}, {"grad", "input", "output", "limit", "alpha"})


def _attention(name: str, rank: int, settings: Mapping[str, Any], grouped: bool) -> Optional[Factors]:
    if name == "softmax_lse":
        return ("b", "h", "sq")
    if rank != 4 or name not in ("q", "k", "v", "o", "d_o", "dq", "dk", "dv"):
        return None
    keys = name in ("k", "v", "dk", "dv")
    length = "sk" if keys else "sq"
    head = ("kh" if grouped else "h") if keys else "h"
    size = "dv" if name in ("v", "o", "d_o", "dv") else "dk"
    return ("b", length, head, size) if settings.get("layout", "sbhd") == "bshd" else (length, "b", head, size)


def _by_rule(op: str, rule: str, rank: int, settings: Mapping[str, Any]) -> Optional[Factors]:
    words: List[str] = []
    rule_terms = terms(op, rule, settings)
    for word in rule_terms:
        if word == "...":
            words += [f"row{i}" for i in range(rank - len(rule_terms) + 1)]
        elif word == "@...":
            words.append("row0")
        else:
            words.append(word.lower() if word.isalpha() else "")  # no name: of this array alone
    return tuple(words) if len(words) == rank else None


def _factors(op: str, name: str, struct: Any, settings: Mapping[str, Any], grouped: bool, packed: FrozenSet[str]) -> Optional[Factors]:
    """The dimensions' names; None: the array is whole on every device."""
    arg, _, part = name.partition(".")
    rank = len(struct.shape)
    if part not in ("", "columnwise_data") or arg not in _rules(op):
        return None
    if op.startswith("fused_attn"):
        return _attention(name, rank, settings, grouped)
    found = _by_rule(op, _rules(op)[arg][0], rank - (arg in packed), settings)
    if arg in packed and found is not None:  # of [n, N] columns a mesh cuts N; both halves of a gated activation's then, as its H
        found = (*found[:-1], "", found[-1] or "h")
        return (*found[1:], found[0]) if part else found
    return found[::-1] if part and found is not None else found


def _may_cut(op: str, operands: Sequence, settings: Mapping[str, Any], packed: FrozenSet[str]) -> Set[str]:
    """The names of dimensions along which the op may be cut."""
    names = {name for name, _ in operands}
    if "rng" in names or any(key.endswith(".scaling") and value != "tensor" for key, value in settings.items()):
        return set()
    if any(key.endswith(".compute_scale") for key in settings):
        return set()
    if op == "generic_gemm":
        plain = {name.partition(".")[0] for name in names} == {"a", "b"}
        return {"m", "n", "k"} if plain else {"m", "n"}
    if op.startswith("fused_attn"):
        rest = {name.partition(".")[0] for name in names} - {"d_o", "q", "k", "v", "o", "softmax_lse"}
        return set() if rest else {"b", "h"}
    if op.startswith("scaled_") and "softmax" in op:
        return {"b"} if "mask" in names else {"b", "h"}
    if _rowwise(op):
        if any("@..." in rule for rule, _ in _rules(op).values()):
            return {"row0"}
        return {f"row{i}" for i in range(8)} | ({"h"} if packed else set())
    return set()


def _spec(factors: Optional[Factors], rank: int, axes: Mapping[str, Any]) -> PartitionSpec:
    return PartitionSpec(*([None] * rank if factors is None else [axes.get(f) for f in factors]))


def _chosen(infos: Sequence, factors: Sequence[Optional[Factors]], cut: Set[str], fits: Callable[[str, Tuple[str, ...]], bool]) -> Dict[str, Any]:
    """The mesh axes over which each dimension is cut: those of the first array that is cut there, each axis once. A dimension
    that these axes do not divide stays whole."""
    axes: Dict[str, Any] = {}
    used: Set[str] = set()
    for info, names in zip(infos, factors):
        spec = getattr(info.sharding, "spec", None)
        if names is None or spec is None:
            continue
        for name, axis in zip(names, tuple(spec)):
            flat = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
            if name in cut and name not in axes and flat and not used & set(flat) and fits(name, flat):
                axes[name] = axis
                used |= set(flat)
    return axes


def _flat(axes: Sequence[Any]) -> Tuple[str, ...]:
    return tuple(a for axis in axes if axis is not None for a in (axis if isinstance(axis, tuple) else (axis,)))


class _Plan:
    """The plan for cutting one call: its arrays' dimensions by name, and the names along which it may be cut."""

    def __init__(self, op: str, operands: Sequence, results: Sequence, settings: Mapping[str, Any], packed: FrozenSet[str]):
        shapes = {name.partition(".")[0]: struct.shape for name, struct in operands}
        grouped = op.startswith("fused_attn") and shapes["q"][2] != shapes["k"][2]
        self.op, self.operands, self.results = op, list(operands), list(results)
        both = self.operands + self.results
        self.factors = [_factors(op, name, struct, settings, grouped, packed) for name, struct in both]
        self.cut = _may_cut(op, operands, settings, packed) - ({"h"} if grouped else set())
        rows = [struct for name, struct in both if name in ("x", "dz")]
        flat = not op.startswith(("layernorm", "rmsnorm")) or len(rows[0].shape) == 2
        columns = [(f, len(struct.shape) - (name.partition(".")[0] in packed)) for f, (name, struct) in zip(self.factors, both)
                   if name.endswith(".columnwise_data")]
        data = [len(struct.shape) - (name in packed) for name, struct in both if "." not in name]
        if not flat or columns and (any(f is None for f, _ in columns) or max(data, default=2) > 2):
            self.cut = set()  # column-wise codes are those of a matrix

    def rule(self) -> Dict[str, Any]:
        """As XLA's partitioner wants it: every dimension has a name, and names come in the order in which they appear."""
        unique = iter(range(10**6))
        both = self.operands + self.results
        words = [" ".join(name or f"only{next(unique)}" for name in (f if f is not None else ("",) * len(struct.shape)))
                 for f, (_, struct) in zip(self.factors, both)]
        count = len(self.operands)
        names = dict.fromkeys(w for text in words for w in text.split())
        return {"sharding_rule": ", ".join(words[:count]) + " -> " + ", ".join(words[count:]),
                "reduction_factors": ("k",) if self.op == "generic_gemm" and "k" in self.cut else (),
                "need_replication_factors": tuple(w for w in names if w not in self.cut)}

    def shardings(self, mesh: Any, axes: Mapping[str, Any]) -> List[NamedSharding]:
        both = self.operands + self.results
        return [NamedSharding(mesh, _spec(f, len(struct.shape), axes)) for f, (_, struct) in zip(self.factors, both)]

    def whole(self, name: str, value: jax.Array, axes: Mapping[str, Any]) -> jax.Array:
        """A result of the parts made that of the whole."""
        everywhere = _flat(list(axes.values()))
        if name.endswith("amax"):
            return jax.lax.pmax(value, everywhere) if everywhere else value
        over = _flat([axes.get("k")]) if self.op == "generic_gemm" and name == "d" else everywhere if name in _SUMMED else ()
        return jax.lax.psum(value, over) if over else value

    def of_a_device(self, run: Callable, mesh: Any, axes: Mapping[str, Any]) -> Tuple[Callable, List[NamedSharding], List[NamedSharding]]:
        """The work of one device on its parts, and the layouts of operands and results."""
        shardings, count = self.shardings(mesh, axes), len(self.operands)
        local = [sharding.shard_shape(struct.shape) for sharding, (_, struct) in zip(shardings[count:], self.results)]

        def lower(*arrays):
            return tuple(self.whole(name, value, axes) for (name, _), value in zip(self.results, run(local, *arrays)))

        return lower, shardings[:count], shardings[count:]

    def chosen(self, mesh: Any, infos: Sequence) -> Dict[str, Any]:
        extents: Dict[str, Set[int]] = {}
        for names, (_, struct) in zip(self.factors, self.operands + self.results):
            for name, extent in zip(names or (), struct.shape):
                extents.setdefault(name, set()).add(extent)

        def fits(name: str, axes: Tuple[str, ...]) -> bool:
            return all(extent % math.prod(mesh.shape[axis] for axis in axes) == 0 for extent in extents[name])

        return _chosen(infos, self.factors, self.cut, fits)

    def partition(self, run: Callable) -> Callable:
        def partition(mesh, arg_infos, result_infos):
            axes = self.chosen(mesh, list(arg_infos) + list(result_infos))
            lower, operands, results = self.of_a_device(run, mesh, axes)
            return mesh, lower, tuple(results), tuple(operands)

        return partition

    def by_types(self, run: Callable, mesh: Any, arrays: Sequence[jax.Array]) -> List[jax.Array]:
        """The call on a mesh of explicit axes, where types say how arrays lie and XLA's partitioner decides nothing."""
        axes = self.chosen(mesh, [jax.typeof(array) for array in arrays])
        lower, operands, results = self.of_a_device(run, mesh, axes)
        arrays = [jax.sharding.reshard(array, sharding) for array, sharding in zip(arrays, operands)]
        cut = jax.shard_map(lower, mesh=mesh, in_specs=tuple(s.spec for s in operands), out_specs=tuple(s.spec for s in results),
                            axis_names=set(_explicit_axes(mesh)), check_vma=False)
        return list(cut(*arrays))


def _explicit_axes(mesh: Any) -> List[str]:
    return [name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind is AxisType.Explicit]


def _mesh_of_types(arrays: Sequence[jax.Array]) -> Any:
    """The mesh over whose explicit axes any of these is cut; None if there is none."""
    for array in arrays:
        sharding = jax.typeof(array).sharding
        if any(axis is not None for axis in sharding.spec):
            return sharding.mesh
    return None


def in_one(x: jax.Array, first: int, count: int) -> jax.Array:
    """x with `count` dimensions from `first` on made one. Over explicit axes JAX does that only where the first of them alone is cut, so the
    others are gathered."""
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
    """The layout of a tree's arrays over explicit axes. It may be kept among what a forward keeps for its backward."""

    shardings: Tuple[Any, ...]

    @classmethod
    def of(cls, tree: Any) -> "Layout":
        return cls(tuple(jax.typeof(array).sharding for array in jax.tree.leaves(tree)))

    def put(self, tree: Any) -> Any:
        """The arrays of a like tree, laid out so: JAX asks for gradients that lie as what they are the gradients of."""
        def put(array, wanted):
            now = jax.typeof(array).sharding
            to = now.update(spec=wanted.spec) if wanted.mesh.empty else wanted  # an array from before the mesh was set has none
            return array if now == to else jax.sharding.reshard(array, to)

        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, [put(array, wanted) for array, wanted in zip(leaves, self.shardings, strict=True)])


def call(run: Callable, op: str, operands: Sequence, results: Sequence, settings: Mapping[str, Any],
         packed: FrozenSet[str]) -> List[jax.Array]:
    """run(result shapes, *arrays), cut by XLA's partitioner where the program is one for several devices."""
    plan = _Plan(op, operands, results, settings, packed)
    arrays = [array for _, array in operands]
    mesh = _mesh_of_types(arrays)
    if mesh is not None:
        return plan.by_types(run, mesh, arrays)
    shapes = [struct.shape for _, struct in results]
    wrapped = custom_partitioning(lambda *arrays: tuple(run(shapes, *arrays)))
    wrapped.def_partition(plan.partition(run), **plan.rule())
    return list(sequential_vmap(wrapped)(*arrays))


def may_cut_programs() -> bool:
    """True if XLA may cut a program that is traced now over devices. Inside shard_map each device sees its part alone."""
    return jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes
