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
from te_fl.tensors import Quantized

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


class Scales(NamedTuple):
    """FP8 attention's state of one direction, F32 [3] each: the scales, which autocast updates, and the running amaxes. The entries are those of q, k
    and v, of the probabilities, and of the output; in the backward those of the output's gradient, of the probabilities' and of q's, k's and v's.
    """

    dtype: torch.dtype
    scale: torch.Tensor
    amax: torch.Tensor

    def target(self, codes: torch.Tensor, entry: int, scale: Optional[torch.Tensor] = None) -> Quantized:
        """A tensor to be written with this entry's scale."""
        return Quantized(codes, scale=self.scale[entry:entry + 1] if scale is None else scale, amax=self.amax[entry:entry + 1],
                         scale_inv=torch.empty(1, dtype=torch.float32, device=codes.device))

    def empty(self, shape: Any, device: torch.device, entry: int, zeroed: bool) -> Quantized:
        codes = (torch.zeros if zeroed else torch.empty)(shape, dtype=torch.uint8, device=device)
        return self.target(codes.view(self.dtype), entry)

    def quantised(self, values: torch.Tensor, entry: int) -> Quantized:
        made = self.empty(values.shape, values.device, entry, False)
        ops.quantize(input=values.contiguous(), output=made)
        return made

    def inner(self, entry: int, scale: Optional[torch.Tensor] = None) -> Quantized:
        """The scale of a matrix that is in no memory: of the probabilities or of their gradient."""
        return self.target(torch.empty(1, dtype=torch.uint8, device=self.scale.device).view(self.dtype), entry, scale)


def _values(tensor: Any) -> torch.Tensor:
    """The values of an op's output, in FP32."""
    return tensor.data.float() * tensor.scale_inv if isinstance(tensor, Quantized) else tensor.float()


def _operand(values: torch.Tensor, scale_inv: Optional[torch.Tensor]) -> Any:
    """The op's argument for values, or for codes with their scale."""
    return values if scale_inv is None else Quantized(values, scale_inv=scale_inv)


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
    fp8: Optional[Tuple[Scales, Scales]] = None  # of forward and backward

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


_HEADER = 16  # bytes in front of codes, for their scale


