"""torch.autocast when another device takes CUDA's place: one state for the devices cuda and, for example, cpu.

PyTorch has a separate autocast state and op table for each device type. CUDA tensors are the other device's tensors here, so autocast("cuda") also sets
its state. On the host, ops that only CUDA's table has are added to the CPU's (after PyTorch's ATen/autocast_mode.h, which defines CUDA's table); another
device has its vendor's table.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterable

import torch

__all__ = ["install"]

_LOWER = """_convolution addmv addr chain_matmul convolution einsum gru_cell linalg_multi_dot lstm_cell mv rnn_relu_cell rnn_tanh_cell"""
_FP32 = """_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d acos asin cosh
    cosine_similarity dist erfinv exp expm1 frobenius_norm.dim group_norm layer_norm log log10 log1p log2 logsumexp native_layer_norm nuclear_norm
    nuclear_norm.dim pdist pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal renorm rsqrt sinh softplus tan upsample_bicubic2d
    upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d"""
# Ops with FP32 results unless the call gives a dtype.
_FP32_RESULT = """cumprod cumprod.dimname cumsum cumsum.dimname linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.Dimname
    log_softmax.int softmax.Dimname softmax.int sum sum.dim_DimnameList sum.dim_IntList"""
# Ops with another overload that takes a dtype as its last argument.
_FP32_NORMS = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
               "norm.names_ScalarOpt_dim": "norm.names_ScalarOpt_dim_dtype"}
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot index_put scatter_add tensordot vdot"
_KEY = "AutocastCPU"

_library: Any = None  # keeps the registered kernels alive


def _is_eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cast(v, dtype) for v in value]
    return value.to(dtype) if _is_eligible(value) else value


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _cast_to(dtype: Callable[[tuple], torch.dtype]) -> Callable:
    def rule(op: Any, arguments: tuple, options: dict) -> Any:
        to = dtype((*arguments, *options.values()))
        return op(*(_cast(a, to) for a in arguments), **{k: _cast(v, to) for k, v in options.items()})

    return rule


def _widest(values: tuple) -> torch.dtype:
    """Autocast's dtype, or FP32 if one of the tensors is FP32."""
    return torch.float32 if any(t.dtype == torch.float32 for t in _tensors(values)) else torch.get_autocast_dtype("cpu")


def _with_fp32_result(op: Any, arguments: tuple, options: dict) -> Any:
    if not _is_eligible(arguments[0]):
        return op(*arguments, **options)
    place = next(i for i, argument in enumerate(op._schema.arguments) if argument.name == "dtype")
    if place < len(arguments):
        if arguments[place] is None:
            arguments = (*arguments[:place], torch.float32, *arguments[place + 1:])
    elif options.get("dtype") is None:
        options = {**options, "dtype": torch.float32}
    return op(*arguments, **options)


def _norm(op: Any, arguments: tuple, options: dict) -> Any:
    dtype = torch.float32 if _is_eligible(arguments[0]) else arguments[0].dtype
    values = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    values.update(zip((a.name for a in op._schema.arguments), arguments), **options)
    with_dtype = _overload(_FP32_NORMS[op._schema.name.split("::")[1] + "." + op._schema.overload_name])
    return with_dtype(*(values[a.name] for a in op._schema.arguments), dtype=dtype)


def _kernel(name: str, rule: Callable) -> Callable:
    op = _overload(name)
    below = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def kernel(*arguments: Any, **options: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(below):
            return rule(op, arguments, options)

    return kernel


def _take_over_rules() -> None:
    """Adds CUDA's rules to the CPU's, for the ops for which this version of PyTorch has a CUDA rule."""
    global _library
    names = set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"))
    names -= set(torch._C._dispatch_get_registrations_for_dispatch_key(_KEY))
    _library = torch.library.Library("aten", "IMPL")
    rules = {**dict.fromkeys(_LOWER.split(), _cast_to(lambda values: torch.get_autocast_dtype("cpu"))),
             **dict.fromkeys(_FP32.split(), _cast_to(lambda values: torch.float32)), **dict.fromkeys(_FP32_RESULT.split(), _with_fp32_result),
             **dict.fromkeys(_FP32_NORMS, _norm), **dict.fromkeys(_WIDEST.split(), _cast_to(_widest))}
    for name, rule in rules.items():
        if f"aten::{name}" in names:
            _library.impl(name, _kernel(name, rule), _KEY)


def _join_states(device: str) -> None:
    """Makes an autocast scope of cuda apply to the device type too, and the reverse; leaving it restores both states."""
    others = {"cuda": device, device: "cuda"}
    scope = torch.amp.autocast_mode.autocast
    enter, leave = scope.__enter__, scope.__exit__

    @functools.wraps(enter)
    def enter_both(self: Any) -> Any:
        if (other := others.get(self.device)) is not None:
            before = torch.is_autocast_enabled(other), torch.get_autocast_dtype(other)
            self._te_fl_before = (*getattr(self, "_te_fl_before", ()), before)
            torch.set_autocast_enabled(other, self._enabled)
            torch.set_autocast_dtype(other, self.fast_dtype)
        return enter(self)

    @functools.wraps(leave)
    def leave_both(self: Any, *error: Any) -> Any:
        if before := getattr(self, "_te_fl_before", ()):  # A scope entered before this patch has none.
            self._te_fl_before, (enabled, dtype) = before[:-1], before[-1]
            torch.set_autocast_enabled(others[self.device], enabled)
            torch.set_autocast_dtype(others[self.device], dtype)
        return leave(self, *error)

    scope.__enter__, scope.__exit__ = enter_both, leave_both


def _cast_where_tensors_lie(device: str) -> None:
    """Makes custom_fwd and register_autocast check tensors for the device type, also if the program names cuda."""
    cast = torch.amp.autocast_mode._cast

    def placed_cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast(value, device if device_type == "cuda" else device_type, dtype)

    torch.amp.autocast_mode._cast = placed_cast
    for owner in (torch.library, torch.library.CustomOpDef):
        def placed_register(op: Any, device_type: str, *arguments: Any, _register: Any = owner.register_autocast, **options: Any) -> Any:
            return _register(op, device if device_type == "cuda" else device_type, *arguments, **options)

        owner.register_autocast = functools.wraps(owner.register_autocast)(placed_register)


def install(device: str) -> None:
    """device: the type of the device that takes CUDA's place."""
    _join_states(device)
    _cast_where_tensors_lie(device)
    if device == "cpu":
        _take_over_rules()
