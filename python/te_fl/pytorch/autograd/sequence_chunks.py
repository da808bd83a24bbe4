"""Sequences that the ranks of a group divide: the order of their chunks, and the exchanges that give a rank whole sequences.

Each sequence is split into 2 R equal chunks; rank r of R holds the chunks r and 2 R - 1 - r, in that order, so that a causal mask gives all ranks
equally much work. Padded layouts ('bshd', 'sbhd') have one length for all sequences; 'thd' has cu_seqlens, the padded boundaries of the whole
sequences.
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import torch

from te_fl.packed_sequences import places_in_rank_order, tokens_of_ranks
from te_fl.pytorch.autograd.once import once_differentiable
from te_fl.pytorch.distributed import collectives

Tensors = Tuple[torch.Tensor, ...]


class Order:
    """The order of the tokens of whole sequences over `ranks` ranks. dim: the dimension of the tokens. cu_seqlens: None for equal lengths.
    chunked: false if each rank has one contiguous piece.
    """

    __slots__ = ("dim", "ranks", "_to_ranks", "_to_sequences", "_chunked")

    def __init__(self, layout: str, ranks: int, cu_seqlens: Optional[torch.Tensor] = None, tokens: int = 0, chunked: bool = True):
        self.dim, self.ranks, self._chunked = 1 if layout == "bshd" else 0, ranks, chunked
        self._to_ranks = self._to_sequences = None
        if cu_seqlens is not None and chunked:
            numbers = torch.arange(ranks, device=cu_seqlens.device).view(-1, 1)
            self._to_ranks = tokens_of_ranks(cu_seqlens, tokens * ranks, ranks, numbers).view(-1)
            self._to_sequences = places_in_rank_order(cu_seqlens, tokens * ranks, ranks)

    def in_sequences(self, parts: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors, stacked in front, as one tensor in the sequences' order."""
        if not self._chunked:
            return parts.movedim(0, self.dim).flatten(self.dim, self.dim + 1)
        if self._to_sequences is not None:
            return parts.flatten(0, 1).index_select(0, self._to_sequences)
        halves = parts.unflatten(self.dim + 1, (2, -1)).movedim(self.dim + 1, 0)
        chunks = torch.cat([halves[0], halves[1].flip(0)])
        return chunks.movedim(0, self.dim).flatten(self.dim, self.dim + 1)

    def in_ranks(self, whole: torch.Tensor) -> torch.Tensor:
        """The inverse of in_sequences()."""
        if not self._chunked:
            return whole.unflatten(self.dim, (self.ranks, -1)).movedim(self.dim, 0)
        if self._to_ranks is not None:
            return whole.index_select(0, self._to_ranks).unflatten(0, (self.ranks, -1))
        chunks = whole.unflatten(self.dim, (2 * self.ranks, -1)).movedim(self.dim, 0)
        return torch.cat([chunks[:self.ranks], chunks[self.ranks:].flip(0)], self.dim + 1)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors [ranks, ..] as rows [ranks, n] of one matrix, so that one collective sends them all."""
    return torch.cat([part.reshape(part.shape[0], -1) for part in parts], 1) if len(parts) > 1 else parts[0].reshape(parts[0].shape[0], -1)


def _divided(rows: torch.Tensor, shapes: Sequence[torch.Size]) -> List[torch.Tensor]:
    """The inverse of _joined(): tensors of these shapes behind the dimension of the ranks."""
    return [part.view(rows.shape[0], *shape) for part, shape in zip(rows.split([shape.numel() for shape in shapes], 1), shapes)]


def _exchanged(parts: Sequence[torch.Tensor], group: Any) -> List[torch.Tensor]:
    """Sends element i of each tensor [ranks, ..] to rank i; returns those that the ranks sent to this one. One all-to-all."""
    rows = _joined(parts).contiguous()
    received = torch.empty_like(rows)
    collectives.all_to_all(received, rows, group)
    return _divided(received, [part.shape[1:] for part in parts])


def _spread(tensors: Sequence[torch.Tensor], orders: Sequence[Order], group: Any) -> List[torch.Tensor]:
    """From all heads of this rank's tokens to this rank's heads of all tokens."""
    ranks = orders[0].ranks
    parts = _exchanged([t.unflatten(-2, (ranks, -1)).movedim(-3, 0) for t in tensors], group)
    return [order.in_sequences(part) for part, order in zip(parts, orders)]


def _collected(tensors: Sequence[torch.Tensor], orders: Sequence[Order], group: Any) -> List[torch.Tensor]:
    """The inverse of _spread()."""
    parts = _exchanged([order.in_ranks(t) for t, order in zip(tensors, orders)], group)
    return [part.movedim(0, -3).flatten(-3, -2) for part in parts]


class _WholeSequences(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group: Any, orders: Sequence[Order], *tensors: torch.Tensor):
        ctx.group, ctx.orders = group, orders
        return tuple(_spread(tensors, orders, group))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: torch.Tensor):
        return (None, None, *_collected(grads, ctx.orders, ctx.group))


class _WholeHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group: Any, orders: Sequence[Order], *tensors: torch.Tensor):
        ctx.group, ctx.orders = group, orders
        return tuple(_collected(tensors, orders, group))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: torch.Tensor):
        return (None, None, *_spread(grads, ctx.orders, ctx.group))


def whole_sequences(group: Any, orders: Sequence[Order], *tensors: torch.Tensor) -> Tensors:
    """Tensors [.., all heads, D] of this rank's tokens become tensors [.., this rank's heads, D] of all tokens. One all-to-all in each direction."""
    return _WholeSequences.apply(group, orders, *tensors)


def whole_heads(group: Any, order: Order, tensor: torch.Tensor) -> torch.Tensor:
    """The inverse of whole_sequences(), for one tensor."""
    return _WholeHeads.apply(group, (order,), tensor)[0]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group: Any, order: Order, *tensors: torch.Tensor):
        ctx.group, ctx.order = group, order
        own = _joined([t.unsqueeze(0) for t in tensors]).contiguous()
        every = own.new_empty((order.ranks, own.shape[1]))
        collectives.all_gather_into(every, own, group)
        return tuple(order.in_sequences(part) for part in _divided(every, [t.shape for t in tensors]))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: torch.Tensor):
        parts = _exchanged([ctx.order.in_ranks(grad) for grad in grads], ctx.group)
        # Summed here, in FP32 and in the order of the ranks, so that the result does not depend on the backend.
        return (None, None, *(part.sum(0, dtype=torch.float32).to(part.dtype) for part in parts))


def gathered_sequences(group: Any, order: Order, *tensors: torch.Tensor) -> Tensors:
    """The tensors of all tokens, on each rank. The backward sums the ranks' gradients of this rank's tokens."""
    return _Gathered.apply(group, order, *tensors)


class _OwnHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group: Any, values: torch.Tensor):
        ctx.group = group
        return values.chunk(collectives.size_of(group))[collectives.rank_in(group)].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        every = grad.new_empty(grad.shape[0] * collectives.size_of(ctx.group))
        collectives.all_gather_into(every, grad.contiguous(), ctx.group)
        return None, every


def own_heads(group: Any, values: torch.Tensor) -> torch.Tensor:
    """This rank's share of a parameter [heads], equal on all ranks. The backward gathers the ranks' gradients, so that each rank has all of them, as
    in Transformer Engine.
    """
    return _OwnHeads.apply(group, values)
