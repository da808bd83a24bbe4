"""Takes the layers' random numbers from PyTorch's generator of the device."""

from __future__ import annotations

from typing import Any

import torch

from te_fl.pytorch.runtime import traced


def draw(device: torch.device) -> torch.Tensor:
    """Seed and offset for one forward, int64 [2] on the device, drawn by its default generator.

    They are values on the device, so that each launch of a captured graph draws others, and a recomputed forward, whose generator has been
    set back, the same.
    """
    return torch.randint(0, 2 ** 62, (2,), device=device, dtype=torch.int64)


def draw_for(module: Any, device: torch.device) -> torch.Tensor:
    """draw(), from the stream of the module's get_rng_state_tracker where it has one."""
    tracker = module.get_rng_state_tracker
    if tracker is None:
        return draw(device)
    if torch.compiler.is_compiling():
        return traced.graph.draw(module._number, device)
    with tracker().fork():
        return draw(device)
