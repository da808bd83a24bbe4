"""Gathers and sums of sequence parallelism by copies between the memories of a host's GPUs, which run beside products and take none of their processors.

NCCL's kernels take thread blocks from the products that they run beside, and a product that fills the GPU lets no kernel begin; copies between GPUs are made
by copy engines, and ranks tell each other by words in each other's memory, which a stream writes and waits for without a kernel. The memory is PyTorch's
symmetric memory. Everything can be captured in a CUDA graph, but for the first use of a size.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Optional

import torch
import torch.distributed as dist

from te_fl.errors import Internal

MOST_RANKS = 32
_FLAGS = 4096  # bytes at the beginning of a rank's memory: a word for each meeting and rank
_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ


class _WordStep(ctypes.Structure):
    """CUstreamBatchMemOpParams: a word that a stream writes, or waits for."""
    _fields_ = [("operation", ctypes.c_uint32), ("address", ctypes.c_uint64), ("value", ctypes.c_uint64), ("flags", ctypes.c_uint32),
                ("alias", ctypes.c_uint64), ("rest", ctypes.c_uint64)]


@functools.lru_cache(maxsize=None)
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    for name, types in (("cuStreamBatchMemOp_v2", (ctypes.c_void_p, ctypes.c_uint, ctypes.POINTER(_WordStep), ctypes.c_uint)),
                        ("cuMemcpyDtoDAsync_v2", (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p))):
        function = getattr(driver, name)
        function.argtypes, function.restype = types, ctypes.c_int
    return driver


def _done(name: str, code: int) -> None:
    if code != 0:
        raise Internal(f"INTERNAL: {name} failed with CUDA's error {code}, in a copy between GPUs beside a product; TE_FL_TP_OVERLAP=0 leaves such copies to "
                       "the process group")


class PeerMemory:
    """Memory of the same size on each rank of a group, which all of them can copy to and from, and a stream for that. Made by all ranks at the same
    time; the collectives below are called by all ranks in the same order, from one thread at a time. Each leaves the memory free for the next: its last
    step on the memory's stream is meeting 0, after which nobody reads or writes there any more, and the stream that waits for it goes on after that, so
    that graphs and calls outside of them may follow each other."""

    def __init__(self, group: Any, device: torch.device, size: int):
        import torch.distributed._symmetric_memory as symmetric
        self.size, self.ranks, self.rank = size, dist.get_world_size(group), dist.get_rank(group)
        self._memory = symmetric.empty(_FLAGS + size, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(self._memory, group.group_name)
        self._memory[:_FLAGS].zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group, device_ids=[device.index])  # all words are zero before anyone writes one
        torch.cuda.synchronize(device)
        self._stream = torch.cuda.Stream(device, priority=-1)
        self.stream = self._stream.cuda_stream
        self._followed = torch.cuda.Event()
        self.others = [(self.rank + i) % self.ranks for i in range(1, self.ranks)]
        self._pointers = [int(p) for p in self._handle.buffer_ptrs]
        self._meetings = [self._steps_of(0), self._steps_of(1)]
        self.begun: Optional[Any] = None  # the last collective, until it is waited for
        self.broken = False  # one was given up before its end: ranks do not know what lies there
        self._free: Optional[torch.cuda.Event] = None  # of the last one that ended outside of a capture

    def address(self, owner: int, offset: int = 0) -> int:
        return self._pointers[owner] + _FLAGS + offset

    def own(self, like: torch.Tensor, offset: int) -> torch.Tensor:
        """A tensor like that one in this rank's memory, so many bytes from its beginning."""
        place = self._memory[_FLAGS + offset:_FLAGS + offset + like.numel() * like.element_size()]
        return place.view(like.dtype).view(like.shape)

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        _done("cuMemcpyDtoDAsync", _driver().cuMemcpyDtoDAsync_v2(to, source, size, stream))

    def begin(self, stream: torch.cuda.Stream) -> None:
        """The stream goes on once the memory is free."""
        if self.begun is not None:
            self.begun.let_wait(stream)
        elif self._free is not None and not torch.cuda.is_current_stream_capturing():  # that one may have been on another stream
            stream.wait_event(self._free)

    def follow(self, stream: torch.cuda.Stream) -> None:
        """The memory's stream goes on after what that one has now."""
        self._followed.record(stream)
        self._stream.wait_event(self._followed)

    def ended(self) -> torch.cuda.Event:
        """Returns the event of the last step of a collective, after which the memory is free."""
        event = self.now()
        if not torch.cuda.is_current_stream_capturing():
            self._free = event
        return event

    def now(self) -> torch.cuda.Event:
        """An event of what the memory's stream has now."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def meet(self, meeting: int) -> None:
        """The memory's stream goes on once all ranks' have come here. Meetings 1 and 0 take turns, so a word is read and cleared before it can be
        written again."""
        steps = self._meetings[meeting]
        _done("cuStreamBatchMemOp", _driver().cuStreamBatchMemOp_v2(self.stream, len(steps), steps, 0))

    def _steps_of(self, meeting: int) -> Any:
        """Tells each other rank, and takes each one's word."""
        steps = [_WordStep(_WRITE, self._pointers[other] + 4 * (meeting * MOST_RANKS + self.rank), 1, 0) for other in self.others]
        for other in self.others:
            word = self._pointers[self.rank] + 4 * (meeting * MOST_RANKS + other)
            steps += [_WordStep(_WAIT, word, 1, _EQUAL), _WordStep(_WRITE, word, 0, 0)]
        return (_WordStep * len(steps))(*steps)


