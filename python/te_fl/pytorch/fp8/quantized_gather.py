"""All-gather of tensors. For Float8Tensors, the codes are transferred."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from te_fl.errors import InvalidArgument, Unsupported
from te_fl.pytorch.distributed import collectives
from te_fl.pytorch.distributed.rank_helpers import get_distributed_world_size
from te_fl.pytorch.fp8.codes import BLOCK, Codes, MXFP8Codes
from te_fl.pytorch.fp8.float8_tensor import Float8Tensor

__all__ = ["gather_along_first_dim"]


def _gathered_codes(inp: Float8Tensor, group: Any, ranks: int) -> Float8Tensor:
    """Concatenates the ranks' rows. Per-tensor scales must be equal on all ranks, as Transformer Engine assumes too; block scales are gathered."""
    codes = inp._codes
    if isinstance(codes, MXFP8Codes):
        raise Unsupported("gather_along_first_dim: the tensor has MXFP8 codes, whose column-wise ones do not follow one another; dequantize() it first")
    rows, columns = codes.data.shape
    made = Codes.empty(codes.rules, torch.Size((ranks * rows, columns)), codes.data.device)
    if codes.rules.scaling != "tensor":
        if rows % BLOCK != 0:
            raise InvalidArgument(f"gather_along_first_dim: each rank has {rows} rows of codes scaled by blocks of {BLOCK} rows, which may not be "
                                  "divided; give a multiple, or dequantize() first")
        collectives.all_gather_into(made.scale_inv, codes.scale_inv, group)
    else:
        made.scale_inv.copy_(codes.scale_inv)
        made.amax.copy_(codes.amax)
    collectives.all_gather_into(made.data, codes.data, group)
    return Float8Tensor(made, inp.dtype)


def gather_along_first_dim(inp: torch.Tensor, process_group: Any, async_op: bool = False, quantizer: Optional[Any] = None,
                           output_tensor: Optional[torch.Tensor] = None,
                           external_coalescing: bool = False) -> Tuple[torch.Tensor, Optional[Any]]:
    """Returns (the tensors of all ranks, concatenated along the first dimension; with async_op a Work to wait for).

    A Float8Tensor's codes are gathered synchronously. external_coalescing: the caller runs several gathers in one of PyTorch's coalescing managers.
    It has no effect, because this function never opens such a manager.
    """
    if quantizer is not None:
        raise Unsupported(f"gather_along_first_dim: quantizer = {quantizer!r} is not supported; gather a Float8Tensor, or values")
    ranks = get_distributed_world_size(process_group)
    if ranks == 1:
        return inp, None
    if isinstance(inp, Float8Tensor):
        if output_tensor is not None:
            raise Unsupported("gather_along_first_dim: output_tensor with a Float8Tensor is not supported; leave it out")
        return _gathered_codes(inp, process_group, ranks), None
    if output_tensor is None:
        output_tensor = torch.empty((ranks * inp.shape[0], *inp.shape[1:]), dtype=inp.dtype, device=inp.device)
    return output_tensor, collectives.all_gather_into(output_tensor, inp.contiguous(), process_group, wait=not async_op)
