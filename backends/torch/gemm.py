"""Matrix products by PyTorch's operations.

A product of half-precision operands runs in their dtype, with FP32 accumulation, if PyTorch's operation then rounds only once, as the op must; a product
of per-tensor FP8 codes runs as torch._scaled_mm. All others are computed in FP32, from dequantised values where operands are codes.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, Callable, List, Optional, Tuple

import torch

from te_fl.tensors import Quantized

from te_fl.reference_torch import repeat
from te_fl.reference_torch.activation import ACTIVATIONS
from te_fl.reference_torch.values import store, values

_HALF = (torch.float16, torch.bfloat16)
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
FP8_SCALINGS = ("tensor", "block_1x128", "block_128x128")  # of which torch._scaled_mm may compute products
_MM_IN_FP32 = "dtype" in torch.ops.aten.mm.overloads()  # torch.mm takes out_dtype since PyTorch 2.8


def _operand(t: Any, transposed: bool, left: bool) -> torch.Tensor:
    """op(t) in FP32, from the copy whose blocks run along the contraction if t has it."""
    x = values(t, columnwise=transposed == left)
    return x.t() if transposed else x


def _dtype(t: Any) -> torch.dtype:
    return t.dtype if isinstance(t, torch.Tensor) else torch.float32


def _codes(t: Any, transposed: bool, rowwise: bool) -> Optional[torch.Tensor]:
    """op(t)'s codes in the memory order that torch._scaled_mm takes: the left operand row-major, the right one column-major. None if t has no such
    copy.
    """
    if not isinstance(t, Quantized) or t.scaling not in FP8_SCALINGS or len(t.shape) != 2:
        return None
    if transposed == rowwise:  # the copy of the transposed matrix, [K, M] where t is [M, K], has the order
        copy = t.columnwise_data
        return None if copy is None else copy if rowwise else copy.t()
    return None if t.data is None else t.data.t() if transposed else t.data


def _block_scales(t: Any, transposed: bool, rowwise: bool) -> Optional[torch.Tensor]:
    """The factors of _codes() as torch._scaled_mm takes them for a row-major operand; None if their memory order differs."""
    own = transposed != rowwise  # the codes are the row-wise copy
    factors = t.scale_inv if own else t.columnwise_scale_inv
    rows, columns = t.shape if own else t.shape[::-1]
    blocks = -(-columns // 128)
    if t.scaling == "block_1x128":
        return factors.t() if factors.shape == (blocks, rows) else None
    return factors if factors.shape == (-(-rows // 128), blocks) else None


def _scales(a: Quantized, b: Quantized, trans_a: bool, trans_b: bool, device: torch.device) -> Optional[Tuple[torch.Tensor, torch.Tensor]]:
    if a.scaling == b.scaling == "tensor":
        return a.scale_inv.reshape(()), b.scale_inv.reshape(())
    if "tensor" in (a.scaling, b.scaling) or a.scaling == b.scaling == "block_128x128" or not _multiplies_blocks(device):
        return None
    left, right = _block_scales(a, trans_a, True), _block_scales(b, trans_b, False)
    return None if left is None or right is None else (left, right.t())


@functools.cache
def _multiplies_blocks(device: torch.device) -> bool:
    """True if cuBLASLt has products of blocks of 128 on the device: Hopper GPUs, from CUDA 12.9."""
    version = tuple(map(int, (torch.version.cuda or "0").split(".")[:2]))
    return version >= (12, 9) and torch.cuda.get_device_capability(device) == (9, 0)


def _fp8_product(a: Any, b: Any, trans_a: bool, trans_b: bool, fast: bool, out: Optional[torch.Tensor] = None) -> Optional[torch.Tensor]:
    """The product of codes in `out`, or in FP32; None if torch._scaled_mm cannot compute it here."""
    left, right = _codes(a, trans_a, True), _codes(b, trans_b, False)
    if left is None or right is None or not left.is_cuda or left.dtype not in _CODES or (left.dtype == right.dtype == torch.float8_e5m2):
        return None
    if left.shape[1] % 16 or right.shape[1] % 16 or not left.numel() or not right.numel():
        return None
    scales = _scales(a, b, trans_a, trans_b, left.device)
    if scales is None:
        return None
    return torch._scaled_mm(left, right, *scales, out_dtype=torch.float32 if out is None else out.dtype, use_fast_accum=fast and a.scaling == "tensor",
                            out=out)


def _half_product(a: Any, b: Any, trans_a: bool, trans_b: bool, d: Any, bias: Optional[torch.Tensor]) -> bool:
    """Computes d if it is nothing but a product and a bias of one half-precision dtype. Returns false, with nothing written, for others."""
    if not all(isinstance(t, torch.Tensor) for t in (a, b, d)) or a.dtype not in _HALF or not a.dtype == b.dtype == d.dtype or a.device.type == "cpu":
        return False
    left, right = a.t() if trans_a else a, b.t() if trans_b else b
    if bias is None:
        torch.mm(left, right, out=d)
        return True
    if bias.dtype != d.dtype:
        return False
    torch.addmm(bias, left, right, out=d)
    return True


def _product(a: Any, b: Any, trans_a: bool, trans_b: bool, fast: bool) -> torch.Tensor:
    """op(a) op(b) in FP32."""
    result = _fp8_product(a, b, trans_a, trans_b, fast)
    if result is not None:
        return result
    if (_MM_IN_FP32 and isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.is_cuda and a.dtype in _HALF and a.dtype == b.dtype
            and a.numel() and b.numel()):
        return torch.mm(a.t() if trans_a else a, b.t() if trans_b else b, out_dtype=torch.float32)
    return _operand(a, trans_a, True) @ _operand(b, trans_b, False)


def epilogue(result: torch.Tensor, d: Any, bias: Optional[torch.Tensor], pre_gelu_out: Any, pre_gelu_in: Any, residual: Optional[torch.Tensor],
             d_sum: Optional[torch.Tensor], gelu: bool, alpha: float, beta: Optional[float], a_dtype: torch.dtype) -> None:
    """Computes outputs from the product in FP32. beta: None without accumulation."""
    if alpha != 1:
        result = result * alpha
    if bias is not None:
        result = result + values(bias)
    if gelu:
        if pre_gelu_out is not None:
            store(pre_gelu_out, result)
        result = ACTIVATIONS["gelu"][0](result)
    if pre_gelu_in is not None:
        result = result * ACTIVATIONS["gelu"][1](values(pre_gelu_in))
    if residual is not None:
        result = result + values(residual)
    if d_sum is not None:
        d_sum.copy_(result.sum(0))
    if beta is not None:
        result = result + beta * values(d)
    store(d, result, a_dtype)


def generic_gemm(a: Any, b: Any, d: Any, bias: Optional[torch.Tensor], pre_gelu_out: Any, pre_gelu_in: Any, bias_grad: Optional[torch.Tensor],
                 trans_a: bool, trans_b: bool, gelu: bool, accumulate: bool, accumulate_bias_grad: bool, use_split_accumulator: bool, alpha: float,
                 beta: float, residual: Optional[torch.Tensor] = None, d_sum: Optional[torch.Tensor] = None) -> None:
    run_gemm(epilogue, a, b, d, bias, pre_gelu_out, pre_gelu_in, bias_grad, trans_a, trans_b, gelu, accumulate, accumulate_bias_grad, use_split_accumulator,
             alpha, beta, residual, d_sum)


def run_gemm(last: Callable[..., None], a: Any, b: Any, d: Any, bias: Optional[torch.Tensor], pre_gelu_out: Any, pre_gelu_in: Any,
             bias_grad: Optional[torch.Tensor], trans_a: bool, trans_b: bool, gelu: bool, accumulate: bool, accumulate_bias_grad: bool,
             use_split_accumulator: bool, alpha: float, beta: float, residual: Optional[torch.Tensor] = None,
             d_sum: Optional[torch.Tensor] = None) -> None:
    """generic_gemm. last: epilogue(), or a function that computes the same."""
    if bias_grad is not None:
        plain = isinstance(a, torch.Tensor) and a.dtype in _HALF
        total = a.sum(0 if trans_a else 1, dtype=torch.float32) if plain else _operand(a, trans_a, True).sum(1)
        bias_grad.copy_(total + values(bias_grad) if accumulate_bias_grad else total)
    bare = not (gelu or accumulate) and alpha == 1 and residual is None and d_sum is None and pre_gelu_in is None
    if bare and _half_product(a, b, trans_a, trans_b, d, bias):
        return
    fast = not use_split_accumulator
    if bare and bias is None and isinstance(d, torch.Tensor) and d.dtype in (*_HALF, torch.float32) and d.is_contiguous():
        if _fp8_product(a, b, trans_a, trans_b, fast, d) is not None:
            return
    last(result=_product(a, b, trans_a, trans_b, fast), d=d, bias=bias, pre_gelu_out=pre_gelu_out, pre_gelu_in=pre_gelu_in, residual=residual,
         d_sum=d_sum, gelu=gelu, alpha=alpha, beta=beta if accumulate and beta != 0 else None, a_dtype=_dtype(a))


class _Memory:
    """Rows of BF16 in the device's memory, by their address. PyTorch has no view over tensors of several storages."""

    def __init__(self, address: int, rows: int, columns: int):
        self.__cuda_array_interface__ = {"shape": (rows, columns), "typestr": "<i2", "data": (address, False), "strides": None, "version": 3}


