"""Tensor parallelism of modules: common code of Linear and others, with Transformer Engine's names.

Each rank's C++ layer has the size of its shard of the weights. Collectives run around the layer (te_fl.pytorch.autograd.regions) or, for
sequence-parallel rows, inside of it (te_fl.pytorch.distributed.sequence_ranks). docs/ranks-pytorch.md lists which gradients te-fl reduces and which
the program must reduce.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, Optional

import torch

from te_fl.errors import FailedPrecondition, InvalidArgument
from te_fl.pytorch.autograd import regions
from te_fl.pytorch.distributed import collectives
from te_fl.pytorch.distributed.sequence_ranks import SequenceRanks
from te_fl.pytorch.runtime.refuse import process_group, refuse


def divided(where: str, what: str, size: int, ranks: int) -> int:
    """size / ranks, this rank's share; InvalidArgument if ranks does not divide size."""
    if size % ranks != 0:
        raise InvalidArgument(f"{where}: {what} is {size}, which the {ranks} ranks of tp_size do not divide; give a multiple of {ranks}, or a group of "
                         "fewer ranks")
    return size // ranks


def size_of(tp_group: Optional[Any], tp_size: int) -> int:
    """The number of ranks that shard a module: the group's size if a group is given, as in Transformer Engine, else tp_size."""
    return tp_size if tp_group is None else collectives.size_of(tp_group)


def set_parallel(param: Any, dim: int) -> None:
    """Marks along which dimension a parameter is sharded, for frameworks."""
    param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, 1


def mark_product(module: Any, weights: Iterable[str], biases: Iterable[str]) -> None:
    """Marks the weights and biases with these names of a product with a parallel_mode."""
    for name in weights:
        weight = getattr(module, name)
        set_parallel(weight, weight.dim() - (1 if module.parallel_mode == "row" else 2))
    for name in biases:
        bias = getattr(module, name)
        if module.parallel_mode == "row":
            bias.sequence_parallel = module.sequence_parallel
        elif module.parallel_mode == "column":
            set_parallel(bias, bias.dim() - 1)


_MARKS = ("sequence_parallel", "tensor_model_parallel", "partition_dim", "partition_stride", "is_grouped_bias")


def find_marks(param: Any) -> Dict[str, Any]:
    """The marks of a sharded parameter, which frameworks read. PyTorch drops them when it replaces a parameter (copy.deepcopy, fully_shard,
    to_empty).
    """
    attributes = getattr(param, "__dict__", {})
    return {name: attributes[name] for name in _MARKS if name in attributes}


def mark_again(param: Any, marks: Dict[str, Any]) -> None:
    """Copies attributes (sequence_parallel and the like) to a parameter's replacement, except those that it has already."""
    for name, mark in marks.items():
        if param is not None and name not in param.__dict__:
            setattr(param, name, mark)


class TensorParallel:
    """A mixin for modules whose weights or heads are sharded over a group.

    tp_size: the number of ranks. tp_group: the group; set_tensor_parallel_group() may set it later. sequence_parallel: inputs and outputs outside of
    the sharded region are sharded along the first dimension.
    """

    tp_group: Optional[Any] = None
    tp_group_initialized = False
    tp_size = 1
    sequence_parallel = False
    _divides = False  # true if forwards have collectives

    def _divide(self, tp_group: Optional[Any], tp_size: int, sequence_parallel: Any) -> None:
        """Takes the constructor's arguments. With tp_size alone, the group is set later."""
        self.tp_size = size_of(tp_group, tp_size)
        self.sequence_parallel = self.tp_size > 1 and bool(sequence_parallel)
        if tp_group is not None or self.tp_size == 1:
            self.set_tensor_parallel_group(tp_group)

    def set_tensor_parallel_group(self, tp_group: Optional[Any]) -> None:
        """Sets the group, of tp_size ranks, from the next forward on. None: torch.distributed's default group. A module with tp_size 1 has
        unsharded weights and ignores the group.
        """
        where = type(self).__name__
        process_group(where, "tp_group", tp_group)
        if self.tp_size > 1 and collectives.size_of(tp_group) != self.tp_size:
            named = "the default group" if tp_group is None else "the group"
            raise InvalidArgument(f"{where}: {named} has {collectives.size_of(tp_group)} ranks, and the module was made with tp_size = {self.tp_size}; "
                             "give a group of that size, or make the module with this one as tp_group")
        if tp_group is not self.tp_group:  # the next forward creates layers for the new group
            self._forget_layers()
        self.__dict__["tp_group"], self.__dict__["tp_group_initialized"] = tp_group, True

    def _shows_whole(self) -> bool:
        """True if forwards return the gathered input; then the matrix product reads the gathered input."""
        return False

    @property
    def _layer_moves_rows(self) -> bool:
        """True if the C++ layer itself runs the collectives of sequence_parallel."""
        return self._divides and self.sequence_parallel and not self._shows_whole()

    def _group(self) -> Any:
        """The group of a forward that calls collectives."""
        if not self.tp_group_initialized:
            raise FailedPrecondition(f"{type(self).__name__}: it was made with tp_size = {self.tp_size} and has no group; call "
                                     "set_tensor_parallel_group(group) before the first forward")
        return self.tp_group

    def _row_options(self) -> dict:
        """Options of a C++ layer that gathers and scatters rows itself."""
        if not self._layer_moves_rows:
            return {}
        return {"sequence_ranks": SequenceRanks(self._group(), next(self.parameters()).device)}

    def _own_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Prepares the input of a C++ layer with collectives: this rank's rows of x, or all rows for a row-parallel weight."""
        self._group()
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # reduces the bytes to transfer
        return x

    def _check_rows(self, x: torch.Tensor) -> None:
        """Refuses outputs whose first dimension the ranks do not divide evenly, for a product with a row-parallel weight."""
        if x.shape[0] % self.tp_size != 0:
            raise InvalidArgument(f"{type(self).__name__}: the first dimension of {tuple(x.shape)} is divided over the {self.tp_size} ranks of "
                             "sequence_parallel, and they do not divide it; pad it to a multiple")

    def _into(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the input of a column-parallel matrix product, with all rows on each rank."""
        group = self._group()
        if not self.sequence_parallel:
            return regions.copied(x, group)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # reduces the bytes to transfer
        return regions.gathered(x, group)

    def _finish_output(self, y: torch.Tensor) -> torch.Tensor:
        """Reduces the output of a row-parallel product, of which each rank has a partial sum."""
        group = self._group()
        if not self.sequence_parallel:
            return regions.summed(y, group)
        self._check_rows(y)
        return regions.scattered(y, group)

    def _refuse_overlap(self, **flags: Any) -> None:
        """Refuses Userbuffers flags with sequence_parallel, since te-fl has no Userbuffers. On one rank the flags have no effect."""
        for name, value in flags.items():
            if value and self.sequence_parallel:
                raise refuse(type(self).__name__, name, value, "te-fl has no Userbuffers, and its products wait for their collectives; leave it out")
