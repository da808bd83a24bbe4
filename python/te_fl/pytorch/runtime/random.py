"""Draws seeds for the layers from PyTorch's generator of the device."""

from __future__ import annotations

from typing import Any

import torch

from te_fl.pytorch.runtime import traced


def draw(device: torch.device) -> torch.Tensor:
    """Seed and offset for one forward, int64 [2] on the device, drawn from the device's default generator.

    The values stay on the device. Therefore each replay of a captured graph draws new ones, and a recomputed forward, whose generator state is
    restored, draws the same ones again.
    """
    return torch.randint(0, 2 ** 62, (2,), device=device, dtype=torch.int64)


def draw_for(module: Any, device: torch.device) -> torch.Tensor:
    """draw(), using the module's get_rng_state_tracker if it has one."""
    tracker = module.get_rng_state_tracker
    if tracker is None:
        return draw(device)
    if torch.compiler.is_compiling():
        return traced.graph.draw(module._number, device)
    with tracker().fork():
        return draw(device)
