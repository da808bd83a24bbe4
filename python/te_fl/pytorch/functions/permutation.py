"""Permutation of tokens by expert, and its inverse.

A row map, INT32 [K, T], holds for token t the permuted rows [0, K) that the token is copied to; -1 means none. With index maps K is the number of
experts per token; with mask maps K is the number of all experts. Two ops build a map and permute the rows; the inverse and the gradients are ops that
take a map.
"""

from __future__ import annotations

import warnings
from typing import Optional, Tuple

import torch

from te_fl._native import positional_op
from te_fl.errors import InvalidArgument, Unsupported
from te_fl.pytorch.functions.function import Op, differentiable, differentiable_op, op

__all__ = ["moe_permute", "moe_permute_and_pad_with_probs", "moe_permute_with_probs", "moe_sort_chunks_by_index",
           "moe_sort_chunks_by_index_with_probs", "moe_unpermute"]


def _spread_run(tokens, rows, count):
    # The op needs the values of fwd_input only for the gradient of the probabilities, which this
    # call does not request; here only its number of rows counts, which the output shares.
    return _unpermute_bwd(tokens, tokens.new_empty((count, tokens.shape[1])), rows)


_unpermute_bwd = positional_op("moe_unpermute_bwd")
_gather = op("moe_permute_bwd", "moe_gather_rows", 2)


def _mask_run(tokens, mask, probs, pads, count):
    output, moved = tokens.new_empty((count, tokens.shape[1])), None if probs is None else probs.new_empty(count)
    rows = _permute_by_mask_fwd(tokens, mask, probs, pads, output=output, permuted_probs=moved)
    return output, tokens.new_empty(0) if moved is None else moved, rows


_permute_by_mask_fwd = positional_op("moe_permute_by_mask_fwd")


def _mask_fake(tokens, mask, probs, pads, count):
    return (tokens.new_empty((count, tokens.shape[1])), tokens.new_empty(0) if probs is None else probs.new_empty(count),
            mask.new_empty((mask.shape[1], mask.shape[0]), dtype=torch.int32))


def _mask_save(ctx, inputs, output):
    ctx.save_for_backward(output[2])
    ctx.mark_non_differentiable(output[2], *(() if inputs[2] is not None else (output[1],)))
    ctx.set_materialize_grads(False)


def _mask_gradient(op, ctx, grad, grad_moved=None, _grad_rows=None):
    rows, = ctx.saved_tensors
    grad_probs = None
    if grad_moved is not None and ctx.needs_input_grad[2]:  # treats the probabilities as E * T tokens of one column, each copied to at most one row
        grad_probs = op(grad_moved.reshape(-1, 1), rows.view(1, -1)).view(rows.shape).t()
    return None if grad is None else op(grad, rows), None, grad_probs, None, None


_permute_by_mask = differentiable(Op("moe_permute_rows(Tensor tokens, Tensor mask, Tensor? probs, Tensor? pads, SymInt count) -> (Tensor, Tensor, Tensor)",
                                     _mask_run, _mask_fake), _gather, _mask_save, _mask_gradient)


def _sort_run(tokens, indices, count):
    output = tokens.new_empty((count, tokens.shape[1]))
    return output, _permute_fwd(tokens, indices, output=output)


_permute_fwd = positional_op("moe_permute_fwd")


def _sort_fake(tokens, indices, count):
    return tokens.new_empty((count, tokens.shape[1])), indices.new_empty((indices.shape[1], indices.shape[0]), dtype=torch.int32)


def _sort_save(ctx, inputs, output):
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _sort_gradient(op, ctx, grad, _grad_rows=None):
    return None if grad is None else op(grad, *ctx.saved_tensors), None, None


_sort = differentiable(Op("moe_sort_rows(Tensor tokens, Tensor indices, SymInt count) -> (Tensor, Tensor)", _sort_run, _sort_fake),
                       _gather, _sort_save, _sort_gradient)


# output[t] = sum over k of probs[t, k] permuted[rows[k, t]]
_combine = differentiable_op("moe_unpermute_fwd", "moe_combine_rows", "moe_combine_rows_bwd")


def _sum_save(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])
    ctx.count = inputs[0].shape[0]


