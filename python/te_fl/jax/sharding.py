"""Mesh axes of data and tensor parallelism, and the logical axis names by which modules describe their arrays' sharding."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from typing import Any, Callable, Dict, Iterator, Optional, Sequence, Tuple, Union

import jax
from jax.interpreters import pxla
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from te_fl.errors import InvalidArgument, Unsupported

MeshAxes = Optional[Union[str, Tuple[str, ...]]]

BATCH_AXES = "nvte_batch"
SEQLEN_AXES = "nvte_seqlen"
SEQLEN_TP_AXES = "nvte_seqlen_tp"
SEQLEN_CP_AXES = "nvte_seqlen_cp"
HEAD_AXES = "nvte_head"
HIDDEN_AXES = "nvte_hidden"
HIDDEN_TP_AXES = "nvte_hidden_tp"
JOINED_AXES = "nvte_joined"
W_NO_SHARD_AXES = "nvte_w_no_shard"
W_FSDP_AXES = "nvte_w_fsdp"
W_TP_AXES = "nvte_w_tp"
W_JOINED_AXES = "nvte_w_joined"


@dataclasses.dataclass(unsafe_hash=True)
class MeshResource:
    """Names of mesh axes: data parallelism (dp), tensor parallelism (tp), tensor with sequence parallelism (tpsp), fully sharded data parallelism
    (fsdp), pipeline stages (pp) and sequences in attention (context parallelism, cp). pp shards no array and takes part in no amax reduction. At most one
    of tp and tpsp may have more than one device. te_fl.jax does not support expert parallelism (ep), so its axis must have one device.
    """

    dp_resource: Optional[str] = None
    tp_resource: Optional[str] = None
    tpsp_resource: Optional[str] = None
    fsdp_resource: Optional[str] = None
    pp_resource: Optional[str] = None
    cp_resource: Optional[str] = None
    ep_resource: Optional[str] = None

    def axes(self) -> Tuple[str, ...]:
        """The axes that shard arrays, each once; pipeline stages are excluded."""
        named = (self.dp_resource, self.fsdp_resource, self.tp_resource, self.tpsp_resource)
        return tuple(dict.fromkeys(axis for axis in named if axis is not None))


def flat_axes(axes: Sequence[MeshAxes]) -> Tuple[str, ...]:
    """The mesh axes of a PartitionSpec, flattened."""
    return tuple(a for axis in axes if axis is not None for a in (axis if isinstance(axis, tuple) else (axis,)))


# The mesh resource of the calling thread, as part of JAX's trace cache key.
_resource = jax.make_user_context(MeshResource())


def global_mesh_resource() -> MeshResource:
    """The calling thread's mesh resource; an empty one outside of autocast and global_shard_guard."""
    return _resource.value


@contextlib.contextmanager
def global_shard_guard(resource: Optional[MeshResource]) -> Iterator[None]:
    """Shards everything traced inside, on this thread, over these axes; None: no axes."""
    if resource is not None and not isinstance(resource, MeshResource):
        raise TypeError(f"the mesh resource is {resource!r}; it is a MeshResource, such as MeshResource(dp_resource='data')")
    with _resource(MeshResource() if resource is None else dataclasses.replace(resource)):
        yield


def current_mesh() -> Any:
    """The mesh of jax.set_mesh, or of the older `with mesh:`; None if there is none."""
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty:
        return abstract
    physical = pxla.thread_resources.env.physical_mesh
    return None if physical.empty else physical


def _size(mesh: Any, who: str, argument: str, axis: str) -> int:
    """The number of devices along a mesh axis; InvalidArgument if the mesh does not have the axis."""
    if axis not in mesh.shape:
        has = ", ".join(f"{name!r} ({size})" for name, size in mesh.shape.items())
        raise InvalidArgument(f"te_fl.jax: {who} names no axis of the mesh, which has {has}; name one of these, leave {argument} out, or set a mesh that has the "
                         "axis")
    return mesh.shape[axis]


