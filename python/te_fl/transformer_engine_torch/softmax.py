"""Softmax of attention scores with the masks of NVIDIA's kernels, and its gradient. Results are new tensors."""

from __future__ import annotations

from typing import Callable

import torch

from te_fl import ops

__all__ = ["scaled_masked_softmax_forward"]


def _forward(op: Callable) -> Callable:
    def softmax(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
        x = input.contiguous()
        output = torch.empty_like(x)
        op(input=x, output=output, scale=scale_factor)
        return output

    return softmax


def _backward(op: Callable) -> Callable:
    def gradient(output_grad_: torch.Tensor, softmax_results_: torch.Tensor, scale_factor: float) -> torch.Tensor:
        grad = output_grad_.contiguous()
        input_grad = torch.empty_like(grad)
        op(output_grad=grad, softmax_results=softmax_results_.contiguous(), input_grad=input_grad, scale=scale_factor)
        return input_grad

    return gradient


def scaled_masked_softmax_forward(input: torch.Tensor, mask: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """mask: [1 or B, 1 or H, Q, K], nonzero where a score is masked out. A fully masked row gives zeros."""
    x = input.contiguous()
    output = torch.empty_like(x)
    ops.scaled_masked_softmax_forward(input=x, mask=mask.contiguous(), output=output, scale=scale_factor)
    return output


def _named(name: str, function: Callable) -> str:
    function.__name__ = function.__qualname__ = name
    globals()[name] = function
    return name


_KINDS = "scaled scaled_upper_triang_masked scaled_aligned_causal_masked"
__all__ += [_named(f"{k}_softmax_forward", _forward(getattr(ops, f"{k}_softmax_forward"))) for k in _KINDS.split()]
__all__ += [_named(f"{k}_softmax_backward", _backward(getattr(ops, f"{k}_softmax_backward"))) for k in f"{_KINDS} scaled_masked".split()]
