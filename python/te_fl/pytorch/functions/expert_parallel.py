"""Expert parallelism: rows of tokens travel to the ranks that have their experts, and back.

With E experts and n ranks in a group, rank r has the experts [r E / n, (r + 1) E / n). moe_dispatch() sends each row to its expert's rank, and
moe_combine() returns it to its place; each is the backward of the other. All ranks of the group make the same calls in the same order, in forward and
backward, with equal hidden sizes, dtypes and options; `requires_grad` of the rows and of the probabilities is the same on all ranks.
"""

from __future__ import annotations

import functools
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch

from te_fl import ops
from te_fl.errors import InvalidArgument, add_note
from te_fl.pytorch.autograd.once import once_differentiable
from te_fl.pytorch.distributed import collectives, communicator
from te_fl.pytorch.functions import permutation
from te_fl.tensors import Quantized

__all__ = ["MoEDispatched", "MoEHandle", "MoETransfer", "moe_combine", "moe_dispatch", "start_moe_combine", "start_moe_dispatch"]

_BLOCK = 128  # elements of a row that share an FP8 scale
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Each rank sends each other one a message of these fields and of its numbers of rows for that rank. _WORDS is for fields that must be equal.
_FIELDS = ("experts", "hidden", "dtype", "probs", "capacity", "fp8", "rows", "sum", "least", "refused")
_WORDS = {"experts": "experts in tokens_per_expert", "hidden": "columns of inp", "dtype": "as dtype of inp", "probs": "as dtype of probs (0: none)",
          "capacity": "as capacity", "fp8": "as fp8"}
_HERE = 54  # numbers of rows in the message; more than that follow in a second one, when the ranks are known to agree


class MoEHandle:
    """Holds the data of one moe_dispatch() that moe_combine() needs, and statistics.

    group: the process group. tokens_per_expert: INT64 [E / n] on inp's device, the number of rows with a token of each of this rank's experts.
    splits: the number of rows of each of this rank's experts in moe_dispatch()'s result, as integers: the m_splits of GroupedLinear. dropped: INT64
    scalar on inp's device, the number of this rank's rows beyond the capacity; None without capacity.
    """

    __slots__ = ("group", "ranks", "sent", "received", "tokens_per_expert", "dropped", "rows", "_slots")

    def __init__(self, group: Any, sent: List[int], received: List[int], tokens_per_expert: torch.Tensor, rows: int,
                 slots: Optional[torch.Tensor] = None, dropped: Optional[torch.Tensor] = None) -> None:
        self.group, self.ranks = group, collectives.size_of(group)
        self.sent, self.received = sent, received  # rows by (rank, the rank's expert) that this rank sends and receives
        self.tokens_per_expert, self.dropped = tokens_per_expert, dropped
        self.rows = rows  # of inp
        self._slots = slots  # with capacity, INT32 [1, E C]: the row of inp in each slot, or -1

    @property
    def splits(self) -> List[int]:
        each = len(self.received) // self.ranks
        return [sum(self.received[e::each]) for e in range(each)]


class MoEDispatched(NamedTuple):
    """rows [R, H] and probs [R] (None without probs) of this rank's experts, and the handle for moe_combine()."""

    rows: torch.Tensor
    probs: Optional[torch.Tensor]
    handle: MoEHandle


class MoETransfer:
    """Rows that are on their way. wait() returns the results of moe_dispatch() or moe_combine(); call it once."""

    __slots__ = ("_flight", "_begun", "_end")

    def __init__(self, flight: "_Flight", begun: Tuple[torch.Tensor, ...], end: Any) -> None:
        self._flight, self._begun, self._end = flight, begun, end

    def wait(self) -> Any:
        if self._flight is None:
            raise InvalidArgument("MoETransfer: wait() was called before; keep its result")
        flight, self._flight = self._flight, None
        return self._end(*_Arrived.apply(flight, *self._begun))