def _joined(parts: List[torch.Tensor]) -> Optional[torch.Tensor]:
    """Matrices that lie one behind the other in memory as one; None if they do not."""
    at, columns, rows = parts[0].data_ptr(), parts[0].shape[1], sum(t.shape[0] for t in parts)
    address = at
    for t in parts:
        if t.data_ptr() != address or not t.is_contiguous():
            return None
        address += t.numel() * t.element_size()
    repeat.abandon()  # the address is this call's
    return torch.as_tensor(_Memory(at, rows, columns), device=parts[0].device).view(torch.bfloat16)


@functools.cache
def _has_grouped_mm(device: torch.device) -> bool:
    """True if PyTorch multiplies groups of BF16 in one operation on this device; a trial tells."""
    try:
        a, b = torch.ones(16, 16, dtype=torch.bfloat16, device=device), torch.ones(2, 16, 16, dtype=torch.bfloat16, device=device)
        return bool((torch._grouped_mm(a, b, offs=torch.tensor([8, 16], dtype=torch.int32, device=device)) == 16).all())
    except (AttributeError, NotImplementedError, RuntimeError):
        return False


_MANY, _LITTLE = 8, 1 << 30  # at least so many groups of at most so many operations: then one operation is worth the copies of weights and results


def _in_one(a: List[Any], b: List[Any], d: List[torch.Tensor], trans_b: bool) -> bool:
    """Computes the products of many small groups of rows, [rows, K] by [K, N] or its transpose, as one operation. Returns false, with nothing written, for
    others.
    """
    used = [i for i, rows in enumerate(a) if rows.shape[0]] if isinstance(a[0], torch.Tensor) else []
    if len(used) < _MANY:
        return False
    first, weight = a[used[0]], b[used[0]]
    if not first.is_cuda or not all(isinstance(t, torch.Tensor) and t.dtype == torch.bfloat16 and t.dim() == 2 for t in (*a, *b, *d)):
        return False
    rows, (columns, inner) = sum(a[i].shape[0] for i in used), d[used[0]].shape[1:] + first.shape[1:]
    if columns % 8 or inner % 8 or 2 * rows * columns * inner > _LITTLE * len(used) or any(b[i].shape != weight.shape for i in used):
        return False
    if torch.cuda.is_current_stream_capturing() or not _has_grouped_mm(first.device):  # a capture would keep the address of the row numbers
        return False
    left, out = _joined([a[i] for i in used]), _joined([d[i] for i in used])
    if left is None or out is None:
        return False
    ends = torch.tensor(list(itertools.accumulate(a[i].shape[0] for i in used)), dtype=torch.int32, pin_memory=True).to(first.device, non_blocking=True)
    weights = torch.stack([b[i] for i in used])
    out.copy_(torch._grouped_mm(left, weights.transpose(1, 2) if trans_b else weights, offs=ends))
    return True


def grouped_gemm(a: List[Any], b: List[Any], d: List[torch.Tensor], bias: Optional[List[torch.Tensor]], bias_grad: Optional[List[torch.Tensor]],
                 trans_a: bool, trans_b: bool, accumulate: bool, accumulate_bias_grad: bool, use_split_accumulator: bool, alpha: float,
                 beta: float) -> None:
    if not (trans_a or bias or bias_grad or accumulate or alpha != 1) and a and _in_one(a, b, d, trans_b):
        return
    for i, (left, right, out) in enumerate(zip(a, b, d)):
        generic_gemm(left, right, out, bias[i] if bias else None, None, None, bias_grad[i] if bias_grad else None, trans_a, trans_b, False, accumulate,
                     accumulate_bias_grad, use_split_accumulator, alpha, beta)


OPS = {"generic_gemm": generic_gemm, "grouped_gemm": grouped_gemm}
