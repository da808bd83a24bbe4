"""Packed sequences (thd) under context parallelism: sequence halves, their log-sum-exps and gradients, and token orders.

Each sequence is split into 2 R equal chunks; rank r of R holds the chunks r and 2 R - 1 - r, in that order. cu_seqlens are the padded sequence
boundaries, int32 [B + 1], on the device. No function synchronises with the device, so no Python code depends on their values. Implemented with
PyTorch's ops.
"""

from __future__ import annotations

import torch

from te_fl.errors import InvalidArgument
from te_fl.packed_sequences import Places, places, places_in_rank_order, tokens_of_ranks

__all__ = ["thd_copy_valid_tokens_from_per_split_to_rank_local", "thd_cp_rank_order_to_sequence_order", "thd_get_partitioned_indices",
           "thd_grad_correction", "thd_out_correction", "thd_read_half_tensor", "thd_read_second_half_lse", "thd_second_half_lse_correction",
           "thd_sequence_order_to_cp_rank_order"]


def _check_boundaries(function: str, cu_seqlens: torch.Tensor) -> None:
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise InvalidArgument(f"{function}: cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}; it is int32 [B + 1] for one sequence or more")


def _along(mask: torch.Tensor, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Reshapes per-token values to broadcast with a tensor whose dimension dim indexes the tokens."""
    return mask.view([-1 if i == dim else 1 for i in range(tensor.dim())])


def _token_dim(function: str, tensor: torch.Tensor) -> int:
    if tensor.dim() not in (3, 4):
        raise InvalidArgument(f"{function}: the tensor has shape {tuple(tensor.shape)}; it is [T, H, D] or [2, T, H, D]")
    return tensor.dim() - 3


def thd_read_half_tensor(tensor: torch.Tensor, cu_seqlens: torch.Tensor, half_idx: int) -> torch.Tensor:
    """The first (0) or second (1) half of each sequence, concatenated. tensor: [T, H, D] or [2, T, H, D]."""
    name = "thd_read_half_tensor"
    _check_boundaries(name, cu_seqlens)
    if half_idx not in (0, 1):
        raise InvalidArgument(f"{name}: half_idx is {half_idx}; it is 0 or 1")
    dim = _token_dim(name, tensor)
    tokens = tensor.shape[dim]
    at = places(cu_seqlens // 2, tokens // 2)
    source = 2 * at.begin + half_idx * at.length + at.within
    return tensor.index_select(dim, source.clamp_(0, max(tokens - 1, 0)))


def _lse_shape(function: str, lse: torch.Tensor, lse_packed: bool) -> None:
    if lse.dtype != torch.float32 or lse.dim() != (2 if lse_packed else 3):
        raise InvalidArgument(f"{function}: lse is {lse.dtype} {tuple(lse.shape)}; it is float32 {'[H, T]' if lse_packed else '[B, H, S]'} "
                              f"with lse_packed={lse_packed}")


def _half_of_lse(lse: torch.Tensor, cu_seqlens: torch.Tensor, lse_packed: bool) -> tuple:
    """Returns (a mask of lse's elements in second halves, each element's index among the second halves), both broadcastable to lse."""
    if lse_packed:
        at = places(cu_seqlens, lse.shape[1])
        half = at.length // 2
        return at.inside & (at.within >= half), at.begin // 2 + at.within - half
    half = ((cu_seqlens[1:] - cu_seqlens[:-1]).long() // 2).view(-1, 1, 1)
    place = torch.arange(lse.shape[2], device=lse.device) - half
    return (place >= 0) & (place < half), place


def _taken(source: torch.Tensor, place: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Gathers source's elements along its last dimension; indices out of range are clamped."""
    return source.gather(-1, place.clamp(0, max(source.shape[-1] - 1, 0)).expand(shape))


def thd_second_half_lse_correction(lse: torch.Tensor, lse_per_step: torch.Tensor, cu_seqlens: torch.Tensor, lse_packed: bool) -> None:
    """Adds a step over the second halves to lse, in place: log(exp(lse) + exp(lse_per_step))."""
    name = "thd_second_half_lse_correction"
    _check_boundaries(name, cu_seqlens)
    for each in (lse, lse_per_step):
        _lse_shape(name, each, lse_packed)
    if lse.shape[-1] // 2 > lse_per_step.shape[-1]:
        raise InvalidArgument(f"{name}: lse_per_step has {lse_per_step.shape[-1]} rows of a head; the second halves of lse have {lse.shape[-1] // 2}")
    if lse.numel() == 0:
        return
    second, place = _half_of_lse(lse, cu_seqlens, lse_packed)
    lse.copy_(torch.where(second, torch.logaddexp(lse, _taken(lse_per_step, place, lse.shape)), lse))


def thd_read_second_half_lse(lse: torch.Tensor, cu_seqlens: torch.Tensor, lse_packed: bool, second_half_lse_seqlen: int) -> torch.Tensor:
    """The elements of the second halves, packed [H, second_half_lse_seqlen], else [B, H, second_half_lse_seqlen]; zero-padded."""
    name = "thd_read_second_half_lse"
    _check_boundaries(name, cu_seqlens)
    _lse_shape(name, lse, lse_packed)
    if lse.shape[-1] // 2 > second_half_lse_seqlen:
        raise InvalidArgument(f"{name}: second_half_lse_seqlen is {second_half_lse_seqlen}; the second halves have {lse.shape[-1] // 2} rows of a head")
    shape = torch.Size((*lse.shape[:-1], second_half_lse_seqlen))
    if lse.numel() == 0:
        return torch.zeros(shape, dtype=lse.dtype, device=lse.device)
    if lse_packed:
        at = places(cu_seqlens // 2, second_half_lse_seqlen)
        inside, source = at.inside, 2 * at.begin + at.length + at.within
    else:
        half = ((cu_seqlens[1:] - cu_seqlens[:-1]).long() // 2).view(-1, 1, 1)
        place = torch.arange(second_half_lse_seqlen, device=lse.device)
        inside, source = place < half, place + half
    return torch.where(inside, _taken(lse, source, shape), 0.0)


def _weights(lse: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """exp(lse - total), or 0 where total is -inf."""
    return torch.exp(lse - total).masked_fill_(total == -torch.inf, 0.0)


def _by_token(lse: torch.Tensor, at: Places, place: torch.Tensor, lse_packed: bool) -> torch.Tensor:
    """The lse of each token at the given place of its row, [T, H]."""
    place = place.clamp(0, max(lse.shape[-1] - 1, 0))
    return lse[:, place].t() if lse_packed else lse[at.sequence, :, place]


def thd_out_correction(out: torch.Tensor, out_per_step: torch.Tensor, old_lse: torch.Tensor, lse: torch.Tensor, lse_per_step: torch.Tensor,
                       cu_seqlens: torch.Tensor, only_second_half: bool, lse_packed: bool) -> None:
    """In place: out * exp(old_lse - lse) + out_per_step * exp(lse_per_step - lse). With only_second_half, the step covers the second halves only.

    out: [T, H, D]; out_per_step: as out, or [T / 2, H, D] for the second halves. Where lse_per_step is -inf, the step had no keys and out is
    unchanged: for padding, which never has keys, Transformer Engine has computed lse = NaN.
    """
    name = "thd_out_correction"
    _check_boundaries(name, cu_seqlens)
    for each in (old_lse, lse, lse_per_step):
        _lse_shape(name, each, lse_packed)
    tokens = out.shape[0]
    if out_per_step.shape[0] != (tokens // 2 if only_second_half else tokens):
        raise InvalidArgument(f"{name}: out_per_step has {out_per_step.shape[0]} tokens, out {tokens}, with only_second_half={only_second_half}")
    if out_per_step.shape[1:] != out.shape[1:]:
        raise InvalidArgument(f"{name}: out_per_step has shape {tuple(out_per_step.shape)}, out {tuple(out.shape)}; all extents but the number of tokens must be equal")
    if out.numel() == 0:
        return
    at = places(cu_seqlens, tokens)
    half = at.length // 2
    in_lse = at.begin + at.within if lse_packed else at.within
    if only_second_half:
        touched, place = at.inside & (at.within >= half), at.within - half
        step_token = (at.begin // 2 + place).clamp_(0, max(out_per_step.shape[0] - 1, 0))
        in_step = step_token if lse_packed else place
        step = out_per_step.index_select(0, step_token)
    else:
        touched, in_step, step = at.inside, in_lse, out_per_step
    total = _by_token(lse, at, in_lse, lse_packed)
    old = _weights(_by_token(old_lse, at, in_lse, lse_packed), total).unsqueeze(-1)
    step_lse = _by_token(lse_per_step, at, in_step, lse_packed)
    new = _weights(step_lse, total).unsqueeze(-1)
    corrected = torch.addcmul(step.float() * new, out.float(), old).to(out.dtype)
    touched = touched.unsqueeze(-1) & (step_lse != -torch.inf)
    out.copy_(torch.where(touched.unsqueeze(-1), corrected, out))


_ACTIONS = ("none", "add", "copy", "zero")


def thd_grad_correction(grad: torch.Tensor, grad_per_step: torch.Tensor, cu_seqlens: torch.Tensor, first_half: str, second_half: str) -> None:
    """For each half of the sequences: adds the step's gradient to grad, copies it, zeroes grad, or leaves it, in place.

    grad: [T, H, D] or [2, T, H, D]. grad_per_step: as grad if both halves use it, else only the tokens of one half.
    """
    name = "thd_grad_correction"
    _check_boundaries(name, cu_seqlens)
    for half, action in (("first_half", first_half), ("second_half", second_half)):
        if action not in _ACTIONS:
            raise InvalidArgument(f"{name}: {half} is {action!r}; it is one of {', '.join(_ACTIONS)}")
    if grad.dtype == torch.uint8 and "add" in (first_half, second_half):
        raise InvalidArgument(f"{name}: grad is codes of FP8, which are not added as bytes; copy or zero them")
    dim, takes = _token_dim(name, grad), [action in ("add", "copy") for action in (first_half, second_half)]
    tokens = grad.shape[dim]
    expected = tokens if all(takes) else tokens // 2
    if any(takes) and grad_per_step.dtype != grad.dtype:
        raise InvalidArgument(f"{name}: grad is {grad.dtype} and grad_per_step {grad_per_step.dtype}; they have one dtype")
    if grad_per_step.dim() != grad.dim() or grad_per_step.shape[dim] != expected:
        raise InvalidArgument(f"{name}: grad_per_step has shape {tuple(grad_per_step.shape)}; ({first_half}, {second_half}) takes {expected} of {tokens} "
                              f"tokens in dimension {dim}")
    if grad_per_step.shape[:dim] + grad_per_step.shape[dim + 1:] != grad.shape[:dim] + grad.shape[dim + 1:]:
        raise InvalidArgument(f"{name}: grad_per_step has shape {tuple(grad_per_step.shape)}, grad {tuple(grad.shape)}; all extents but the number of tokens must be equal")
    if grad.numel() == 0:
        return
    at = places(cu_seqlens, tokens)
    half = at.length // 2
    step = grad_per_step
    if not all(takes):
        place = at.begin // 2 + at.within - (half if takes[1] else 0)
        step = step.index_select(dim, place.clamp_(0, max(expected - 1, 0)))
    result = grad
    for mask, action in ((at.inside & (at.within < half), first_half), (at.inside & (at.within >= half), second_half)):
        if action != "none":
            value = step if action == "copy" else grad + step if action == "add" else torch.zeros_like(grad)
            result = torch.where(_along(mask, grad, dim), value, result)
    grad.copy_(result)


def _check_ranks(function: str, total_tokens: int, world_size: int) -> None:
    if world_size < 1 or total_tokens < 1 or total_tokens % (2 * world_size):
        raise InvalidArgument(f"{function}: {total_tokens} tokens do not divide into 2 chunks for each of {world_size} ranks")


def thd_get_partitioned_indices(cu_seqlens: torch.Tensor, total_tokens: int, world_size: int, rank: int) -> torch.Tensor:
    """The indices of the tokens that a rank holds, in the rank's order; int32 [total_tokens / world_size]."""
    name = "thd_get_partitioned_indices"
    _check_boundaries(name, cu_seqlens)
    _check_ranks(name, total_tokens, world_size)
    if not 0 <= rank < world_size:
        raise InvalidArgument(f"{name}: rank is {rank}; it is 0 or more, and less than world_size {world_size}")
    return tokens_of_ranks(cu_seqlens, total_tokens, world_size, rank).int()


def _check_order(function: str, inp: torch.Tensor, cu_seqlens: torch.Tensor, cp_size: int, total_tokens: int) -> None:
    _check_boundaries(function, cu_seqlens)
    _check_ranks(function, total_tokens, cp_size)
    if inp.dim() < 1 or inp.shape[0] != total_tokens:
        raise InvalidArgument(f"{function}: inp has shape {tuple(inp.shape)}; total_tokens says {total_tokens} tokens")


def thd_sequence_order_to_cp_rank_order(inp: torch.Tensor, cu_seqlens: torch.Tensor, cp_size: int, total_tokens: int) -> torch.Tensor:
    """Reorders tokens from sequence order to rank order: first those of rank 0, then those of rank 1, ..."""
    _check_order("thd_sequence_order_to_cp_rank_order", inp, cu_seqlens, cp_size, total_tokens)
    ranks = torch.arange(cp_size, device=cu_seqlens.device).view(-1, 1)
    return inp.index_select(0, tokens_of_ranks(cu_seqlens, total_tokens, cp_size, ranks).view(-1))


def thd_cp_rank_order_to_sequence_order(inp: torch.Tensor, cu_seqlens: torch.Tensor, cp_size: int, total_tokens: int) -> torch.Tensor:
    """The inverse of thd_sequence_order_to_cp_rank_order."""
    _check_order("thd_cp_rank_order_to_sequence_order", inp, cu_seqlens, cp_size, total_tokens)
    return inp.index_select(0, places_in_rank_order(cu_seqlens, total_tokens, cp_size))


def thd_copy_valid_tokens_from_per_split_to_rank_local(out: torch.Tensor, inp: torch.Tensor, cu_seqlens_padded: torch.Tensor,
                                                       cu_seqlens: torch.Tensor) -> None:
    """Copies the tokens that are not padding, in place. cu_seqlens: from the lengths without padding."""
    name = "thd_copy_valid_tokens_from_per_split_to_rank_local"
    _check_boundaries(name, cu_seqlens)
    _check_boundaries(name, cu_seqlens_padded)
    if cu_seqlens.shape != cu_seqlens_padded.shape or out.shape != inp.shape or out.dtype != inp.dtype or inp.dim() < 1:
        raise InvalidArgument(f"{name}: out is {out.dtype} {tuple(out.shape)}, inp {inp.dtype} {tuple(inp.shape)}, cu_seqlens_padded "
                              f"{tuple(cu_seqlens_padded.shape)}, cu_seqlens {tuple(cu_seqlens.shape)}; each pair must be equal")
    at = places(cu_seqlens_padded, inp.shape[0])
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    valid = at.inside & (at.within < lengths[at.sequence])
    out.copy_(torch.where(_along(valid, out, 0), inp, out))
