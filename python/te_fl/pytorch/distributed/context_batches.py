"""A batch's tokens over the ranks of context parallelism, with Transformer Engine's names."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from te_fl.errors import InvalidArgument
from te_fl.packed_sequences import tokens_of_ranks
from te_fl.pytorch.distributed import collectives
from te_fl.pytorch.runtime.constants import CPLoadBalancingStrategy

__all__ = ["generate_positional_ids_for_cp", "get_batch_on_this_cp_rank", "get_cu_seqlens_on_cp_rank", "get_thd_partitioned_indices",
           "pad_thd_sequences_for_cp"]

_DUAL = CPLoadBalancingStrategy.DUAL_CHUNK_SWAP


def _check_lengths(where: str, name: str, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The sequences' lengths."""
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.is_floating_point():
        raise InvalidArgument(f"{where}: {name} is {cu_seqlens!r:.60}; it is a tensor of integers [batch + 1]")
    lengths = cu_seqlens.diff()
    if bool((lengths < 0).any()):
        raise InvalidArgument(f"{where}: {name} is {cu_seqlens.tolist()}; cumulative lengths do not decrease")
    return lengths


def _padded(where: str, cu_seqlens: torch.Tensor, divisibility_factor: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """The sequences' lengths, and those lengths rounded up to multiples."""
    if isinstance(divisibility_factor, bool) or not isinstance(divisibility_factor, int) or divisibility_factor < 1:
        raise InvalidArgument(f"{where}: divisibility_factor is {divisibility_factor!r}; it is an integer of 1 or more, such as twice the number of ranks")
    lengths = _check_lengths(where, "cu_seqlens", cu_seqlens)
    return lengths, (lengths + divisibility_factor - 1) // divisibility_factor * divisibility_factor


def pad_thd_sequences_for_cp(input_ids: torch.Tensor, labels: torch.Tensor, cu_seqlens: torch.Tensor, divisibility_factor: int,
                             padding_token_id: int = 0, padding_label_id: int = -100) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pads each sequence to a multiple of divisibility_factor, which for context parallelism is twice the number of ranks. Returns the padded
    input_ids and labels, [tokens], and their cumulative lengths. input_ids, labels: [1, tokens] or [tokens].
    """
    where = "pad_thd_sequences_for_cp"
    lengths, padded = _padded(where, cu_seqlens, divisibility_factor)
    total = int(cu_seqlens[-1])
    ends = torch.zeros(padded.shape[0] + 1, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    ends[1:] = padded.cumsum(0)
    found = []
    for name, tokens, filler in (("input_ids", input_ids, padding_token_id), ("labels", labels, padding_label_id)):
        own = tokens.squeeze(0) if tokens.dim() == 2 else tokens
        if own.dim() != 1 or own.shape[0] < total:
            raise InvalidArgument(f"{where}: {name} is {tuple(tokens.shape)}, and cu_seqlens ends at {total}; it is [tokens] or [1, tokens], with all "
                                  "tokens of the sequences")
        begin = torch.repeat_interleave((ends[:-1] - cu_seqlens[:-1]).to(own.device), lengths.to(own.device))
        made = own.new_full((int(ends[-1]),), filler)
        at = torch.arange(int(cu_seqlens[0]), total, device=own.device)
        made[at + begin] = own[int(cu_seqlens[0]):total]
        found.append(made)
    return found[0], found[1], ends


def generate_positional_ids_for_cp(cu_seqlens: torch.Tensor, divisibility_factor: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """The position of each token of the padded sequences in its own sequence; padding counts on."""
    _, padded = _padded("generate_positional_ids_for_cp", cu_seqlens, divisibility_factor)
    ends = padded.cumsum(0)
    total = int(ends[-1]) if ends.numel() else 0
    return (torch.arange(total, device=cu_seqlens.device) - torch.repeat_interleave(ends - padded, padded)).to(dtype)


def get_cu_seqlens_on_cp_rank(cu_seqlens: torch.Tensor, cu_seqlens_padded_on_cp_rank: torch.Tensor, cp_size: int, cp_rank: int, first_half: bool,
                              second_half: bool) -> torch.Tensor:
    """The cumulative lengths, without padding, of the first and second chunks of the sequences on a rank. cu_seqlens: of the whole sequences, without
    padding. cu_seqlens_padded_on_cp_rank: of the rank's two chunks of each, with padding.
    """
    lengths, chunk = cu_seqlens.diff(), cu_seqlens_padded_on_cp_rank.diff() // 2
    own = torch.zeros_like(lengths)
    for number, wanted in ((cp_rank, first_half), (2 * cp_size - 1 - cp_rank, second_half)):
        if wanted:
            own += torch.minimum((lengths - number * chunk).clamp(min=0), chunk)
    result = torch.zeros_like(cu_seqlens)
    result[1:] = own.cumsum(0)
    return result


def get_thd_partitioned_indices(cu_seqlens_padded: torch.Tensor, total_tokens: int, cp_size: int, cp_rank: int, device: Any = None,
                                load_balancing_strategy: CPLoadBalancingStrategy = _DUAL) -> torch.Tensor:
    """The indices of a rank's tokens among those of the packed sequences, in the rank's order, int32. device: that of the result; None is that of
    cu_seqlens_padded.
    """
    where = "get_thd_partitioned_indices"
    if not 0 <= cp_rank < cp_size:
        raise InvalidArgument(f"{where}: cp_rank is {cp_rank}; it is 0 or more, and less than cp_size {cp_size}")
    return _own_tokens(where, cu_seqlens_padded, total_tokens, cp_size, cp_rank, load_balancing_strategy).to(device or cu_seqlens_padded.device, torch.int32)


def _own_tokens(where: str, cu_seqlens_padded: torch.Tensor, total: int, size: int, rank: int, strategy: CPLoadBalancingStrategy) -> torch.Tensor:
    if not isinstance(strategy, CPLoadBalancingStrategy):
        raise TypeError(f"{where}: load_balancing_strategy is {strategy!r}; it is a CPLoadBalancingStrategy")
    lengths = _check_lengths(where, "cu_seqlens_padded", cu_seqlens_padded)
    if strategy is _DUAL:
        if bool((lengths % (2 * size) != 0).any()):
            raise InvalidArgument(f"{where}: cu_seqlens_padded is {cu_seqlens_padded.tolist()}; {size} ranks take two chunks of equal length of each sequence: "
                                  f"pad them to multiples of {2 * size} (pad_thd_sequences_for_cp)")
        return tokens_of_ranks(cu_seqlens_padded, total, size, rank)
    if total % size:
        raise InvalidArgument(f"{where}: there are {total} tokens, which {size} ranks do not divide; pad to a multiple of {size}")
    return torch.arange(rank * (total // size), (rank + 1) * (total // size), device=cu_seqlens_padded.device)


def get_batch_on_this_cp_rank(cu_seqlens_padded: torch.Tensor, input_ids_padded: Optional[torch.Tensor], labels_padded: Optional[torch.Tensor],
                              position_ids_padded: Optional[torch.Tensor], cp_group: Any = None, qvk_format: str = "thd",
                              load_balancing_strategy: CPLoadBalancingStrategy = _DUAL
                              ) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor]]:
    """This rank's tokens of packed sequences: two chunks of each, or with NO_LOAD_BALANCE one contiguous piece of all. None stays None.

    The tensors have all tokens in their first dimension, or in their second. cp_group: None is the default group.
    """
    where = "get_batch_on_this_cp_rank"
    if qvk_format != "thd":
        raise InvalidArgument(f"{where}: qvk_format is {qvk_format!r}; it is 'thd', as in Transformer Engine. Of sequences of one length take chunks rank and "
                              "2 * size - 1 - rank of 2 * size")
    size, rank = collectives.size_of(cp_group), collectives.rank_in(cp_group)
    if size == 1:
        return input_ids_padded, labels_padded, position_ids_padded
    total = int(cu_seqlens_padded[-1])
    own = _own_tokens(where, cu_seqlens_padded, total, size, rank, load_balancing_strategy)

    def taken(name: str, tensor: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        if tensor is None:
            return None
        dim = 1 if tensor.dim() > 1 and tensor.shape[1] == total else 0
        if tensor.dim() < 1 or tensor.shape[dim] != total:
            raise InvalidArgument(f"{where}: {name} is {tuple(tensor.shape)}, and cu_seqlens_padded ends at {total}; it has that many tokens in its first or "
                                  "second dimension")
        return tensor.index_select(dim, own.to(tensor.device))

    return taken("input_ids_padded", input_ids_padded), taken("labels_padded", labels_padded), taken("position_ids_padded", position_ids_padded)
