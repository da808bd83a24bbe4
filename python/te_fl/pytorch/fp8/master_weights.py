"""Casts master weights that are sharded over ranks to FP8 weights that are replicated on every rank, as in distributed optimizers."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Union

import torch

from te_fl import ops
from te_fl.errors import InvalidArgument, Unsupported
from te_fl.pytorch.distributed import collectives
from te_fl.pytorch.fp8.codes import BLOCK, Codes, MXFP8Codes
from te_fl.pytorch.fp8.float8_tensor import Float8Tensor

__all__ = ["cast_master_weights_to_fp8", "clear_columnwise_cache", "post_all_gather_processing", "quantize_master_weights", "replace_raw_data"]


class _Part(NamedTuple):
    """A weight's codes and this rank's flattened shard of the master values, which begins at element `start`; values=None: this rank has no shard."""

    codes: Codes
    values: Optional[torch.Tensor]
    start: int
    target: Optional[torch.Tensor]  # the codes to write if they are not the weight's own

    @property
    def blocks(self) -> bool:
        return self.codes.rules.scaling != "tensor"

    def written(self) -> torch.Tensor:
        """The flattened codes that receive the values."""
        assert self.values is not None
        if self.target is not None:
            return self.target
        return self.codes.data.view(-1)[self.start:self.start + self.values.numel()]


def _codes_of(target: Any) -> Optional[torch.Tensor]:
    """The codes of a shard, given as a Float8Tensor or as bytes, flattened."""
    if target is None:
        return None
    data = target._codes.data if isinstance(target, Float8Tensor) else target
    return data.view(-1).view(torch.float8_e4m3fn)


def _part(weight: Any, master: Optional[torch.Tensor], start: Optional[int], target: Any, number: int) -> _Part:
    where = f"quantize_master_weights: weight {number}"
    if not isinstance(weight, Float8Tensor):
        raise TypeError(f"{where} is a {type(weight).__name__}; it is a Float8Tensor, which quantized_model_init makes")
    if isinstance(weight._codes, MXFP8Codes):
        raise Unsupported(f"{where} {tuple(weight.shape)} has MXFP8 codes, which are quantised from all of its values; copy_() the values to it")
    if master is None:
        return _Part(weight._codes, None, 0, None)
    if start is None or start < 0 or start + master.numel() > weight.numel():
        raise InvalidArgument(f"{where} {tuple(weight.shape)} has {weight.numel()} elements, and its master weight has {master.numel()} from "
                              f"start_offset {start} on; they lie within it")
    # A high-precision weight would be rounded to its dtype first, and quantised in the forward.
    values = master.detach().to(weight.device, weight.dtype).reshape(-1)
    part = _Part(weight._codes, values, start, _codes_of(target))
    if part.written().numel() != values.numel():
        raise InvalidArgument(f"{where}: its shard has {part.written().numel()} codes, and its master weight {values.numel()} elements")
    return part


def _over_blocks(values: torch.Tensor) -> torch.Tensor:
    """Reshapes values [rows, columns] to [blocks down, blocks across, 128 * 128], zero-padded at the edges."""
    rows, columns = values.shape
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.nn.functional.pad(values, (0, across * BLOCK - columns, 0, down * BLOCK - rows))
    return padded.view(down, BLOCK, across, BLOCK).transpose(1, 2).reshape(down, across, BLOCK * BLOCK)


def _covering(part: _Part) -> tuple:
    """(first, last): the row range of the whole blocks that contain the values."""
    assert part.values is not None
    columns = part.codes.data.shape[1]
    first = part.start // columns // BLOCK * BLOCK
    last = -(-(part.start + part.values.numel()) // columns)
    return first, min(-(-last // BLOCK) * BLOCK, part.codes.data.shape[0])


def _placed(part: _Part, source: torch.Tensor) -> torch.Tensor:
    """The rows of _covering(), with `source` at the values' position and zeros elsewhere."""
    first, last = _covering(part)
    columns = part.codes.data.shape[1]
    placed = source.new_zeros((last - first) * columns)
    at = part.start - first * columns
    placed[at:at + source.numel()] = source
    return placed.view(last - first, columns)


