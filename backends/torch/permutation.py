"""Permutation of tokens by expert, reordering and padding of groups of rows, by PyTorch's operations. The host reads no number of rows from a device's
memory.
"""

from __future__ import annotations

from typing import List, Optional, Tuple

import torch

from te_fl.reference_torch.checks import require, within
from te_fl.reference_torch.embedding import add_rows
from te_fl.reference_torch.values import bits, values

_FEW = 16  # up to this number of experts per token, a token's rows are summed one after another


def _moved(input: torch.Tensor, output: torch.Tensor, sources: torch.Tensor) -> None:
    """output[r] = input[sources[r]], 0 where the source is negative. The elements are copied as they are."""
    x, out = bits(input), bits(output)
    if x.shape[0] == 0:
        out.zero_()
        return
    there = (sources >= 0).reshape(-1, *(1 for _ in x.shape[1:]))
    out.copy_(torch.where(there, x.index_select(0, sources.clamp_min(0)), torch.zeros((), dtype=x.dtype, device=x.device)))


def _inverse(rows: torch.Tensor, size: int) -> torch.Tensor:
    """For each number in [0, size), its place in `rows`, int64; -1 if it has none. Numbers outside of [0, size) are ignored."""
    places = torch.full((size + 1,), -1, dtype=torch.int64, device=rows.device)
    at = torch.where((rows >= 0) & (rows < size), rows.long(), size)
    return places.scatter_(0, at, torch.arange(rows.numel(), device=rows.device))[:size]


