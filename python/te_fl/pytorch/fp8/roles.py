"""Roles of the quantizers that a CustomRecipe has, with Transformer Engine's names, and the quantizers that modules have by its factory."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Optional, Tuple, Union

import torch

from te_fl.common.recipe import CustomRecipe, Format
from te_fl.errors import InvalidArgument, Unsupported
from te_fl.pytorch.fp8 import operands

__all__ = ["DelayedScalingRequest", "QuantizerRequest", "QuantizerRole"]


@dataclasses.dataclass(frozen=True)
class QuantizerRole:
    """The tensor that a quantizer is for. module_type: "linear" or "grouped_linear". tensor_type: "input", "weight" or "grad_output". name: the module's
    name, which its constructor's argument `name` sets; LayerNormMLP's linear maps have ".fc1" and ".fc2" behind it.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __str__(self) -> str:
        fields = (f"{field}={value}" for field, value in dataclasses.asdict(self).items() if value)
        return "|".join(fields) or "QuantizerRole()"


@dataclasses.dataclass(frozen=True)
class QuantizerRequest:
    """Base class of what a factory may return in place of a quantizer."""


@dataclasses.dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """Asks for delayed scaling of a tensor. te-fl's modules have delayed scaling of all tensors or none: see DelayedScaling."""

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Union[str, Callable] = "max"
    scaling_factor_compute_algo: Optional[Callable] = None
    reduce_amax: bool = True


_TENSORS = ("input", "weight", "grad_output")


def _dequantised(quantised: Any) -> torch.Tensor:
    return quantised.dequantize() if hasattr(quantised, "dequantize") and not type(quantised) is torch.Tensor else quantised


def _by_own_tensors(quantizer: Any) -> operands.Quantiser:
    """Uses a program's own quantizer, whose quantize() returns values, or an object whose dequantize() does. The operand for products over rows is
    quantised from the transposed values.
    """
    def quantise(values: torch.Tensor, rowwise: bool, columnwise: bool) -> Tuple[operands.Operand, operands.Operand]:
        by_rows = _dequantised(quantizer.quantize(values)).contiguous() if rowwise else None
        return by_rows, _dequantised(quantizer.quantize(values.t().contiguous())).t().contiguous() if columnwise else None

    return quantise


def _quantiser_of(made: Any, role: QuantizerRole) -> operands.Named:
    """The quantiser of what a factory returned for the role."""
    where = f"CustomRecipe: qfactory({role})"
    if isinstance(made, DelayedScalingRequest):
        raise Unsupported(f"{where} returned a DelayedScalingRequest: te-fl's modules have delayed scaling of all tensors or none; use DelayedScaling as the "
                          "recipe of an autocast around those modules, or return a Float8CurrentScalingQuantizer")
    if made is None or isinstance(made, QuantizerRequest):
        raise InvalidArgument(f"{where} returned {made!r}; it is a quantizer, and IdentityQuantizer() for high precision")
    if getattr(made, "is_identity", False):
        return None
    name = type(made).__name__
    if hasattr(made, "operands"):
        return name, made.operands
    if not callable(getattr(made, "quantize", None)):
        raise InvalidArgument(f"{where} returned {made!r}; it is a quantizer, which has quantize(tensor)")
    return name, _by_own_tensors(made)


def _linear(recipe: CustomRecipe, module_type: str, name: str) -> operands.Linear:
    roles = [QuantizerRole(module_type, tensor, name) for tensor in _TENSORS]
    inp, weight, gradient = (_quantiser_of(recipe.qfactory(role), role) for role in roles)
    return inp, weight, gradient


def native_of(module: Any, recipe: CustomRecipe) -> dict:
    """The dict, as of te_fl.common.recipe.native_of(), of the recipe for one module. The factory is called once for each tensor of a module, and again
    if the recipe is another one.
    """
    known = module.__dict__.get("_factory_made")
    if known is not None and known[0] is recipe and known[1] == (recipe.qfactory, recipe.backward_override):
        return known[2]
    made = [_linear(recipe, *site) for site in module._quantizer_sites()]
    native = {"kind": "module", "format": recipe.fp8_format.name.lower(), "fp8_dpa": False, "backward_override": recipe.backward_override,
              "native": operands.native("custom", recipe.backward_override, made[0], made[1] if len(made) > 1 else None)}
    module.__dict__["_factory_made"] = (recipe, (recipe.qfactory, recipe.backward_override), native)
    return native
