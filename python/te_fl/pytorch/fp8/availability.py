"""Queries of supported FP8 computations. te-fl's CPU implementations support FP8 too, so the dispatcher answers, not the GPU's compute capability.

Every is_..._available takes return_reason: False returns a bool; True returns (bool, reason), with an empty reason if available.
"""

from __future__ import annotations

import functools
from typing import Tuple, Union

import torch

from te_fl import _native
from te_fl.common.recipe import DelayedScaling, Format, Recipe, native_of
from te_fl.errors import Error, Unsupported
from te_fl.pytorch.runtime.device import default_device
from te_fl.tensors import Quantized

__all__ = ["check_fp8_block_scaling_support", "check_fp8_support", "check_mxfp8_support", "check_nvfp4_support", "check_recipe_support",
           "get_align_size_for_quantization", "get_cudnn_version", "get_default_fp8_recipe", "get_default_recipe",
           "get_device_compute_capability", "get_fp8_max", "get_fp8_torch_dtype", "is_bf16_available", "is_fp8_available",
           "is_fp8_block_scaling_available", "is_mxfp8_available", "is_nvfp4_available", "torch_version"]

Answer = Tuple[bool, str]


def _quantized(scaling: str, scales: tuple, device: torch.device) -> Quantized:
    return Quantized(torch.empty(128, 128, dtype=torch.float8_e4m3fn, device=device), scaling=scaling,
                           scale_inv=torch.empty(scales, dtype=torch.float32, device=device))


@functools.lru_cache(maxsize=None)
def _who_multiplies(device: torch.device, kind: str) -> Answer:
    """Returns (supported, reason): whether an implementation on the device itself supports a layer's FP8 GEMM. Resolves the dispatch without running
    it.
    """
    if kind in ("bf16", "f32"):
        a = b = torch.empty(128, 128, dtype=torch.bfloat16 if kind == "bf16" else torch.float32, device=device)
    elif kind == "mxfp8":
        scales = torch.empty(128, 4, dtype=torch.float8_e8m0fnu, device=device)
        a = b = Quantized(torch.empty(128, 128, dtype=torch.float8_e4m3fn, device=device), scaling="mxfp8", scale_inv=scales)
    elif kind == "tensor":
        a = b = _quantized("tensor", (1,), device)
    else:
        a, b = _quantized("block_1x128", (1, 128), device), _quantized("block_128x128", (1, 1), device)
    d = torch.empty(128, 128, dtype=torch.bfloat16, device=device)
    try:
        found = _native.resolve("generic_gemm", {"a": a, "b": b, "d": d, "trans_b": True}, None, ())
    except Error as error:
        return False, str(error)
    chosen = [candidate for candidate in found["candidates"] if candidate["chosen"]]
    if chosen and not chosen[0]["staged"]:
        return True, ""
    reasons = "; ".join(f"{candidate['impl_id']}: {candidate['reason']}" for candidate in found["candidates"])
    return False, f"no implementation on {device} supports such products ({reasons})"


def _constant(function):
    """Equivalent to torch.compiler.assume_constant_result(), but does not import the compiler, which takes a second."""
    function._dynamo_marked_constant = True
    return function


@_constant
def check_fp8_support() -> Answer:
    """Returns (supported, reason) for layers in FP8 with one scale per tensor (delayed and current scaling)."""
    return _who_multiplies(default_device(), "tensor")


@_constant
def check_fp8_block_scaling_support() -> Answer:
    """Returns (supported, reason) for layers in FP8 with a scale per block."""
    return _who_multiplies(default_device(), "block")


@_constant
def check_mxfp8_support() -> Answer:
    """Returns (supported, reason) for layers in MXFP8. Without tensor cores for the format, products are those of the dequantised codes."""
    return _who_multiplies(default_device(), "mxfp8")


@_constant
def check_nvfp4_support() -> Answer:
    """Returns (supported, reason) for layers in NVFP4, whose products are those of the dequantised codes in FP32."""
    return _who_multiplies(default_device(), "f32")


def _answer(answer: Answer, return_reason: bool) -> Union[bool, Answer]:
    return answer if return_reason else answer[0]


def is_fp8_available(return_reason: bool = False) -> Union[bool, Answer]:
    return _answer(check_fp8_support(), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> Union[bool, Answer]:
    return _answer(check_fp8_block_scaling_support(), return_reason)


def is_mxfp8_available(return_reason: bool = False) -> Union[bool, Answer]:
    return _answer(check_mxfp8_support(), return_reason)


def is_nvfp4_available(return_reason: bool = False) -> Union[bool, Answer]:
    return _answer(check_nvfp4_support(), return_reason)


@_constant
def is_bf16_available(return_reason: bool = False) -> Union[bool, Answer]:
    return _answer(_who_multiplies(default_device(), "bf16"), return_reason)


def check_recipe_support(recipe: Recipe) -> None:
    """Raises Unsupported if layers cannot run with the recipe here."""
    native_of(recipe)
    check = next((check for asked, check in ((recipe.float8_block_scaling, check_fp8_block_scaling_support), (recipe.mxfp8, check_mxfp8_support),
                                             (recipe.nvfp4, check_nvfp4_support), (recipe.custom, check_nvfp4_support)) if asked()), check_fp8_support)
    supported, reason = check()
    if not supported:
        raise Unsupported(f"{type(recipe).__name__}: {reason}; leave autocast off, or use a device that has it")


def get_default_fp8_recipe() -> Recipe:
    return DelayedScaling()


def get_default_recipe() -> Recipe:
    """The default recipe of autocast."""
    return get_default_fp8_recipe()


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """Returns n: each group of rows of a grouped GEMM is padded to a multiple of n rows."""
    if recipe.custom():
        return recipe.quantization_alignment
    return 32 if recipe.mxfp8() else 128 if recipe.nvfp4() else 16


def get_fp8_torch_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> torch.dtype:
    """The dtype of the FP8 codes in the forward (fprop_tensor=True) or of gradients."""
    e4m3 = fp8_recipe.fp8_format is Format.E4M3 or (fp8_recipe.fp8_format is Format.HYBRID and fprop_tensor)
    return torch.float8_e4m3fn if e4m3 else torch.float8_e5m2


def get_fp8_max(fp8_recipe: Recipe, fprop_tensor: bool = True) -> float:
    """The largest value of the FP8 codes in the forward (fprop_tensor=True) or of gradients."""
    return torch.finfo(get_fp8_torch_dtype(fp8_recipe, fprop_tensor)).max


@_constant
def get_device_compute_capability() -> Tuple[int, int]:
    """(major, minor) of the current GPU; (0, 0) without one, so that version comparisons are false."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


@_constant
def get_cudnn_version() -> Tuple[int, int, int]:
    """(major, minor, patch) of the cuDNN that PyTorch has loaded; (0, 0, 0) without one. te-fl's layers do not need cuDNN."""
    version = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    if version is None:
        return 0, 0, 0
    scale = 1000 if version < 90000 else 10000
    return version // scale, version % scale // 100, version % 100


def torch_version() -> Tuple[int, ...]:
    """PyTorch's version as a tuple of numbers."""
    return tuple(int(part) for part in torch.__version__.partition("+")[0].split(".")[:3] if part.isdigit())
