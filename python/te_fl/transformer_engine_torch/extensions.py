"""The module transformer_engine_extensions, as Transformer Engine's extension for PyTorch was called before 1.6: what Nanotron's nanotron.fp8 calls of it.

Codes are uint8 tensors, and dtypes are members of DType. Results of one call stay on the device of its first argument.
"""

from __future__ import annotations

from typing import Any

import torch

from te_fl import ops
from te_fl.errors import Unsupported
from te_fl.tensors import Quantized
from te_fl.transformer_engine_torch.enums import DType

__all__ = ["DType", "cast_from_fp8", "cast_to_fp8", "fp8_transpose", "te_gemm"]

_TORCH = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}
_CODES = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}


def _quantised(codes: torch.Tensor, scale_inv: torch.Tensor, dtype: DType) -> Quantized:
    return Quantized(codes.view(_CODES[dtype]), scale_inv=scale_inv.to(codes.device).reshape(1))


def cast_to_fp8(input: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor, scale_inv: torch.Tensor, otype: DType) -> torch.Tensor:
    """The codes of input * scale. Writes amax and scale_inv."""
    codes = torch.empty(input.shape, dtype=_CODES[otype], device=input.device)
    ops.quantize(input=input.contiguous(), output=Quantized(codes, scale=scale.to(input.device).reshape(1), scale_inv=scale_inv.reshape(1), amax=amax.reshape(1)))
    return codes.view(torch.uint8)


def cast_from_fp8(input: torch.Tensor, scale_inv: torch.Tensor, itype: DType, otype: DType) -> torch.Tensor:
    output = torch.empty(input.shape, dtype=_TORCH[otype], device=input.device)
    ops.dequantize(input=_quantised(input, scale_inv, itype), output=output)
    return output


def fp8_transpose(input: torch.Tensor, otype: DType) -> torch.Tensor:
    """The codes of a matrix, transposed. The layout does not depend on the format of the codes."""
    return input.t().contiguous()


def te_gemm(A: torch.Tensor, A_scale_inverse: torch.Tensor, A_type: DType, transa: bool, B: torch.Tensor, B_scale_inverse: torch.Tensor, B_type: DType,
            transb: bool, D: torch.Tensor, D_scale: torch.Tensor, D_type: DType, D_amax: torch.Tensor, bias: torch.Tensor, bias_type: DType,
            pre_gelu_out: torch.Tensor, grad: bool, workspace: torch.Tensor, workspaceSize: int, accumulate: bool, use_split_accumulator: bool,
            math_sm_count: int) -> None:
    """D = op(B) op(A) + bias, or added to D. The ops have their own workspace, so `workspace` stays as it is. Empty tensors stand for none."""
    if D_type in _CODES or grad or pre_gelu_out.numel():
        raise Unsupported("te_gemm: a result in FP8, grad and pre_gelu_out are not supported; call te_fl.ops.generic_gemm (docs/ops.md)")
    if math_sm_count:
        raise Unsupported(f"te_gemm(math_sm_count={math_sm_count}) is not supported; give 0, for all multiprocessors")

    def operand(tensor: torch.Tensor, scale_inverse: torch.Tensor, dtype: DType) -> Any:
        return _quantised(tensor, scale_inverse, dtype) if dtype in _CODES else tensor

    ops.generic_gemm(a=operand(B, B_scale_inverse, B_type), b=operand(A, A_scale_inverse, A_type), d=D, bias=bias if bias.numel() else None, trans_a=transb,
                     trans_b=transa, accumulate=accumulate, use_split_accumulator=use_split_accumulator)
