"""Transformer Engine's helpers for tensors that are sharded over a tensor-parallel group."""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch

from te_fl.errors import AlreadyExists, FailedPrecondition, InvalidArgument, Unsupported
from te_fl.pytorch.distributed import collectives

__all__ = ["HAS_TORCH_SYMMETRIC", "allreduce", "gather_split_1d_tensor", "get_distributed_rank", "get_distributed_world_size", "initialize_affine_weight_gpu",
           "reduce_scatter_along_first_dim", "set_tensor_model_parallel_attributes", "split_tensor_into_1d_equal_chunks",
           "symmetric_all_reduce"]

HAS_TORCH_SYMMETRIC = False  # te-fl allocates no symmetric memory

_ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride")


def get_distributed_world_size(group: Optional[Any] = None) -> int:
    """The number of ranks of the group (None: the default group); 1 without torch.distributed."""
    return collectives.size_of(group) if collectives.available() else 1


def get_distributed_rank(group: Optional[Any] = None) -> int:
    """This process's rank in the group (None: the default group)."""
    if not collectives.available():
        raise FailedPrecondition("get_distributed_rank: torch.distributed is not initialised; call "
                                 "torch.distributed.init_process_group() first")
    return collectives.rank_in(group)


def set_tensor_model_parallel_attributes(tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Sets attributes on a parameter that say along which dimension it is sharded, for Megatron's optimizers and checkpoints."""
    for name in _ATTRIBUTES:
        if hasattr(tensor, name):
            raise AlreadyExists(f"set_tensor_model_parallel_attributes: the tensor {tuple(tensor.shape)} has {name} = {getattr(tensor, name)!r} "
                                "already; the attributes are set once")
    for name, value in zip(_ATTRIBUTES, (is_parallel, dim, stride)):
        setattr(tensor, name, value)


def initialize_affine_weight_gpu(weight: torch.Tensor, init_method: Callable, get_rng_state_tracker: Optional[Callable], partition_dim: int = 0,
                                 stride: int = 1, set_tp_attributes: bool = True) -> None:
    """Calls init_method on a weight on any device. Uses the random state of the model-parallel RNG tracker if there is one."""
    if set_tp_attributes:
        set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    if get_rng_state_tracker is None:
        init_method(weight)
        return
    with get_rng_state_tracker().fork():
        init_method(weight)


def _each(where: str, extent: int, group: Optional[Any], what: str) -> int:
    ranks = get_distributed_world_size(group)
    if extent % ranks != 0:
        raise InvalidArgument(f"{where}: {what} {extent}, which {ranks} ranks do not divide evenly")
    return extent // ranks


def split_tensor_into_1d_equal_chunks(tensor: torch.Tensor, tp_group: Optional[Any], new_buffer: bool = False) -> torch.Tensor:
    """This rank's shard of a contiguous tensor split into equal parts, flattened. new_buffer: returns a copy instead of a view."""
    each = _each("split_tensor_into_1d_equal_chunks", tensor.numel(), tp_group, f"the tensor {tuple(tensor.shape)} has a number of elements of")
    start = each * get_distributed_rank(tp_group)
    part = tensor.view(-1)[start:start + each]
    return part.detach().clone() if new_buffer else part


def gather_split_1d_tensor(tensor: torch.Tensor, tp_group: Optional[Any]) -> torch.Tensor:
    """All-gathers the flattened shards into one vector."""
    gathered = torch.empty(tensor.numel() * get_distributed_world_size(tp_group), dtype=tensor.dtype, device=tensor.device)
    collectives.all_gather_into(gathered, tensor.detach().contiguous(), tp_group)
    return gathered


def reduce_scatter_along_first_dim(inp: torch.Tensor, tp_group: Optional[Any], async_op: bool = False,
                                   output: Optional[torch.Tensor] = None) -> Tuple[torch.Tensor, Optional[Any]]:
    """Reduce-scatter. Returns (this rank's rows of the sum, with async_op a Work to wait for)."""
    if get_distributed_world_size(tp_group) == 1:
        return inp, None
    rows = _each("reduce_scatter_along_first_dim", inp.shape[0], tp_group, f"the tensor {tuple(inp.shape)} has a first extent of")
    if output is None:
        output = torch.empty((rows, *inp.shape[1:]), dtype=inp.dtype, device=inp.device)
    return output, collectives.reduce_scatter_into(output, inp.contiguous(), tp_group, wait=not async_op)


def allreduce(inp: torch.Tensor, tp_group: Optional[Any] = None, async_op: bool = False) -> Tuple[torch.Tensor, Optional[Any]]:
    """All-reduce in place. Returns (inp, which becomes the sum; with async_op a Work to wait for)."""
    if get_distributed_world_size(tp_group) == 1:
        return inp, None
    return inp, collectives.all_reduce(inp, tp_group, wait=not async_op)


def symmetric_all_reduce(inp: torch.Tensor, tp_group: Optional[Any] = None, async_op: bool = False,
                         all_reduce_type: str = "multimem_all_reduce") -> Tuple[torch.Tensor, None]:
    """allreduce() with all_reduce_type 'nccl', which uses the group's own backend. Types that need symmetric memory are refused for several ranks."""
    if async_op:
        raise Unsupported("symmetric_all_reduce: async_op = True is not supported, as it is not by Transformer Engine; call allreduce()")
    if get_distributed_world_size(tp_group) == 1:
        return inp, None
    if all_reduce_type not in ("nccl", "multimem_all_reduce", "two_shot", "one_shot"):
        raise TypeError(f"symmetric_all_reduce: all_reduce_type is {all_reduce_type!r}; it is 'nccl', 'multimem_all_reduce', 'two_shot' or 'one_shot'")
    if all_reduce_type != "nccl":
        raise Unsupported(f"symmetric_all_reduce: all_reduce_type = {all_reduce_type!r} is not supported among several ranks: te-fl has no symmetric "
                          "memory; give 'nccl', or call allreduce()")
    allreduce(inp, tp_group)
    return inp, None
