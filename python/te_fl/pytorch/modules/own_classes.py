"""The classes of te-fl's modules, for programs that ask of a network whether it has any."""

from __future__ import annotations

from typing import Any, Tuple

import torch

from te_fl.pytorch.modules.attention import DotProductAttention
from te_fl.pytorch.modules.base import TransformerEngineBaseModule
from te_fl.pytorch.modules.multihead_attention import MultiheadAttention
from te_fl.pytorch.modules.norm import LayerNorm, RMSNorm
from te_fl.pytorch.modules.transformer import TransformerLayer

__all__ = ["get_te_classes", "has_te_modules"]


def get_te_classes() -> Tuple[type, ...]:
    """The classes that all of te-fl's modules are instances of."""
    return LayerNorm, RMSNorm, TransformerEngineBaseModule, DotProductAttention, MultiheadAttention, TransformerLayer


def has_te_modules(network: Any) -> bool:
    """True if a module has one of te-fl's inside, and of everything that is no module, into which nobody can look."""
    return not isinstance(network, torch.nn.Module) or any(isinstance(m, get_te_classes()) for m in network.modules())
