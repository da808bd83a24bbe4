"""The axes of a mesh that hold data and tensor parallelism, and the names by which modules say how their arrays lie on them."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Dict, Iterator, Optional, Sequence

import jax
from jax.interpreters import pxla
from jax.sharding import AxisType, NamedSharding, PartitionSpec

BATCH_AXES = "nvte_batch"
SEQLEN_AXES = "nvte_seqlen"
SEQLEN_TP_AXES = "nvte_seqlen_tp"
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
    """Names of mesh axes: of data (dp), tensor (tp), tensor with sequence (tpsp) and fully sharded data parallelism (fsdp)."""

    dp_resource: Optional[str] = None
    tp_resource: Optional[str] = None
    tpsp_resource: Optional[str] = None
    fsdp_resource: Optional[str] = None
    pp_resource: Optional[str] = None
    cp_resource: Optional[str] = None
    ep_resource: Optional[str] = None

    def __post_init__(self):
        for name in ("pp_resource", "cp_resource", "ep_resource"):
            if getattr(self, name) is not None:
                raise NotImplementedError(f"te_fl.jax: MeshResource({name}={getattr(self, name)!r}) is not served; it has dp_resource, "
                                          "tp_resource, tpsp_resource and fsdp_resource")
        if self.tp_resource is not None and self.tpsp_resource is not None:
            raise ValueError("MeshResource: give tp_resource or tpsp_resource, not both")


# The mesh resource of the calling thread, a part of the keys under which JAX caches what it traced.
_resource = jax.make_user_context(MeshResource())


def global_mesh_resource() -> MeshResource:
    """The calling thread's; an empty one outside of autocast and global_shard_guard."""
    return _resource.value


@contextlib.contextmanager
def global_shard_guard(resource: Optional[MeshResource]) -> Iterator[None]:
    """Lays out on these axes, as they are now, all that this thread traces inside; None: on none."""
    with _resource(MeshResource() if resource is None else dataclasses.replace(resource)):
        yield


def _mesh():
    """The mesh of jax.set_mesh, or of the older `with mesh:`; None if there is none."""
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty:
        return abstract
    physical = pxla.thread_resources.env.physical_mesh
    return None if physical.empty else physical


def get_sharding_map_logic_axis_to_mesh_axis() -> Dict[str, Optional[str]]:
    """Logical axis to mesh axis; empty without a mesh, and inside shard_map over all of it."""
    mesh = _mesh()
    if mesh is None or set(jax.sharding.get_abstract_mesh().manual_axes) == set(mesh.axis_names):
        return {}
    axes = global_mesh_resource()
    tensor = axes.tpsp_resource or axes.tp_resource
    return {
        BATCH_AXES: axes.fsdp_resource or axes.dp_resource,
        SEQLEN_AXES: None,
        SEQLEN_TP_AXES: axes.tpsp_resource,
        HEAD_AXES: tensor,
        HIDDEN_AXES: None,
        HIDDEN_TP_AXES: tensor,
        JOINED_AXES: None,
        W_NO_SHARD_AXES: None,
        W_FSDP_AXES: axes.fsdp_resource,
        W_TP_AXES: tensor,
        W_JOINED_AXES: None,
    }


def with_sharding_constraint_by_logical_axes(x: jax.Array, logical_axis_names: Optional[Sequence[Optional[str]]]) -> jax.Array:
    """x, laid out as these names say; the same x without names or without a mesh. Names that are not te-fl's are left to Flax's rules. A
    dimension that its axis does not divide stays as it is over an explicit axis, whose types cannot say it; XLA pads it over others."""
    if not logical_axis_names:
        return x
    if len(logical_axis_names) != x.ndim:
        raise ValueError(f"{tuple(logical_axis_names)} names {len(logical_axis_names)} axes of an array that has {x.ndim}")
    rules, mesh = get_sharding_map_logic_axis_to_mesh_axis(), _mesh()
    kinds = {} if mesh is None else dict(zip(mesh.axis_names, mesh.axis_types))
    spec = [rules.get(name) for name in logical_axis_names]

    def of_kind(kind: AxisType) -> Optional[PartitionSpec]:
        wanted = [axis if kinds.get(axis) is kind and (kind is not AxisType.Explicit or extent % mesh.shape[axis] == 0) else None
                  for axis, extent in zip(spec, x.shape)]
        return PartitionSpec(*wanted) if any(wanted) else None

    explicit, automatic = of_kind(AxisType.Explicit), of_kind(AxisType.Auto)  # manual axes lie as shard_map has cut them
    if explicit is not None:
        x = jax.sharding.reshard(x, NamedSharding(mesh, explicit))
    return x if automatic is None else jax.lax.with_sharding_constraint(x, automatic)