def axis_size(argument: str, axis: str) -> int:
    """The number of devices along the axis that an argument names; 1 without a mesh."""
    mesh = current_mesh()
    return 1 if mesh is None else _size(mesh, f"{argument}={axis!r}", argument, axis)


def _sizes(resource: MeshResource, mesh: Any) -> Dict[str, int]:
    """The number of devices of each resource, 1 if unset. InvalidArgument for axes that the mesh does not have, and for tp combined with tpsp.
    Unsupported for ep on several devices.
    """
    sizes = {}
    for field in dataclasses.fields(resource):
        axis = getattr(resource, field.name)
        sizes[field.name] = 1 if axis is None else _size(mesh, f"MeshResource({field.name}={axis!r})", field.name, axis)
    if sizes["ep_resource"] > 1:
        raise Unsupported(f"te_fl.jax: MeshResource(ep_resource={resource.ep_resource!r}) is not supported over {sizes['ep_resource']} devices, only on a mesh "
                          "axis of one; it has dp_resource, tp_resource, tpsp_resource, fsdp_resource, cp_resource and pp_resource")
    if sizes["tp_resource"] > 1 and sizes["tpsp_resource"] > 1:
        raise InvalidArgument(f"te_fl.jax: MeshResource(tp_resource={resource.tp_resource!r}, tpsp_resource={resource.tpsp_resource!r}) has "
                         f"{sizes['tp_resource']} and {sizes['tpsp_resource']} devices; give one of the two: tpsp_resource cuts sequences as well")
    return sizes


def named_manual_axes() -> Tuple[str, ...]:
    """Inside shard_map, the mesh resource's axes over which shard_map has sharded arrays; empty outside."""
    mesh, resource = jax.sharding.get_abstract_mesh(), global_mesh_resource()
    if not mesh.manual_axes:
        return ()
    _sizes(resource, mesh)
    return tuple(axis for axis in resource.axes() if axis in mesh.manual_axes)


def get_sharding_map_logic_axis_to_mesh_axis() -> Dict[str, MeshAxes]:
    """Maps logical axes to mesh axes. Empty without a mesh, and inside shard_map over the whole mesh. Batches are sharded over both the data and the
    fully sharded data parallel axis if the mesh has both.
    """
    mesh = current_mesh()
    if mesh is None or set(jax.sharding.get_abstract_mesh().manual_axes) == set(mesh.axis_names):
        return {}
    resource = global_mesh_resource()
    sizes = _sizes(resource, mesh)
    tensor = resource.tpsp_resource if sizes["tpsp_resource"] > 1 else resource.tp_resource
    batch: MeshAxes = resource.fsdp_resource if sizes["fsdp_resource"] > 1 else resource.dp_resource
    if sizes["fsdp_resource"] > 1 and sizes["dp_resource"] > 1 and resource.dp_resource != resource.fsdp_resource:
        batch = (resource.dp_resource, resource.fsdp_resource)
    return {
        BATCH_AXES: batch,
        SEQLEN_AXES: None,
        SEQLEN_TP_AXES: resource.tpsp_resource,
        SEQLEN_CP_AXES: resource.cp_resource,
        HEAD_AXES: tensor,
        HIDDEN_AXES: None,
        HIDDEN_TP_AXES: tensor,
        JOINED_AXES: None,
        W_NO_SHARD_AXES: None,
        W_FSDP_AXES: resource.fsdp_resource,
        W_TP_AXES: tensor,
        W_JOINED_AXES: None,
    }


def _of_flax(names: Sequence[Optional[str]]) -> Dict[str, MeshAxes]:
    """The mesh axes by flax.linen.logical_axis_rules, for those names that have a rule."""
    linen = sys.modules.get("flax.linen")
    rules = linen.get_logical_axis_rules() if linen is not None else ()
    known = {name for name, _ in rules}
    return {name: axis for name, axis in zip(names, linen.logical_to_mesh_axes(names)) if name in known} if known else {}


