"""FlagGems' functions in place of PyTorch's operations.

While `Kernels` is in force on a thread, PyTorch's operations in the table run as FlagGems' functions, for those tensors whose result by FlagGems is the one
that docs/numerics.md defines; all others run as PyTorch's own.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional

import flag_gems
import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MOST_ELEMENTS = 2 ** 31 - 1  # FlagGems' kernels compute offsets in 32 bits

# On Hopper FlagGems replaces two functions: `mul` by one that reads operands of one rank as if they were contiguous and of one shape, and `mm_out` by one
# that compiles and measures 162 variants for each order of the operands, which takes minutes, and fails for matrices at addresses or with distances that are no
# multiples of 16 bytes. Its general functions are used instead.
_general = flag_gems.ops if flag_gems.vendor_name == "nvidia" else flag_gems


def _fits(*tensors: torch.Tensor) -> bool:
    """True if the tensors have one dtype of FlagGems' kernels and a size that the kernels can index."""
    return all(t.dtype in _FLOATS and t.dtype == tensors[0].dtype and t.dim() > 0 and 0 < t.numel() <= MOST_ELEMENTS for t in tensors)


def _unary(function: Callable) -> Callable:
    return lambda x, **options: function(x, **options) if _fits(x) else NotImplemented


def _gradient(function: Callable) -> Callable:
    return lambda grad, x, **options: function(grad, x, **options) if _fits(grad, x) and grad.shape == x.shape else NotImplemented


def _binary(function: Callable) -> Callable:
    def run(a: Any, b: Any, **options: Any) -> Any:
        tensors = [t for t in (a, b) if isinstance(t, torch.Tensor)]
        return function(a, b, **options) if isinstance(a, torch.Tensor) and _fits(*tensors) else NotImplemented
    return run


def _reduction(function: Callable) -> Callable:
    def run(x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Optional[torch.dtype] = None) -> Any:
        served = _fits(x) and dim is not None and len(dim) == 1 and dtype in (None, torch.float32)
        return function(x, dim, keepdim, dtype=dtype) if served else NotImplemented
    return run


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> Any:
    """For half-precision rows FlagGems subtracts the maximum before it converts to FP32."""
    return flag_gems.softmax(x, dim, half_to_float) if _fits(x) and x.dtype == torch.float32 and dim in (-1, x.dim() - 1) else NotImplemented


def _mm(a: torch.Tensor, b: torch.Tensor, out_dtype: Optional[torch.dtype] = None) -> Any:
    if not _fits(a, b):
        return NotImplemented
    return _general.mm_out(a, b, out=torch.empty(a.shape[0], b.shape[1], dtype=out_dtype or a.dtype, device=a.device))


def _mm_out(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> Any:
    return _general.mm_out(a, b, out=out) if _fits(a, b, out) else NotImplemented


def _addmm_out(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1, out: torch.Tensor) -> Any:
    return flag_gems.addmm_out(bias, a, b, beta=beta, alpha=alpha, out=out) if _fits(bias, a, b, out) else NotImplemented


def _into(kernel: Callable, name: str) -> Callable:
    """The form of an operation that writes to its argument `name`."""
    def run(*arguments: Any, **options: Any) -> Any:
        out = options.pop(name)
        result = kernel(*arguments, **options)
        return result if result is NotImplemented else out.copy_(result)
    return run


TABLE: Dict[Any, Callable] = {
    _aten.mm.default: _mm, _aten.mm.dtype: _mm, _aten.mm.out: _mm_out, _aten.addmm.out: _addmm_out, _aten._softmax.default: _softmax,
    _aten.sum.dim_IntList: _reduction(flag_gems.sum_dim), _aten.mean.dim: _reduction(flag_gems.mean_dim),
    _aten.mul.Tensor: _binary(_general.mul), _aten.add.Tensor: _binary(flag_gems.add), _aten.sub.Tensor: _binary(flag_gems.sub),
    _aten.gelu_backward.default: _gradient(flag_gems.gelu_backward), _aten.silu_backward.default: _gradient(flag_gems.silu_backward),
    _aten.gelu_backward.grad_input: _into(_gradient(flag_gems.gelu_backward), "grad_input"), _aten.gelu.out: _into(_unary(flag_gems.gelu), "out"),
    _aten.silu_backward.grad_input: _into(_gradient(flag_gems.silu_backward), "grad_input"), _aten.silu.out: _into(_unary(flag_gems.silu), "out"),
    **{getattr(_aten, name).default: _unary(getattr(flag_gems, name)) for name in ("gelu", "silu", "sigmoid", "tanh", "exp", "rsqrt", "cos", "sin")},
}


class Kernels(TorchDispatchMode):
    """Runs PyTorch's operations of this thread by FlagGems where TABLE has them."""

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        kernel = TABLE.get(operation)
        result = NotImplemented if kernel is None else kernel(*arguments, **options)
        return operation(*arguments, **options) if result is NotImplemented else result
