"""The classes of te-fl's modules, for programs that test whether a network contains one."""

from __future__ import annotations

import sys
from typing import Any, Tuple

import torch

from te_fl.pytorch.modules.attention import DotProductAttention
from te_fl.pytorch.modules.base import TransformerEngineBaseModule
from te_fl.pytorch.modules.multihead_attention import MultiheadAttention
from te_fl.pytorch.modules.norm import LayerNorm, RMSNorm
from te_fl.pytorch.modules.transformer import TransformerLayer

__all__ = ["get_te_classes", "has_te_modules", "prepare_te_modules_for_fsdp"]


def get_te_classes() -> Tuple[type, ...]:
    """Returns classes such that every te-fl module is an instance of one of them."""
    return LayerNorm, RMSNorm, TransformerEngineBaseModule, DotProductAttention, MultiheadAttention, TransformerLayer


def has_te_modules(network: Any) -> bool:
    """True if the network contains a te-fl module. Also true for an object that is not an nn.Module, since its contents are unknown."""
    return not isinstance(network, torch.nn.Module) or any(isinstance(m, get_te_classes()) for m in network.modules())


def prepare_te_modules_for_fsdp(fsdp_root: torch.nn.Module) -> None:
    """Sets `fsdp_group` of te-fl's modules wrapped by FullyShardedDataParallel, at fsdp_root or inside, to their process group.

    FSDP shards parameters without it. te-fl does not shard saved activations, while Transformer Engine shards those in FP8.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported if a module is wrapped
    if fsdp is None or not isinstance(fsdp_root, fsdp.FullyShardedDataParallel):
        way_out = "; fully_shard() needs no such call" if fsdp is not None and isinstance(fsdp_root, fsdp.FSDPModule) else ""
        raise TypeError(f"prepare_te_modules_for_fsdp: the root module is a {type(fsdp_root).__name__}; it is wrapped by FullyShardedDataParallel{way_out}")
    for wrapper in fsdp.FullyShardedDataParallel.fsdp_modules(fsdp_root):
        if isinstance(wrapper.module, get_te_classes()):
            wrapper.module.fast_setattr("fsdp_group", wrapper.process_group)
