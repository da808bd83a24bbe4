"""An activation that all ranks of a group have alike, of which each keeps a part until its backward."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, NamedTuple

import torch

from te_fl.errors import FailedPrecondition
from te_fl.pytorch.distributed import collectives


class _Part(NamedTuple):
    """This rank's part of a tensor, as a vector; the last ranks' may end with zeros that are not the tensor's."""

    values: torch.Tensor
    shape: torch.Size
    group: Any


def _part_of(tensor: torch.Tensor, group: Any) -> _Part:
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
    """A scope in which autograd saves this rank's part of `tensor` in its place, and a backward gathers the parts, in which all ranks take part.
    Other tensors are saved as they are."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"checkpoint: distribute_saved_activations divides the first argument, which is a {type(tensor).__name__}; it is to be a "
                        "tensor, by position")
    if not collectives.available():
        raise FailedPrecondition("FAILED_PRECONDITION: checkpoint: distribute_saved_activations needs ranks; call "
                                 "torch.distributed.init_process_group() first, or leave it out")
    whole = [tensor]  # emptied at the end, since autograd keeps the hooks

    def pack(saved: torch.Tensor) -> Any:
        if not whole or saved.numel() == 0 or _place(saved) != _place(whole[0]):
            return saved
        return _part_of(saved, group)

    def unpack(kept: Any) -> torch.Tensor:
        return _gathered(kept) if isinstance(kept, _Part) else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        del tensor
        try:
            yield
        finally:
            whole.clear()
