"""Token orders of packed sequences (thd) that ranks divide, in PyTorch's ops. No function synchronises with the device.

Each sequence is split into 2 R equal chunks; rank r of R holds the chunks r and 2 R - 1 - r, in that order. cu_seqlens are the padded sequence
boundaries, int32 [B + 1].
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Places(NamedTuple):
    """For each token: the start, length and index of its sequence, its position in the sequence, and whether it belongs to any sequence."""

    begin: torch.Tensor
    length: torch.Tensor
    sequence: torch.Tensor
    within: torch.Tensor
    inside: torch.Tensor


def places(cu_seqlens: torch.Tensor, tokens: int) -> Places:
    cu = cu_seqlens.long()
    token = torch.arange(tokens, device=cu.device)
    sequence = torch.searchsorted(cu[1:], token, right=True).clamp_(max=cu.shape[0] - 2)
    begin = cu[sequence]
    length = cu[sequence + 1] - begin
    within = token - begin
    return Places(begin, length, sequence, within, (within >= 0) & (within < length))


def tokens_of_ranks(cu_seqlens: torch.Tensor, tokens: int, world_size: int, rank: torch.Tensor | int) -> torch.Tensor:
    """The indices, in the full order, of a rank's tokens in the rank's order. rank: a number, or [R, 1] for several ranks."""
    at = places(cu_seqlens // world_size, tokens // world_size)
    chunk = at.length // 2
    second = at.within >= chunk
    number = torch.where(second, 2 * world_size - 1 - rank, rank)
    source = at.begin * world_size + number * chunk + at.within - torch.where(second, chunk, 0)
    return source.clamp_(0, tokens - 1)


def places_in_rank_order(cu_seqlens: torch.Tensor, tokens: int, world_size: int) -> torch.Tensor:
    """For each token of the full order, its index among all ranks' tokens, those of rank 0 first."""
    at = places(cu_seqlens, tokens)
    size = (at.length // (2 * world_size)).clamp_(min=1)
    chunk = at.within // size
    second = chunk >= world_size
    rank = torch.where(second, 2 * world_size - 1 - chunk, chunk)
    local = at.begin // world_size + at.within % size + torch.where(second, size, 0)
    return (rank * (tokens // world_size) + local).clamp_(0, tokens - 1)
