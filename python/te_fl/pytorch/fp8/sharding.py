"""Weights of FP8 codes with torch.distributed: FSDP shards them and gathers their codes, and checkpoints read and write their rows.

A view of a Float8Tensor with another shape normally consists of dequantised values. For torch.distributed's own calls, and for views made by them, it
consists of codes.
"""

from __future__ import annotations

import warnings
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch

from te_fl.errors import Unsupported
from te_fl.pytorch.fp8.codes import Codes
from te_fl.pytorch.fp8.shards import Flat, Gathered, Rows, Shard, apart, divides
from te_fl.pytorch.runtime.callers import called_from

_aten = torch.ops.aten
_FSDP, _CHECKPOINT = "torch.distributed.fsdp.", "torch.distributed.checkpoint."
_WRITERS = (_FSDP, _CHECKPOINT, "torch.distributed._shard.")


def _views_codes(codes: Codes) -> bool:
    return isinstance(codes, (Rows, Shard, Gathered)) or called_from(*_WRITERS)


def _like(tensor: Any, codes: Codes) -> Any:
    return type(tensor)(codes, tensor.dtype)


def _values(func: Callable, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return func(tensor._codes.read(tensor.dtype), *args, **kwargs)


def _split(func: Callable, tensor: Any, each: int, dim: int = 0) -> Sequence[Any]:
    codes = tensor._codes
    rows = codes.data.shape[0]
    if codes.data.dim() != 2 or dim not in (0, -2) or not _views_codes(codes) or not divides(codes.rules, rows, each):
        return _values(func, tensor, each, dim)
    return [_like(tensor, Rows(codes, at, min(at + each, rows))) for at in range(0, max(rows, 1), max(each, 1))]


def _slice(func: Callable, tensor: Any, dim: int = 0, start: Optional[int] = None, end: Optional[int] = None, step: int = 1) -> Any:
    codes = tensor._codes
    if codes.data.dim() != 2 or dim not in (0, -2) or step != 1 or not _views_codes(codes):
        return _values(func, tensor, dim, start, end, step)
    rows = codes.data.shape[0]
    first, last, _ = slice(start, end).indices(rows)
    if first == 0 and last == rows:
        return _like(tensor, codes)
    if first > last or not apart(codes.rules, rows, first, last):
        return _values(func, tensor, dim, start, end, step)
    return _like(tensor, Rows(codes, first, last, alone=isinstance(codes, Shard) and called_from(_FSDP)))


def _new_zeros(func: Callable, tensor: Any, size: Sequence[int], **kwargs: Any) -> torch.Tensor:
    codes, size = tensor._codes, tuple(size)
    plain = torch.zeros(size, dtype=kwargs.pop("dtype", None) or tensor.dtype, device=kwargs.pop("device", None) or tensor.device)
    if not called_from(_FSDP) or len(size) != 2:
        return plain
    if size[1] == codes.data.shape[1] and divides(codes.rules, codes.data.shape[0], size[0]):
        return _like(tensor, Shard.like(codes, size[0]))
    warnings.warn(f"fully_shard divides a weight {tuple(codes.data.shape)} of FP8 codes into parts {size}, which have no scales of their own "
                  f"(scaling {codes.rules.scaling}; blocks are of 128 rows, and columns are not divided); it is sharded as {tensor.dtype} "
                  "values", stacklevel=2)
    return plain


def _view(func: Callable, tensor: Any, size: Sequence[int]) -> Any:
    if tuple(size) == tuple(tensor.shape):  # as DTensor.to_local() calls it
        return _like(tensor, tensor._codes)
    if isinstance(tensor._codes, (Rows, Shard)) and tuple(size) in ((-1,), (tensor.numel(),)):
        return _like(tensor, Flat(tensor._codes))
    return _values(func, tensor, size)


def _as_strided(func: Callable, tensor: Any, size: Sequence[int], stride: Sequence[int], storage_offset: Optional[int] = None) -> Any:
    codes = tensor._codes
    if isinstance(codes, Gathered) and len(size) == 2 and tuple(stride) == codes.data.stride() and not storage_offset:
        scales = codes.scale_inv if codes.rules.scaling == "tensor" else codes.scale_inv[:-(-size[0] // 128)]
        return _like(tensor, Gathered(codes.rules, codes.data[:size[0]], scales, codes.amax, codes.memory))
    return _values(func, tensor, size, stride, storage_offset)


def _pin(func: Callable, tensor: Any, *args: Any) -> Any:
    codes = tensor._codes
    whole = codes.whole if isinstance(codes, Rows) else codes
    for part in ("data", "scale_inv", "amax"):
        if getattr(whole, part) is not None:
            setattr(whole, part, getattr(whole, part).pin_memory())
    return _like(tensor, Rows(whole, codes.start, codes.start + codes.data.shape[0], codes.alone) if whole is not codes else whole)


OPERATIONS = {_aten.split.Tensor: _split, _aten.slice.Tensor: _slice, _aten.new_zeros.default: _new_zeros, _aten.view.default: _view,
              _aten.as_strided.default: _as_strided, _aten._pin_memory.default: _pin,
              _aten.is_pinned.default: lambda func, tensor, *args, **kwargs: tensor._codes.data.is_pinned()}


def copies_codes(to: Codes, source: Codes) -> bool:
    """True if codes of the same shape and scaling may be copied unchanged. For a row slice, which shares its scale with
    other rows, only callers that also copy the other rows may do so: FSDP, checkpoints and torch.distributed._shard.
    """
    return not isinstance(to, Rows) or to.alone or called_from(*_WRITERS)


def check_write(to: Codes) -> None:
    """Refuses values that a checkpoint writes piecewise into a shard whose scale is already common to all ranks: ranks read the pieces in different
    orders, so the amax cannot be reduced over the ranks.
    """
    whole = to.whole if isinstance(to, Rows) else to
    if isinstance(whole, Shard) and whole.group is not None and whole.rules.scaling == "tensor" and called_from(_CHECKPOINT):
        raise Unsupported("torch.distributed.checkpoint loads values of high precision into a sharded weight of FP8 codes that was gathered "
                          "already; load them before the first forward, or load a checkpoint that was saved from FP8 codes")


def note_copy(made: Codes, source: Codes) -> None:
    """Links a copy to its source shard. FSDP copies a host shard for each all-gather, and what the copy learns there must reach the shard."""
    made, source = (codes.whole if isinstance(codes, Rows) else codes for codes in (made, source))
    if isinstance(made, Shard) and isinstance(source, Shard) and made.data.device != source.data.device and called_from(_FSDP):
        made.source = source


class Sharded:
    """The methods of Float8Tensor that FSDP calls on a shard."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: torch.Size, outer_stride: Tuple[int, ...], module: Any, mp_policy: Any) -> tuple:
        """Returns (the tensors to gather, metadata for fsdp_post_all_gather()): this rank's codes, and its block scales."""
        codes = self._codes
        shard = codes.whole if isinstance(codes, Rows) else codes
        if not isinstance(shard, Shard):  # another tensor has replaced the shard
            made = Shard(shard.rules, shard.data, shard.scale_inv, shard.amax)
            self._codes = shard = made
        shard.join(mesh)
        blocks = () if shard.rules.scaling == "tensor" else (shard.scale_inv,)
        return (shard.data.view(torch.uint8), *blocks), (shard.rules, shard.scale_inv, shard.amax)

    def fsdp_post_all_gather(self, all_gather_outputs: Tuple[torch.Tensor, ...], metadata: tuple, param_dtype: torch.dtype, *,
                             out: Optional[Any] = None) -> Optional[tuple]:
        """Returns (the weight of the gathered codes, the tensors whose memory FSDP frees and reallocates with it). out: the weight of an earlier
        all-gather, into which the codes are copied.
        """
        rules, scale_inv, amax = metadata
        data, *blocks = all_gather_outputs
        data = data.view(torch.float8_e4m3fn)
        if out is None:
            memory: List[torch.Tensor] = []
            scales = blocks[0] if blocks else scale_inv.clone()
            return type(self)(Gathered(rules, data, scales, None if amax is None else amax.clone(), memory), param_dtype), memory
        codes = out._codes
        codes.columns_are_old = True
        if not blocks:  # with one rank, block scales are not gathered
            codes.scale_inv.copy_(scale_inv)
        if amax is not None:
            codes.amax.copy_(amax)
        return None
