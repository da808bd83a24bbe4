"""Recipes of quantised training, with Transformer Engine's names, arguments and defaults.

Constructing a recipe never fails because te-fl lacks support for it: native_of() checks the support when the recipe is used, so programs may
construct recipes that they never use. Some defaults come from NVTE_ environment variables, which are read when this module is imported.
"""

from __future__ import annotations

import functools
import numbers
import os
import warnings
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Callable, Literal, NamedTuple, Optional, Union

from te_fl.errors import InvalidArgument, Unsupported, did_you_mean

__all__ = ["CustomRecipe", "DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "Format", "MMParams", "MXFP8BlockScaling",
           "NVFP4BlockScaling", "QParams", "Recipe", "native_of"]


def _switched_on(variable: str) -> bool:
    return os.environ.get(variable, "0") == "1"


class _FormatHelper(NamedTuple):
    """The largest finite values of a format, in the forward and in the backward."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """The number formats of activations and weights (forward) and of gradients (backward). HYBRID is E4M3 forward, E5M2 backward."""

    E2M1 = _FormatHelper(max_fwd=6, max_bwd=6)
    E4M3 = _FormatHelper(max_fwd=448, max_bwd=448)
    E5M2 = _FormatHelper(max_fwd=57344, max_bwd=57344)
    HYBRID = _FormatHelper(max_fwd=448, max_bwd=57344)

    def __reduce_ex__(self, protocol):
        # Pickles by value in every Python version: 3.11.0 to 3.11.3 would pickle a call of getattr, which safe unpicklers refuse.
        return Format, (self.value,)


@dataclass(frozen=True)
class MMParams:
    """Options of a matrix product. use_split_accumulator: FP8 partial sums are promoted to FP32 during the accumulation."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """Options of quantisation."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False

    def __repr__(self) -> str:
        fields = ",\n".join(f"{name}={getattr(self, name)}" for name in self.__dataclass_fields__)
        return f"Qparams(\n{fields}\n)"


def _require(recipe: "Recipe", field: str, holds: bool, rule: str) -> None:
    if not holds:
        raise InvalidArgument(f"{type(recipe).__name__}: {field} is {getattr(recipe, field)!r}; {rule}")


_OVERRIDES = (None, "high_precision", "dequantized")
_SCOPES = ("none", "weights", "activations", "all")


class Recipe:
    """Base class of recipes: predicates of the recipe's kind, and a text for comparing recipes."""

    __slots__ = ("_native",)  # cache of native_of(); not a field, so it is not compared, copied or pickled
    _shown: tuple = ()

    def __getstate__(self) -> dict:
        return self.__dict__

    @classmethod
    def nvfp4(cls) -> bool:
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def delayed(cls) -> bool:
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        return issubclass(cls, (DelayedScaling, Float8CurrentScaling))

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        return issubclass(cls, CustomRecipe)

    def __repr__(self) -> str:
        words = [f"recipe_type={type(self).__name__}"]
        for name in self._shown:
            key, _, field = name.partition("=")
            value = getattr(self, field or key)
            words.append(f"{key}={value.name if isinstance(value, Format) else value}")
        return ", ".join(words)

    def _check_common(self) -> None:
        _require(self, "fp8_format", isinstance(self.fp8_format, Format), "it is a Format, such as Format.HYBRID")
        _require(self, "fp8_format", self.fp8_format is not Format.E5M2, "E5M2 throughout cannot train; give Format.HYBRID or Format.E4M3")
        _require(self, "backward_override", self.backward_override in _OVERRIDES, f"it is one of {_OVERRIDES} (NVTE_BACKWARD_OVERRIDE)")


def switch(where: str, argument: str, value: Any, by_name: str = "recipe") -> bool:
    """Validates an argument that must be True or False. Other truthy values raise TypeError, in particular a recipe, which would count as True while
    the default recipe is used. by_name: the name of the argument that takes a recipe.
    """
    if value is True or value is False:
        return value
    kind = type(value)
    if kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"):
        return bool(value)
    shown = kind.__name__ if isinstance(value, Recipe) else repr(value)
    raise TypeError(f"{where}(): {argument} is {shown}; it is True or False" + (
        f", and a recipe is given by name: {where}({by_name}=...)" if isinstance(value, Recipe) or isinstance(value, type) else ""))


