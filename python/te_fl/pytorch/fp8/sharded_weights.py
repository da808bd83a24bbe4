"""Initialisation of sharded weights that were created on the meta device: each rank initialises its shard and quantises it."""

from __future__ import annotations

import warnings
from typing import Any, Callable, Tuple

import torch

from te_fl.pytorch.fp8.codes import Rules
from te_fl.pytorch.fp8.float8_tensor import Float8Tensor
from te_fl.pytorch.fp8.shards import Shard, divides


def is_sharded(param: Any) -> bool:
    """True for a DTensor; does not import DTensor."""
    return hasattr(param, "_local_tensor")


def _has_scales(param: Any, rules: Rules) -> bool:
    rows, ranks = param.shape[0], param.device_mesh.size(-1)
    return param.placements[-1].is_shard(0) and divides(rules, rows, -(-rows // ranks))


def initialise(param: Any, rules: Rules, init: Callable) -> Tuple[Any, torch.Tensor]:
    """Returns (the DTensor that replaces param, this rank's values). init draws the values, which are quantised unless a shard boundary splits a
    block. All ranks must call it.
    """
    values = torch.empty_like(param.detach())
    init(values)
    mine, local = values._local_tensor, param._local_tensor
    if isinstance(local, Float8Tensor) or not _has_scales(param, rules):
        if not isinstance(local, Float8Tensor):
            warnings.warn(f"the ranks divide a weight {tuple(param.shape)} into rows of {tuple(local.shape)}, which have no scales of their own "
                          f"(scaling {rules.scaling}: blocks are of 128 rows); it stays {param.dtype} values", stacklevel=3)
        local.copy_(mine)
        return param, mine
    codes = Shard.empty(rules, mine.shape, mine.device)
    codes.write(mine)
    made = type(param.data).from_local(Float8Tensor(codes, param.dtype), param.device_mesh, param.placements, run_check=False, shape=param.shape,
                                       stride=param.stride())
    return made, mine
