"""Computes the largest score of each query, for return_max_logit; te-fl's attention op returns only the log-sum-exp."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch

__all__ = ["max_logits"]

_MOST_SCORES = 1 << 25  # number of scores held in memory at a time


def _sequences(tensor: torch.Tensor, layout: str, starts: Optional[torch.Tensor], length: int) -> torch.Tensor:
    """Returns [B, S, H, D]. Under thd every sequence gets the longest one's number of rows; surplus rows belong to other sequences."""
    if layout != "thd":
        return tensor.transpose(0, 1) if layout == "sbhd" else tensor
    rows = starts[:-1, None].long() + torch.arange(length, device=tensor.device)
    return tensor[rows.clamp_(max=tensor.shape[0] - 1)]


def _lengths(starts: Optional[torch.Tensor], batch: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.full((batch,), length, dtype=torch.int64, device=device) if starts is None else starts.diff().long()


def _hidden(queries: torch.Tensor, keys: torch.Tensor, rows: int, columns: int, mask_type: str, left: int, right: int) -> torch.Tensor:
    """A mask, true for each score [rows, columns] that is masked out in a sequence with these numbers of queries and keys."""
    i, j = torch.arange(rows, device=queries.device)[:, None], torch.arange(columns, device=queries.device)[None]
    top_left = "causal" in mask_type and not mask_type.endswith("bottom_right")
    distance = j - i if top_left else j - i - (keys - queries)
    hidden = (i >= queries) | (j >= keys)
    if "causal" in mask_type:
        hidden |= distance > 0
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    return hidden


def _by_group(of_heads: torch.Tensor, groups: int) -> torch.Tensor:
    """Reshapes per-head values [1|H, Sq, Sk] to [1|groups, 1|heads per group, Sq, Sk]."""
    return of_heads.unsqueeze(1) if of_heads.shape[0] == 1 else of_heads.unflatten(0, (groups, -1))


@torch.no_grad()
def max_logits(q: torch.Tensor, k: torch.Tensor, bias: Optional[torch.Tensor], *, layout: str, mask_type: str, scale: float, window_left: int,
               window_right: int, cu_seqlens_q: Optional[torch.Tensor] = None, cu_seqlens_kv: Optional[torch.Tensor] = None, max_seqlen_q: int = 0,
               max_seqlen_kv: int = 0, cu_seqlens_q_padded: Optional[torch.Tensor] = None, cu_seqlens_kv_padded: Optional[torch.Tensor] = None,
               softcap: float = 0.0, attn_mask: Optional[torch.Tensor] = None, alibi_slopes: Optional[torch.Tensor] = None, **_: Any) -> torch.Tensor:
    """float32 [B, H, Sq, 1] for the arguments of fused_attn_fwd; -inf for a fully masked query. Sinks are excluded."""
    if layout == "thd":
        max_seqlen_q, max_seqlen_kv = (longest or (int(starts.diff().max()) if starts.numel() > 1 else 0) for longest, starts in
                                       ((max_seqlen_q, cu_seqlens_q), (max_seqlen_kv, cu_seqlens_kv)))
    q = _sequences(q, layout, cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded, max_seqlen_q)
    k = _sequences(k, layout, cu_seqlens_kv if cu_seqlens_kv_padded is None else cu_seqlens_kv_padded, max_seqlen_kv)
    (batch, rows, heads, _), (columns, groups) = q.shape, k.shape[1:3]
    of_q, of_k = _lengths(cu_seqlens_q, batch, rows, q.device), _lengths(cu_seqlens_kv, batch, columns, q.device)
    result = torch.full((batch, groups, heads // groups, rows), -math.inf, dtype=torch.float32, device=q.device)
    if not q.numel() or not k.numel():
        return result.view(batch, heads, rows, 1)
    step = max(1, _MOST_SCORES // (rows * columns * (heads // groups)))
    per_head = (groups, heads // groups, 1, 1)
    for b in range(batch):
        hidden = _hidden(of_q[b], of_k[b], rows, columns, mask_type, window_left, window_right)
        hidden_by_head = None if attn_mask is None else _by_group(attn_mask[b if attn_mask.shape[0] > 1 else 0].bool(), groups)
        of_heads = None if bias is None else _by_group(bias[b if bias.shape[0] > 1 else 0].float(), groups)
        slopes = None if alibi_slopes is None else (alibi_slopes[b] if alibi_slopes.dim() == 2 else alibi_slopes).float().view(per_head)
        behind = torch.arange(columns, device=q.device) - torch.arange(rows, device=q.device)[:, None] - (of_k[b] - of_q[b])
        for g in range(0, groups, step):
            part = slice(g, g + step)
            left = q[b].view(rows, groups, heads // groups, -1)[:, part].permute(1, 2, 0, 3)
            scores = left.float() @ k[b, :, part].permute(1, 2, 0).unsqueeze(1).float() * scale
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            if of_heads is not None:
                scores += of_heads[part] if of_heads.shape[0] > 1 else of_heads
            if slopes is not None:
                scores += slopes[part] * behind
            if hidden_by_head is not None:
                scores.masked_fill_(hidden_by_head[part] if hidden_by_head.shape[0] > 1 else hidden_by_head, -math.inf)
            result[b, part] = scores.masked_fill_(hidden, -math.inf).amax(-1)
    return result.view(batch, heads, rows, 1)
