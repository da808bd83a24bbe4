"""A process group as layers in C++ use it under sequence parallelism: they gather and scatter the rows of their products' operands themselves."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Optional, Tuple

import torch
import torch.distributed as dist

from te_fl.pytorch.distributed import collectives, communicator, overlap, same_overlap
from te_fl.pytorch.distributed.amax_reduction import global_ranks, on_stream
from te_fl.pytorch.runtime.dtypes import LIKE


class _Pieces:
    """A reduce_scatter whose rows come one rank's after the other's: on their way at once where `beside`, else with the last of them."""

    __slots__ = ("_ranks", "_tensors", "_stream", "_missing", "_work", "_number")

    def __init__(self, ranks: "SequenceRanks", whole: torch.Tensor, part: torch.Tensor, stream: int, beside: bool):
        self._ranks, self._tensors, self._stream, self._missing = ranks, (whole, part), stream, ranks.size
        self._work: Optional[Any] = None
        if beside:
            self._begin(lambda: ranks._overlap.scatter(whole, part))

    def _begin(self, begin: Optional[Callable[[], Any]]) -> None:
        whole, part = self._tensors
        with torch.no_grad(), on_stream(part.device, self._stream):
            self._work = collectives.reduce_scatter_into(part, whole, self._ranks.group, wait=False, begin=begin)
        self._number = self._ranks.communicator.collectives

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
        """Once, on any thread: that stream goes on after the sum; on a CPU the thread does. Before all rows are there it waits for nothing: a product has
        failed, whose error is on its way."""
        work, tensors = self._work, self._tensors
        self._work = self._tensors = None
        if work is None or tensors is None:
            return
        if self._missing > 0:
            work.abandon()
            return
        try:
            with torch.no_grad(), on_stream(tensors[0].device, self._stream):
                work.wait()
        except Exception as error:
            self._ranks.add_note_to(error, (work, "reduce_scatter", tensors[0], self._number))
            raise


_HERE = contextlib.nullcontext()


class SequenceRanks:
    """The ranks of a group, None for the default one, as python/src/torch/process_group.cpp calls them: it dispatches te-fl's ops, and begin() is what
    they run. The tensors share te-fl's memory, which lives until the collective is over. All ranks of the group make one at the same time."""

    def __init__(self, group: Optional[Any], device: torch.device):
        same_overlap.agree(group)
        self.group, self.size, self.rank, self.ranks = group, collectives.size_of(group), collectives.rank_in(group), global_ranks(group)
        self.like = LIKE
        self.communicator = communicator.of(group, device)
        self._communicator = self.communicator._communicator
        self._overlap = overlap.of(group, device)
        self.pieces_from = 0 if self._overlap is None else self._overlap.pieces_from  # bytes of a part; 0: products are never in pieces

    def begin(self, way: str, source: torch.Tensor, to: torch.Tensor, now: bool, stream: Optional[int]) -> Optional[Tuple[Any, str, torch.Tensor, int]]:
        """Begins a collective on PyTorch's current stream, or on that of the handle: "all_gather" of source, "reduce_scatter", or "sum" and "max" in
        place. None: the stream has it, as `now` asks for; else its work, op, first tensor and number, of which the work is waited for on that
        stream."""
        ranks, op = self.communicator, "all_reduce" if source is to else way
        group = communicator.member(self.group)
        communicator.check(op, group)
        number = ranks.count_collective()
        try:
            if ranks.same_call is not None:
                arguments = {"input": source} if way == "all_gather" else {"input": source, "reduction": "max" if way == "max" else "sum"}
                ranks.same_call.compare(op, arguments)
            with _HERE if stream is None else on_stream(source.device, stream):
                if way == "all_gather":
                    if self.pieces_from and self._in_pieces(source) and self._overlap.gathers(source):
                        work = self._overlap.gather(source, to)
                    else:
                        work = dist.all_gather_into_tensor(to, source, group, not now)
                elif way == "reduce_scatter":
                    work = dist.reduce_scatter_tensor(to, source, dist.ReduceOp.SUM, group, not now)
                else:
                    work = dist.all_reduce(to, dist.ReduceOp.MAX if way == "max" else dist.ReduceOp.SUM, group, not now)
        except Exception as error:
            self.add_note_to(error, (None, op, source, number))
            raise
        collectives.count(op, ranks.backend, to if way == "all_gather" else source)
        return None if work is None else (work, op, source, number)

    def wait_on(self, work: Any, stream: int) -> None:
        """As work.wait() where the stream of that handle is PyTorch's current one."""
        with on_stream(self.communicator.device, stream):
            work.wait()

    def add_note_to(self, error: BaseException, begun: Tuple[Any, str, torch.Tensor, int]) -> None:
        """Says of which of begin()'s collectives an error is."""
        _, op, tensor, number = begun
        error.add_note(self.communicator.note(error, op, communicator.member(self.group), {"input": tensor}, number))

    def _in_pieces(self, part: torch.Tensor) -> bool:
        return 0 < self.pieces_from <= part.numel() * part.element_size()

    def reduce_scatter(self, whole: torch.Tensor, part: torch.Tensor, stream: int) -> "_Pieces":
        """Begins one for parts of pieces_from bytes and more, all of whose rows are there."""
        pieces = self.scatter_pieces(whole, part, stream)
        for other in range(1, self.size + 1):
            pieces.rows_done((self.rank + other) % self.size, stream)
        return pieces

    def scatter_pieces(self, whole: torch.Tensor, part: torch.Tensor, stream: int) -> "_Pieces":
        """A reduce_scatter of rows that are written one rank's after the other's, of which rows_done() tells."""
        return _Pieces(self, whole, part, stream, self._overlap.scatters(whole))