def _ignoring_unknown(recipe: type) -> type:
    """A class decorator: unknown keywords are ignored with a warning, as Transformer Engine's recipes ignore them. Programs for other versions pass
    such keywords, for example Megatron's override_linear_precision. A keyword similar to a field's name counts as misspelt and raises an error.
    """
    plain, known = recipe.__init__, tuple(recipe.__dataclass_fields__)  # a tuple, because torch.compile can trace it but not the dict of fields

    @functools.wraps(plain)
    def init(self, *fields: Any, **named: Any) -> None:
        unknown = [name for name in named if name not in known]
        for name in unknown:
            misspelt = did_you_mean(name, known)
            # A field of another recipe is not a misspelling.
            if misspelt and not any(name in kind.__dataclass_fields__ for kind in Recipe.__subclasses__()):
                raise TypeError(f"{recipe.__name__}() has no argument {name!r}{misspelt}")
            del named[name]
        if unknown:
            warnings.warn(f"{recipe.__name__} has no argument {', '.join(unknown)}: what was given has no effect, as in Transformer Engine 2.20", stacklevel=2)
        plain(self, *fields, **named)

    recipe.__init__ = init
    return recipe


@_ignoring_unknown
@dataclass(repr=False)
class DelayedScaling(Recipe):
    """One scale per tensor, computed from the amaxes of the last amax_history_len steps: scale = fp8_max / amax / 2^margin."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Union[Literal["max", "most_recent"], Callable] = "max"
    scaling_factor_compute_algo: Optional[Callable] = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = os.environ.get("NVTE_BACKWARD_OVERRIDE")

    _shown = ("margin", "format=fp8_format", "amax_history_len", "reduce_amax", "fp8_dpa", "fp8_mha", "backward_override")

    def __post_init__(self) -> None:
        self._check_common()
        algo = self.amax_compute_algo
        _require(self, "amax_compute_algo", algo in ("max", "most_recent") or callable(algo), "it is 'max', 'most_recent' or a function")
        scale = self.scaling_factor_compute_algo
        _require(self, "scaling_factor_compute_algo", scale is None or callable(scale), "it is a function or None")
        _require(self, "margin", isinstance(self.margin, numbers.Real) and float(self.margin).is_integer(), "it is a whole number, of powers of two")
        _require(self, "amax_history_len", isinstance(self.amax_history_len, numbers.Integral) and self.amax_history_len >= 1,
                 "it is a whole number and at least 1")
        _require(self, "backward_override", self.backward_override is None, "delayed scaling has only None")


@_ignoring_unknown
@dataclass(repr=False)
class Float8CurrentScaling(Recipe):
    """One scale per tensor, computed from its own amax. fp8_quant_fwd_inp, fp8_quant_fwd_weight and fp8_quant_bwd_grad may be set after construction.
    """

    use_power_2_scales: bool = _switched_on("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES")
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = os.environ.get("NVTE_BACKWARD_OVERRIDE")

    _shown = ("format=fp8_format", "fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad", "fp8_gemm_fprop", "fp8_gemm_dgrad",
              "fp8_gemm_wgrad", "fp8_dpa", "fp8_mha", "backward_override")

    def __post_init__(self) -> None:
        self._check_common()
        self.fp8_quant_fwd_inp = self.fp8_quant_fwd_weight = self.fp8_quant_bwd_grad = QParams(power_2_scale=self.use_power_2_scales)


@_ignoring_unknown
@dataclass(repr=False)
class MXFP8BlockScaling(Recipe):
    """One power-of-two scale for each 32 consecutive values of a row."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = os.environ.get("NVTE_BACKWARD_OVERRIDE")
    enable_2d_quantization: bool = False

    _shown = ("margin", "format=fp8_format", "backward_override", "enable_2d_quantization")

    def __post_init__(self) -> None:
        self._check_common()