class _Flight:
    """One transfer in forward, and its reverse in backward."""

    def __init__(self, handle: MoEHandle, dispatches: bool, fp8: bool) -> None:
        self._handle, self._dispatches, self._fp8 = handle, dispatches, fp8
        self._pending: Any = None
        self._arrive: Any = None
        self._gradients: Tuple[torch.Tensor, ...] = ()  # that are on their way
        self._sent: Any = None  # the op's name and the rows on their way, for errors

    def begin(self, tensors: Sequence[torch.Tensor], reverse: bool = False) -> Tuple[torch.Tensor, ...]:
        """Begins the transfer of [rows, H], and perhaps one number for each row. Returns the tensors into which end() puts the received rows."""
        handle, dispatches = self._handle, self._dispatches != reverse
        sent, received = (handle.sent, handle.received) if dispatches else (handle.received, handle.sent)
        rows, probs = tensors[0].contiguous(), tensors[1].contiguous() if len(tensors) > 1 else None
        count = sum(received)
        results = tuple(t.new_empty((count, *t.shape[1:])) for t in tensors)
        sends: List[Optional[torch.Tensor]] = [rows, probs, None]
        gets: List[Optional[torch.Tensor]] = [results[0], results[1] if probs is not None else None, None]
        self._arrive = None
        if self._fp8 and not reverse and rows.numel():
            sends[0], sends[2] = _encoded(rows)
        if self._fp8 and not reverse:
            codes, scales = rows.new_empty((count, rows.shape[1]), dtype=torch.uint8), rows.new_empty((count, -(-rows.shape[1] // _BLOCK)), dtype=torch.float32)
            if sends[2] is None:  # this rank has no rows
                sends[0], sends[2] = codes[:0].clone(), scales[:0].clone()
            gets[0], gets[2] = codes, scales
            self._arrive = functools.partial(_decode, codes, scales, results[0])
        move = collectives.moe_dispatch if dispatches else collectives.moe_combine
        self._sent = move.__name__, sends[0]
        self._pending = move(gets, sends, sent, received, handle.group, wait=False)
        return results

    def begin_gradients(self, grads: Sequence[torch.Tensor]) -> None:
        self._gradients = self.begin(grads, reverse=True)

    def take_gradients(self) -> Tuple[torch.Tensor, ...]:
        self.end()
        gradients, self._gradients = self._gradients, ()
        return gradients

    def end(self) -> None:
        pending, arrive, (op, sent) = self._pending, self._arrive, self._sent
        self._pending = self._arrive = self._sent = None
        try:
            pending.wait()
        except Exception as error:  # PyTorch's, which does not say which call and which rank
            group = communicator.member(self._handle.group)
            ranks = communicator.of(group, sent.device)
            add_note(error, ranks.note(error, op, group, {"input": sent}, ranks.collectives))
            raise
        if arrive is not None:
            arrive()


class _Begun(torch.autograd.Function):
    @staticmethod
    def forward(ctx, flight: _Flight, *tensors: torch.Tensor):
        ctx.flight = flight
        return flight.begin(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: torch.Tensor):
        return None, *ctx.flight.take_gradients()


class _Arrived(torch.autograd.Function):
    """Its backward begins the transfer of the gradients, and that of _Begun waits for them, after the backward of what ran in between. The gradients
    reach _Begun by way of the flight: what this backward returns to autograd has the shape of the forward's rows, and is not read.
    """

    @staticmethod
    def forward(ctx, flight: _Flight, *tensors: torch.Tensor):
        ctx.flight = flight
        flight.end()
        return tuple(t.detach() for t in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: torch.Tensor):
        ctx.flight.begin_gradients(grads)
        return None, *grads


class _Spread(torch.autograd.Function):
    """out[slots[i]] = x[i]; other rows are 0."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, slots: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.slots = slots
        return permutation._spread_run(x.contiguous(), slots, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        return permutation._gather.run(grad.contiguous(), ctx.slots), None, None


def _encoded(rows: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """The rows as E4M3 codes [rows, H], and their inverse scales F32 [rows, H / 128]."""
    count, columns = rows.shape
    codes = torch.empty(count, columns, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.zeros(-(-columns // _BLOCK), -(-count // 4) * 4, dtype=torch.float32, device=rows.device)
    ops.quantize(input=rows, output=Quantized(codes, scaling="block_1x128", pow2_scale=True, scale_inv=scales))
    return codes.view(torch.uint8), scales[:, :count].t().contiguous()


def _decode(codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes the values of codes to rows."""
    count, blocks = scales.shape
    if not rows.numel():
        return
    stored = torch.zeros(blocks, -(-count // 4) * 4, dtype=torch.float32, device=rows.device)
    stored[:, :count] = scales.t()
    ops.dequantize(input=Quantized(codes.view(torch.float8_e4m3fn), scaling="block_1x128", scale_inv=stored), output=rows)


# ---- the agreement of the ranks

@functools.lru_cache(maxsize=256)
def _header(device: torch.device, *fields: int) -> torch.Tensor:
    return torch.tensor(fields, dtype=torch.int64, device=device)


_seen: set = set()  # calls with capacity whose arguments were compared: group name, and the arguments


def _problem(inp: Any, tokens: Any, probs: Any, capacity: Any, fp8: Any, ranks: int) -> str:
    """Returns why the arguments are refused; empty if they are right."""
    if not isinstance(inp, torch.Tensor) or inp.dim() != 2 or inp.dtype not in _DTYPES:
        seen = f"{str(inp.dtype).removeprefix('torch.')}{list(inp.shape)}" if isinstance(inp, torch.Tensor) else type(inp).__name__
        return f"inp is {seen}; it is [rows, hidden size] in FP32, FP16 or BF16"
    if tokens is None:
        return "tokens_per_expert has to be a list or tensor of integers, one for each expert of all ranks"
    if tokens.numel() == 0 or tokens.numel() % ranks:
        return f"tokens_per_expert has {tokens.numel()} elements; it has one for each expert, and {ranks} ranks have equally many experts"
    if probs is not None and (probs.dtype not in _DTYPES or probs.shape != inp.shape[:1] or probs.device != inp.device):
        return f"probs is {str(probs.dtype).removeprefix('torch.')}{list(probs.shape)} on {probs.device}; inp has {inp.shape[0]} rows on {inp.device}, each of which has one probability"
    if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1):
        return f"capacity is {capacity!r}; it is None or the largest number of rows from one rank for one expert, 1 or more"
    if not isinstance(fp8, bool):
        return f"fp8 is {fp8!r}; it is True or False"
    return ""


def _as_tensor(tokens: Any, device: torch.device) -> Optional[torch.Tensor]:
    if isinstance(tokens, torch.Tensor):
        return tokens.reshape(-1).to(device, torch.int64) if not tokens.is_floating_point() and tokens.dtype != torch.bool else None
    try:
        return torch.tensor(list(map(int, tokens)), dtype=torch.int64, device=device)
    except (TypeError, ValueError):
        return None


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _exchanged(values: torch.Tensor, group: Any) -> torch.Tensor:
    """Row r of the result is row (this rank) of rank r's values."""
    got = torch.empty_like(values)
    collectives.all_to_all(got, values, group)
    return got


def _disagreement(messages: List[List[int]], own: int) -> str:
    """Returns why the ranks' arguments do not fit together, the same text on all ranks except for `own`; empty if they do."""
    found = []
    for name, words in _WORDS.items():
        column = [message[_FIELDS.index(name)] for message in messages]
        if len(set(column)) > 1:
            found.append(" and ".join(f"rank {rank} has {value}" for rank, value in enumerate(column)) + f" {words}; they must be equal")
    for rank, message in enumerate(messages):
        fields = dict(zip(_FIELDS, message))
        if fields["refused"]:
            return f"rank {rank} refused its arguments" + ("" if rank == own else ", with an error that says why")
        if fields["least"] < 0:
            found.append(f"tokens_per_expert of rank {rank} has {fields['least']}; no expert has fewer than 0 rows")
        elif fields["sum"] != fields["rows"]:
            found.append(f"tokens_per_expert of rank {rank} sums to {fields['sum']}; its inp has {fields['rows']} rows")
    return "; ".join(found)


def _agree(where: str, inp: torch.Tensor, tokens: Any, probs: Optional[torch.Tensor], group: Any, capacity: Optional[int], fp8: bool) -> MoEHandle:
    """Exchanges the numbers of rows, and checks that all ranks' arguments fit together. The host reads numbers of inp's device, except with capacity
    once its arguments have been compared.
    """
    ranks, own = collectives.size_of(group), collectives.rank_in(group)
    device = inp.device if isinstance(inp, torch.Tensor) else torch.device("cpu")
    counts = _as_tensor(tokens, device)
    problem = _problem(inp, counts, probs, capacity, fp8, ranks)
    if problem:
        message = _header(device, *[0] * (len(_FIELDS) - 1), 1, *[0] * _HERE).expand(ranks, -1).contiguous()
        if ranks > 1:
            _exchanged(message, group)
        raise InvalidArgument(f"{where}: {problem}")
    experts, rows = counts.numel(), inp.shape[0]
    each = experts // ranks
    kept = counts if capacity is None else counts.clamp(max=capacity)
    static = (experts, inp.shape[1], 1 + _DTYPES.index(inp.dtype), 0 if probs is None else 1 + _DTYPES.index(probs.dtype), capacity or 0, int(fp8))
    fields = torch.cat((_header(device, *static, rows), counts.sum().view(1), counts.amin().view(1), _header(device, 0)))
    message = fields.new_zeros(ranks, len(_FIELDS) + _HERE)
    message[:, :len(_FIELDS)] = fields
    message[:, len(_FIELDS):len(_FIELDS) + min(each, _HERE)] = kept.view(ranks, each)[:, :_HERE]
    got = _exchanged(message, group) if ranks > 1 else message
    key = (getattr(group, "group_name", None), *static)
    reads = capacity is None or (not _capturing(device) and (device.type == "cpu" or key not in _seen))
    told: List[int] = []
    if reads:
        # One copy to the host has the messages and this rank's own numbers.
        told = torch.cat((got.flatten(), counts)).tolist()
        width = len(_FIELDS) + _HERE
        disagreement = _disagreement([told[r * width:r * width + len(_FIELDS)] for r in range(ranks)], own)
        if disagreement:
            raise InvalidArgument(f"{where}: {disagreement}")
        if capacity is not None:
            _seen.add(key)
    came = got[:, len(_FIELDS):len(_FIELDS) + each]
    if each > _HERE:
        came = torch.cat((came, _exchanged(kept.view(ranks, each)[:, _HERE:].contiguous(), group) if ranks > 1 else kept.view(1, each)[:, _HERE:]), 1)
    arrived = came.sum(0)
    if capacity is None:
        received = came.flatten().tolist() if each > _HERE else [n for r in range(ranks) for n in told[r * width + len(_FIELDS):r * width + len(_FIELDS) + each]]
        return MoEHandle(group, told[ranks * width:], received, arrived, rows)
    place = torch.arange(capacity, device=device)
    first = counts.cumsum(0) - counts
    slots = torch.where(place < kept.view(-1, 1), first.view(-1, 1) + place, -1).to(torch.int32).view(1, -1)
    return MoEHandle(group, [capacity] * experts, [capacity] * experts, arrived, rows, slots, (counts - kept).sum())


# ---- the functions

def start_moe_dispatch(inp: torch.Tensor, tokens_per_expert: Union[Sequence[int], torch.Tensor], ep_group: Optional[Any] = None, *,
                       probs: Optional[torch.Tensor] = None, capacity: Optional[int] = None, fp8: bool = False) -> MoETransfer:
    """Begins moe_dispatch(), and returns while the rows travel; the returned object's wait() gives the result. What runs before wait(), such as shared
    experts, overlaps with the transfer, and its backward with that of the gradients.
    """
    handle = _agree("moe_dispatch", inp, tokens_per_expert, probs, ep_group, capacity, fp8)
    tensors = (inp,) if probs is None else (inp, probs)
    if handle._slots is not None:
        tensors = tuple(permutation._sum(t if t.dim() == 2 else t.view(-1, 1), handle._slots) for t in tensors)
        tensors = (tensors[0], *(t.view(-1) for t in tensors[1:]))
    flight = _Flight(handle, True, fp8)

    def end(rows: torch.Tensor, moved: Optional[torch.Tensor] = None) -> MoEDispatched:
        return MoEDispatched(rows, moved, handle)

    return MoETransfer(flight, _Begun.apply(flight, *tensors), end)


def moe_dispatch(inp: torch.Tensor, tokens_per_expert: Union[Sequence[int], torch.Tensor], ep_group: Optional[Any] = None, *,
                 probs: Optional[torch.Tensor] = None, capacity: Optional[int] = None, fp8: bool = False) -> MoEDispatched:
    """Sends the rows of inp [T, H], ordered by expert as moe_permute() returns them, to the ranks of their experts.

    tokens_per_expert: the number of rows for each expert of all ranks, [E], a list or an integer tensor. ep_group: the process group; None: the default
    group. probs [T]: one number for each row, which travels with it; differentiable. The result's rows are ordered by this rank's expert, then by the rank
    that they come from, then as there.

    capacity: None, and the host waits for the numbers of rows. C: at most C rows go from a rank to an expert, and those beyond are dropped:
    moe_combine() returns zeros for them. Each expert then has n C rows, C from each rank, of which those without a token are zeros, so that nothing
    depends on numbers in device memory: capturable, after one call outside of the capture, in which the host compares the ranks' arguments.

    fp8: the forward sends E4M3 codes with a scale for every 128 elements of a row (power of two), half of BF16's bytes, and inp gets the gradient as if
    the rows had been sent unchanged.

    Arguments that a rank refuses, numbers that do not sum to T, and hidden sizes, dtypes or options that differ between ranks are InvalidArgument on all
    ranks before rows are sent.
    """
    return start_moe_dispatch(inp, tokens_per_expert, ep_group, probs=probs, capacity=capacity, fp8=fp8).wait()


def start_moe_combine(inp: torch.Tensor, handle: MoEHandle) -> MoETransfer:
    """Begins moe_combine(), as start_moe_dispatch() begins moe_dispatch()."""
    if not isinstance(handle, MoEHandle):
        raise InvalidArgument(f"moe_combine: handle is a {type(handle).__name__}; it is the handle that moe_dispatch() returned")
    rows = sum(handle.received)
    if not isinstance(inp, torch.Tensor) or inp.dim() != 2 or inp.shape[0] != rows or inp.dtype not in _DTYPES:
        seen = f"{str(inp.dtype).removeprefix('torch.')}{list(inp.shape)}" if isinstance(inp, torch.Tensor) else type(inp).__name__
        raise InvalidArgument(f"moe_combine: inp is {seen}; it has the {rows} rows that moe_dispatch() returned, in FP32, FP16 or BF16")
    flight = _Flight(handle, False, False)

    def end(back: torch.Tensor) -> torch.Tensor:
        return back if handle._slots is None else _Spread.apply(back, handle._slots, handle.rows)

    return MoETransfer(flight, _Begun.apply(flight, inp), end)


def moe_combine(inp: torch.Tensor, handle: MoEHandle) -> torch.Tensor:
    """Returns the experts' rows [R, H'] to the ranks and places that they came from: [T, H'], in the order of moe_dispatch()'s inp. Rows that were
    dropped are zeros. The result is for moe_unpermute(), which sums the rows of each token.
    """
    return start_moe_combine(inp, handle).wait()
