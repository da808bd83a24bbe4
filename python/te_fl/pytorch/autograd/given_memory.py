"""Results and gradients written into memory that the program provides."""

from __future__ import annotations

import torch


def count_write(memory: torch.Tensor) -> None:
    """Bumps the version counter of the memory, so that a backward which saved the old contents raises an error, as after an in-place op of PyTorch.
    """
    if not memory.is_inference():
        torch.autograd.graph.increment_version(memory)


class ResultInto(torch.autograd.Function):
    """forward(y, memory): copies y into the memory and returns the memory as the result."""

    @staticmethod
    def forward(ctx, y: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        memory = memory.detach()
        return memory if y.data_ptr() == memory.data_ptr() else memory.copy_(y)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad, None


class GradientInto(torch.autograd.Function):
    """forward(x, memory): returns x; the gradient of x is written to the memory."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        ctx.memory = memory.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        count_write(ctx.memory)
        return ctx.memory if grad.data_ptr() == ctx.memory.data_ptr() else ctx.memory.copy_(grad), None
