"""All-gather and reduce-scatter by copies between the GPUs of one host, for overlap with matrix products.

NCCL's kernels compete with concurrent products for SMs, and a product that fills the GPU delays them. Copies between GPUs use the copy engines
instead. Ranks synchronise by flag words in each other's memory, which a stream writes and waits for without a kernel (stream memory operations). The
memory is PyTorch's symmetric memory. Everything except the first use of a size can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Optional

import torch
import torch.distributed as dist

from te_fl.errors import Internal

MOST_RANKS = 32
_FLAGS = 4096  # bytes reserved at the beginning of each rank's memory for flag words, one per barrier and rank
_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ


class _WordStep(ctypes.Structure):
    """CUstreamBatchMemOpParams: a stream operation that writes a word or waits for a word's value."""
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
        raise Internal(f"{name} failed with CUDA's error {code}, in a copy between GPUs beside a product; TE_FL_TP_OVERLAP=0 leaves such copies to "
                       "the process group")


class PeerMemory:
    """A buffer of equal size on each rank of a group, which all ranks can copy to and from, and a stream for the copies. All ranks construct it at
    the same time. All ranks call the collectives below in the same order, from one thread at a time.

    Each collective leaves the buffer free for the next one: its last step on the buffer's stream is barrier 0, after which no rank accesses the
    buffer. The stream that waits for the collective continues after that barrier, so CUDA graphs and eager calls may follow each other.
    """

    def __init__(self, group: Any, device: torch.device, size: int):
        import torch.distributed._symmetric_memory as symmetric
        self.size, self.ranks, self.rank = size, dist.get_world_size(group), dist.get_rank(group)
        self._memory = symmetric.empty(_FLAGS + size, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(self._memory, group.group_name)
        self._memory[:_FLAGS].zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group, device_ids=[device.index])  # all flag words must be zero before any rank writes one
        torch.cuda.synchronize(device)
        self._stream = torch.cuda.Stream(device, priority=-1)
        self.stream = self._stream.cuda_stream
        self._followed = torch.cuda.Event()
        self.others = [(self.rank + i) % self.ranks for i in range(1, self.ranks)]
        self._pointers = [int(p) for p in self._handle.buffer_ptrs]
        self._meetings = [self._split_steps(0), self._split_steps(1)]
        self.begun: Optional[Any] = None  # the last collective, until a stream waits for it
        self.broken = False  # a collective was abandoned midway, so the buffer's state differs between ranks
        self._free: Optional[torch.cuda.Event] = None  # recorded after the last collective that ended outside of a graph capture

    def address(self, owner: int, offset: int = 0) -> int:
        return self._pointers[owner] + _FLAGS + offset

    def own(self, like: torch.Tensor, offset: int) -> torch.Tensor:
        """A view of this rank's buffer at the byte offset, with the shape and dtype of `like`."""
        place = self._memory[_FLAGS + offset:_FLAGS + offset + like.numel() * like.element_size()]
        return place.view(like.dtype).view(like.shape)

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        _done("cuMemcpyDtoDAsync", _driver().cuMemcpyDtoDAsync_v2(to, source, size, stream))

    def begin(self, stream: torch.cuda.Stream) -> None:
        """Makes the stream wait until the buffer is free."""
        if self.begun is not None:
            self.begun.let_wait(stream)
        elif self._free is not None and not torch.cuda.is_current_stream_capturing():  # the last collective may have ended on another stream
            stream.wait_event(self._free)

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Makes the buffer's stream wait for the work that `stream` has now."""
        self._followed.record(stream)
        self._stream.wait_event(self._followed)

    def ended(self) -> torch.cuda.Event:
        """Records the event of a collective's last step, after which the buffer is free."""
        event = self.now()
        if not torch.cuda.is_current_stream_capturing():
            self._free = event
        return event

    def now(self) -> torch.cuda.Event:
        """An event for the work that the buffer's stream has now."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def meet(self, meeting: int) -> None:
        """A barrier: the buffer's stream continues once all ranks' streams have arrived. Barriers 1 and 0 alternate, so that a word is read and
        cleared before it is written again.
        """
        steps = self._meetings[meeting]
        _done("cuStreamBatchMemOp", _driver().cuStreamBatchMemOp_v2(self.stream, len(steps), steps, 0))

    def _split_steps(self, meeting: int) -> Any:
        """The stream operations of a barrier: write a word at each other rank, and wait for each rank's word."""
        steps = [_WordStep(_WRITE, self._pointers[other] + 4 * (meeting * MOST_RANKS + self.rank), 1, 0) for other in self.others]
        for other in self.others:
            word = self._pointers[self.rank] + 4 * (meeting * MOST_RANKS + other)
            steps += [_WordStep(_WAIT, word, 1, _EQUAL), _WordStep(_WRITE, word, 0, 0)]
        return (_WordStep * len(steps))(*steps)


class Gather:
    """All-gather: whole [ranks * n, ..] = the ranks' shards [n, ..]. wait() makes the current stream wait, as torch.distributed's Work does."""

    def __init__(self, memory: PeerMemory, part: torch.Tensor, whole: torch.Tensor):
        stream, size = torch.cuda.current_stream(part.device), part.numel() * part.element_size()
        source, to = part.data_ptr(), whole.data_ptr()
        memory.begin(stream)
        # A copy within one GPU runs as a kernel, which a concurrent product could delay. So it runs on the caller's stream, before the product.
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
    """Reduce-scatter: part [n, ..] = this rank's rows of the sum of the ranks' whole [ranks * n, ..]. rows_done() sends the rows of one rank, once
    for each rank.
    """

    def __init__(self, memory: PeerMemory, whole: torch.Tensor, part: torch.Tensor):
        memory.begin(torch.cuda.current_stream(part.device))
        self._memory, self._whole, self._part = memory, whole, part
        self._bytes = part.numel() * part.element_size()
        self._missing = memory.ranks
        self._came: Optional[torch.cuda.Event] = None
        self._summed = False
        memory.begun = self

    def rows_done(self, rank: int) -> None:
        """Called after the current stream has written the rows of that rank."""
        memory = self._memory
        if rank != memory.rank:
            memory.follow(torch.cuda.current_stream(self._part.device))
            memory.copy(memory.address(rank, memory.rank * self._bytes), self._whole.data_ptr() + rank * self._bytes, self._bytes, memory.stream)
        self._missing -= 1
        if self._missing == 0:
            memory.meet(1)
            self._came = memory.now()

    def wait(self) -> None:
        """Makes the current stream wait for the sum. With more than two ranks, the sum is computed in F32 in rank order and rounded once."""
        self.let_wait(torch.cuda.current_stream(self._part.device))

    def let_wait(self, stream: torch.cuda.Stream) -> None:
        """wait() for a given stream. The next collective calls it if the program has not waited."""
        memory = self._memory
        if memory.begun is self:
            memory.begun = None
        if self._came is None:
            raise Internal("a sum over ranks was waited for before all its rows were there")
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
        """Ends the collective when the product that computes the remaining rows has failed."""
        self._memory.begun, self._memory.broken = None, True

    def _sum(self, stream: torch.cuda.Stream) -> None:
        memory, part = self._memory, self._part
        mine = self._whole.view(memory.ranks, *part.shape)[memory.rank]
        if memory.ranks == 2:
            torch.add(mine, memory.own(part, (1 - memory.rank) * self._bytes), out=part)
            return
        memory.copy(memory.address(memory.rank, memory.rank * self._bytes), mine.data_ptr(), self._bytes, stream.cuda_stream)
        torch.sum(memory.own(self._whole.view(memory.ranks, *part.shape), 0), 0, out=part)
