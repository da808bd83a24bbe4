"""Activations that are equal on all ranks of a group: each rank saves only its shard until the backward."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, NamedTuple

import torch

from te_fl.errors import FailedPrecondition
from te_fl.pytorch.distributed import collectives


class _Part(NamedTuple):
    """This rank's shard of a tensor, flattened; the last ranks' shards may be padded with zeros."""

    values: torch.Tensor
    shape: torch.Size
    group: Any


def _make_part(tensor: torch.Tensor, group: Any) -> _Part:
    flat = tensor.detach().reshape(-1)
    each = -(-flat.numel() // collectives.size_of(group))
    start = min(each * collectives.rank_in(group), flat.numel())
    values = flat.new_zeros(each)
    values[:min(each, flat.numel() - start)] = flat[start:start + each]
    return _Part(values, tensor.shape, group)


def _place(tensor: torch.Tensor) -> tuple:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _gathered(part: _Part) -> torch.Tensor:
    whole = part.values.new_empty(part.values.numel() * collectives.size_of(part.group))
    collectives.all_gather_into(whole, part.values, part.group)
    return whole[:part.shape.numel()].view(part.shape)


@contextlib.contextmanager
def saved_in_parts(tensor: Any, group: Any) -> Iterator[None]:
    """A scope in which autograd saves this rank's shard instead of `tensor`. The backward all-gathers the shards, so all ranks must run it. Other
    tensors are saved unchanged.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"checkpoint: distribute_saved_activations divides the first argument, which is a {type(tensor).__name__}; it is to be a "
                        "tensor, by position")
    if not collectives.available():
        raise FailedPrecondition("checkpoint: distribute_saved_activations needs ranks; call "
                                 "torch.distributed.init_process_group() first, or leave it out")
    whole = [tensor]  # cleared at the end, because autograd keeps the hooks alive

    def pack(saved: torch.Tensor) -> Any:
        if not whole or saved.numel() == 0 or _place(saved) != _place(whole[0]):
            return saved
        return _make_part(saved, group)

    def unpack(kept: Any) -> torch.Tensor:
        return _gathered(kept) if isinstance(kept, _Part) else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        del tensor
        try:
            yield
        finally:
            whole.clear()