@_ignoring_unknown
@dataclass(repr=False)
class Float8BlockScaling(Recipe):
    """One scale for each 1x128 values of inputs and gradients, and for each 128x128 values of weights. The fp8_quant_ fields may be set after
    construction.
    """

    use_f32_scales: bool = _switched_on("NVTE_FP8_BLOCK_SCALING_FP32_SCALES")
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = os.environ.get("NVTE_BACKWARD_OVERRIDE")

    _shown = ("format=fp8_format", "fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad", "x_block_scaling_dim",
              "w_block_scaling_dim", "grad_block_scaling_dim", "fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad", "fp8_dpa", "fp8_mha",
              "backward_override")

    def __post_init__(self) -> None:
        self._check_common()
        dims = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
        for field in dims:
            _require(self, field, getattr(self, field) in (1, 2), "blocks have 1 or 2 dimensions")
        if sum(getattr(self, field) == 2 for field in dims) > 1:
            raise InvalidArgument(f"Float8BlockScaling: only one of {', '.join(dims)} may be 2")
        for field in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            _require(self, field, getattr(self, field).use_split_accumulator, "block scaling needs use_split_accumulator=True")
        for field in ("fp8_dpa", "fp8_mha"):
            _require(self, field, not getattr(self, field), "block scaling has no FP8 attention")
        self.fp8_quant_fwd_inp = self.fp8_quant_fwd_weight = self.fp8_quant_bwd_grad = QParams(power_2_scale=not self.use_f32_scales)


@_ignoring_unknown
@dataclass(repr=False)
class NVFP4BlockScaling(Recipe):
    """Four-bit values, with an E4M3 scale for each 16 values and one FP32 scale per tensor."""

    disable_rht: bool = _switched_on("NVTE_NVFP4_DISABLE_RHT")
    disable_stochastic_rounding: bool = _switched_on("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING")
    disable_2d_quantization: bool = _switched_on("NVTE_NVFP4_DISABLE_2D_QUANTIZATION")
    row_scaled_activation: bool = _switched_on("NVTE_NVFP4_ROW_SCALED_ACTIVATION")
    nvfp4_4over6: str = os.environ.get("NVTE_NVFP4_4OVER6", "none")
    nvfp4_4over6_e4m3_use_256: str = os.environ.get("NVTE_NVFP4_4OVER6_E4M3_USE_256", "all")
    nvfp4_4over6_err_mode: str = os.environ.get("NVTE_NVFP4_4OVER6_ERR_MODE", "MAE").upper()
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = os.environ.get("NVTE_BACKWARD_OVERRIDE")

    _shown = ("fp4_format", "fp8_format", "fp8_dpa", "fp8_mha", "backward_override", "row_scaled_activation", "nvfp4_4over6",
              "nvfp4_4over6_e4m3_use_256", "nvfp4_4over6_err_mode", "fp4_quant_fwd_inp", "fp4_quant_fwd_weight", "fp4_quant_bwd_grad")

    def __post_init__(self) -> None:
        _require(self, "fp4_format", self.fp4_format is Format.E2M1, "NVFP4 has only Format.E2M1")
        _require(self, "fp8_format", self.fp8_format is Format.E4M3, "the scales of NVFP4 are in Format.E4M3")
        self._check_common()
        for field in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256"):
            _require(self, field, getattr(self, field) in _SCOPES, f"it is one of {_SCOPES}")
        _require(self, "nvfp4_4over6_err_mode", self.nvfp4_4over6_err_mode in ("MAE", "MSE"), "it is 'MAE' or 'MSE'")
        rht = not self.disable_rht
        self.fp4_quant_fwd_inp = QParams(random_hadamard_transform=rht)
        self.fp4_quant_fwd_weight = QParams(fp4_2d_quantization=not self.disable_2d_quantization)
        self.fp4_quant_bwd_grad = QParams(random_hadamard_transform=rht, stochastic_rounding=not self.disable_stochastic_rounding)

    def __repr__(self) -> str:
        return super().__repr__() + ", "


