"""Host replacements of the Triton kernels in NVIDIA's package: permutation by routing map, sorting of chunks, cross-entropy, and gradients of grouped
biases. Implemented with PyTorch's ops, in FP32 where the kernels compute in FP32. A program needs them on a machine without CUDA, where Triton
cannot run the package's kernels.

A kernel's function is replaced only if both functions take the same arguments, so versions with other arguments keep their own.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any, Callable, Optional, Tuple

import torch
import torch.distributed as dist

__all__ = ["adopt"]


# -- Permutation by routing map ------------------------------------------------------------------------------------------------------------

def make_row_id_map(routing_map: torch.Tensor, num_tokens: int, num_experts: int) -> torch.Tensor:
    """int32 [tokens, 2 experts + 1], for each token: its rows in the order grouped by expert (the last row first), its experts, and the number of its
    experts.
    """
    chosen = routing_map != 0
    rows = (chosen.t().reshape(-1).cumsum(0) - 1).view(num_experts, num_tokens).t()
    rows, experts = torch.where(chosen, rows, -1).sort(dim=1, descending=True)
    return torch.cat((rows, experts, chosen.sum(1, keepdim=True)), 1).int()


def _routes(row_id_map: torch.Tensor, num_experts: int, pad_offsets: Optional[torch.Tensor]) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (token, expert, row) of each selected pair."""
    there = torch.arange(num_experts, device=row_id_map.device) < row_id_map[:, 2 * num_experts:]
    token, place = there.nonzero(as_tuple=True)
    expert, row = row_id_map[token, num_experts + place].long(), row_id_map[token, place].long()
    return token, expert, row if pad_offsets is None else row + pad_offsets[expert].long()


def permute_with_mask_map(inp: torch.Tensor, row_id_map: torch.Tensor, probs: Optional[torch.Tensor], scale: Optional[torch.Tensor],
                          pad_offsets: Optional[torch.Tensor], num_tokens: int, num_experts: int, num_out_tokens: int, hidden_size: int,
                          scale_hidden_dim: int) -> tuple:
    """Returns (the rows, their scales, their probabilities). Rows with probability 0 and padding rows are zeros."""
    token, expert, row = _routes(row_id_map, num_experts, pad_offsets)
    output = inp.new_zeros((num_out_tokens, hidden_size))
    output[row] = inp[token]
    permuted_scale = permuted_probs = None
    if scale is not None:
        permuted_scale = scale.new_zeros((num_out_tokens, scale_hidden_dim))
        permuted_scale[row] = scale[token]
    if probs is not None:
        of_rows = probs[token, expert]
        permuted_probs = probs.new_zeros(num_out_tokens)
        permuted_probs[row] = of_rows
        output[row[of_rows == 0]] = 0
    return output, permuted_scale, permuted_probs


def unpermute_with_mask_map(inp: torch.Tensor, row_id_map: torch.Tensor, merging_probs: Optional[torch.Tensor],
                            permuted_probs: Optional[torch.Tensor], pad_offsets: Optional[torch.Tensor], num_tokens: int, num_experts: int,
                            hidden_size: int) -> tuple:
    """Returns (the sum of each token's rows in FP32, weighted by merging_probs if given; the probabilities [tokens, experts])."""
    token, expert, row = _routes(row_id_map, num_experts, pad_offsets)
    rows = inp[row].float()
    if merging_probs is not None:
        rows = rows * merging_probs[token, expert].float().unsqueeze(1)
    output = torch.zeros((num_tokens, hidden_size), dtype=torch.float32, device=inp.device).index_add_(0, token, rows).to(inp.dtype)
    probs = None
    if permuted_probs is not None:
        probs = permuted_probs.new_zeros((num_tokens, num_experts))
        probs[token, expert] = permuted_probs[row]
    return output, probs


def unpermute_with_mask_map_bwd_with_merging_probs(fwd_output_grad: torch.Tensor, row_id_map: torch.Tensor, fwd_input: torch.Tensor,
                                                   merging_probs: torch.Tensor, pad_offsets: Optional[torch.Tensor], num_tokens: int,
                                                   num_experts: int, num_out_tokens: int, hidden_size: int) -> tuple:
    """Returns (the gradient of the rows, the gradient of the probabilities)."""
    token, expert, row = _routes(row_id_map, num_experts, pad_offsets)
    grad = fwd_output_grad[token].float()
    rows = fwd_output_grad.new_zeros((num_out_tokens, hidden_size))
    rows[row] = (grad * merging_probs[token, expert].float().unsqueeze(1)).to(rows.dtype)
    probs = merging_probs.new_zeros((num_tokens, num_experts))
    probs[token, expert] = (fwd_input[row].float() * grad).sum(1).to(probs.dtype)
    return rows, probs