_sum = differentiable(  # _combine() without probabilities; its gradient does not need the tokens
    op("moe_permute_bwd", "moe_sum_rows", 2),
    Op("moe_sum_rows_bwd(Tensor grad, Tensor rows, SymInt count) -> Tensor", _spread_run,
       lambda grad, rows, count: grad.new_empty((count, grad.shape[1]))),
    _sum_save, lambda op, ctx, grad: (op(grad, ctx.saved_tensors[0], ctx.count), None))


def _check_tokens(where: str, inp: torch.Tensor) -> None:
    if type(inp) is not torch.Tensor and hasattr(inp, "dequantize") and "te_fl" in type(inp).__module__:
        raise Unsupported(f"{where}: inp is a {type(inp).__name__}, and te-fl permutes values; give inp.dequantize()")
    if inp.dim() != 2:
        raise InvalidArgument(f"{where}: inp has shape {tuple(inp.shape)}; it is [tokens, hidden size]")


def _by_mask(where: str, inp: torch.Tensor, routing_map: torch.Tensor, count: int, probs: Optional[torch.Tensor] = None,
             pad_offsets: Optional[torch.Tensor] = None) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (permuted rows, their probabilities, the row map) for a mask [T, E]: grouped by expert, with tokens in order within each expert."""
    if routing_map.dim() != 2 or routing_map.shape[0] != inp.shape[0]:
        raise InvalidArgument(f"{where}: routing_map has shape {tuple(routing_map.shape)} for {inp.shape[0]} tokens; a mask is [tokens, experts]")
    if probs is not None and probs.shape != routing_map.shape:
        raise InvalidArgument(f"{where}: probs has shape {tuple(probs.shape)}; routing_map has {tuple(routing_map.shape)}")
    mask = routing_map if routing_map.dtype in (torch.bool, torch.uint8) else routing_map != 0
    return _permute_by_mask(inp, mask, probs, pad_offsets, count)


def _padded(rows: torch.Tensor, pad_offsets: Optional[torch.Tensor]) -> torch.Tensor:
    """Shifts each expert's rows by the padding of the experts before it."""
    if pad_offsets is None:
        return rows
    return torch.where(rows < 0, rows, rows + pad_offsets.to(torch.int32).unsqueeze(1))


def _check_count(where: str, num_out_tokens: int, least: int) -> None:
    if num_out_tokens < least:
        raise InvalidArgument(f"{where}: num_out_tokens is {num_out_tokens}; it is at least {least}: the number of pairs of a token and one of its experts")


def _check_map_type(where: str, map_type: str) -> None:
    if map_type not in ("mask", "index"):
        raise InvalidArgument(f"{where}: map_type is {map_type!r}; it is 'mask' or 'index'")


def moe_permute(inp: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int, max_token_num: int = -1,
                map_type: str = "mask") -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns (the rows of inp [T, H] grouped by expert, row_id_map for moe_unpermute).

    map_type "mask": routing_map [T, E] is 1 if the token goes to the expert; num_out_tokens is the number of ones, or more, and surplus rows are 0.
    "index": routing_map [T, K] holds the experts of each token; pairs beyond num_out_tokens are dropped, and 0 means K T. row_id_map is INT32: [E, T]
    by mask, [K T] in the order [K, T] by index. max_token_num has no effect: there is no workspace.
    """
    _check_map_type("moe_permute", map_type)
    _check_tokens("moe_permute", inp)
    if map_type == "mask":
        _check_count("moe_permute", num_out_tokens, min(1, inp.shape[0]))
        output, _, rows = _by_mask("moe_permute", inp, routing_map, num_out_tokens if inp.shape[0] else 0)
        return output, rows
    _check_count("moe_permute", num_out_tokens, 0)
    if routing_map.dim() != 2 or routing_map.shape[0] != inp.shape[0]:
        raise InvalidArgument(f"moe_permute: routing_map has shape {tuple(routing_map.shape)} for {inp.shape[0]} tokens; indices are [tokens, topK]")
    indices = routing_map if routing_map.dtype in (torch.int32, torch.int64) else routing_map.to(torch.int32)
    output, rows = _sort(inp, indices, num_out_tokens if num_out_tokens and inp.shape[0] else indices.numel())
    return output, rows.view(-1)


def moe_permute_with_probs(inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor,
                           num_out_tokens: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With a mask: returns (permuted rows, their probabilities [num_out_tokens] taken from probs [T, E], row_id_map)."""
    where = "moe_permute_with_probs"
    _check_tokens(where, inp)
    _check_count(where, num_out_tokens, min(1, inp.shape[0]))
    return _by_mask(where, inp, routing_map, num_out_tokens if inp.shape[0] else 0, probs)