class Gather:
    """whole [ranks * n, ..] <- the ranks' parts [n, ..]. wait() is that of torch.distributed's Work: the current stream goes on after it."""

    def __init__(self, memory: PeerMemory, part: torch.Tensor, whole: torch.Tensor):
        stream, size = torch.cuda.current_stream(part.device), part.numel() * part.element_size()
        source, to = part.data_ptr(), whole.data_ptr()
        memory.begin(stream)
        # A copy within a GPU is a kernel, which would come after a product that was begun beside it, so it is not on the memory's stream.
        memory.copy(memory.address(memory.rank), source, size, stream.cuda_stream)
        memory.follow(stream)
        memory.meet(1)
        for other in memory.others:
            memory.copy(to + other * size, memory.address(other), size, memory.stream)
        memory.meet(0)
        self._memory, self._came, self._device = memory, memory.ended(), part.device
        memory.copy(to + memory.rank * size, source, size, stream.cuda_stream)
        memory.begun = self

    def wait(self) -> None:
        self.let_wait(torch.cuda.current_stream(self._device))

    def let_wait(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._came)
        if self._memory.begun is self:
            self._memory.begun = None


class Scatter:
    """part [n, ..] <- this rank's rows of the sum of the ranks' whole [ranks * n, ..]. Rows go to their rank as rows_done() says; each rank once."""

    def __init__(self, memory: PeerMemory, whole: torch.Tensor, part: torch.Tensor):
        memory.begin(torch.cuda.current_stream(part.device))
        self._memory, self._whole, self._part = memory, whole, part
        self._bytes = part.numel() * part.element_size()
        self._missing = memory.ranks
        self._came: Optional[torch.cuda.Event] = None
        self._summed = False
        memory.begun = self

    def rows_done(self, rank: int) -> None:
        """The current stream has written the rows of that rank."""
        memory = self._memory
        if rank != memory.rank:
            memory.follow(torch.cuda.current_stream(self._part.device))
            memory.copy(memory.address(rank, memory.rank * self._bytes), self._whole.data_ptr() + rank * self._bytes, self._bytes, memory.stream)
        self._missing -= 1
        if self._missing == 0:
            memory.meet(1)
            self._came = memory.now()

    def wait(self) -> None:
        """The current stream has the sum: of F32 numbers, in the order of ranks where there are more than two, rounded once."""
        self.let_wait(torch.cuda.current_stream(self._part.device))

    def let_wait(self, stream: torch.cuda.Stream) -> None:
        """wait() for that stream; what the next collective calls, if nobody has waited."""
        memory = self._memory
        if memory.begun is self:
            memory.begun = None
        if self._came is None:
            raise Internal("INTERNAL: a sum over ranks was waited for before all its rows were there")
        stream.wait_event(self._came)
        if self._summed:
            return
        self._summed = True
        with torch.no_grad(), torch.cuda.stream(stream):
            self._sum(stream)
        memory.follow(stream)
        memory.meet(0)
        self._came = memory.ended()
        stream.wait_event(self._came)

    def abandon(self) -> None:
        """Some rows do not come: the product of theirs has failed."""
        self._memory.begun, self._memory.broken = None, True

    def _sum(self, stream: torch.cuda.Stream) -> None:
        memory, part = self._memory, self._part
        mine = self._whole.view(memory.ranks, *part.shape)[memory.rank]
        if memory.ranks == 2:
            torch.add(mine, memory.own(part, (1 - memory.rank) * self._bytes), out=part)
            return
        memory.copy(memory.address(memory.rank, memory.rank * self._bytes), mine.data_ptr(), self._bytes, stream.cuda_stream)
        torch.sum(memory.own(self._whole.view(memory.ranks, *part.shape), 0), 0, out=part)