def _devices(mesh: Any, shape: Tuple[int, ...], dim: int, name: Optional[str], axes: Tuple[str, ...]) -> int:
    """The number of devices along these axes. InvalidArgument for axes that the mesh does not have, and if they do not divide the dimension."""
    wrong = [axis for axis in axes if axis not in mesh.shape]
    if wrong:
        raise InvalidArgument(f"te_fl.jax: Flax's rules lay the logical axis {name!r} on {wrong[0]!r}, and the mesh has {', '.join(mesh.shape)}; name one "
                         "of these in the rules, or set a mesh that has the axis")
    devices = math.prod(mesh.shape[axis] for axis in axes)
    if shape[dim] != 1 and shape[dim] % devices != 0:
        raise InvalidArgument(f"te_fl.jax: dimension {dim} of an array {list(shape)} has {shape[dim]} elements, and its logical axis {name!r} lies on "
                         f"{' and '.join(repr(axis) for axis in axes)} of the mesh, of {devices} devices: {shape[dim]} is not a multiple of {devices}. "
                         "Pad it or choose another size, take a mesh whose axis divides it, or leave the axis out of MeshResource and Flax's rules")
    return devices


def _whole_sequence(x: jax.Array, mesh: Any, dims: Sequence[bool]) -> jax.Array:
    """Gathers these dimensions of x and keeps the sharding of the others: ends sequence parallelism where no axis shards batches."""
    spec = jax.typeof(x).sharding.spec
    if any(axis is not None for axis in spec):  # explicit axes
        now = (*spec, *(None,) * (x.ndim - len(spec)))
        return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*[None if whole else axis for whole, axis in zip(dims, now)])))
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*[None if whole else PartitionSpec.UNCONSTRAINED for whole in dims]))


def with_sharding_constraint_by_logical_axes(x: jax.Array, logical_axis_names: Optional[Sequence[Optional[str]]]) -> jax.Array:
    """Shards x by logical axis names; returns x unchanged without names or without a mesh. Names are looked up in Flax's rules first, then in
    te-fl's; unknown names are ignored. InvalidArgument if an axis does not divide its dimension; a dimension of extent 1 stays unsharded.
    """
    if not logical_axis_names:
        return x
    if len(logical_axis_names) != x.ndim:
        raise InvalidArgument(f"{tuple(logical_axis_names)} names {len(logical_axis_names)} axes of an array that has {x.ndim}")
    mesh = current_mesh()
    if mesh is None:
        return x
    rules = {**get_sharding_map_logic_axis_to_mesh_axis(), **_of_flax(logical_axis_names)}
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    manual = jax.sharding.get_abstract_mesh().manual_axes  # shard_map determines the sharding over these axes
    dims = []
    for dim, name in enumerate(logical_axis_names):
        axes = tuple(axis for axis in flat_axes([rules.get(name)]) if axis not in manual)
        devices = _devices(mesh, x.shape, dim, name, axes)
        dims.append(axes if devices > 1 and x.shape[dim] != 1 else ())

    def of_kind(kind: AxisType) -> Optional[PartitionSpec]:
        wanted = [tuple(axis for axis in axes if kinds[axis] is kind) or None for axes in dims]
        return PartitionSpec(*wanted) if any(wanted) else None

    if not any(dims) and SEQLEN_AXES in logical_axis_names and rules.get(SEQLEN_TP_AXES) is not None:
        return _whole_sequence(x, mesh, [name == SEQLEN_AXES for name in logical_axis_names])
    explicit, automatic = of_kind(AxisType.Explicit), of_kind(AxisType.Auto)
    if explicit is not None:
        x = jax.sharding.reshard(x, NamedSharding(mesh, explicit))
    return x if automatic is None else jax.lax.with_sharding_constraint(x, automatic)