def moe_permute_fwd(input: torch.Tensor, indices: torch.Tensor, output: torch.Tensor, row_id_map: torch.Tensor, num_experts: int) -> None:
    low, bound = (0, num_experts) if num_experts else (-1 << 31, 1 << 31)
    within("indices", indices, low, bound, ", the experts")
    (tokens, each), rows = indices.shape, output.shape[0]
    order = torch.sort(indices.reshape(-1), stable=True).indices
    places = _inverse(order, order.numel())
    row_id_map.copy_(torch.where(places < rows, places, -1).reshape(tokens, each).t())
    sources = torch.nn.functional.pad(order // max(each, 1), (0, max(0, rows - order.numel())), value=-1)
    _moved(input, output, sources[:rows])


def _pairs(row_id_map: torch.Tensor, rows: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns which pairs have a row, and a valid row of each pair; both [s, t]."""
    right = within("row_id_map", row_id_map, -1, rows, ", -1 or a permuted row")
    return right & (row_id_map >= 0), row_id_map.long().clamp(0, max(rows - 1, 0))


def _sum_rows(input: torch.Tensor, row_id_map: torch.Tensor, probs: Optional[torch.Tensor], output: torch.Tensor) -> None:
    (each, tokens), rows = row_id_map.shape, input.shape[0]
    held, at = _pairs(row_id_map, rows)
    total = torch.zeros(tokens + 1, output.shape[1], dtype=torch.float32, device=output.device)
    if rows == 0 or tokens == 0:
        pass
    elif each <= _FEW:
        for s in range(each):
            part = values(input.index_select(0, at[s]))
            part = part if probs is None else part * probs[:, s, None]
            total[:tokens] += torch.where(held[s, :, None], part, 0.0)
    else:  # most pairs have no row, so the rows are added to their tokens
        pair = _inverse(torch.where(held, at, -1).reshape(-1), rows)
        there, token, part = pair >= 0, pair.clamp_min(0) % tokens, values(input)
        part = part if probs is None else part * probs.t().reshape(-1).index_select(0, pair.clamp_min(0))[:, None]
        add_rows(total, torch.where(there, token, tokens), part)
    output.copy_(total[:tokens])


def moe_permute_bwd(grad_output: torch.Tensor, row_id_map: torch.Tensor, probs: Optional[torch.Tensor], grad_input: torch.Tensor) -> None:
    _sum_rows(grad_output, row_id_map, probs, grad_input)


def moe_unpermute_fwd(input: torch.Tensor, row_id_map: torch.Tensor, probs: Optional[torch.Tensor], output: torch.Tensor) -> None:
    _sum_rows(input, row_id_map, probs, output)


def moe_unpermute_bwd(grad_output: torch.Tensor, fwd_input: torch.Tensor, row_id_map: torch.Tensor, probs: Optional[torch.Tensor],
                      grad_input: torch.Tensor, grad_probs: Optional[torch.Tensor]) -> None:
    (each, tokens), rows = row_id_map.shape, fwd_input.shape[0]
    held, at = _pairs(row_id_map, rows)
    flat = torch.where(held, at, -1).reshape(-1)
    pair = _inverse(flat, rows)
    mine = torch.arange(flat.numel(), device=flat.device)
    if rows:
        require((flat < 0) | (pair[flat.clamp_min(0)] == mine), lambda i: _twice(flat, i), "row_id_map has a row twice; a row belongs to one pair")
    if rows == 0 or flat.numel() == 0:
        grad_input.zero_()
        if grad_probs is not None:
            grad_probs.zero_()
        return
    there, pair = (pair >= 0)[:, None], pair.clamp_min(0)
    grads = values(grad_output.index_select(0, pair % tokens))
    if grad_probs is not None:
        dots = (grads * values(fwd_input)).sum(-1)
        grad_probs.copy_(torch.where(held, dots[at], 0.0).t())
    if probs is not None:
        grads = grads * probs.t().reshape(-1)[pair][:, None]
    grad_input.copy_(torch.where(there, grads, 0.0))


def _twice(rows: torch.Tensor, at: int) -> str:
    same = (rows == rows[at]).nonzero().reshape(-1).tolist()
    return f"row_id_map[{same[0]}] and row_id_map[{same[1]}] are both {int(rows[at])}; a row belongs to one pair"


def moe_permute_by_mask_fwd(input: torch.Tensor, routing_map: torch.Tensor, probs: Optional[torch.Tensor], pad_offsets: Optional[torch.Tensor],
                            output: torch.Tensor, permuted_probs: Optional[torch.Tensor], row_id_map: torch.Tensor) -> None:
    (tokens, experts), rows = routing_map.shape, output.shape[0]
    chosen = (routing_map != 0).t()  # [e, t]
    row = (chosen.reshape(-1).cumsum(0) - 1).reshape(experts, tokens)
    if pad_offsets is not None:
        pads = pad_offsets.long()
        before = torch.nn.functional.pad(pads, (1, 0))[:experts]
        require(pads >= before, lambda e: f"pad_offsets[{e}] is {int(pads[e])}, expected {int(before[e])} or more: the rows left out before an expert, "
                "in all", "pad_offsets decrease; they are the rows left out before each expert, in all")
        row = row + pads.clamp(0, 1 << 62)[:, None]
    fits = ~chosen | (row < rows)
    require(fits, lambda i: _beyond(row, fits, rows, experts), "a pair of routing_map has no row in the output; give it one for each pair and for what "
            "pad_offsets leaves out")
    row = torch.where(chosen & fits, row, -1)
    pair = _inverse(row.reshape(-1), rows)
    token = torch.where(pair >= 0, pair % max(tokens, 1), -1)
    if probs is not None:
        p = torch.where(pair >= 0, _picked(values(probs).t().reshape(-1), pair), 0.0)
        permuted_probs.copy_(p)
        token = torch.where(p == 0, -1, token)
    _moved(input, output, token)
    row_id_map.copy_(row)


def _picked(numbers: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return numbers.index_select(0, at.clamp_min(0)) if numbers.numel() else numbers.new_zeros(at.shape)


def _beyond(row: torch.Tensor, fits: torch.Tensor, rows: int, experts: int) -> str:
    e, t = (~fits).nonzero()[0].tolist()
    return (f"routing_map[{t * experts + e}] has row {int(row[e, t])}, but the output has {rows} rows; give it one for each pair and for what "
            "pad_offsets leaves out")


def moe_sort_chunks_fwd(input: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor, probs: Optional[torch.Tensor], output: torch.Tensor,
                        permuted_probs: Optional[torch.Tensor], row_id_map: torch.Tensor) -> None:
    rows, chunks = input.shape[0], split_sizes.shape[0]
    sizes = split_sizes.long()
    ends = sizes.cumsum(0)
    starts = ends - sizes
    require((sizes >= 0) & (sizes <= rows - starts), lambda i: f"split_sizes[{i}] is {int(sizes[i])}; it is 0 or more, and the {rows} rows have "
            f"{rows - int(starts[i])} left for it", f"an element of split_sizes is wrong; they are 0 or more, and in all at most {rows}")
    within("sorted_index", sorted_index, 0, chunks, ", the chunks")
    index = sorted_index.long().clamp(0, max(chunks - 1, 0))
    place = _inverse(index, chunks)  # of each chunk in the output
    mine = torch.arange(chunks, device=index.device)
    require(place[index] == mine, lambda i: _chunk_twice(index), "sorted_index names a chunk twice; each chunk is named once")
    row = torch.full((rows,), -1, dtype=torch.int64, device=input.device)
    if chunks:
        ordered = sizes[index].clamp_min(0)
        at = torch.arange(rows, device=input.device)
        chunk = torch.searchsorted(ends, at, right=True)
        inside, chunk = chunk < chunks, chunk.clamp_max(chunks - 1)
        row = torch.where(inside, (ordered.cumsum(0) - ordered)[place[chunk].clamp_min(0)] + at - starts[chunk], -1)
    sources = _inverse(row, rows)
    _moved(input, output, sources)
    if probs is not None:
        _moved(probs, permuted_probs, sources)
    row_id_map.copy_(row)


def _chunk_twice(index: torch.Tensor) -> str:
    numbers = index.tolist()
    at = next(i for i, n in enumerate(numbers) if n in numbers[:i])
    return f"sorted_index[{at}] is {numbers[at]}, as an earlier element is; each chunk is named once"


def moe_sort_chunks_bwd(grad_output: torch.Tensor, row_id_map: torch.Tensor, grad_permuted_probs: Optional[torch.Tensor], grad_input: torch.Tensor,
                        grad_probs: Optional[torch.Tensor]) -> None:
    right = within("row_id_map", row_id_map, -1, grad_output.shape[0], ", -1 or a permuted row")
    sources = torch.where(right, row_id_map.long(), -1)
    _moved(grad_output, grad_input, sources)
    if grad_probs is not None:
        _moved(grad_permuted_probs, grad_probs, sources)


def fused_multi_row_padding(input: torch.Tensor, output: torch.Tensor, input_rows: List[int], padded_rows: List[int]) -> None:
    x, out, begin, to = bits(input), bits(output), 0, 0
    for rows, padded in zip(input_rows, padded_rows):
        out[to:to + rows].copy_(x[begin:begin + rows])
        out[to + rows:to + padded].zero_()
        begin, to = begin + rows, to + padded


def fused_multi_row_unpadding(input: torch.Tensor, output: torch.Tensor, input_rows: List[int], unpadded_rows: List[int]) -> None:
    x, out, begin, to = bits(input), bits(output), 0, 0
    for padded, rows in zip(input_rows, unpadded_rows):
        out[to:to + rows].copy_(x[begin:begin + rows])
        begin, to = begin + padded, to + rows


def splits_to_offsets(splits: torch.Tensor, offsets: torch.Tensor, leading_zero: bool, stride: int) -> None:
    require(splits >= 0, lambda i: f"splits[{i}] is {int(splits[i])}, expected 0 or more", "an element of splits is negative")
    sums = (splits.long() * stride).cumsum(0)
    offsets.copy_(torch.nn.functional.pad(sums, (1, 0)) if leading_zero else sums)


OPS = {f.__name__: f for f in (moe_permute_fwd, moe_permute_bwd, moe_unpermute_fwd, moe_unpermute_bwd, moe_permute_by_mask_fwd, moe_sort_chunks_fwd,
                               moe_sort_chunks_bwd, fused_multi_row_padding, fused_multi_row_unpadding, splits_to_offsets)}
