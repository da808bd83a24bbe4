"""Master weights that ranks hold in parts, cast to weights of FP8 codes that every rank holds whole, as distributed optimizers do it."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Union

import torch

from te_fl import ops
from te_fl.errors import InvalidArgument
from te_fl.pytorch.distributed import collectives
from te_fl.pytorch.fp8.codes import BLOCK, Codes
from te_fl.pytorch.fp8.float8_tensor import Float8Tensor

__all__ = ["cast_master_weights_to_fp8", "clear_columnwise_cache", "post_all_gather_processing", "quantize_master_weights", "replace_raw_data"]


class _Part(NamedTuple):
    """A weight's codes, and the values of those from `start` on that this rank has, as a vector; None: it has none."""

    codes: Codes
    values: Optional[torch.Tensor]
    start: int
    target: Optional[torch.Tensor]  # the codes to write, where they are not the weight's own

    @property
    def blocks(self) -> bool:
        return self.codes.rules.scaling != "tensor"

    def written(self) -> torch.Tensor:
        """The codes that take the values."""
        assert self.values is not None
        if self.target is not None:
            return self.target
        return self.codes.data.view(-1)[self.start:self.start + self.values.numel()]


def _codes_of(target: Any) -> Optional[torch.Tensor]:
    """The codes of a shard that is a Float8Tensor, or its bytes, as a vector."""
    if target is None:
        return None
    data = target._codes.data if isinstance(target, Float8Tensor) else target
    return data.view(-1).view(torch.float8_e4m3fn)


def _part(weight: Any, master: Optional[torch.Tensor], start: Optional[int], target: Any, number: int) -> _Part:
    where = f"quantize_master_weights: weight {number}"
    if not isinstance(weight, Float8Tensor):
        raise TypeError(f"{where} is a {type(weight).__name__}; it is a Float8Tensor, which quantized_model_init makes")
    if master is None:
        return _Part(weight._codes, None, 0, None)
    if start is None or start < 0 or start + master.numel() > weight.numel():
        raise InvalidArgument(f"{where} {tuple(weight.shape)} has {weight.numel()} elements, and its master weight has {master.numel()} from "
                              f"start_offset {start} on; they lie within it")
    # A weight of high precision would be rounded to its dtype first, and then to FP8 in the forward.
    values = master.detach().to(weight.device, weight.dtype).reshape(-1)
    part = _Part(weight._codes, values, start, _codes_of(target))
    if part.written().numel() != values.numel():
        raise InvalidArgument(f"{where}: its shard has {part.written().numel()} codes, and its master weight {values.numel()} elements")
    return part


def _over_blocks(values: torch.Tensor) -> torch.Tensor:
    """values [rows, columns] as [blocks down, blocks across, 128 * 128], with zeros beyond the edges."""
    rows, columns = values.shape
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.nn.functional.pad(values, (0, across * BLOCK - columns, 0, down * BLOCK - rows))
    return padded.view(down, BLOCK, across, BLOCK).transpose(1, 2).reshape(down, across, BLOCK * BLOCK)


def _covering(part: _Part) -> tuple:
    """(first, last): the rows of the whole blocks in which the values lie."""
    assert part.values is not None
    columns = part.codes.data.shape[1]
    first = part.start // columns // BLOCK * BLOCK
    last = -(-(part.start + part.values.numel()) // columns)
    return first, min(-(-last // BLOCK) * BLOCK, part.codes.data.shape[0])


def _placed(part: _Part, source: torch.Tensor) -> torch.Tensor:
    """The rows that _covering() names, with `source` where the values lie, and zeros elsewhere."""
    first, last = _covering(part)
    columns = part.codes.data.shape[1]
    placed = source.new_zeros((last - first) * columns)
    at = part.start - first * columns
    placed[at:at + source.numel()] = source
    return placed.view(last - first, columns)


def _amaxes(part: _Part) -> torch.Tensor:
    """F32 [1], or a vector with one for each block of the weight; 0 where this rank has no values."""
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
    """Codes at `data` that share another's scale."""
    return Codes(codes.rules, data, codes.scale_inv, codes.amax)


def _write_tensor(part: _Part, amax: torch.Tensor) -> None:
    if part.values is not None and part.values.numel():
        _fragment(part.codes, part.written().view(1, -1)).write(part.values.view(1, -1), amax)
    else:  # the scale is needed all the same
        scratch = torch.empty(1, 1, dtype=torch.float8_e4m3fn, device=amax.device)
        _fragment(part.codes, scratch).write(torch.zeros(1, 1, dtype=torch.float32, device=amax.device), amax)


def _write_blocks(part: _Part, amaxes: torch.Tensor) -> None:
    """Codes by the op that quantises whole blocks: other ranks' values are stood for by their amax, in a place of the block that is theirs."""
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
    """Casts parts of master weights to the codes of weights that each rank of `group` holds whole; the codes of other ranks' parts are for the
    caller to gather, over `_data`.

    model_weights: Float8Tensors, the same on all ranks. master_weights: this rank's part of each, as a vector, or None. start_offsets: the
    element of the weight at which the part begins. fsdp_shard_model_weights: codes, or bytes, of the parts' sizes that are written in place
    of the weights'. Scales are of the amaxes of all ranks, which one collective finds, and the codes those of copy_() of the whole weight.
    Transposes are made anew by the next training forward, or by post_all_gather_processing(), whatever manual_post_all_gather_processing
    says, as long as either comes after the gathering.
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
    """The older name of quantize_master_weights()."""
    quantize_master_weights(model_weights, master_weights, start_offsets, group, fsdp_shard_model_weights, manual_post_all_gather_processing)


def post_all_gather_processing(model_weights: Union[torch.Tensor, List[torch.Tensor]]) -> None:
    """Makes the transposes of weights of codes that were gathered; other tensors stay as they are."""
    for weight in model_weights if isinstance(model_weights, list) else [model_weights]:
        if isinstance(weight, Float8Tensor):
            weight._codes.columns_are_old = True
            weight._codes.add_columns()


def replace_raw_data(tensor: Any, new_raw_data: torch.Tensor) -> None:
    """Moves a weight's codes into other memory, uint8 of as many elements, which the weight lies in from then on."""
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
    """Lets the transpose of a weight's codes go; the next training forward makes it anew. A plain tensor has none."""
    if isinstance(tensor, Float8Tensor):
        tensor._codes.drop_columns()
