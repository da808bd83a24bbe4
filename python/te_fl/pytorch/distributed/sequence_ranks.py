"""A process group as layers in C++ use it under sequence parallelism: they gather and scatter the rows of their products' operands themselves."""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch

from te_fl.pytorch.distributed import collectives, communicator, overlap, same_stripes
from te_fl.pytorch.distributed.amax_reduction import global_ranks, on_stream


class _Work:
    """A collective that has begun on a stream, and its tensors, of which the first is its input."""

    __slots__ = ("_work", "_tensors", "_stream", "_op", "_group", "_number")

    def __init__(self, work: Any, tensors: Tuple[torch.Tensor, ...], stream: int, op: str, group: Any):
        self._work, self._tensors, self._stream, self._op, self._group = work, tensors, stream, op, group
        self._number = communicator.of(group, tensors[0].device).collectives

    def wait(self) -> None:
        """Once, on any thread: that stream goes on after the collective; on a CPU the thread does."""
        if self._work is not None:
            with on_stream(self._tensors[0].device, self._stream):
                self._wait()
        self._work = self._tensors = self._group = None

    def _wait(self) -> None:
        try:
            self._work.wait()
        except Exception as error:
            ranks = communicator.of(self._group, self._tensors[0].device)
            error.add_note(ranks.note(self._op, communicator.member(self._group), {"input": self._tensors[0]}, self._number))
            raise


class _Pieces(_Work):
    """A reduce_scatter whose rows come one rank's after the other's: on their way at once where `beside`, else with the last of them."""

    __slots__ = ("_ranks", "_missing")

    def __init__(self, ranks: "SequenceRanks", whole: torch.Tensor, part: torch.Tensor, stream: int, beside: bool):
        super().__init__(None, (whole, part), stream, "reduce_scatter", ranks.group)
        self._ranks, self._missing = ranks, ranks.size
        if beside:
            self._begin(lambda: ranks._overlap.scatter(whole, part))

    def _begin(self, begin: Optional[Callable[[], Any]]) -> None:
        whole, part = self._tensors
        with torch.no_grad(), on_stream(part.device, self._stream):
            self._work = collectives.reduce_scatter_into(part, whole, self._group, wait=False, begin=begin)

    def rows_done(self, rank: int, stream: int) -> None:
        """The stream of that handle, on a CPU the thread, has written the rows of that rank; each one's once."""
        self._missing -= 1
        if self._work is None:
            if self._missing == 0:
                self._begin(None)
            return
        with torch.no_grad(), on_stream(self._tensors[1].device, stream):
            self._work.rows_done(rank)

    def wait(self) -> None:
        """As _Work's. Before all rows are there it waits for nothing: a product has failed, whose error is on its way."""
        if self._missing > 0:
            if self._work is not None:
                self._work.abandon()
            self._work = None
        super().wait()

    def _wait(self) -> None:
        with torch.no_grad():
            super()._wait()


class SequenceRanks:
    """The ranks of a group, None for the default one. Each method begins a collective on the stream of that handle; the tensors share te-fl's memory,
    which lives until the result's wait(). In C++ python/src/torch/process_group.cpp calls them. All ranks of the group make one at the same time."""

    def __init__(self, group: Optional[Any], device: torch.device):
        same_stripes.agree(group)
        self.group, self.size, self.rank, self.ranks = group, collectives.size_of(group), collectives.rank_in(group), global_ranks(group)
        self.like = torch.empty(0)  # tensors are to be PyTorch's
        self._overlap = overlap.of(group, device)
        self.pieces_from = 0 if self._overlap is None else self._overlap.pieces_from  # bytes of a part; 0: products are never in pieces

    def _in_pieces(self, part: torch.Tensor) -> bool:
        return 0 < self.pieces_from <= part.numel() * part.element_size()

    def all_gather(self, part: torch.Tensor, whole: torch.Tensor, stream: int) -> _Work:
        with torch.no_grad(), on_stream(part.device, stream):
            begin = None
            if self._in_pieces(part) and self._overlap.gathers(part):
                begin = lambda: self._overlap.gather(part, whole)
            return _Work(collectives.all_gather_into(whole, part, self.group, wait=False, begin=begin), (part, whole), stream, "all_gather", self.group)

    def reduce_scatter(self, whole: torch.Tensor, part: torch.Tensor, stream: int) -> _Work:
        if self._in_pieces(part) and self._overlap.scatters(whole):
            pieces = _Pieces(self, whole, part, stream, True)
            for other in range(1, self.size + 1):
                pieces.rows_done((self.rank + other) % self.size, stream)
            return pieces
        with torch.no_grad(), on_stream(part.device, stream):
            return _Work(collectives.reduce_scatter_into(part, whole, self.group, wait=False), (whole, part), stream, "reduce_scatter", self.group)

    def scatter_pieces(self, whole: torch.Tensor, part: torch.Tensor, stream: int) -> "_Pieces":
        """A reduce_scatter of rows that are written one rank's after the other's, of which rows_done() tells."""
        return _Pieces(self, whole, part, stream, self._overlap.scatters(whole))

    def sum(self, values: torch.Tensor, _: torch.Tensor, stream: int) -> _Work:
        """In place, as all_reduce() has it; `_` is the same tensor."""
        return self._reduce(values, "sum", stream)

    def largest(self, values: torch.Tensor, _: torch.Tensor, stream: int) -> _Work:
        """As sum()."""
        return self._reduce(values, "max", stream)

    def _reduce(self, values: torch.Tensor, op: str, stream: int) -> _Work:
        with torch.no_grad(), on_stream(values.device, stream):
            return _Work(collectives.all_reduce(values, self.group, op, wait=False), (values,), stream, "all_reduce", self.group)