def with_sharding_constraint(x: jax.Array, pspec: Optional[PartitionSpec]) -> jax.Array:
    """Shards x over the axes that shard_map does not manage; returns x unchanged without a mesh."""
    mesh = current_mesh()
    if pspec is None or mesh is None:
        return x
    manual = jax.sharding.get_abstract_mesh().manual_axes
    dims = [tuple(axis for axis in flat_axes([axes]) if axis not in manual) or None for axes in pspec]
    if not any(dims):
        return x
    cleaned = PartitionSpec(*dims)
    if AxisType.Explicit in (dict(zip(mesh.axis_names, mesh.axis_types))[axis] for axis in flat_axes(dims)):
        return jax.sharding.reshard(x, NamedSharding(mesh, cleaned))
    return jax.lax.with_sharding_constraint(x, cleaned)


def is_mesh_available() -> bool:
    return current_mesh() is not None


def get_all_mesh_axes() -> Tuple[str, ...]:
    mesh = current_mesh()
    return () if mesh is None else tuple(mesh.axis_names)


def num_of_devices() -> int:
    return jax.device_count()


def get_num_devices_in_mesh(mesh: Any = None) -> int:
    mesh = current_mesh() if mesh is None else mesh
    return 1 if mesh is None else math.prod(mesh.shape.values())


def get_mesh_axis_size(axis: Optional[str], mesh: Any = None) -> int:
    """The number of devices along an axis; 1 for None. InvalidArgument if the mesh does not have the axis."""
    mesh = current_mesh() if mesh is None else mesh
    if axis is None:
        return 1
    if mesh is None:
        raise InvalidArgument(f"te_fl.jax: there is no mesh that could have the axis {axis!r}; set one with jax.set_mesh(mesh)")
    return _size(mesh, f"axis={axis!r}", "axis", axis)


def get_mesh_axis_rank(axis: str, mesh: Any = None) -> Union[int, jax.Array]:
    """Inside shard_map, this device's index along the axis; 0 without a mesh."""
    if mesh is None:
        return 0
    _size(mesh, f"axis={axis!r}", "axis", axis)
    return jax.lax.axis_index(axis)


def get_active_resource_axis(resource_name: str) -> Optional[str]:
    """The axis in a field of MeshResource if it has more than one device, else None."""
    axis, mesh = getattr(global_mesh_resource(), resource_name), current_mesh()
    return None if axis is None or mesh is None or get_mesh_axis_size(axis, mesh) == 1 else axis


def tpsp_axis_size() -> int:
    return get_mesh_axis_size(global_mesh_resource().tpsp_resource)


def dp_or_fsdp_axis_size() -> int:
    dp = get_mesh_axis_size(global_mesh_resource().dp_resource)
    return dp if dp > 1 else get_mesh_axis_size(global_mesh_resource().fsdp_resource)


def ep_axis_size() -> int:
    return get_mesh_axis_size(global_mesh_resource().ep_resource)


def lax_paral_op(x: jax.Array, ops: Callable, mesh_resource: Optional[str], mesh: Any, **kwargs: Any) -> jax.Array:
    """Calls ops(x, axis), such as jax.lax.psum, inside shard_map; returns x unchanged without an axis."""
    if mesh_resource is None:
        return x
    _size(mesh, f"mesh_resource={mesh_resource!r}", "mesh_resource", mesh_resource)
    return ops(x, mesh_resource, **kwargs)


def all_reduce_sum_along_dp_fsdp(x: jax.Array, mesh: Any) -> jax.Array:
    resource = global_mesh_resource()
    return lax_paral_op(lax_paral_op(x, jax.lax.psum, resource.dp_resource, mesh), jax.lax.psum, resource.fsdp_resource, mesh)


def all_reduce_sum_along_dp_fsdp_tpsp(x: jax.Array, mesh: Any) -> jax.Array:
    return all_reduce_sum_along_dp_fsdp(lax_paral_op(x, jax.lax.psum, global_mesh_resource().tpsp_resource, mesh), mesh)


def all_reduce_max_along_all_axes_except_PP(x: jax.Array, mesh: Any) -> jax.Array:
    for axis in get_all_mesh_axes():
        if axis != global_mesh_resource().pp_resource:
            x = lax_paral_op(x, jax.lax.pmax, axis, mesh)
    return x
