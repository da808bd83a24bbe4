"""Checks of what a vendor's function with Transformer Engine's results returns: the number of results, and the device and dtype of tensors."""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

_PLAIN = "gelu qgelu relu srelu silu geglu qgeglu reglu sreglu swiglu glu".split()
_SOFTMAX = [f"{kind}_softmax_{way}" for kind in ("scaled", "scaled_masked", "scaled_upper_triang_masked", "scaled_aligned_causal_masked")
            for way in ("forward", "backward")]
# The number of results; 1: the result itself, not a list.
_COUNTS = {
    **dict.fromkeys([*_PLAIN, *(f"d{name}" for name in _PLAIN), "clamped_swiglu", "clamped_dswiglu", *_SOFTMAX], 1),
    **dict.fromkeys("fused_rope_forward fused_rope_backward fused_qkv_rope_backward moe_unpermute_fwd moe_permute_bwd dropout_bwd dequantize".split(), 1),
    **dict.fromkeys([f"dbias_d{name}" for name in "gelu silu relu qgelu srelu".split()], 2),
    **dict.fromkeys("bgrad_quantize rmsnorm_bwd rmsnorm_bwd_add moe_unpermute_bwd dropout_fwd multi_tensor_l2norm multi_tensor_unscale_l2norm "
                    "fused_moe_aux_loss_fwd".split(), 2),
    **dict.fromkeys("layernorm_fwd rmsnorm_fwd layernorm_bwd moe_permute_fwd fused_qkv_rope_forward fused_topk_with_score_function_fwd "
                    "fused_score_for_moe_aux_loss_fwd".split(), 3),
    "generic_gemm": 4,
}
# The positions of the arguments that say the dtype of the first result: (the dtype, the quantizer).
_DTYPES = {"layernorm_fwd": (6, 5), "rmsnorm_fwd": (5, 4), "generic_gemm": (6, 5)}
# Transformer Engine's numbers of dtypes, by PyTorch's names.
_NUMBERS = {0: "uint8", 2: "int32", 4: "float32", 5: "float16", 6: "bfloat16"}
# Functions whose first result has the dtype of one of the tensors.
_LIKE_ARGUMENTS = frozenset([name for name, count in _COUNTS.items() if count == 1 and name != "dequantize"] + ["rmsnorm_bwd", "layernorm_bwd"])


class WrongResult(RuntimeError):
    """A function returned what Transformer Engine's function does not."""


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "device") and hasattr(value, "data_ptr")


def first_tensor(arguments: tuple, options: dict) -> Any:
    """The first tensor among a call's arguments, also in lists; None without one."""
    for value in (*arguments, *options.values()):
        if isinstance(value, (list, tuple)):
            value = first_tensor(tuple(value), {})
        if _is_tensor(value):
            return value
    return None


def _has_quantizer(arguments: tuple, options: dict) -> bool:
    """True if the call asks for a quantised result, whose class is the package's."""
    return any(hasattr(value, "quantize") for value in (*arguments, *options.values()))


def _expected_dtype(name: str, arguments: tuple, first: Any) -> Optional[Tuple[str, ...]]:
    """The names of the dtypes that the first result may have; None: any."""
    if name in _DTYPES:
        place, quantizer = _DTYPES[name]
        if len(arguments) <= place or arguments[place] is None or arguments[quantizer] is not None:
            return None
        number = arguments[place]
        return (_NUMBERS.get(int(number), "") if not _is_torch_dtype(number) else str(number).rpartition(".")[2],)
    if name not in _LIKE_ARGUMENTS or (arguments and hasattr(arguments[-1], "quantize")):
        return None
    return tuple({str(value.dtype).rpartition(".")[2] for value in arguments if _is_tensor(value)})


def _is_torch_dtype(value: Any) -> bool:
    return type(value).__name__ == "dtype"


def checker(name: str) -> Optional[Callable[[tuple, dict, Any], None]]:
    """The check of an op's results, called with (positional arguments, keyword arguments, result); None for an op without one."""
    count = _COUNTS.get(name)
    if count is None:
        return None

    def check(arguments: tuple, options: dict, result: Any) -> None:
        several = isinstance(result, (list, tuple))
        if (count == 1) == several or (several and len(result) != count):
            got = f"{len(result)} results" if several else f"a {type(result).__name__}"
            raise WrongResult(f"{name} returned {got}; it returns {'one tensor' if count == 1 else f'{count} results'}")
        results = result if several else (result,)
        if results[0] is None or (not _is_tensor(results[0]) and not _has_quantizer(arguments, options)):
            raise WrongResult(f"{name} returned {type(results[0]).__name__} as its first result; it returns a tensor")
        tensor = first_tensor(arguments, options)
        for at, one in enumerate(results):
            if tensor is not None and _is_tensor(one) and one.device != tensor.device:
                raise WrongResult(f"{name} returned a tensor on {one.device} as result {at}; the arguments are on {tensor.device}")
        if _is_tensor(results[0]):
            expected = _expected_dtype(name, arguments, results[0])
            dtype = str(results[0].dtype).rpartition(".")[2]
            if expected and dtype not in expected:
                raise WrongResult(f"{name} returned {dtype}; the call asks for {' or '.join(expected)}")

    return check
