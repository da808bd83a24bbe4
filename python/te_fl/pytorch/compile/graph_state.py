"""Hooks for frameworks that capture te-fl's modules in CUDA graphs themselves, with Transformer Engine's names."""

from __future__ import annotations

from typing import Any, Callable, Iterable, List, Optional

import torch

from te_fl.common.recipe import DelayedScaling, Recipe
from te_fl.errors import InvalidArgument
from te_fl.pytorch.fp8.quantization import captures
from te_fl.pytorch.modules.base import TransformerEngineBaseModule

__all__ = ["graph_pool_handle", "is_graph_capturing", "restore_fp8_tensors", "save_fp8_tensors", "set_capture_end", "set_capture_start"]

def set_capture_start() -> None:
    """Marks the start of a capture: is_graph_capturing() becomes true, and layers obey FP8GlobalStateManager.set_skip_fp8_weight_update_tensor()."""
    captures.started = True


def set_capture_end() -> None:
    captures.started = False


def is_graph_capturing() -> bool:
    """True inside of make_graphed_callables(), and between set_capture_start() and set_capture_end()."""
    return captures.started


def graph_pool_handle() -> Any:
    """Returns torch.cuda.graph_pool_handle()."""
    return torch.cuda.graph_pool_handle()


def _parts(modules: Iterable[torch.nn.Module]) -> List[TransformerEngineBaseModule]:
    return [m for module in modules for m in module.modules() if isinstance(m, TransformerEngineBaseModule)]


def save_fp8_tensors(modules: Iterable[torch.nn.Module], recipe: Optional[Recipe]) -> Optional[List[Callable[[], None]]]:
    """The FP8 state of all parts of the modules, for restore_fp8_tensors(). None unless the recipe is delayed scaling, the only one with state."""
    return [m._saved() for m in _parts(modules)] if isinstance(recipe, DelayedScaling) else None


def restore_fp8_tensors(modules: Iterable[torch.nn.Module], fp8_tensors: Optional[List[Callable[[], None]]]) -> None:
    """Restores the state of save_fp8_tensors() in place, so that warm-up runs leave the FP8 state unchanged."""
    if fp8_tensors is None:
        return
    count = len(_parts(modules))
    if len(fp8_tensors) != count:
        raise InvalidArgument(f"restore_fp8_tensors: the state is of {len(fp8_tensors)} modules, and there are {count}; give those of save_fp8_tensors()")
    for restore in fp8_tensors:
        restore()
