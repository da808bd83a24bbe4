"""Small helper functions of Transformer Engine that frameworks import."""

from __future__ import annotations

from typing import Any, Dict, Sequence, Tuple, Union

import torch

from te_fl.pytorch.runtime.device import default_device

__all__ = ["SplitAlongDim", "get_dummy_wgrad", "gpu_autocast_ctx", "make_weak_ref"]


class SplitAlongDim(torch.autograd.Function):
    """torch.split with Transformer Engine's argument order; squeeze removes the split dimension from the parts."""

    @staticmethod
    def forward(ctx, mixed_x_layer: torch.Tensor, split_dim: int, split_size_or_sections: Union[int, Sequence[int]],
                squeeze: bool = False) -> Tuple[torch.Tensor, ...]:
        ctx.split_dim, ctx.squeeze = split_dim, squeeze
        sections = split_size_or_sections if isinstance(split_size_or_sections, int) else list(split_size_or_sections)
        parts = torch.split(mixed_x_layer, sections, dim=split_dim)
        return tuple(part.squeeze(split_dim) for part in parts) if squeeze else parts

    @staticmethod
    def backward(ctx, *grads: torch.Tensor):
        return torch.cat([g.unsqueeze(ctx.split_dim) for g in grads] if ctx.squeeze else grads, ctx.split_dim), None, None, None


_dummies: Dict[tuple, torch.Tensor] = {}


def get_dummy_wgrad(shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """A placeholder gradient on the default device, in memory shared by all calls with the same shape and dtype. Its values are undefined; zero=True
    zeroes it now.
    """
    device = default_device()
    key = (*shape, dtype, device)
    if key not in _dummies:
        _dummies[key] = torch.empty(tuple(shape), dtype=dtype, device=device)
    if zero:
        _dummies[key].zero_()
    return _dummies[key].detach()


def gpu_autocast_ctx(enabled: bool = True, dtype: Any = None, cache_enabled: Any = None) -> torch.amp.autocast:
    """torch.amp.autocast on the default device."""
    return torch.amp.autocast(default_device().type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


class _Memory:
    """A non-owning view of CUDA memory."""

    def __init__(self, address: int, count: int):
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 3}


def _without_owner(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    elements = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    memory = torch.as_tensor(_Memory(tensor.data_ptr(), elements * tensor.element_size()), device=tensor.device)
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def make_weak_ref(x: Any) -> Any:
    """Replaces each CUDA tensor in x (a tensor, or tuples, lists and dicts of tensors, numbers and None) by a tensor that does not own its memory.
    For memory that a CUDA graph keeps alive. Other values are unchanged.
    """
    if isinstance(x, torch.Tensor):
        return _without_owner(x) if x.is_cuda else x
    if isinstance(x, (tuple, list)):
        parts = [make_weak_ref(part) for part in x]
        return type(x)._make(parts) if hasattr(type(x), "_make") else type(x)(parts)
    if isinstance(x, dict):
        return {key: make_weak_ref(part) for key, part in x.items()}
    if x is None or isinstance(x, (bool, int, float)):
        return x
    raise TypeError(f"make_weak_ref: {type(x).__name__} is not supported; it takes tensors, numbers, None, and tuples, lists and dicts of them")
