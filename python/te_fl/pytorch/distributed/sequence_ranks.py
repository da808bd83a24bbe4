"""A process group for sequence parallelism in the C++ layers, which all-gather the inputs of their products and reduce-scatter the outputs
themselves.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, List, Optional, Tuple

import torch
import torch.distributed as dist

from te_fl.errors import add_note
from te_fl.pytorch.distributed import collectives, communicator, overlap, same_overlap
from te_fl.pytorch.distributed.amax_reduction import global_ranks
from te_fl.pytorch.runtime.dtypes import LIKE
from te_fl.torch_streams import on_stream


class _Chunks:
    """A reduce-scatter whose rows are computed for one rank after the other. With overlap, each rank's rows are sent at once; otherwise, all rows
    after the last is written.
    """

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
        """Called once for each rank, after the stream of this handle (on a CPU: the thread) has written the rows of that rank."""
        self._missing -= 1
        if self._work is None:
            if self._missing == 0:
                self._begin(None)
            return
        with torch.no_grad(), on_stream(self._tensors[1].device, stream):
            self._work.rows_done(rank)

    def wait(self) -> None:
        """Makes the stream given to the constructor (on a CPU: the calling thread) wait for the reduce-scatter. Called once, on any thread. Does not
        wait if rows are missing: then a matrix product has failed and its error is propagating.
        """
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
    """The ranks of a group (None: the default group), for python/src/torch/process_group.cpp: that file dispatches te-fl's collective ops, and their
    implementation calls begin(). The tensors passed to begin() share te-fl's memory, which lives until the collective is over. All ranks of the group
    must construct a SequenceRanks at the same time.
    """

    def __init__(self, group: Optional[Any], device: torch.device):
        same_overlap.agree(group)
        self.group, self.size, self.rank, self.ranks = group, collectives.size_of(group), collectives.rank_in(group), global_ranks(group)
        self.like = LIKE
        self.communicator = communicator.of(group, device)
        self._communicator = self.communicator._communicator
        self._overlap = overlap.of(group, device)
        # Least bytes of a shard for which products are computed in chunks; 0: never.
        self.chunked_from = 0 if self._overlap is None else self._overlap.chunked_from

    def begin(self, way: str, source: torch.Tensor, to: torch.Tensor, now: bool, stream: Optional[int]) -> Optional[Tuple[Any, str, torch.Tensor, int]]:
        """Starts a collective on PyTorch's current stream, or on the stream of the given handle: "all_gather" of source, "reduce_scatter", or "sum"
        and "max" in place. With `now`, returns None once the stream has the work. Otherwise returns (work, op, first tensor, number); wait for the
        work on the same stream.
        """
        ranks, op = self.communicator, "all_reduce" if source is to else way
        group = communicator.member(self.group)
        communicator.check(op, group)
        arguments = {"input": source, "output": to}
        if way not in ("all_gather", "all_to_all"):
            arguments["reduction"] = "max" if way == "max" else "sum"

        def gather() -> Optional[Any]:
            return self._overlap.gather(source, to) if self._overlap.gathers(source) else dist.all_gather_into_tensor(to, source, group, not now)

        with _HERE if stream is None else on_stream(source.device, stream):
            work = ranks.begin(op, group, arguments, not now, gather if way == "all_gather" and self._in_chunks(source) else None)
        collectives.count(op, ranks.backend, to if way == "all_gather" else source)
        return None if work is None else (work, op, source, ranks.collectives)

    def move_rows(self, op: str, rows: torch.Tensor, probs: Optional[torch.Tensor], to_rows: torch.Tensor, to_probs: Optional[torch.Tensor],
                  sent: List[int], received: List[int], stream: Optional[int]) -> None:
        """Runs moe_dispatch or moe_combine on PyTorch's current stream, or on the stream of the given handle."""
        group = communicator.member(self.group)
        communicator.check(op, group)
        arguments = {"input": rows, "output": to_rows, "probs": probs, "output_probs": to_probs, "input_rows": sent, "output_rows": received}
        with _HERE if stream is None else on_stream(rows.device, stream):
            self.communicator.begin(op, group, arguments, False)
        collectives.count(op, self.communicator.backend, max(rows, to_rows, key=lambda t: t.nbytes))

    def wait_on(self, work: Any, stream: int) -> None:
        """Calls work.wait() with the stream of this handle as the current stream."""
        with on_stream(self.communicator.device, stream):
            work.wait()

    def add_note_to(self, error: BaseException, begun: Tuple[Any, str, torch.Tensor, int]) -> None:
        """Adds a note to the error that names the collective, given the result of begin()."""
        _, op, tensor, number = begun
        add_note(error, self.communicator.note(error, op, communicator.member(self.group), {"input": tensor}, number))

    def _in_chunks(self, part: torch.Tensor) -> bool:
        return 0 < self.chunked_from <= part.numel() * part.element_size()

    def reduce_scatter(self, whole: torch.Tensor, part: torch.Tensor, stream: int) -> "_Chunks":
        """Starts a reduce-scatter of complete rows, for shards of at least chunked_from bytes."""
        chunks = self.scatter_chunks(whole, part, stream)
        for other in range(1, self.size + 1):
            chunks.rows_done((self.rank + other) % self.size, stream)
        return chunks

    def scatter_chunks(self, whole: torch.Tensor, part: torch.Tensor, stream: int) -> "_Chunks":
        """Starts a reduce-scatter whose rows are written for one rank after the other; call rows_done() for each rank."""
        return _Chunks(self, whole, part, stream, self._overlap.scatters(whole))