def moe_permute_and_pad_with_probs(inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, tokens_per_expert: torch.Tensor,
                                   align_size: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, Optional[torch.Tensor], torch.Tensor]:
    """As moe_permute_with_probs, with each expert's rows zero-padded to a multiple of align_size.

    Also returns pad_offsets [E] for moe_unpermute, the amount of padding before each expert's rows, or None without padding, and the padded number of
    rows of each expert, INT64 [E]. The host reads the token counts, which synchronises with the device.
    """
    where = "moe_permute_and_pad_with_probs"
    _check_tokens(where, inp)
    if tokens_per_expert is None:
        raise InvalidArgument(f"{where}: tokens_per_expert is None; give the number of tokens of each expert")
    if align_size <= 0:
        raise InvalidArgument(f"{where}: align_size is {align_size}; it is at least 1")
    counts = tokens_per_expert.to(inp.device, torch.int64)
    padded = (counts + align_size - 1) // align_size * align_size
    ends = torch.cumsum(padded - counts, 0)
    padding, total = torch.stack((ends[-1], padded.sum())).tolist()
    offsets = torch.nn.functional.pad(ends[:-1], (1, 0)) if padding else None
    output, moved, rows = _by_mask(where, inp, routing_map, total, probs, offsets)
    return output, moved, rows if offsets is None else _padded(rows, -offsets), offsets, padded