def make_chunk_sort_map(split_sizes: torch.Tensor, sorted_indices: torch.Tensor, num_tokens: int, num_splits: int) -> torch.Tensor:
    """int32 [tokens]: the destination of each row when chunks are ordered by sorted_indices. Rows after the last chunk keep their place."""
    sizes, order = split_sizes.long(), sorted_indices.long()
    begins, wanted = sizes.cumsum(0) - sizes, torch.empty_like(sizes)
    wanted[order] = sizes[order].cumsum(0) - sizes[order]
    moved = torch.arange(num_tokens, device=sizes.device)
    total = int(sizes.sum())
    moved[:total] += (wanted - begins).repeat_interleave(sizes)[:num_tokens]
    return moved.int()


def sort_chunks_by_map(inp: torch.Tensor, row_id_map: torch.Tensor, probs: Optional[torch.Tensor], num_tokens: int, hidden_size: int,
                       is_forward: bool) -> tuple:
    """Applies the map, or its inverse, to the rows and their probabilities; returns both."""
    places = row_id_map.long()
    order = torch.empty_like(places).scatter_(0, places, torch.arange(num_tokens, device=places.device)) if is_forward else places
    return inp[order], None if probs is None else probs[order]


# -- Cross-entropy -------------------------------------------------------------------------------------------------------------------------

def cross_entropy_forward(_input: torch.Tensor, target: torch.Tensor, label_smoothing: float, reduce_loss: bool, dist_process_group: Any,
                          ignore_idx: int, overwrite_input: bool) -> tuple:
    """Returns (the losses [B, SQ], or their mean over targets that are not ignored; data for the backward). The input [B, SQ, V] is this rank's shard
    of the vocabulary.
    """
    batch, length, columns = _input.shape
    target = target.contiguous()
    y, x = target.reshape(-1), _input.reshape(-1, columns).float()
    saved = _input if overwrite_input else torch.empty(_input.shape, dtype=_input.dtype, device=_input.device).copy_(_input)
    rank, world = (0, 1) if dist_process_group is None else (dist.get_rank(dist_process_group), dist.get_world_size(dist_process_group))
    column = y - rank * columns
    here = (column >= 0) & (column < columns)
    chosen = x.gather(1, column.clamp(0, columns - 1).unsqueeze(1)).squeeze(1).masked_fill(~here, -torch.inf)
    largest = x.amax(1)
    parts = torch.stack((largest, torch.exp(x - largest.unsqueeze(1)).sum(1), chosen, x.sum(1) if label_smoothing > 0 else torch.zeros_like(largest)), 1)
    if world > 1:
        gathered = parts.new_empty((world * len(parts), 4))
        dist.all_gather_into_tensor(gathered, parts, group=dist_process_group)
        parts = gathered.view(world, -1, 4)
    else:
        parts = parts.unsqueeze(0)
    largest = parts[..., 0].amax(0)
    total = (parts[..., 1] * torch.exp(parts[..., 0] - largest)).sum(0)
    whole = largest + total.log()
    loss = whole - parts[..., 2].amax(0)
    if label_smoothing > 0:
        smooth = label_smoothing * whole - label_smoothing / (columns * world) * parts[..., 3].sum(0)
        loss = loss * (1 - label_smoothing) + smooth
    counts = y != ignore_idx
    loss = torch.where(counts, loss, 0.0)
    counted = counts.sum().view(1).clamp(min=1) if reduce_loss else None
    result = loss.sum() / counted if reduce_loss else loss.view(batch, length)
    return result, saved, torch.stack((largest, total), 1), target, counted, rank, world


def cross_entropy_backward(saved_input: torch.Tensor, stats: torch.Tensor, target: torch.Tensor, n_non_ignore: Optional[torch.Tensor],
                           grad_output: torch.Tensor, label_smoothing: float, reduce_loss: bool, rank: int, world_size: int,
                           ignore_idx: int) -> torch.Tensor:
    """Writes the gradient over the input."""
    columns = saved_input.shape[-1]
    y, x = target.reshape(-1), saved_input.reshape(-1, columns).float()
    grad = torch.exp(x - stats[:, :1]) / stats[:, 1:] - label_smoothing / (columns * world_size)
    column = y - rank * columns
    here = ((column >= 0) & (column < columns)).nonzero().squeeze(1)
    grad[here, column[here]] -= 1 - label_smoothing
    outer = grad_output.reshape(-1).float()
    outer = outer / n_non_ignore if reduce_loss else outer
    grad = (grad * outer.view(-1, 1)).masked_fill_((y == ignore_idx).unsqueeze(1), 0.0)
    return saved_input.copy_(grad.view(saved_input.shape))


