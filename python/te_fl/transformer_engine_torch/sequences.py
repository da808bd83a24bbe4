"""Functions that copy attention's operands between layouts, into KV caches, and into the formats of kernels."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import torch

from te_fl.errors import InvalidArgument
from te_fl.packed_sequences import places
from te_fl.transformer_engine_torch.enums import NVTE_QKV_Format
from te_fl.transformer_engine_torch.quantize import apart

__all__ = ["convert_bshd_to_thd", "convert_thd_to_bshd", "copy_to_kv_cache", "fa_prepare_bwd", "fa_prepare_fwd", "multi_tensor_pad_last_dim",
           "multi_tensor_transpose_to_bhsd"]


def convert_thd_to_bshd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, b: int, max_seq_len: int) -> torch.Tensor:
    """Converts [T, H, D] to [b, max_seq_len, H, D], zero-padded after each sequence."""
    if tensor.dim() != 3:
        raise InvalidArgument(f"convert_thd_to_bshd: the tensor has shape {tuple(tensor.shape)}; it is [T, H, D]")
    if cu_seqlens.shape[0] < b + 1:
        raise InvalidArgument(f"convert_thd_to_bshd: cu_seqlens has {cu_seqlens.shape[0]} elements; {b} sequences have {b + 1}")
    shape = (b, max_seq_len, *tensor.shape[1:])
    if tensor.numel() == 0 or 0 in shape:
        return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    begin = cu_seqlens[:b + 1].long()
    place = torch.arange(max_seq_len, device=tensor.device)
    inside = place < (begin[1:] - begin[:-1]).unsqueeze(1)
    taken = tensor.index_select(0, (begin[:-1].unsqueeze(1) + place).clamp_(0, tensor.shape[0] - 1).view(-1)).view(shape)
    return taken.masked_fill_(~inside.view(b, max_seq_len, 1, 1), 0)


def convert_bshd_to_thd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, t: int) -> torch.Tensor:
    """Converts [B, S, H, D] to [t, H, D], zero-padded after the last sequence."""
    if tensor.dim() != 4:
        raise InvalidArgument(f"convert_bshd_to_thd: the tensor has shape {tuple(tensor.shape)}; it is [B, S, H, D]")
    shape = (t, *tensor.shape[2:])
    if tensor.numel() == 0 or 0 in shape:
        return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    at = places(cu_seqlens, t)
    inside = at.inside & (at.within < tensor.shape[1]) & (at.sequence < tensor.shape[0])
    taken = tensor[at.sequence.clamp(max=tensor.shape[0] - 1), at.within.clamp(0, tensor.shape[1] - 1)]
    return taken.masked_fill_(~inside.view(t, 1, 1), 0)


_FORMATS = {int(NVTE_QKV_Format.NVTE_BSHD): "bshd", int(NVTE_QKV_Format.NVTE_SBHD): "sbhd", int(NVTE_QKV_Format.NVTE_THD): "thd"}


def _new_tokens(form: str, new: torch.Tensor, new_lens: torch.Tensor, cu_new_lens: torch.Tensor, max_ctx_len: int) -> tuple:
    """Returns (the sequence of each token of new, its position among the sequence's new tokens, its index), with padding tokens replaced by real
    ones.

    A padding token is replaced by its sequence's last token, or by a token of another sequence if its own has none. The copy then writes the same
    value to the same place twice, so padding tokens need not be skipped.
    """
    if form == "thd":
        token = torch.arange(new.shape[0], device=new.device).clamp_(max=(cu_new_lens[-1].long() - 1).clamp_(min=0))
        at = places(cu_new_lens, new.shape[0])
        sequence = at.sequence[token]
        return sequence, token - at.begin[token], (token,)
    nonempty = new_lens > 0
    sequence = torch.arange(new_lens.shape[0], device=new.device).repeat_interleave(max_ctx_len)
    sequence = torch.where(nonempty[sequence], sequence, nonempty.int().argmax())
    place = torch.minimum(torch.arange(max_ctx_len, device=new.device).repeat(new_lens.shape[0]), (new_lens[sequence] - 1).clamp_(min=0))
    return sequence, place, (sequence, place) if form == "bshd" else (place, sequence)


def _check_caches(new_k: torch.Tensor, new_v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, max_seq_len: int,
                  max_pages_per_seq: int) -> None:
    if not new_k.dtype == new_v.dtype == k_cache.dtype == v_cache.dtype:
        raise InvalidArgument(f"copy_to_kv_cache: new_k, new_v, k_cache and v_cache are {new_k.dtype}, {new_v.dtype}, {k_cache.dtype} and "
                              f"{v_cache.dtype}; they have one dtype")
    if max_pages_per_seq < 1 or k_cache.dim() != 4 or max_seq_len != k_cache.shape[1] * max_pages_per_seq:
        raise InvalidArgument(f"copy_to_kv_cache: k_cache has shape {tuple(k_cache.shape)}; with {max_pages_per_seq} pages for {max_seq_len} tokens it "
                              "is [pages, tokens of a page, H, D]")


def copy_to_kv_cache(new_k: torch.Tensor, new_v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor,
                     cu_new_lens: torch.Tensor, cu_cached_lens: torch.Tensor, qkv_format: Any, b: int, max_ctx_len: int, max_seq_len: int,
                     max_pages_per_seq: int, is_non_paged: bool) -> None:
    """Appends each sequence's new tokens to its cached ones, in place; cu_cached_lens counts both.

    Paged: page_table [b, max_pages_per_seq] lists each sequence's pages. Not paged: page_table is [b], the cache rows that the sequences had before;
    they are moved to rows 0, 1, ... first.
    """
    form = _FORMATS.get(int(qkv_format))
    if form is None:
        raise InvalidArgument(f"copy_to_kv_cache: qkv_format is {NVTE_QKV_Format(int(qkv_format)).name}; it is one of {', '.join(_FORMATS.values())}")
    _check_caches(new_k, new_v, k_cache, v_cache, max_seq_len, max_pages_per_seq)
    caches = (k_cache, v_cache)
    if is_non_paged:
        rows = page_table[:b].long()
        for cache in caches:
            cache[:b] = cache[rows]
    if new_k.numel() == 0:
        return
    new_lens = (cu_new_lens[1:b + 1] - cu_new_lens[:b]).long()
    cached_lens = (cu_cached_lens[1:b + 1] - cu_cached_lens[:b]).long()
    sequence, place, source = _new_tokens(form, new_k, new_lens, cu_new_lens[:b + 1], max_ctx_len)
    any_new = new_lens[sequence] > 0  # false only if no sequence has new tokens
    position = torch.where(any_new, (cached_lens - new_lens)[sequence] + place, 0)
    page_size = max_seq_len // max_pages_per_seq
    page = sequence if is_non_paged else page_table.view(-1)[sequence * max_pages_per_seq + position // page_size].long()
    slot = position % page_size
    for cache, new in zip(caches, (new_k, new_v)):
        cache[page, slot] = torch.where(any_new.view(-1, 1, 1), new[source], cache[page, slot])


def fa_prepare_fwd(qkvi: torch.Tensor) -> torch.Tensor:
    """Unpacks [S, B, H, 3 D], given as its view of the queries [S, B, H, D], to [3, B, S, H, D]."""
    s, b, h, d = qkvi.shape if qkvi.dim() == 4 else (0, 0, 0, 0)
    if qkvi.dim() != 4 or qkvi.stride() != (3 * d * h * b, 3 * d * h, 3 * d, 1):
        raise InvalidArgument(f"fa_prepare_fwd: qkvi has shape {tuple(qkvi.shape)} and strides {qkvi.stride()}; it is the first third of the last "
                              "dimension of a contiguous [S, B, H, 3 D]")
    return qkvi.as_strided((3, b, s, h, d), (d, 3 * d * h, 3 * d * h * b, 3 * d, 1)).contiguous()


def fa_prepare_bwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Packs three tensors [S, B, H, D] to [B, S, H, 3 D]."""
    if not (q.dim() == 4 and q.shape == k.shape == v.shape and q.dtype == k.dtype == v.dtype):
        raise InvalidArgument(f"fa_prepare_bwd: q, k and v are {q.dtype} {tuple(q.shape)}, {k.dtype} {tuple(k.shape)}, {v.dtype} {tuple(v.shape)}; "
                              "they must have equal shapes of 4 dimensions")
    return torch.cat([x.transpose(0, 1) for x in (q, k, v)], -1)


def multi_tensor_transpose_to_bhsd(inputs: Sequence[Optional[torch.Tensor]], original_format: str,
                                   outputs: Sequence[Optional[torch.Tensor]] = ()) -> List[Optional[torch.Tensor]]:
    """Transposes each tensor to [B, H, S, D]. A given output may have a longer last dimension, which is zero-padded."""
    if original_format not in ("sbhd", "bshd"):
        raise InvalidArgument(f"multi_tensor_transpose_to_bhsd: original_format is {original_format!r}; it is 'sbhd' or 'bshd'")
    if outputs and len(outputs) != len(inputs):
        raise InvalidArgument(f"multi_tensor_transpose_to_bhsd: {len(inputs)} inputs have {len(outputs)} outputs; give one for each, or none")
    results: List[Optional[torch.Tensor]] = []
    for i, each in enumerate(inputs):
        if each is None:
            results.append(None)
            continue
        if each.dim() != 4:
            raise InvalidArgument(f"multi_tensor_transpose_to_bhsd: input {i} has shape {tuple(each.shape)}; it has 4 dimensions")
        turned = each.permute(1, 2, 0, 3) if original_format == "sbhd" else each.transpose(1, 2)
        output = outputs[i] if outputs else None
        if output is None:
            output = turned.contiguous()
        elif output.shape[:-1] != turned.shape[:-1] or output.shape[-1] < turned.shape[-1] or output.dtype != turned.dtype:
            raise InvalidArgument(f"multi_tensor_transpose_to_bhsd: output {i} is {output.dtype} {tuple(output.shape)}; the result is {turned.dtype} "
                                  f"{tuple(turned.shape)}")
        else:
            output[..., :turned.shape[-1]] = apart(turned, output)
            output[..., turned.shape[-1]:] = 0
        results.append(output)
    return results


def multi_tensor_pad_last_dim(inputs: Sequence[torch.Tensor], alignment: int) -> List[torch.Tensor]:
    """Zero-pads the rows of each matrix to a multiple of the alignment; returns aligned matrices unchanged."""
    if alignment < 1 or not inputs:
        raise InvalidArgument(f"multi_tensor_pad_last_dim: {len(inputs)} inputs, alignment {alignment}; give one or more, and an alignment above 0")
    for i, each in enumerate(inputs):
        if each.dim() != 2:
            raise InvalidArgument(f"multi_tensor_pad_last_dim: input {i} has shape {tuple(each.shape)}; it is a matrix")
    return [torch.nn.functional.pad(each, (0, -each.shape[1] % alignment)) if each.shape[1] % alignment else each.contiguous() for each in inputs]