def moe_unpermute(inp: torch.Tensor, row_id_map: torch.Tensor, merging_probs: Optional[torch.Tensor] = None,
                  restore_shape: Optional[torch.Size] = None, map_type: str = "mask", probs: Optional[torch.Tensor] = None,
                  pad_offsets: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Sums the rows of each token in FP32, weighted by merging_probs, [T, E] by mask or [T, K] by index, if given.

    row_id_map and map_type: from moe_permute. restore_shape: [T, H]; T must be the map's. pad_offsets: from moe_permute_and_pad_with_probs. probs is
    an older name of merging_probs.
    """
    _check_map_type("moe_unpermute", map_type)
    if probs is not None:
        if merging_probs is not None:
            raise InvalidArgument("moe_unpermute: merging_probs and probs were both given; probs is deprecated: leave it out")
        warnings.warn("moe_unpermute: probs is deprecated; give merging_probs", FutureWarning)
        merging_probs = probs
    _check_tokens("moe_unpermute", inp)
    if map_type == "index":
        if pad_offsets is not None:
            raise InvalidArgument("moe_unpermute: pad_offsets belongs to map_type='mask'; leave it out")
        rows = _index_rows(row_id_map, merging_probs)
    else:
        if row_id_map.dim() != 2:
            raise InvalidArgument(f"moe_unpermute: row_id_map has shape {tuple(row_id_map.shape)}; that of a mask is [experts, tokens], as moe_permute made it")
        rows = _padded(row_id_map, pad_offsets)
    if restore_shape is not None and tuple(restore_shape) != (rows.shape[1], inp.shape[1]):
        raise InvalidArgument(f"moe_unpermute: restore_shape is {tuple(restore_shape)}; row_id_map and inp say {(rows.shape[1], inp.shape[1])}")
    if merging_probs is None:
        return _sum(inp, rows)
    if merging_probs.shape != (rows.shape[1], rows.shape[0]):
        raise InvalidArgument(f"moe_unpermute: merging_probs has shape {tuple(merging_probs.shape)}; row_id_map says {(rows.shape[1], rows.shape[0])}")
    return _combine(inp.contiguous(), rows, merging_probs.float().contiguous())


def _index_rows(row_id_map: torch.Tensor, probs: Optional[torch.Tensor]) -> torch.Tensor:
    """Reshapes the map [K T] to [K, T]; without probabilities K is 1."""
    tokens, top_k = (row_id_map.numel(), 1) if probs is None else probs.shape
    if row_id_map.numel() != tokens * top_k:
        raise InvalidArgument(f"moe_unpermute: row_id_map has {row_id_map.numel()} elements; merging_probs of {tokens} x {top_k} has {tokens * top_k}")
    return row_id_map.view(top_k, tokens)


def _check_chunks(where: str, inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> None:
    """Checks chunk sizes and indices that are in host memory."""
    if split_sizes.device.type == "cpu":
        sizes = split_sizes.tolist()
        if sum(sizes) != inp.shape[0]:
            raise InvalidArgument(f"{where}: split_sizes sum to {sum(sizes)}; inp has {inp.shape[0]} rows")
        if min(sizes, default=0) < 0:
            raise InvalidArgument(f"{where}: split_sizes is {sizes}; no chunk has fewer than 0 rows")
    if sorted_index.device.type == "cpu" and sorted(order := sorted_index.tolist()) != list(range(len(order))):
        raise InvalidArgument(f"{where}: sorted_index is {order}; it names each of the {len(order)} chunks once")


_sort_chunks = differentiable_op("moe_sort_chunks_fwd", "moe_sort_chunks", "moe_sort_chunks_bwd", 3)
_sort_chunks_with_probs = differentiable_op("moe_sort_chunks_fwd", "moe_sort_chunks_with_probs", "moe_sort_chunks_with_probs_bwd",
                                            requests=("permuted_probs",))


def _checked_chunks(where: str, inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """The chunk sizes and order in the op's form. On a CPU, sizes that do not sum to T are refused; on a device, surplus rows belong to no chunk."""
    if split_sizes.dim() != 1 or split_sizes.shape != sorted_index.shape:
        raise InvalidArgument(f"{where}: split_sizes has shape {tuple(split_sizes.shape)} and sorted_index {tuple(sorted_index.shape)}; both have one element for each chunk")
    if not torch.compiler.is_compiling():
        _check_chunks(where, inp, split_sizes, sorted_index)
    return tuple(t.to(inp.device, t.dtype if t.dtype in (torch.int32, torch.int64) else torch.int64).contiguous() for t in (split_sizes, sorted_index))


_SORTED = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)  # the op's dtypes


def _moved(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Moves the rows of values, of any dtype, to the places in the op's row map. Rows after the last chunk have no place and are dropped."""
    count = values.shape[0]
    return values.new_zeros((count + 1, *values.shape[1:])).index_copy(0, torch.where(rows < 0, count, rows).long(), values)[:count]


def moe_sort_chunks_by_index(inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> torch.Tensor:
    """Splits inp [T, H] into chunks of split_sizes rows, and concatenates them in the order sorted_index."""
    _check_tokens("moe_sort_chunks_by_index", inp)
    chunks = _checked_chunks("moe_sort_chunks_by_index", inp, split_sizes, sorted_index)
    if inp.dtype in _SORTED:
        return _sort_chunks(inp, *chunks)[0]
    return _moved(inp, _sort_chunks(inp.new_zeros((inp.shape[0], 1), dtype=torch.uint8), *chunks)[1])


def moe_sort_chunks_by_index_with_probs(inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor,
                                        sorted_index: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """As moe_sort_chunks_by_index; returns (the sorted inp [T, H], the sorted probs [T])."""
    where = "moe_sort_chunks_by_index_with_probs"
    _check_tokens(where, inp)
    if probs.shape != inp.shape[:1]:
        raise InvalidArgument(f"{where}: probs has shape {tuple(probs.shape)}; inp has {inp.shape[0]} rows, each of which has one")
    chunks = _checked_chunks(where, inp, split_sizes, sorted_index)
    if inp.dtype in _SORTED and probs.dtype in _SORTED[:3]:
        return _sort_chunks_with_probs(inp, *chunks, probs)[:2]
    rows = _sort_chunks(inp.new_zeros((inp.shape[0], 1), dtype=torch.uint8), *chunks)[1]
    return _moved(inp, rows), _moved(probs, rows)
