"""Attention over a sequence whose keys and values go from rank to rank (cp_comm_type 'p2p').

Each rank computes its queries against one rank's keys at a time, and combines the results by their log-sum-exps. Step s uses the keys of rank r - s.
They come directly from that rank, while the step before computes; in the backward their gradients go back the same way. Under a causal mask a rank
needs only the first chunk of a lower rank's keys, and only its second chunk of queries sees a higher rank's keys; the chunks that are not needed are
not sent.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import torch

from te_fl import ops
from te_fl.attention_logits import max_logits
from te_fl.pytorch.autograd.once import once_differentiable
from te_fl.pytorch.distributed import collectives
from te_fl.pytorch.distributed.agreement import agree_over

WHERE = "DotProductAttention"


class Lengths(NamedTuple):
    """The lengths of the sequences of queries, or of keys.

    tokens: int [B], without padding. chunk: int [B], of one of the 2 R chunks. starts: int32 [B + 1], of this rank's sequences in the packed layout.
    longest: of a rank's chunk, 0 if unknown.
    """

    tokens: torch.Tensor
    chunk: torch.Tensor
    starts: Optional[torch.Tensor]
    longest: int

    def of_chunk(self, number: int) -> torch.Tensor:
        """The tokens that are not padding in the chunk with this number."""
        return torch.minimum((self.tokens - number * self.chunk).clamp_(min=0), self.chunk)


def sums(lengths: torch.Tensor) -> torch.Tensor:
    """Cumulative lengths, int32 [B + 1]."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