@_ignoring_unknown
@dataclass(repr=False)
class CustomRecipe(Recipe):
    """A user-defined function selects the quantiser of each tensor."""

    qfactory: Callable[..., Any]
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = os.environ.get("NVTE_BACKWARD_OVERRIDE")
    quantization_alignment: int = 128

    _shown = ("qfactory", "backward_override", "quantization_alignment")

    def __post_init__(self) -> None:
        self._check_common()
        _require(self, "quantization_alignment", self.quantization_alignment > 0, "it is at least 1")


_HIGH_PRECISION_ATTENTION = (("fp8_dpa", False, "use DelayedScaling(fp8_dpa=True)"), ("fp8_mha", False, "use DelayedScaling(fp8_dpa=True)"))

# The only value of each field that te-fl's layers support, and advice for other values.
_SERVED = {
    DelayedScaling: (),
    Float8CurrentScaling: (
        ("fp8_gemm_fprop", MMParams(False), "leave it out: the forward's partial sums are not split"),
        ("fp8_gemm_dgrad", MMParams(True), "leave it out: the gradients' partial sums are split"),
        ("fp8_gemm_wgrad", MMParams(True), "leave it out: the gradients' partial sums are split"),
        *_HIGH_PRECISION_ATTENTION,
    ),
    Float8BlockScaling: (
        ("x_block_scaling_dim", 1, "leave it out: inputs have blocks of 1x128"),
        ("w_block_scaling_dim", 2, "leave it out: weights have blocks of 128x128"),
        ("grad_block_scaling_dim", 1, "leave it out: gradients have blocks of 1x128"),
    ),
    MXFP8BlockScaling: _HIGH_PRECISION_ATTENTION,
    NVFP4BlockScaling: _HIGH_PRECISION_ATTENTION,
    CustomRecipe: _HIGH_PRECISION_ATTENTION,
}


def _refuse(recipe: Recipe, field: str, way_out: str) -> Unsupported:
    return Unsupported(f"{type(recipe).__name__}: te-fl's layers do not support {field}={getattr(recipe, field)!r}; {way_out}")


def _one_quantisation(recipe: Recipe) -> QParams:
    """Returns the quantisation options of the recipe; te-fl requires equal options for inputs, weights and gradients."""
    fields = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
    first = getattr(recipe, fields[0])
    for field in fields:
        params = getattr(recipe, field)
        if params != first:
            raise _refuse(recipe, field, f"set it to that of fp8_quant_fwd_inp, {first!r}: te-fl has one for all tensors")
        if params.random_hadamard_transform or params.stochastic_rounding or params.fp4_2d_quantization:
            raise _refuse(recipe, field, "leave random_hadamard_transform, stochastic_rounding and fp4_2d_quantization at False")
    return first


class NVFP4Rules(NamedTuple):
    """The options with which one kind of tensor is quantised to NVFP4.

    hadamard: the copy for products over rows is multiplied by a 16x16 Hadamard matrix with fixed signs first. stochastic: rounds stochastically.
    square: one scale for each 16x16 values. by_rows: one amax for each row. four_over_six: each block's largest value becomes 4 or 6, whichever gives
    the smaller error. largest_scale: the largest scale of a block, 448, or 256 with four_over_six. squared: the error is the sum of squares.
    """

    hadamard: bool = False
    stochastic: bool = False
    square: bool = False
    by_rows: bool = False
    four_over_six: bool = False
    largest_scale: float = 448.0
    squared: bool = False

    def check(self, where: str) -> "NVFP4Rules":
        """Refuses combinations that the format does not define. where: the name in the message."""
        if self.by_rows and (self.hadamard or self.stochastic or self.square):
            raise InvalidArgument(f"{where}: one amax for each row excludes the random Hadamard transform, stochastic rounding and square blocks; give "
                                  "disable_rht=True")
        if self.four_over_six and (self.hadamard or self.stochastic):
            raise InvalidArgument(f"{where}: 4over6 excludes the random Hadamard transform and stochastic rounding; give disable_rht=True")
        if self.hadamard and self.square:
            raise InvalidArgument(f"{where}: a transformed copy is no transpose, as square blocks are; leave one of random_hadamard_transform and "
                                  "fp4_2d_quantization at False")
        return self


