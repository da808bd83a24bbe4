"""Results and gradients in memory that a program gives."""

from __future__ import annotations

import torch


def count_write(memory: torch.Tensor) -> None:
    """Has a backward that still reads what was in the memory raise, as after PyTorch's own writes in place."""
    if not memory.is_inference():
        torch.autograd.graph.increment_version(memory)


class ResultInto(torch.autograd.Function):
    """y in the memory, which is returned over it. forward(y, memory)."""

    @staticmethod
    def forward(ctx, y: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        memory = memory.detach()
        return memory if y.data_ptr() == memory.data_ptr() else memory.copy_(y)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad, None


class GradientInto(torch.autograd.Function):
    """x; its gradient is written to the memory. forward(x, memory)."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        ctx.memory = memory.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        count_write(ctx.memory)
        return ctx.memory if grad.data_ptr() == ctx.memory.data_ptr() else ctx.memory.copy_(grad), None