def _with_gradient(in_fp32: bool) -> Callable:
    """The cross-entropy of versions up to 2.19: the forward also computes the gradient, in FP32 or the input's dtype, and autograd saves only that.
    """
    def forward(_input: torch.Tensor, target: torch.Tensor, label_smoothing: float, reduce_loss: bool, dist_process_group: Any, ignore_idx: int) -> tuple:
        loss, _, stats, target, counted, rank, world = cross_entropy_forward(_input, target, label_smoothing, reduce_loss, dist_process_group, ignore_idx, True)
        grad, one = torch.empty(_input.shape, dtype=torch.float32, device=_input.device).copy_(_input), torch.ones(1, device=_input.device)
        cross_entropy_backward(grad, stats, target, counted, one, label_smoothing, reduce_loss, rank, world, ignore_idx)
        return loss, grad if in_fp32 else grad.to(_input.dtype)

    return forward


def _times_outer(grad_input: torch.Tensor, grad_output: torch.Tensor, is_cg_capturable: bool = False) -> torch.Tensor:
    rows = grad_input.reshape(-1, grad_input.shape[-1]).float() * grad_output.reshape(-1, 1).float()
    return rows.view(grad_input.shape).to(grad_input.dtype)


def _times_outer_2_17(_input: torch.Tensor, grad_output: torch.Tensor, is_cg_capturable: bool = False) -> torch.Tensor:
    return _times_outer(_input, grad_output)


# -- Gradients of groups' biases -----------------------------------------------------------------------------------------------------------

def _groups(offsets: torch.Tensor, rows: int) -> Tuple[torch.Tensor, int]:
    """Returns (the group of each row, the number of rows that belong to a group)."""
    count = min(int(offsets[-1]), rows)
    return torch.searchsorted(offsets[1:].contiguous(), torch.arange(count, dtype=offsets.dtype, device=offsets.device), right=True), count


def compute_grouped_dbias(dy: torch.Tensor, offsets: torch.Tensor, num_groups: int, dbias: Optional[torch.Tensor] = None) -> torch.Tensor:
    """FP32 [groups, hidden]: the sum of each group's rows, added to dbias if given."""
    group, count = _groups(offsets, dy.shape[0])
    dbias = torch.zeros((num_groups, dy.shape[1]), dtype=torch.float32, device=dy.device) if dbias is None else dbias
    return dbias.index_add_(0, group, dy[:count].float())


def compute_grouped_dbias_dscales(dy: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor, offsets: torch.Tensor,
                                  dbias: Optional[torch.Tensor] = None, dscales: Optional[torch.Tensor] = None) -> tuple:
    """Returns (compute_grouped_dbias of rows times their scales; FP32 [tokens]: the dot product of each row and its group's bias). Both are added to
    the given outputs.
    """
    group, count = _groups(offsets, dy.shape[0])
    rows = dy[:count].float()
    dbias = torch.zeros(bias.shape, dtype=torch.float32, device=dy.device) if dbias is None else dbias
    dscales = torch.zeros(dy.shape[0], dtype=torch.float32, device=dy.device) if dscales is None else dscales
    dbias.index_add_(0, group, rows * scales[:count].float().unsqueeze(1))
    dscales[:count] += (rows * bias[group].float()).sum(1)
    return dbias, dscales


_KERNELS = {f.__name__: f for f in (make_row_id_map, permute_with_mask_map, unpermute_with_mask_map, unpermute_with_mask_map_bwd_with_merging_probs,
                                    make_chunk_sort_map, sort_chunks_by_map, cross_entropy_forward, cross_entropy_backward, compute_grouped_dbias,
                                    compute_grouped_dbias_dscales)}
_FORMER = ({"cross_entropy_forward": _with_gradient(True), "cross_entropy_backward": _times_outer},
           {"cross_entropy_forward": _with_gradient(False), "cross_entropy_backward": _times_outer_2_17})


def _takes_alike(function: Any, other: Any) -> bool:
    return list(inspect.signature(function).parameters) == list(inspect.signature(other).parameters)


def adopt(module: ModuleType) -> None:
    """Replaces a module's functions of equal names and arguments. Functions that depend on each other are replaced together or not at all."""
    for name in _KERNELS.keys() & vars(module).keys():
        if _takes_alike(getattr(module, name), _KERNELS[name]):
            setattr(module, name, _KERNELS[name])
    for forms in _FORMER:
        if all(hasattr(module, name) and _takes_alike(getattr(module, name), form) for name, form in forms.items()):
            vars(module).update(forms)
            break