class _Pair:
    """Keys and values, or their gradients, in one buffer, so that one message carries both. Codes have their scale in front."""

    __slots__ = ("buffer", "shapes", "dtype")

    def __init__(self, memory: torch.Tensor, shapes: Tuple[torch.Size, torch.Size], dtype: torch.dtype):
        length = sum(shape.numel() for shape in shapes)
        self.buffer = memory[:length + _HEADER] if memory.dtype == torch.uint8 else memory[:length]
        self.shapes, self.dtype = shapes, dtype

    @staticmethod
    def memory(numbers: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        codes = dtype.itemsize == 1
        return torch.zeros(numbers + (_HEADER if codes else 0), dtype=torch.uint8 if codes else dtype, device=device)

    @property
    def scale_inv(self) -> Optional[torch.Tensor]:
        return self.buffer[:4].view(torch.float32) if self.buffer.dtype == torch.uint8 else None

    def tensors(self) -> Tuple[torch.Tensor, torch.Tensor]:
        content = self.buffer[_HEADER:] if self.buffer.dtype == torch.uint8 else self.buffer
        k, v = content.view(self.dtype).split([shape.numel() for shape in self.shapes])
        return k.view(self.shapes[0]), v.view(self.shapes[1])

    def fill(self, k: torch.Tensor, v: torch.Tensor, scale_inv: Optional[torch.Tensor] = None) -> "_Pair":
        for own, value in zip(self.tensors(), (k, v)):
            own.copy_(value)
        if scale_inv is not None:
            self.scale_inv.copy_(scale_inv)
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

    def __init__(self, ring: Ring, k: torch.Tensor, v: torch.Tensor, scale_inv: Optional[torch.Tensor], backward: bool):
        self.ring, self.k, self.v, self.scale_inv = ring, k, v, scale_inv
        self.stream = side_stream(ring.stream, k.device)
        self.failed: Optional[Exception] = None
        whole, several = k.numel() + v.numel(), min(2, ring.ranks - 1)

        def memory(dtype: torch.dtype) -> torch.Tensor:
            return _Pair.memory(whole, dtype, k.device)

        # This rank's keys in their two forms: all chunks, and the first ones.
        self._sent = {half: self._pair(memory(k.dtype), half).fill(*(ring.cut(t, False) if half else t for t in (k, v)), scale_inv)
                      for half in {ring.sends_half(ring.rank, reader) for reader in range(ring.ranks) if reader != ring.rank}}
        self._received = [memory(k.dtype) for _ in range(several)]
        self._of_gradients = k.dtype if ring.fp8 is None else ring.fp8[1].dtype
        self._gradients = [[memory(self._of_gradients) for _ in range(several)] for _ in range(2 if backward else 0)]

    def _pair(self, buffer: torch.Tensor, half: bool, dtype: Optional[torch.dtype] = None) -> _Pair:
        shapes = []
        for t in (self.k, self.v):
            shape = list(t.shape)
            if half:
                shape[self.ring.dim] //= 2
            shapes.append(torch.Size(shape))
        return _Pair(buffer, (shapes[0], shapes[1]), dtype or self.k.dtype)

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

    def _back(self, step: int, gradients: Optional[tuple]) -> _Messages:
        """Sends the gradients of another rank's keys to that rank, and receives those of this rank's."""
        ring = self.ring
        to, source = (ring.rank - step) % ring.ranks, (ring.rank + step) % ring.ranks
        sent, received = (buffers[step % len(buffers)] for buffers in self._gradients)
        send = self._pair(sent, ring.sends_half(to, ring.rank), self._of_gradients)
        if gradients is not None:
            send.fill(*gradients)
        return _Messages(ring, send, to, self._pair(received, ring.sends_half(ring.rank, source), self._of_gradients), source, self.stream)

    def run(self, compute: Callable, add: Optional[Callable] = None) -> None:
        """compute(owner, k, v, scale_inv) for each rank's keys, this rank's first. add(k, v, scale_inv, half): adds gradients of this rank's keys, which
        are those that compute() returns on the other ranks. scale_inv: of codes, else None.
        """
        ring, coming, back = self.ring, None, None
        for step in range(ring.ranks):
            owner = (ring.rank - step) % ring.ranks
            keys = (self.k, self.v, self.scale_inv)
            if coming is not None:
                arrived = coming.wait()
                keys = (*arrived.tensors(), arrived.scale_inv)
            coming = self._keys(step + 1) if step + 1 < ring.ranks else None
            found = self.attempt(compute, owner, *keys)
            if back is not None:
                self._finish(back, add)
                back = None
            if add is not None and step > 0:
                back = (self._back(step, found), ring.sends_half(ring.rank, (ring.rank + step) % ring.ranks))
        if back is not None:
            self._finish(back, add)

    def _finish(self, back: Tuple[_Messages, bool], add: Callable) -> None:
        arrived = back[0].wait()
        self.attempt(add, *arrived.tensors(), arrived.scale_inv, back[1])

    def end(self, direction: str) -> None:
        """Raises the failure of any rank, on all ranks."""
        def report() -> None:
            if self.failed is not None:
                raise self.failed

        agree_over(WHERE, self.ring.groups, self.k.device, f"end of the {direction} of {self.ring.words}", report)


def _random(ring: Ring, seeds: Optional[torch.Tensor], owner: int) -> Any:
    return 0 if seeds is None else seeds[owner]


class _Forward:
    """The sums of the forward's steps: the output and the log-sum-exp, in FP32. scale_inv: of q, if that is codes."""

    def __init__(self, ring: Ring, q: torch.Tensor, v: torch.Tensor, scale_inv: Optional[torch.Tensor], bias: Optional[torch.Tensor],
                 seeds: Optional[torch.Tensor], max_logit: bool):
        self.ring, self.q, self.scale_inv, self.bias, self.seeds = ring, q, scale_inv, bias, seeds
        self.o = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=torch.float32, device=q.device)
        self.lse = torch.full(ring.statistics(q), -torch.inf, dtype=torch.float32, device=q.device)
        self.logits = torch.full((q.shape[-2],), -torch.inf, dtype=torch.float32, device=q.device) if max_logit else None
        # The probabilities' scale, which an update may change before the backward.
        self.of_probabilities = None if ring.fp8 is None else ring.fp8[0].scale[1:2].clone()

    def step(self, owner: int, k: torch.Tensor, v: torch.Tensor, scale_inv: Optional[torch.Tensor]) -> None:
        ring, half = self.ring, self.ring.half_of_queries(owner)
        q = ring.cut(self.q, True) if half else self.q
        shape, thd = (*q.shape[:-1], v.shape[-1]), ring.layout == "thd"
        # In the packed layout the op need not write tokens outside of every sequence.
        lse = torch.full(ring.statistics(q), -torch.inf if thd else 0.0, dtype=torch.float32, device=q.device)
        if ring.fp8 is None:
            o: Any = q.new_zeros(shape) if thd else q.new_empty(shape)
        else:
            o = ring.fp8[0].empty(shape, q.device, 2, thd)
        bias, arguments = ring.bias_of(self.bias, owner), ring.arguments(owner)
        ops.fused_attn_fwd(q=_operand(q, self.scale_inv), k=_operand(k, scale_inv), v=_operand(v, scale_inv), o=o, softmax_lse=lse, bias=bias,
                           s_quant=None if ring.fp8 is None else ring.fp8[0].inner(1, self.of_probabilities),
                           seed=_random(ring, self.seeds, owner), **arguments)
        if self.logits is not None:
            arguments = {**arguments, "window_left": -1, "window_right": -1}
            scores = max_logits(q, k, bias, **arguments)
            self.logits = torch.maximum(self.logits, scores.amax(dim=(0, 2, 3)))
        self._add(ring.cut(self.o, True) if half else self.o, ring.second_statistics(self.lse) if half else self.lse, _values(o), lse)

    def _add(self, total: torch.Tensor, total_lse: torch.Tensor, o: torch.Tensor, lse: torch.Tensor) -> None:
        """Combines a step's output with that of the steps before, in place. A row without keys has the log-sum-exp -inf and the weight 0."""
        both = torch.logaddexp(total_lse, lse)
        old, new = (self.ring.by_row(torch.exp(each - both).masked_fill_(both == -torch.inf, 0.0)) for each in (total_lse, lse))
        total.mul_(old).addcmul_(o, new)
        total_lse.copy_(both)

    def add_sink(self, sink: torch.Tensor) -> None:
        """Adds a logit for each head to the denominator of every row that has keys."""
        logit = sink.float() if self.ring.layout == "thd" else sink.float().view(-1, 1)
        both = torch.where(self.lse == -torch.inf, self.lse, torch.logaddexp(self.lse, logit))
        self.o.mul_(self.ring.by_row(torch.exp(self.lse - both).masked_fill_(both == -torch.inf, 0.0)))
        self.lse = both