def _in_scope(scope: str, weight: bool) -> bool:
    return scope == "all" or scope == ("weights" if weight else "activations")


def _nvfp4_rules(recipe: NVFP4BlockScaling, field: str) -> NVFP4Rules:
    params, weight, gradient = getattr(recipe, field), field == "fp4_quant_fwd_weight", field == "fp4_quant_bwd_grad"
    if params.power_2_scale or params.amax_epsilon:
        raise _refuse(recipe, field, "leave power_2_scale and amax_epsilon out: NVFP4 has neither")
    adaptive = not gradient and _in_scope(recipe.nvfp4_4over6, weight)
    return NVFP4Rules(bool(params.random_hadamard_transform), bool(params.stochastic_rounding), bool(params.fp4_2d_quantization),
                      bool(recipe.row_scaled_activation) and not weight and not gradient, adaptive,
                      256.0 if adaptive and _in_scope(recipe.nvfp4_4over6_e4m3_use_256, weight) else 448.0,
                      adaptive and recipe.nvfp4_4over6_err_mode == "MSE").check(f"NVFP4BlockScaling: {field}")


def nvfp4_of(described: dict) -> NVFP4BlockScaling:
    """The recipe that describe_natively() describes so."""
    inp, weight, gradient = (NVFP4Rules(*described[name]) for name in ("input", "weight", "gradient"))
    scopes = {(True, True): "all", (True, False): "activations", (False, True): "weights", (False, False): "none"}
    made = NVFP4BlockScaling(row_scaled_activation=inp.by_rows, nvfp4_4over6=scopes[inp.four_over_six, weight.four_over_six],
                             nvfp4_4over6_e4m3_use_256=scopes[inp.largest_scale == 256, weight.largest_scale == 256],
                             nvfp4_4over6_err_mode="MSE" if inp.squared or weight.squared else "MAE", backward_override=described["backward_override"])
    for name, rules in (("inp", inp), ("weight", weight), ("grad", gradient)):
        setattr(made, f"fp4_quant_{'bwd' if name == 'grad' else 'fwd'}_{name}",
                QParams(random_hadamard_transform=rules.hadamard, stochastic_rounding=rules.stochastic, fp4_2d_quantization=rules.square))
    return made


class Functions:
    """User-defined functions of a delayed scaling recipe; None: te-fl's own computation.

    amax(history [length, tensors]) -> [tensors]; scale(amax, scale, fp8_max, recipe) -> [tensors]. native: a cache for the front end that calls them.
    """

    def __init__(self, recipe: DelayedScaling):
        algo = recipe.amax_compute_algo
        self.recipe, self.amax, self.scale = recipe, algo if callable(algo) else None, recipe.scaling_factor_compute_algo
        self.native: Any = None


def attends(recipe: Recipe) -> bool:
    """True if attention computes in FP8: with fp8_dpa, or with fp8_mha, which implies it."""
    return bool(getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False))


def _as_data(value: Any) -> Any:
    """Converts a value to Python's and this module's types: a program may pass NumPy numbers, or an instance of a class derived from MMParams."""
    if value is None or isinstance(value, Format):
        return value
    for kind in (MMParams, QParams):
        if isinstance(value, kind):
            return kind(**{name: _as_data(getattr(value, name)) for name in kind.__dataclass_fields__})
    for kind, plain in ((numbers.Integral, int), (numbers.Real, float), (str, str)):
        if isinstance(value, kind):
            return bool(value) if isinstance(value, bool) else plain(value)
    return bool(value) if type(value).__name__ in ("bool", "bool_") else value  # NumPy's bool is not a number type


