"""Where layers take their random numbers from: PyTorch's generator of the device."""

from __future__ import annotations


import torch


def draw(device: torch.device) -> torch.Tensor:
    """Seed and offset for one forward, int64 [2] on the device, drawn by its default generator.

    They are values on the device, so that each launch of a captured graph draws others, and a recomputed forward, whose generator has been
    set back, the same.
    """
    return torch.randint(0, 2 ** 62, (2,), device=device, dtype=torch.int64)