class Ring(NamedTuple):
    """The settings that all steps of one attention share. groups: in which the ranks agree, the last one that in which keys go around. lengths: of queries
    and of keys; None if all sequences have the tensors' length.
    """

    groups: Tuple[Any, ...]
    stream: Optional[Any]
    layout: str
    causal: bool
    lengths: Optional[Tuple[Lengths, Lengths]]
    scale: float
    softcap: float
    dropout: float
    words: str

    @property
    def group(self) -> Any:
        return self.groups[-1]

    @property
    def ranks(self) -> int:
        return collectives.size_of(self.group)

    @property
    def rank(self) -> int:
        return collectives.rank_in(self.group)

    @property
    def dim(self) -> int:
        return 1 if self.layout == "bshd" else 0

    def half_of_keys(self, owner: int, reader: int) -> bool:
        """True if the reader needs only the first chunks of the owner's keys."""
        return self.causal and owner < reader

    def sends_half(self, owner: int, reader: int) -> bool:
        """True if the owner's message to the reader has the first chunks only. In the packed layout it has all, since the chunks of the sequences
        lie between one another.
        """
        return self.layout != "thd" and self.half_of_keys(owner, reader)

    def half_of_queries(self, owner: int) -> bool:
        """True if only this rank's second chunks of queries see the owner's keys."""
        return self.causal and owner > self.rank

    def cut(self, t: torch.Tensor, second: bool) -> torch.Tensor:
        """A view of the first or second chunks. In the packed layout, where the chunks of many sequences follow one another, the whole tensor:
        there arguments() names the chunks.
        """
        if self.layout == "thd":
            return t
        half = t.shape[self.dim] // 2
        return t.narrow(self.dim, half if second else 0, half)

    def arguments(self, owner: int) -> dict:
        """Arguments of the attention op for the keys of one rank."""
        mask = "causal" if self.causal and owner == self.rank else "none"
        common = dict(layout=self.layout, scale=self.scale, softcap=self.softcap, dropout_p=self.dropout, softmax_type="vanilla")
        if self.lengths is None:
            return dict(common, mask_type=mask)
        of_q, of_kv = self.lengths
        last = 2 * self.ranks - 1
        q, kv = of_q.of_chunk(last - self.rank), of_kv.of_chunk(owner)
        if not self.half_of_queries(owner):
            q = q + of_q.of_chunk(self.rank)
        if not self.half_of_keys(owner, self.rank):
            kv = kv + of_kv.of_chunk(last - owner)
        common.update(mask_type="padding_causal" if mask == "causal" else "padding", cu_seqlens_q=sums(q), cu_seqlens_kv=sums(kv))
        if self.layout == "thd":
            starts = of_q.starts
            if self.half_of_queries(owner):
                starts = starts + torch.nn.functional.pad(of_q.chunk, (0, 1)).to(torch.int32)
            common.update(cu_seqlens_q_padded=starts, cu_seqlens_kv_padded=of_kv.starts, max_seqlen_q=2 * of_q.longest, max_seqlen_kv=2 * of_kv.longest)
        return common

    def statistics(self, q: torch.Tensor) -> torch.Size:
        """The shape of the log-sum-exp."""
        if self.layout == "thd":
            return q.shape[:2]
        batch, length = (q.shape[0], q.shape[1]) if self.layout == "bshd" else (q.shape[1], q.shape[0])
        return torch.Size((batch, q.shape[2], length))

    def second_statistics(self, lse: torch.Tensor) -> torch.Tensor:
        return lse if self.layout == "thd" else lse[..., lse.shape[-1] // 2:]

    def by_row(self, lse: torch.Tensor) -> torch.Tensor:
        """A log-sum-exp with the dimensions of the output."""
        if self.layout == "thd":
            return lse.unsqueeze(-1)
        return (lse.transpose(1, 2) if self.layout == "bshd" else lse.permute(2, 0, 1)).unsqueeze(-1)

    def bias_of(self, bias: Optional[torch.Tensor], owner: int) -> Optional[torch.Tensor]:
        """The bias of one step, from that of this rank's queries and all keys, which are in the sequence's order."""
        if bias is None:
            return None
        columns = bias.unflatten(-1, (2 * self.ranks, -1))
        parts = [columns[..., owner, :]]
        if not self.half_of_keys(owner, self.rank):
            parts.append(columns[..., 2 * self.ranks - 1 - owner, :])
        part = torch.cat(parts, -1)
        return (part[..., part.shape[-2] // 2:, :] if self.half_of_queries(owner) else part).contiguous()

    def add_bias_gradient(self, total: torch.Tensor, part: torch.Tensor, owner: int) -> None:
        columns = total.unflatten(-1, (2 * self.ranks, -1))
        if self.half_of_queries(owner):
            columns = columns[..., columns.shape[-3] // 2:, :, :]
        chunk = columns.shape[-1]
        columns[..., owner, :] += part[..., :chunk]
        if not self.half_of_keys(owner, self.rank):
            columns[..., 2 * self.ranks - 1 - owner, :] += part[..., chunk:]


class _Pair:
    """Keys and values, or their gradients, in one buffer, so that one message carries both."""

    __slots__ = ("buffer", "shapes")

    def __init__(self, buffer: torch.Tensor, shapes: Tuple[torch.Size, torch.Size]):
        self.buffer, self.shapes = buffer[:sum(shape.numel() for shape in shapes)], shapes

    def tensors(self) -> Tuple[torch.Tensor, torch.Tensor]:
        k, v = self.buffer.split([shape.numel() for shape in self.shapes])
        return k.view(self.shapes[0]), v.view(self.shapes[1])

    def fill(self, k: torch.Tensor, v: torch.Tensor) -> "_Pair":
        for own, value in zip(self.tensors(), (k, v)):
            own.copy_(value)
        return self


class _Messages:
    """The messages of one step, sent and received on a stream of its own, beside the attention that the current stream computes."""

    def __init__(self, ring: Ring, send: _Pair, to: int, receive: _Pair, source: int, stream: Optional[Any]):
        self.received, self._works = receive, []
        device = send.buffer.device
        if stream is not None:
            stream.wait_stream(torch.get_device_module(device).current_stream(device))
        with contextlib.ExitStack() as scopes:
            if stream is not None:
                scopes.enter_context(torch.get_device_module(device).stream(stream))
            together = _coalesced(ring.group, device)
            if together is not None:
                self._works.append(scopes.enter_context(together))
            # With Gloo the order does not matter. Backends whose messages block each other send them together.
            for work in (collectives.send(send.buffer, to, ring.group, wait=False),
                         collectives.receive(receive.buffer, source, ring.group, wait=False)):
                if work is not None and together is None:
                    self._works.append(work)
        self._kept = send  # until wait(): the backend reads it

    def wait(self) -> _Pair:
        """Makes the current stream wait for the messages."""
        for work in self._works:
            work.wait()
        return self.received


def _coalesced(group: Any, device: torch.device) -> Optional[Any]:
    """PyTorch's manager that issues sends and receives as one group call, for backends that have one."""
    backend = group._get_backend(device) if hasattr(group, "_get_backend") else None
    if backend is None or not getattr(backend, "supports_coalescing", False) or device.type == "cpu":
        return None
    return torch.distributed.distributed_c10d._coalescing_manager(group, device, async_ops=True)


_streams: dict = {}


def side_stream(stream: Optional[Any], device: torch.device) -> Optional[Any]:
    """cp_stream, or a stream of te-fl's own for the device; None on a CPU."""
    if device.type == "cpu":
        return None
    if stream is not None:
        return stream
    if device not in _streams:
        _streams[device] = torch.get_device_module(device).Stream(device)
    return _streams[device]


class _Steps:
    """The steps of one direction on this rank, with the memory for their messages, which is allocated before the first of them. After a failure the
    messages go on, so that no rank waits for this one, and the failure is reported at the end.
    """

    def __init__(self, ring: Ring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backward: bool):
        self.ring, self.q, self.k, self.v = ring, q, k, v
        self.stream = side_stream(ring.stream, k.device)
        self.failed: Optional[Exception] = None
        whole = k.numel() + v.numel()
        # This rank's keys in their two forms: all chunks, and the first ones.
        self._sent = {half: self._pair(k.new_empty(whole // 2 if half else whole), half).fill(*(ring.cut(t, False) if half else t for t in (k, v)))
                      for half in {ring.sends_half(ring.rank, reader) for reader in range(ring.ranks) if reader != ring.rank}}
        self._received = [k.new_empty(whole) for _ in range(min(2, ring.ranks - 1))]
        self._gradients = [[k.new_zeros(whole) for _ in range(min(2, ring.ranks - 1))] for _ in range(2 if backward else 0)]

    def _pair(self, buffer: torch.Tensor, half: bool) -> _Pair:
        shapes = []
        for t in (self.k, self.v):
            shape = list(t.shape)
            if half:
                shape[self.ring.dim] //= 2
            shapes.append(torch.Size(shape))
        return _Pair(buffer, (shapes[0], shapes[1]))

    def attempt(self, function: Callable, *arguments: Any) -> Any:
        """function(*arguments), or None after a failure."""
        if self.failed is None:
            try:
                return function(*arguments)
            except Exception as error:
                self.failed = error
        return None

    def _keys(self, step: int) -> _Messages:
        ring = self.ring
        to, source = (ring.rank + step) % ring.ranks, (ring.rank - step) % ring.ranks
        receive = self._pair(self._received[step % len(self._received)], ring.sends_half(source, ring.rank))
        return _Messages(ring, self._sent[ring.sends_half(ring.rank, to)], to, receive, source, self.stream)

    def _back(self, step: int, gradients: Optional[Tuple[torch.Tensor, torch.Tensor]]) -> _Messages:
        """Sends the gradients of another rank's keys to that rank, and receives those of this rank's."""
        ring = self.ring
        to, source = (ring.rank - step) % ring.ranks, (ring.rank + step) % ring.ranks
        sent, received = (buffers[step % len(buffers)] for buffers in self._gradients)
        send = self._pair(sent, ring.sends_half(to, ring.rank))
        if gradients is not None:
            send.fill(*gradients)
        return _Messages(ring, send, to, self._pair(received, ring.sends_half(ring.rank, source)), source, self.stream)

    def run(self, compute: Callable, add: Optional[Callable] = None) -> None:
        """compute(owner, k, v) for each rank's keys, this rank's first. add(k, v, half): adds gradients of this rank's keys, which are those that
        compute() returns on the other ranks.
        """
        ring, coming, back = self.ring, None, None
        for step in range(ring.ranks):
            owner = (ring.rank - step) % ring.ranks
            k, v = coming.wait().tensors() if coming is not None else (self.k, self.v)
            coming = self._keys(step + 1) if step + 1 < ring.ranks else None
            found = self.attempt(compute, owner, k, v)
            if back is not None:
                self._finish(back, add)
                back = None
            if add is not None and step > 0:
                back = (self._back(step, found), ring.sends_half(ring.rank, (ring.rank + step) % ring.ranks))
        if back is not None:
            self._finish(back, add)

    def _finish(self, back: Tuple[_Messages, bool], add: Callable) -> None:
        k, v = back[0].wait().tensors()
        self.attempt(add, k, v, back[1])

    def end(self, direction: str) -> None:
        """Raises the failure of any rank, on all ranks."""
        def report() -> None:
            if self.failed is not None:
                raise self.failed

        agree_over(WHERE, self.ring.groups, self.k.device, f"end of the {direction} of {self.ring.words}", report)


def _random(ring: Ring, seeds: Optional[torch.Tensor], owner: int) -> Any:
    return 0 if seeds is None else seeds[owner]


class _Forward:
    """The sums of the forward's steps: the output and the log-sum-exp, in FP32."""

    def __init__(self, ring: Ring, q: torch.Tensor, v: torch.Tensor, bias: Optional[torch.Tensor], seeds: Optional[torch.Tensor], max_logit: bool):
        self.ring, self.q, self.bias, self.seeds = ring, q, bias, seeds
        self.o = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=torch.float32, device=q.device)
        self.lse = torch.full(ring.statistics(q), -torch.inf, dtype=torch.float32, device=q.device)
        self.logits = torch.full((q.shape[-2],), -torch.inf, dtype=torch.float32, device=q.device) if max_logit else None

    def step(self, owner: int, k: torch.Tensor, v: torch.Tensor) -> None:
        ring, half = self.ring, self.ring.half_of_queries(owner)
        q = ring.cut(self.q, True) if half else self.q
        if ring.layout == "thd":  # tokens outside of every sequence need not be written by the op
            o, lse = q.new_zeros((*q.shape[:-1], v.shape[-1])), torch.full(ring.statistics(q), -torch.inf, dtype=torch.float32, device=q.device)
        else:
            o, lse = q.new_empty((*q.shape[:-1], v.shape[-1])), torch.empty(ring.statistics(q), dtype=torch.float32, device=q.device)
        bias, arguments = ring.bias_of(self.bias, owner), ring.arguments(owner)
        ops.fused_attn_fwd(q=q, k=k, v=v, o=o, softmax_lse=lse, bias=bias, seed=_random(ring, self.seeds, owner), **arguments)
        if self.logits is not None:
            arguments = {**arguments, "window_left": -1, "window_right": -1}
            scores = max_logits(q, k, bias, **arguments)
            self.logits = torch.maximum(self.logits, scores.amax(dim=(0, 2, 3)))
        self._add(ring.cut(self.o, True) if half else self.o, ring.second_statistics(self.lse) if half else self.lse, o, lse)

    def _add(self, total: torch.Tensor, total_lse: torch.Tensor, o: torch.Tensor, lse: torch.Tensor) -> None:
        """Combines a step's output with that of the steps before, in place. A row without keys has the log-sum-exp -inf and the weight 0."""
        both = torch.logaddexp(total_lse, lse)
        old, new = (self.ring.by_row(torch.exp(each - both).masked_fill_(both == -torch.inf, 0.0)) for each in (total_lse, lse))
        total.mul_(old).addcmul_(o.float(), new)
        total_lse.copy_(both)

    def add_sink(self, sink: torch.Tensor) -> None:
        """Adds a logit for each head to the denominator of every row that has keys."""
        logit = sink.float() if self.ring.layout == "thd" else sink.float().view(-1, 1)
        both = torch.where(self.lse == -torch.inf, self.lse, torch.logaddexp(self.lse, logit))
        self.o.mul_(self.ring.by_row(torch.exp(self.lse - both).masked_fill_(both == -torch.inf, 0.0)))
        self.lse = both


class _Backward:
    """The sums of the backward's steps, in FP32."""

    def __init__(self, ring: Ring, q, k, v, o, lse, d_o, bias, seeds):
        self.ring, self.q, self.o, self.lse, self.d_o, self.bias, self.seeds = ring, q, o, lse, d_o, bias, seeds
        self.dq, self.dk, self.dv = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (q, k, v))
        self.dbias = None if bias is None else torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)

    def step(self, owner: int, k: torch.Tensor, v: torch.Tensor) -> Optional[Tuple[torch.Tensor, torch.Tensor]]:
        ring, half = self.ring, self.ring.half_of_queries(owner)
        q, o, d_o = (ring.cut(t, True) if half else t for t in (self.q, self.o, self.d_o))
        lse = ring.second_statistics(self.lse).contiguous() if half else self.lse
        make = torch.zeros if ring.layout == "thd" else torch.empty  # tokens outside of every sequence need not be written by the op
        dq, dk, dv = (make(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        bias = ring.bias_of(self.bias, owner)
        dbias = None if bias is None else torch.empty_like(bias)
        ops.fused_attn_bwd(d_o=d_o, q=q, k=k, v=v, o=o, softmax_lse=lse, dq=dq, dk=dk, dv=dv, bias=bias, dbias=dbias,
                           seed=_random(ring, self.seeds, owner), **ring.arguments(owner))
        (ring.cut(self.dq, True) if half else self.dq).add_(dq)
        if dbias is not None:
            ring.add_bias_gradient(self.dbias, dbias.float(), owner)
        if owner != ring.rank:
            return dk, dv
        self.add(dk, dv, False)
        return None

    def add(self, dk: torch.Tensor, dv: torch.Tensor, half: bool) -> None:
        for total, part in ((self.dk, dk), (self.dv, dv)):
            (self.ring.cut(total, False) if half else total).add_(part)

    def sink(self, sink: torch.Tensor) -> torch.Tensor:
        """The gradient of the sink's logits, of this rank's queries."""
        delta = (self.d_o.float() * self.o.float()).sum(-1, keepdim=True)
        row = self.ring.by_row(self.lse)
        logit = sink.float().view(*[1] * (row.dim() - 2), -1, 1)
        weight = torch.exp(logit - row).masked_fill_(row == -torch.inf, 0.0)
        return -(weight * delta).sum(dim=tuple(i for i in range(row.dim()) if i != row.dim() - 2)).view(-1).to(sink.dtype)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ring: Ring, max_logit: bool, seeds: Optional[torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                bias: Optional[torch.Tensor], sink: Optional[torch.Tensor]):
        def prepare() -> Tuple[_Steps, _Forward]:
            return _Steps(ring, q, k, v, False), _Forward(ring, q, v, bias, seeds, max_logit)

        steps, total = agree_over(WHERE, ring.groups, q.device, ring.words, prepare)
        steps.run(total.step)
        out = steps.attempt(_RingAttention._output, total, sink, q)
        steps.end("forward")
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, total.lse, seeds, bias, sink)
        logits = total.logits if max_logit else out.new_empty(0)
        ctx.mark_non_differentiable(logits)
        return out, logits

    @staticmethod
    def _output(total: _Forward, sink: Optional[torch.Tensor], q: torch.Tensor) -> torch.Tensor:
        if sink is not None:
            total.add_sink(sink)
        return total.o.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o: torch.Tensor, _: Any):
        ring = ctx.ring
        q, k, v, out, lse, seeds, bias, sink = ctx.saved_tensors

        def prepare() -> Tuple[_Steps, _Backward]:
            return _Steps(ring, q, k, v, True), _Backward(ring, q, k, v, out, lse, d_o.contiguous(), bias, seeds)

        steps, total = agree_over(WHERE, ring.groups, q.device, f"backward: {ring.words}", prepare)
        steps.run(total.step, total.add)
        results: List[Optional[torch.Tensor]] = steps.attempt(_RingAttention._gradients, total, (q, k, v, bias), sink)
        steps.end("backward")
        return (None, None, None, *results)

    @staticmethod
    def _gradients(total: _Backward, like: tuple, sink: Optional[torch.Tensor]) -> List[Optional[torch.Tensor]]:
        found = [None if t is None else grad.to(t.dtype) for grad, t in zip((total.dq, total.dk, total.dv, total.dbias), like)]
        return [*found, None if sink is None else total.sink(sink)]


def ring_attention(ring: Ring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Optional[torch.Tensor], sink: Optional[torch.Tensor],
                   seeds: Optional[torch.Tensor], max_logit: bool) -> Tuple[torch.Tensor, torch.Tensor]:
    """The output of this rank's queries, and the largest score of each head of this rank's queries if requested.

    bias: of this rank's queries and all keys in their order. sink: [heads] logits. seeds: int64 [ranks, 2], seed and offset of each step's dropout.
    """
    return _RingAttention.apply(ring, max_logit, seeds, q, k, v, bias, sink)
