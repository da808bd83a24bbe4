"""Modules that a tensor-parallel group divides: what Linear and the others have in common, with Transformer Engine's names.

Each rank of the group holds its part of the weights as a layer of that size; the collectives are around it (te_fl.pytorch.autograd.regions), or, of
sequence-parallel rows, in it (te_fl.pytorch.distributed.sequence_ranks).
docs/ranks-pytorch.md says who reduces what.
"""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch

from te_fl.errors import FailedPrecondition
from te_fl.pytorch.autograd import regions
from te_fl.pytorch.distributed import collectives
from te_fl.pytorch.distributed.sequence_ranks import SequenceRanks
from te_fl.pytorch.runtime.refuse import process_group, refuse


def divided(where: str, what: str, size: int, ranks: int) -> int:
    """The part of `size` that each rank has; ValueError if the ranks do not divide it."""
    if size % ranks != 0:
        raise ValueError(f"{where}: {what} is {size}, which the {ranks} ranks of tp_size do not divide; give a multiple of {ranks}, or a group of "
                         "fewer ranks")
    return size // ranks


def size_of(tp_group: Optional[Any], tp_size: int) -> int:
    """The ranks that divide a module: those of its group, if it is given one, as Transformer Engine has it."""
    return tp_size if tp_group is None else collectives.size_of(tp_group)


def set_parallel(param: Any, dim: int) -> None:
    """Says to frameworks which dimension of a parameter the group divides."""
    param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, 1


_MARKS = ("sequence_parallel", "tensor_model_parallel", "partition_dim", "partition_stride")


def marks_of(param: Any) -> Dict[str, Any]:
    """The attributes of a divided module's parameter that frameworks read. PyTorch's replacements of a parameter (copy.deepcopy, fully_shard, to_empty) drop it."""
    attributes = getattr(param, "__dict__", {})
    return {name: attributes[name] for name in _MARKS if name in attributes}


def mark_again(param: Any, marks: Dict[str, Any]) -> None:
    """Gives a parameter's replacement the marks that it has none of its own for."""
    for name, mark in marks.items():
        if param is not None and name not in param.__dict__:
            setattr(param, name, mark)


class TensorParallel:
    """Shared by modules whose weights, or heads, a group divides.

    tp_size: the ranks that do. tp_group: the group, which set_tensor_parallel_group() may give later. sequence_parallel: whether inputs and
    outputs outside of the divided part are the ranks' parts of the first dimension.
    """

    tp_group: Optional[Any] = None
    tp_group_initialized = False
    tp_size = 1
    sequence_parallel = False
    _divides = False  # true if forwards have collectives

    def _divide(self, tp_group: Optional[Any], tp_size: int, sequence_parallel: Any) -> None:
        """Takes the constructor's arguments. The ranks that tp_size alone says get their group later."""
        self.tp_size = size_of(tp_group, tp_size)
        self.sequence_parallel = self.tp_size > 1 and bool(sequence_parallel)
        if tp_group is not None or self.tp_size == 1:
            self.set_tensor_parallel_group(tp_group)

    def set_tensor_parallel_group(self, tp_group: Optional[Any]) -> None:
        """The group from the next forward on, of tp_size ranks; None: torch.distributed's default group. A module of tp_size 1 holds whole
        weights and computes with them alone, whatever the group."""
        where = type(self).__name__
        process_group(where, "tp_group", tp_group)
        if self.tp_size > 1 and collectives.size_of(tp_group) != self.tp_size:
            named = "the default group" if tp_group is None else "the group"
            raise ValueError(f"{where}: {named} has {collectives.size_of(tp_group)} ranks, and the module was made with tp_size = {self.tp_size}; "
                             "give a group of that size, or make the module with this one as tp_group")
        if tp_group is not self.tp_group:  # the next forward makes layers of the new group
            self._forget_layers()
        self.__dict__["tp_group"], self.__dict__["tp_group_initialized"] = tp_group, True

    def _shows_whole(self) -> bool:
        """True if forwards return the gathered input, which the product then takes as it is."""
        return False

    @property
    def _layer_moves_rows(self) -> bool:
        """True if the layer in C++ has the collectives of sequence_parallel."""
        return self._divides and self.sequence_parallel and not self._shows_whole()

    def _group(self) -> Any:
        """The group of a forward with collectives."""
        if not self.tp_group_initialized:
            raise FailedPrecondition(f"FAILED_PRECONDITION: {type(self).__name__}: it was made with tp_size = {self.tp_size} and has no group; call "
                                     "set_tensor_parallel_group(group) before the first forward")
        return self.tp_group

    def _row_options(self) -> dict:
        """The options of a layer in C++ that gathers and scatters rows itself."""
        if not self._layer_moves_rows:
            return {}
        return {"sequence_ranks": SequenceRanks(self._group(), next(self.parameters()).device)}

    def _own_rows(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of x, or of a row-parallel product all, as such a layer takes them."""
        self._group()
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # fewer bytes to send
        return x

    def _check_rows(self, x: torch.Tensor) -> None:
        """Refuses what the ranks cannot have equal parts of: the result of a product whose columns of the weight are divided."""
        if x.shape[0] % self.tp_size != 0:
            raise ValueError(f"{type(self).__name__}: the first dimension of {tuple(x.shape)} is divided over the {self.tp_size} ranks of "
                             "sequence_parallel, and they do not divide it; pad it to a multiple")

    def _into(self, x: torch.Tensor) -> torch.Tensor:
        """The input of a product whose rows of the weight are divided: whole on each rank."""
        group = self._group()
        if not self.sequence_parallel:
            return regions.copied(x, group)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # fewer bytes to send
        return regions.gathered(x, group)

    def _out_of(self, y: torch.Tensor) -> torch.Tensor:
        """The result of a product whose columns of the weight are divided, which each rank has a summand of."""
        group = self._group()
        if not self.sequence_parallel:
            return regions.summed(y, group)
        self._check_rows(y)
        return regions.scattered(y, group)

    def _refuse_overlap(self, **flags: Any) -> None:
        """Refuses the flags of Userbuffers, which ask for a library that te-fl has none of; on one rank they have no effect."""
        for name, value in flags.items():
            if value and self.sequence_parallel:
                raise refuse(type(self).__name__, name, value, "te-fl has no Userbuffers, and its products wait for their collectives; leave it out")