def _amaxes(part: _Part) -> torch.Tensor:
    """The amax, F32 [1], or a vector with one amax per block of the weight; 0 where this rank has no values."""
    if not part.blocks:
        amax = torch.zeros(1, dtype=torch.float32, device=part.codes.data.device)
        if part.values is not None and part.values.numel():
            ops.compute_amax(input=part.values.view(1, -1), amax=amax)
        return amax
    rows, columns = part.codes.data.shape
    amaxes = torch.zeros(-(-rows // BLOCK), -(-columns // BLOCK), dtype=torch.float32, device=part.codes.data.device)
    if part.values is not None and part.values.numel():
        first, last = _covering(part)
        amaxes[first // BLOCK:-(-last // BLOCK)] = _over_blocks(_placed(part, part.values).abs()).amax(-1).float()
    return amaxes.view(-1)


def _fragment(codes: Codes, data: torch.Tensor) -> Codes:
    """Codes in the memory `data` that share another tensor's scale."""
    return Codes(codes.rules, data, codes.scale_inv, codes.amax)


def _write_tensor(part: _Part, amax: torch.Tensor) -> None:
    if part.values is not None and part.values.numel():
        _fragment(part.codes, part.written().view(1, -1)).write(part.values.view(1, -1), amax)
    else:  # no values on this rank; the scale is still needed
        scratch = torch.empty(1, 1, dtype=torch.float8_e4m3fn, device=amax.device)
        _fragment(part.codes, scratch).write(torch.zeros(1, 1, dtype=torch.float32, device=amax.device), amax)


def _write_blocks(part: _Part, amaxes: torch.Tensor) -> None:
    """Quantises whole blocks with the regular op. A block's elements of other ranks are replaced by zeros, except one that is set to the block's
    amax.
    """
    rows, columns = part.codes.data.shape
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    row = torch.zeros(down * across, BLOCK, dtype=torch.float32, device=amaxes.device)
    row[:, 0] = amaxes
    scales = Codes.empty(part.codes.rules, torch.Size((1, row.numel())), amaxes.device)
    scales.write(row.view(1, -1))
    part.codes.scale_inv[:down, :across] = scales.scale_inv[0, :down * across].view(down, across)
    if part.values is None or not part.values.numel():
        return
    first, last = _covering(part)
    placed = _placed(part, part.values)
    others = _over_blocks(1 - _placed(part, torch.ones(part.values.numel(), dtype=torch.float32, device=amaxes.device)))
    missing = amaxes.view(down, across)[first // BLOCK:-(-last // BLOCK)] * (others.amax(-1) > 0)
    stand = torch.zeros_like(others).scatter_(-1, others.argmax(-1, keepdim=True), missing.unsqueeze(-1))
    stand = stand.view(-1, across, BLOCK, BLOCK).transpose(1, 2).reshape(-1, across * BLOCK)[:last - first, :columns]
    whole = Codes.empty(part.codes.rules, placed.shape, amaxes.device)
    whole.write(placed + stand.to(placed.dtype))
    at = part.start - first * columns
    part.written().copy_(whole.data.view(-1)[at:at + part.values.numel()])


def quantize_master_weights(model_weights: Sequence[Any], master_weights: Sequence[Optional[torch.Tensor]],
                            start_offsets: Sequence[Optional[int]], group: Any,
                            fsdp_shard_model_weights: Optional[Sequence[Any]] = None, manual_post_all_gather_processing: bool = False) -> None:
    """Casts shards of master weights to the FP8 codes of weights that are replicated on each rank of `group`. The caller must all-gather the other
    ranks' codes, through `_data`.

    model_weights: Float8Tensors, the same on all ranks. master_weights: this rank's flattened shard of each, or None. start_offsets: the index of the
    shard's first element in the weight. fsdp_shard_model_weights: codes or bytes with the shards' sizes, which are written instead of the weights'
    codes. Scales come from the amaxes over all ranks, which one collective computes; the codes equal those of copy_() of the whole weight. The
    transposes are recomputed by the next training forward or by post_all_gather_processing(), whatever manual_post_all_gather_processing says,
    provided that this happens after the all-gather.
    """
    targets = [None] * len(model_weights) if fsdp_shard_model_weights is None else fsdp_shard_model_weights
    lengths = {len(model_weights), len(master_weights), len(start_offsets), len(targets)}
    if len(lengths) > 1:
        raise InvalidArgument(f"quantize_master_weights: the lists have {sorted(lengths)} entries; they go together, one by one")
    if not model_weights:
        return
    parts = [_part(*row, number) for number, row in enumerate(zip(model_weights, master_weights, start_offsets, targets))]
    for weight in model_weights:
        if hasattr(weight, "clear_high_precision_init_val"):
            weight.clear_high_precision_init_val()
    found = [_amaxes(part) for part in parts]
    amaxes = torch.cat([each.to(found[0].device) for each in found])
    collectives.all_reduce(amaxes, group, "max")
    for part, amax in zip(parts, amaxes.split([each.numel() for each in found])):
        (_write_blocks if part.blocks else _write_tensor)(part, amax.to(part.codes.data.device))
        part.codes.columns_are_old = True
    torch.autograd.graph.increment_version(list(model_weights))


def cast_master_weights_to_fp8(model_weights, master_weights, start_offsets, group, fsdp_shard_model_weights=None,
                               manual_post_all_gather_processing=False) -> None:
    """An older name of quantize_master_weights()."""
    quantize_master_weights(model_weights, master_weights, start_offsets, group, fsdp_shard_model_weights, manual_post_all_gather_processing)


def post_all_gather_processing(model_weights: Union[torch.Tensor, List[torch.Tensor]]) -> None:
    """Recomputes the transposes of Float8Tensor weights after their codes were gathered; other tensors are unchanged."""
    for weight in model_weights if isinstance(model_weights, list) else [model_weights]:
        if isinstance(weight, Float8Tensor):
            weight._codes.columns_are_old = True
            weight._codes.add_columns()


def replace_raw_data(tensor: Any, new_raw_data: torch.Tensor) -> None:
    """Moves a weight's codes into the given memory, a uint8 tensor of the same number of elements, which the weight uses afterwards."""
    if not isinstance(tensor, Float8Tensor):
        raise TypeError(f"replace_raw_data: the tensor is a {type(tensor).__name__}; it is a Float8Tensor, which quantized_model_init makes")
    old = tensor._codes.data
    if new_raw_data.dtype is not torch.uint8 or new_raw_data.numel() != old.numel() or new_raw_data.device != old.device:
        raise InvalidArgument(f"replace_raw_data: the new memory is {tuple(new_raw_data.shape)} of {new_raw_data.dtype} on {new_raw_data.device}; it "
                              f"is {tuple(old.shape)} of torch.uint8 on {old.device}")
    moved = new_raw_data.detach().view(old.shape)
    moved.copy_(old.view(torch.uint8))
    tensor._codes.data = moved.view(torch.float8_e4m3fn)


def clear_columnwise_cache(tensor: Any) -> None:
    """Frees the transpose of a weight's codes; the next training forward recomputes it. No effect on a plain tensor."""
    if isinstance(tensor, Float8Tensor):
        tensor._codes.drop_columns()