def as_data(recipe: Any) -> Any:
    """Copies the recipe to an instance of this module's class from which its class is derived, with only that class's fields and with user-defined
    functions replaced by defaults. The copy can be unpickled anywhere, without the program's classes.
    """
    kind = next((k for k in type(recipe).__mro__ if k.__module__ == __name__ and k is not Recipe), None) if isinstance(recipe, Recipe) else None
    if kind is None:
        return recipe
    data = object.__new__(kind)  # bypasses __init__, which would validate fields again that the program may have changed
    for name, value in recipe.__dict__.items():
        if name in kind.__dataclass_fields__ or name.startswith(("fp8_quant_", "fp4_quant_")):
            setattr(data, name, _as_data(value))
    if kind is DelayedScaling:
        data.amax_compute_algo = "max" if callable(recipe.amax_compute_algo) else data.amax_compute_algo
        data.scaling_factor_compute_algo = None
    return data


def native_of(recipe: Recipe) -> dict:
    """describe_natively(), cached until a field changes. The dict is shared, so do not modify it."""
    kept = None if isinstance(recipe, type) else getattr(recipe, "_native", None)  # if `recipe` is a class, its _native is the slot descriptor
    if kept is not None and kept[0] == recipe.__dict__:
        return kept[1]
    native = describe_natively(recipe)
    recipe._native = (recipe.__dict__.copy(), native)
    return native


def describe_natively(recipe: Recipe) -> dict:
    """Returns the recipe as a new dict for te-fl's layers (te_fl/nn/fp8/recipe.hpp).

    The dict has kind, format ('hybrid' or 'e4m3') and fp8_dpa. kind 'delayed' also has margin, amax_history_len, amax_compute_algo ('max' or
    'most_recent'), functions (Functions, or None) and reduce_amax; all others have backward_override. 'current' and 'block' have pow2_scale and
    amax_epsilon; 'mxfp8' has square_weights; 'nvfp4' has input, weight and gradient (tuples of the fields of NVFP4Rules); 'factory' has recipe, the
    CustomRecipe, from which te_fl.pytorch asks quantizers for each module. Unsupported settings raise te_fl.errors.Unsupported, which names the field, its value and an alternative.
    """
    kind = ([k for k in _SERVED if isinstance(recipe, k)] or [None])[0]  # PyTorch 2.7's Dynamo does not trace next() with a default
    if kind is None:
        if not isinstance(recipe, Recipe):
            raise TypeError(f"the recipe is {recipe!r}; it is an object of te_fl.common.recipe, such as DelayedScaling()")
        raise Unsupported(f"{type(recipe).__name__}: te-fl's layers do not support this recipe; use one of "
                          f"{', '.join(known.__name__ for known in _SERVED)}")
    for field, supported, way_out in _SERVED[kind]:
        if getattr(recipe, field) != supported:
            raise _refuse(recipe, field, way_out)
    if recipe.fp8_format not in (Format.HYBRID, Format.E4M3):
        raise _refuse(recipe, "fp8_format", "give Format.HYBRID or Format.E4M3")
    native = {"format": recipe.fp8_format.name.lower(), "fp8_dpa": attends(recipe)}
    if kind is DelayedScaling:
        algo = recipe.amax_compute_algo
        functions = Functions(recipe) if callable(algo) or recipe.scaling_factor_compute_algo is not None else None
        return {"kind": "delayed", **native, "margin": int(recipe.margin), "amax_history_len": int(recipe.amax_history_len),
                "amax_compute_algo": "max" if callable(algo) else algo, "reduce_amax": bool(recipe.reduce_amax),
                "functions": functions}
    native["backward_override"] = recipe.backward_override
    if kind is MXFP8BlockScaling:
        return {"kind": "mxfp8", **native, "square_weights": bool(recipe.enable_2d_quantization)}
    if kind is NVFP4BlockScaling:
        return {"kind": "nvfp4", **native, "input": tuple(_nvfp4_rules(recipe, "fp4_quant_fwd_inp")),
                "weight": tuple(_nvfp4_rules(recipe, "fp4_quant_fwd_weight")), "gradient": tuple(_nvfp4_rules(recipe, "fp4_quant_bwd_grad"))}
    if kind is CustomRecipe:
        return {"kind": "factory", **native, "recipe": recipe}
    params = _one_quantisation(recipe)
    return {"kind": "current" if kind is Float8CurrentScaling else "block", **native, "pow2_scale": bool(params.power_2_scale),
            "amax_epsilon": float(params.amax_epsilon)}
