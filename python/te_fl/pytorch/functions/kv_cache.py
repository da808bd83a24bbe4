"""Copies keys and values into the caches of modules/inference.py. No function here synchronises with the device, so CUDA graphs can capture them."""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import torch


def _new_tokens(layout: str, shape: torch.Size, cu_new: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, Tuple[torch.Tensor, ...]]:
    """Returns for each token of a tensor with this layout and shape: (its sequence, its position among the sequence's new tokens, its indices in that
    tensor). Each sequence has at least one token. A padding position repeats the last real token before it, so the same values are written to the
    same place again. The shapes of the results therefore do not depend on the lengths, and no synchronisation is needed.
    """
    cu = cu_new.long()
    if layout == "thd":
        token = torch.arange(shape[0], device=cu.device).clamp_(max=cu[-1] - 1)
        sequence = torch.searchsorted(cu[1:], token, right=True)
        return sequence, token - cu[sequence], (token,)
    batch, tokens = shape[:2] if layout == "bshd" else (shape[1], shape[0])
    last = cu[1:batch + 1] - cu[:batch] - 1
    place = torch.minimum(torch.arange(tokens, device=cu.device), last[:, None])
    sequence = torch.arange(batch, device=cu.device)[:, None].expand_as(place)
    return sequence, place, (sequence, place) if layout == "bshd" else (place, sequence)


def write_tokens(caches: Sequence[torch.Tensor], news: Sequence[torch.Tensor], layout: str, cu_new: torch.Tensor, cu_cached: torch.Tensor,
                 pages: Optional[torch.Tensor] = None) -> None:
    """Appends each sequence's new tokens to its cached tokens, in place.

    caches: [sequences, tokens, heads, channels], or with `pages`, int32 [sequences, pages per sequence], [pages, tokens per page, heads, channels].
    news: tensors of equal heads, channels and dtype, in layout 'bshd', 'sbhd' or 'thd'. cu_new, cu_cached: cumulative lengths of the new tokens, and
    of all tokens including the new ones, int32 [sequences + 1] or longer. The caller has checked that everything fits.
    """
    sequence, place, source = _new_tokens(layout, news[0].shape, cu_new)
    before = (cu_cached.diff() - cu_new.diff()).long()
    position = before[sequence] + place
    slots = caches[0].shape[1]
    row, slot = (sequence, position) if pages is None else (pages.long()[sequence, position // slots], position % slots)
    for cache, new in zip(caches, news):
        cache[row, slot] = new[source]


def of_pages(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Copies a paged cache to [sequences, tokens, heads, channels]."""
    return cache[pages.long()].flatten(1, 2)