class _Saved(NamedTuple):
    """The tensors that the backward reads. With FP8, q, k, v and o are codes, and the scales are their inverse ones and that of the probabilities."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor
    seeds: Optional[torch.Tensor]
    bias: Optional[torch.Tensor]
    sink: Optional[torch.Tensor]
    of_qkv: Optional[torch.Tensor]
    of_o: Optional[torch.Tensor]
    of_probabilities: Optional[torch.Tensor]


class _Backward:
    """The sums of the backward's steps, in FP32."""

    def __init__(self, ring: Ring, saved: _Saved, d_o: torch.Tensor):
        self.ring, self.saved, self.d_o = ring, saved, d_o
        self.scale_inv: Optional[torch.Tensor] = None
        if ring.fp8 is not None:
            codes = ring.fp8[1].quantised(d_o, 0)
            self.d_o, self.scale_inv = codes.data, codes.scale_inv
        self.dq, self.dk, self.dv = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (saved.q, saved.k, saved.v))
        self.dbias = None if saved.bias is None else torch.zeros(saved.bias.shape, dtype=torch.float32, device=saved.bias.device)

    def _empty(self, like: torch.Tensor) -> Any:
        thd = self.ring.layout == "thd"  # tokens outside of every sequence need not be written by the op
        if self.ring.fp8 is not None:
            return self.ring.fp8[1].empty(like.shape, like.device, 2, thd)
        return (torch.zeros if thd else torch.empty)(like.shape, dtype=like.dtype, device=like.device)

    def step(self, owner: int, k: torch.Tensor, v: torch.Tensor, scale_inv: Optional[torch.Tensor]) -> Optional[tuple]:
        ring, saved, half = self.ring, self.saved, self.ring.half_of_queries(owner)
        q, o, d_o = (ring.cut(t, True) if half else t for t in (saved.q, saved.o, self.d_o))
        lse = ring.second_statistics(saved.lse).contiguous() if half else saved.lse
        dq, dk, dv = (self._empty(t) for t in (q, k, v))
        bias = ring.bias_of(saved.bias, owner)
        dbias = None if bias is None else torch.empty_like(bias)
        inner = {} if ring.fp8 is None else {"s_quant": Quantized(torch.empty(1, dtype=ring.fp8[0].dtype, device=q.device), scale=saved.of_probabilities,
                                                                  amax=torch.zeros(1, dtype=torch.float32, device=q.device),
                                                                  scale_inv=torch.empty(1, dtype=torch.float32, device=q.device)),
                                             "dp_quant": ring.fp8[1].inner(1)}
        ops.fused_attn_bwd(d_o=_operand(d_o, self.scale_inv), q=_operand(q, saved.of_qkv), k=_operand(k, scale_inv), v=_operand(v, scale_inv),
                           o=_operand(o, saved.of_o), softmax_lse=lse, dq=dq, dk=dk, dv=dv, bias=bias, dbias=dbias,
                           seed=_random(ring, saved.seeds, owner), **inner, **ring.arguments(owner))
        (ring.cut(self.dq, True) if half else self.dq).add_(_values(dq))
        if dbias is not None:
            ring.add_bias_gradient(self.dbias, dbias.float(), owner)
        found = (dk, dv, None) if ring.fp8 is None else (dk.data, dv.data, dk.scale_inv)
        if owner != ring.rank:
            return found
        self.add(*found, False)
        return None

    def add(self, dk: torch.Tensor, dv: torch.Tensor, scale_inv: Optional[torch.Tensor], half: bool) -> None:
        for total, part in ((self.dk, dk), (self.dv, dv)):
            (self.ring.cut(total, False) if half else total).add_(_values(_operand(part, scale_inv)))

    def sink(self, sink: torch.Tensor) -> torch.Tensor:
        """The gradient of the sink's logits, of this rank's queries."""
        delta = (_values(_operand(self.d_o, self.scale_inv)) * _values(_operand(self.saved.o, self.saved.of_o))).sum(-1, keepdim=True)
        row = self.ring.by_row(self.saved.lse)
        logit = sink.float().view(*[1] * (row.dim() - 2), -1, 1)
        weight = torch.exp(logit - row).masked_fill_(row == -torch.inf, 0.0)
        return -(weight * delta).sum(dim=tuple(i for i in range(row.dim()) if i != row.dim() - 2)).view(-1).to(sink.dtype)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ring: Ring, max_logit: bool, seeds: Optional[torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                bias: Optional[torch.Tensor], sink: Optional[torch.Tensor], anchor: Optional[torch.Tensor]):
        def prepare() -> Tuple[_Steps, _Forward]:
            if ring.fp8 is None:
                return _Steps(ring, k, v, None, False), _Forward(ring, q, v, None, bias, seeds, max_logit)
            of_q, of_k, of_v = (ring.fp8[0].quantised(t, 0) for t in (q, k, v))
            return _Steps(ring, of_k.data, of_v.data, of_k.scale_inv, False), _Forward(ring, of_q.data, of_v.data, of_q.scale_inv, bias, seeds, max_logit)

        steps, total = agree_over(WHERE, ring.groups, q.device, ring.words, prepare)
        steps.run(total.step)
        found = steps.attempt(_RingAttention._output, ring, total, sink, q.dtype)
        steps.end("forward")
        out, kept, of_o = found
        ctx.ring, ctx.dtypes, ctx.anchor = ring, (q.dtype, k.dtype, v.dtype), None if anchor is None else anchor.shape
        ctx.save_for_backward(*_Saved(total.q, steps.k, steps.v, kept, total.lse, seeds, bias, sink, total.scale_inv, of_o, total.of_probabilities))
        logits = total.logits if max_logit else out.new_empty(0)
        ctx.mark_non_differentiable(logits)
        return out, logits

    @staticmethod
    def _output(ring: Ring, total: _Forward, sink: Optional[torch.Tensor], dtype: torch.dtype) -> Tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor]]:
        """The output, what the backward keeps of it, and that one's scale."""
        if sink is not None:
            total.add_sink(sink)
        if ring.fp8 is None:
            out = total.o.to(dtype)
            return out, out, None
        codes = ring.fp8[0].quantised(total.o, 2)
        return _values(codes).to(dtype), codes.data, codes.scale_inv

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o: torch.Tensor, _: Any):
        ring, saved = ctx.ring, _Saved(*ctx.saved_tensors)

        def prepare() -> Tuple[_Steps, _Backward]:
            return _Steps(ring, saved.k, saved.v, saved.of_qkv, True), _Backward(ring, saved, d_o.contiguous())

        steps, total = agree_over(WHERE, ring.groups, d_o.device, f"backward: {ring.words}", prepare)
        steps.run(total.step, total.add)
        results = steps.attempt(_RingAttention._gradients, total, (*ctx.dtypes, None if saved.bias is None else saved.bias.dtype))
        steps.end("backward")
        return (None, None, None, *results, None if ctx.anchor is None else d_o.new_zeros(ctx.anchor))

    @staticmethod
    def _gradients(total: _Backward, dtypes: tuple) -> List[Optional[torch.Tensor]]:
        found = [None if grad is None else grad.to(dtype) for grad, dtype in zip((total.dq, total.dk, total.dv, total.dbias), dtypes)]
        sink = total.saved.sink
        return [*found, None if sink is None else total.sink(sink)]


def ring_attention(ring: Ring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Optional[torch.Tensor], sink: Optional[torch.Tensor],
                   seeds: Optional[torch.Tensor], max_logit: bool, anchor: Optional[torch.Tensor] = None) -> Tuple[torch.Tensor, torch.Tensor]:
    """The output of this rank's queries, and the largest score of each head of this rank's queries if requested.

    bias: of this rank's queries and all keys in their order. sink: [heads] logits. seeds: int64 [ranks, 2], seed and offset of each step's dropout.
    anchor: a tensor whose backward follows this one's, and whose gradient is zeros.
    """
    return _RingAttention.apply(ring, max_logit, seeds, q, k, v, bias, sink, anchor)
