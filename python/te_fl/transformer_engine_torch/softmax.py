"""Softmax of attention scores with the masks of NVIDIA's kernels, and its gradient. Results are new tensors."""

from __future__ import annotations

from typing import Callable

import torch

from te_fl.transformer_engine_torch import matrix_ops as ops

__all__ = ["scaled_masked_softmax_forward"]


def _forward(op: Callable) -> Callable:
    def softmax(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
        return op(input, scale_factor)

    return softmax


def _backward(op: Callable) -> Callable:
    def gradient(output_grad_: torch.Tensor, softmax_results_: torch.Tensor, scale_factor: float) -> torch.Tensor:
        return op(output_grad_, softmax_results_, scale_factor)

    return gradient


def scaled_masked_softmax_forward(input: torch.Tensor, mask: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """mask: [1 or B, 1 or H, Q, K], nonzero where a score is masked out. A fully masked row gives zeros."""
    return ops.scaled_masked_softmax_forward(input, mask, scale_factor)


def _named(name: str, function: Callable) -> str:
    function.__name__ = function.__qualname__ = name
    globals()[name] = function
    return name


_KINDS = "scaled scaled_upper_triang_masked scaled_aligned_causal_masked"
__all__ += [_named(f"{k}_softmax_forward", _forward(getattr(ops, f"{k}_softmax_forward"))) for k in _KINDS.split()]
__all__ += [_named(f"{k}_softmax_backward", _backward(getattr(ops, f"{k}_softmax_backward"))) for k in f"{_KINDS} scaled_masked".split()]
