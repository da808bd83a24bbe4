"""default.flagos: implementations of catalogue ops by FlagGems' Triton kernels (docs/backends.md, FlagGems).

An op is one function of FlagGems, or te_fl.reference_torch's composition in which FlagGems' functions replace PyTorch's operations. NOT_REGISTERED has the
ops of the catalogue that are left out, with the reason.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any, Callable, Dict, Iterable, List, Optional, Union

import torch

from te_fl import _native, frameworks
from te_fl.errors import Unsupported
from te_fl.registration import BackendImplKind, OpImpl, OpRegistry, owned_by
from te_fl.reference_torch import activation, attention, gemm, norm, optimizer, quantize, random, repeat, rope, scaled_activation, softmax, tensor
from te_fl.reference_torch.values import SCALINGS

IMPL_ID = "default.flagos"
_RELU = "FlagGems' relu makes 0 of a NaN"
_STEPS = "FlagGems has only element-wise kernels for it, a dozen launches for each tensor"
_CASTS = "FlagGems casts no FP8, and its maximum does not pass over a NaN as an amax does"
_COPIES = "it moves data and computes nothing"
_INDICES = "an index outside of the table is an error of the stream, and FlagGems checks none"
_ABSENT = "FlagGems has no function with these results"
NOT_REGISTERED: Dict[str, str] = {
    **{name: _RELU for name in (*activation.OPS, *scaled_activation.OPS) if "relu" in name or "reglu" in name},
    **{name: _STEPS for name in optimizer.OPS},
    **{name: _CASTS for name in quantize.OPS if name != "fp8_transpose"},
    **{name: _COPIES for name in ("fp8_transpose", "strided_copy", "fill")},
    **{name: "FlagGems draws its masks by a seed of its own, and te-fl's masks are given" for name in random.OPS},
    **{name: _INDICES for name in ("embedding_fwd", "embedding_bwd", "cross_entropy_fwd", "cross_entropy_bwd")},
    **{name: _ABSENT for name in (
        "moe_permute_fwd", "moe_permute_bwd", "moe_unpermute_fwd", "moe_unpermute_bwd", "moe_permute_by_mask_fwd", "moe_sort_chunks_fwd",
        "moe_sort_chunks_bwd", "fused_topk_with_score_function_fwd", "fused_topk_with_score_function_bwd", "fused_score_for_moe_aux_loss_fwd",
        "fused_score_for_moe_aux_loss_bwd", "fused_moe_aux_loss_fwd", "fused_moe_aux_loss_bwd", "fused_multi_row_padding", "fused_multi_row_unpadding",
        "splits_to_offsets", "get_fused_attn_backend")},
    **{name: "collectives are implemented in C++ only" for name in (
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "moe_dispatch", "moe_combine", "broadcast",
        "send", "recv", "barrier")},
    "fused_attn_bwd": "FlagGems' gradient of attention always applies a causal mask",
}
_COMPOSED = {name: function for module in (activation, scaled_activation, softmax, gemm, rope, tensor) for name, function in module.OPS.items()
             if name not in NOT_REGISTERED}
_QUANTISED = {*activation.OPS, *norm.OPS}  # ops with results in FP8, which are computed in FP32 and cast by PyTorch
_TYPES = {"cpu": "cpu", "xpu": "oneapi"}

_registering = threading.Lock()


def device_type() -> str:
    """te-fl's type of the devices that FlagGems has kernels for in this process. Imports FlagGems."""
    import flag_gems
    kind = flag_gems.device
    return ("rocm" if torch.version.hip else "cuda") if kind == "cuda" else _TYPES.get(kind, f"ext:{kind}")


def _elements(t: Any) -> int:
    count = 1
    for extent in t.shape:
        count *= extent
    return count


def _supports(own: Optional[Callable[..., Union[bool, str]]], most_elements: int) -> Callable[..., Union[bool, str]]:
    """own: what the op refuses besides tensors without elements, and tensors of more elements than FlagGems' kernels index."""
    named = [] if own is None else list(inspect.signature(own).parameters)

    def supports(**arguments: Any) -> Union[bool, str]:
        for value in arguments.values():
            counts = [_elements(t) for t in (value if isinstance(value, (list, tuple)) else [value]) if hasattr(t, "shape")]
            if counts and not any(counts):
                return "tensors without elements are left to others"
            if any(n > most_elements for n in counts):
                return f"FlagGems' kernels index {most_elements} elements at most"
        return True if own is None else own(**{name: arguments[name] for name in named if name in arguments})
    return supports


def _supports_sum(mask: Any) -> Union[bool, str]:
    return True if mask is None else NOT_REGISTERED["dropout_fwd"]


def implementations(devices: Iterable[str]) -> List[OpImpl]:
    """One OpImpl for each op. devices: te-fl's device types. Imports FlagGems.

    The implementations may not run while a stream is captured, because FlagGems tunes a kernel when it first sees a shape; since timing decides, they are
    not deterministic either.
    """
    from te_fl.flaggems import fused, kernels
    functions = {**{name: fused.composed(function) for name, function in _COMPOSED.items()}, **fused.OPS}
    refusals = {"add": _supports_sum, **fused.SUPPORTS}
    return [OpImpl(op_name=name, impl_id=IMPL_ID, kind=BackendImplKind.DEFAULT, fn=repeat.uncast(function), vendor="flagos", priority=150,
                   supports=_supports(refusals.get(name), kernels.MOST_ELEMENTS), devices=tuple(devices), scalings=SCALINGS if name in _QUANTISED else ("none",),
                   tensors="torch", supports_tensors="te_fl", thread_safe=False, in_place=True) for name, function in functions.items()]


def _add(registry: OpRegistry) -> None:
    with _registering:
        if not any(row["impl_id"] == IMPL_ID for row in registry.snapshot()):
            registry.register_many(implementations((device_type(),)))


def register(registry: OpRegistry) -> None:
    """For TE_FL_PLUGIN_MODULES=te_fl.flaggems, load_plugin() and policies that name flagos."""
    missing = frameworks.flaggems_missing()
    if missing:
        raise Unsupported(missing)
    _add(registry)


def register_for(kind: str) -> None:
    """Registers the ops if FlagGems is installed and has kernels for te-fl's devices of this type, unless TE_FL_SKIP_MODULES has the module. te-fl calls
    this when it makes a device of PyTorch's, which no plugin serves.
    """
    skipped = (_native.setting("TE_FL_SKIP_MODULES") or "").replace(" ", "").split(",")
    if frameworks.flaggems_missing() or {"*", __name__} & set(skipped):
        return
    if device_type() == kind:
        with owned_by(__name__):
            _add(OpRegistry.instance())
