"""FP8 with explicit state: a tensor's quantiser is a pytree. It is an argument of the differentiated function, and its updated state is returned as
its gradient.

A matrix product has three quantisers, for its input, its kernel and its output's gradient (QuantizerSet). With delayed scaling they contain a scale
and an amax history. The gradient of a loss with respect to them is not a derivative, but the state after the step, which replaces the old state
(update_collections). JAX sums gradients, so a state used twice in one step would be wrong: give each product its own state, or use accumulating().
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from typing import Any, Callable, Iterator, Mapping, Optional, Tuple

import jax
import jax.numpy as jnp
import numpy as np

from te_fl.common import recipe as recipes
from te_fl.errors import Unsupported
from te_fl.jax import _joined, _partition, ops, sharding
from te_fl.jax._joined import accumulating, add_gradients
from te_fl.jax._varying import tracks_axes, largest, largest_over
from te_fl.jax._tensors import Quantized, QuantizedOutput

__all__ = ["NVTE_FP8_COLLECTION_NAME", "Quantized", "QuantizedOutput", "Quantizer", "QuantizerSet", "autocast", "create_set", "fp8_autocast",
           "accumulating", "add_gradients", "get_global_quantize_recipe", "noop_quantizer_set", "random_state", "update_collections"]

NVTE_FP8_COLLECTION_NAME = "fp8_metas"
_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def random_state(key: jax.Array) -> jax.Array:
    """Converts a jax.random key to an op's random state: uint32 [4], the seed and the offset 0."""
    return jnp.concatenate([jax.random.bits(key, (2,), jnp.uint32), jnp.zeros((2,), jnp.uint32)])


def _positive(amax: jax.Array) -> jax.Array:
    return (amax > 0) & jnp.isfinite(amax)


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """The quantisation settings of one tensor. scale (FP32 [1]) and amax_history (FP32 [length]) are delayed scaling's state; None: the scale is
    computed from the values.
    """

    scale: Optional[jax.Array] = None
    amax_history: Optional[jax.Array] = None
    dtype: str = "float8_e4m3fn"
    scaling: str = "tensor"
    margin: float = 0.0
    amax_compute_algo: str = "max"
    pow2_scale: bool = False
    amax_epsilon: float = 0.0
    shared: bool = False  # true for a state that read() has converted; then after() returns scale 0 if the tensor had no amax

    @property
    def delayed(self) -> bool:
        return self.scale is not None

    @property
    def cut(self) -> bool:
        """True if the scale of a sharded tensor must be computed from the whole tensor before quantisation (current scaling). Inside shard_map the
        mesh resource names the axes of the sharding.
        """
        return self.scaling == "tensor" and not self.delayed and bool(_partition.may_cut_programs() or sharding.named_manual_axes())

    def output(self, rowwise: bool = True, columnwise: bool = True, spread: Optional[Tuple[int, int]] = None) -> QuantizedOutput:
        # A scale of 0 marks a tensor whose matrix product did not contribute to the loss; 1 in its place keeps the computation finite.
        scale = jnp.where(self.scale == 0, 1.0, self.scale) if self.delayed else None
        return QuantizedOutput(jnp.dtype(self.dtype), self.scaling, rowwise, columnwise, scale, self.pow2_scale, self.amax_epsilon, spread=spread)

    def derived_scale(self, x: jax.Array) -> jax.Array:
        """The scale computed from the amax of x, FP32 [1]; see docs/numerics.md, "Scale from amax"."""
        amax = largest_over(jnp.nanmax(jnp.abs(x.astype(jnp.float32)), initial=0.0), sharding.named_manual_axes())
        amax = jnp.maximum(amax, self.amax_epsilon).reshape(1)
        scale = jnp.minimum(_LARGEST[self.dtype] / amax, jnp.finfo(jnp.float32).max)
        if self.pow2_scale:
            bits = jax.lax.bitcast_convert_type(scale, jnp.uint32) & jnp.uint32(0xFF800000)
            scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
        return jnp.where(_positive(amax), scale, 1.0)

    def quantize(self, x: jax.Array, rowwise: bool = True, columnwise: bool = True, spread: Optional[Tuple[int, int]] = None) -> Quantized:
        """spread: the numbers of x's dimensions that form rows and columns. None: all but the last are rows, and they form a single dimension in the
        column-wise codes.
        """
        output = self.output(rowwise, columnwise, spread)
        if self.cut:
            output = dataclasses.replace(output, scale=self.derived_scale(x), pow2_scale=False, amax_epsilon=0.0)
        both = {} if spread is None else {"input": spread, "output": spread}
        return ops.run("quantize", both, input=x, output=output.of_shape(x.shape))

    def after(self, amax: Optional[jax.Array]) -> "Quantizer":
        """The state after a step with this amax; see docs/numerics.md, "Delayed scaling"."""
        if not self.delayed:
            return self
        if not tracks_axes():
            raise Unsupported(
                "te_fl.jax: delayed scaling under pmap or shard_map(check_vma=False) is not supported: JAX does not say there which arrays differ by "
                "device, so the state would differ too, or be added up over the devices; leave check_vma on, take jit with sharded arrays, or a "
                "recipe without state such as Float8CurrentScaling")
        amax = largest(amax, self.scale)  # inside shard_map the shards of a tensor share one scale
        last = jnp.where(amax != 0, amax, self.amax_history[:1])
        rows = jnp.concatenate([last, self.amax_history[1:]])
        most = last if self.amax_compute_algo == "most_recent" else jnp.max(rows, keepdims=True)
        scale = jnp.minimum(_LARGEST[self.dtype] * 2.0**-self.margin / most, jnp.finfo(jnp.float32).max)
        rolled = jnp.concatenate([self.amax_history[1:], last]).at[0].set(0.0)
        # Without an amax, history and scale are unchanged.
        scale = jnp.where((last != 0) & _positive(most), scale, jnp.where(self.scale == 0, 1.0, self.scale))
        if self.shared:
            scale = jnp.where(last != 0, scale, 0.0)
        return dataclasses.replace(self, scale=scale, amax_history=jnp.where(last != 0, rolled, self.amax_history))

    def read(self) -> "Quantizer":
        """Converts state in accumulating()'s special dtype to FP32."""
        if not self.delayed or not jax.dtypes.issubdtype(self.scale.dtype, jax.dtypes.extended):
            return self
        scale, history = _joined.read((self.scale, self.amax_history))
        return dataclasses.replace(self, scale=scale, amax_history=history, shared=True)


jax.tree_util.register_dataclass(Quantizer, data_fields=["scale", "amax_history"], meta_fields=[
    "dtype", "scaling", "margin", "amax_compute_algo", "pow2_scale", "amax_epsilon", "shared"])


@dataclasses.dataclass(frozen=True)
class QuantizerSet:
    """The quantisers of one matrix product. All None: the product is computed in high precision.

    checkpoint_name: the name that policies of jax.checkpoint know the quantised input and kernel by, as jax.ad_checkpoint.checkpoint_name gives it.
    """

    x: Optional[Quantizer] = None
    kernel: Optional[Quantizer] = None
    dgrad: Optional[Quantizer] = None
    split_accumulator: Tuple[bool, bool, bool] = (False, True, True)  # for y, the input's gradient and the kernel's gradient
    checkpoint_name: Optional[str] = None

    @property
    def active(self) -> bool:
        return self.x is not None

    def read(self) -> "QuantizerSet":
        """Applies Quantizer.read() to each."""
        return dataclasses.replace(self, x=self.x.read(), kernel=self.kernel.read(), dgrad=self.dgrad.read()) if self.active else self


jax.tree_util.register_dataclass(QuantizerSet, data_fields=["x", "kernel", "dgrad"], meta_fields=["split_accumulator", "checkpoint_name"])
noop_quantizer_set = QuantizerSet()


def _refuse(recipe: recipes.Recipe, field: str, way_out: str) -> None:
    raise Unsupported(f"te_fl.jax: {type(recipe).__name__}({field}={getattr(recipe, field)!r}) is not supported; {way_out}")


def _check(recipe: Any) -> None:
    """Raises Unsupported for unsupported settings, naming the field."""
    if not isinstance(recipe, recipes.Recipe):
        raise TypeError(f"the recipe is {recipe!r}; it is an object of te_fl.common.recipe, such as DelayedScaling()")
    if not isinstance(recipe, (recipes.DelayedScaling, recipes.Float8CurrentScaling, recipes.Float8BlockScaling, recipes.MXFP8BlockScaling)):
        raise Unsupported(f"te_fl.jax has no {type(recipe).__name__}; it has DelayedScaling, Float8CurrentScaling, "
                                  "Float8BlockScaling and MXFP8BlockScaling")
    if recipe.fp8_dpa or recipe.fp8_mha:
        _refuse(recipe, "fp8_dpa" if recipe.fp8_dpa else "fp8_mha", "attention is in high precision: leave it False")
    if recipe.backward_override is not None:
        _refuse(recipe, "backward_override", "leave it None")
    if isinstance(recipe, recipes.DelayedScaling):
        if recipe.amax_compute_algo not in ("max", "most_recent"):
            _refuse(recipe, "amax_compute_algo", "give 'max' or 'most_recent'")
        if recipe.scaling_factor_compute_algo is not None:
            _refuse(recipe, "scaling_factor_compute_algo", "leave it None")
        if not recipe.reduce_amax:
            _refuse(recipe, "reduce_amax", "an amax is that of the whole tensor: leave it True")
    if isinstance(recipe, recipes.MXFP8BlockScaling) and (recipe.margin != 0 or recipe.enable_2d_quantization):
        _refuse(recipe, "margin" if recipe.margin else "enable_2d_quantization", "leave the default")
    if isinstance(recipe, recipes.Float8BlockScaling):
        for field, wanted in (("x_block_scaling_dim", 1), ("w_block_scaling_dim", 2), ("grad_block_scaling_dim", 1)):
            if getattr(recipe, field) != wanted:
                _refuse(recipe, field, f"te_fl.jax has {wanted}")


def _same_params(params: Any) -> dict:
    return {"pow2_scale": params.power_2_scale, "amax_epsilon": params.amax_epsilon}


def create_set(recipe: Optional[recipes.Recipe], state: Optional[Callable[[str], Tuple[jax.Array, jax.Array]]] = None) -> QuantizerSet:
    """The quantisers of one matrix product under a recipe; None: high precision.

    state(name) for "x", "kernel" and "grad" returns scale and amax history of delayed scaling; omitted: initial state.
    """
    if recipe is None:
        return noop_quantizer_set
    _check(recipe)
    hybrid = recipe.fp8_format is recipes.Format.HYBRID
    dtypes = {"x": "float8_e4m3fn", "kernel": "float8_e4m3fn", "grad": "float8_e5m2" if hybrid else "float8_e4m3fn"}
    if isinstance(recipe, recipes.DelayedScaling):
        fresh = lambda _: (jnp.ones((1,), jnp.float32), jnp.zeros((recipe.amax_history_len,), jnp.float32))  # noqa: E731
        made = [Quantizer(*(state or fresh)(name), dtype=dtype, margin=float(recipe.margin), amax_compute_algo=recipe.amax_compute_algo)
                for name, dtype in dtypes.items()]
        return QuantizerSet(*made)
    if isinstance(recipe, recipes.MXFP8BlockScaling):
        return QuantizerSet(*[Quantizer(dtype=dtype, scaling="mxfp8") for dtype in dtypes.values()], split_accumulator=(True,) * 3)
    params = {"x": recipe.fp8_quant_fwd_inp, "kernel": recipe.fp8_quant_fwd_weight, "grad": recipe.fp8_quant_bwd_grad}
    products = (recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad)
    block = {"x": "block_1x128", "kernel": "block_128x128", "grad": "block_1x128"}
    tensor = isinstance(recipe, recipes.Float8CurrentScaling)
    made = [Quantizer(dtype=dtype, scaling="tensor" if tensor else block[name], **_same_params(params[name])) for name, dtype in dtypes.items()]
    return QuantizerSet(*made, split_accumulator=tuple(p.use_split_accumulator for p in products))


class _Entered:
    """A snapshot of a recipe when its autocast was entered. Snapshots with equal fields are equal, since they give equal programs."""

    def __init__(self, recipe: recipes.Recipe):
        self.recipe = copy.copy(recipe)
        self._key = (type(recipe), tuple(sorted(vars(recipe).items())))

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Entered) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


# The recipe of the calling thread, as part of JAX's trace cache key. Otherwise JAX would reuse a scan body, checkpointed function or jitted function
# that was traced under another recipe.
_entered = jax.make_user_context(None)


def get_global_quantize_recipe() -> Optional[recipes.Recipe]:
    """A snapshot of the recipe of the thread's innermost autocast; None: high precision."""
    entered = _entered.value
    return None if entered is None else entered.recipe


def _check_enabled(function: str, argument: str, enabled: Any) -> None:
    """Raises TypeError unless `enabled` is a bool. A recipe in its place would count as true, and the default recipe would be used."""
    if isinstance(enabled, (bool, np.bool_)):
        return
    kind = enabled if isinstance(enabled, type) else type(enabled)
    if issubclass(kind, recipes.Recipe):
        raise TypeError(f"te_fl.jax: {function}(enabled={kind.__name__}(..)): enabled is True or False; a recipe is given by name: "
                        f"{function}(enabled=True, {argument}={kind.__name__}(..))")
    raise TypeError(f"te_fl.jax: {function}(enabled={enabled!r}): enabled is True or False")


@contextlib.contextmanager
def autocast(enabled: bool = False, recipe: Optional[recipes.Recipe] = None,
             mesh_resource: Optional[sharding.MeshResource] = None) -> Iterator[None]:
    """Modules traced inside, on this thread, quantise by the recipe (None: DelayedScaling()), on the mesh axes that mesh_resource names.

    A compiled function is traced again if it is called under another recipe or mesh resource.
    """
    _check_enabled("autocast", "recipe", enabled)
    chosen = (recipe if recipe is not None else recipes.DelayedScaling()) if enabled else None
    if chosen is not None:
        _check(chosen)
    with _entered(None if chosen is None else _Entered(chosen)), sharding.global_shard_guard(mesh_resource):
        yield


def fp8_autocast(enabled: bool = False, fp8_recipe: Optional[recipes.Recipe] = None,
                 mesh_resource: Optional[sharding.MeshResource] = None):
    """An older name of autocast."""
    _check_enabled("fp8_autocast", "fp8_recipe", enabled)
    warnings.warn("fp8_autocast is the older name of autocast(enabled=.., recipe=.., mesh_resource=..)", DeprecationWarning, stacklevel=2)
    return autocast(enabled, fp8_recipe, mesh_resource)


def update_collections(new: Mapping, original: Mapping) -> dict:
    """Merges `new` into `original`, recursively; keys that `original` lacks are ignored.

    A delayed scaling state whose new scale is 0 keeps its old value: the matrix product with this state did not contribute to the loss.
    """
    made = dict(original)
    for key, value in new.items():
        if key in made:
            made[key] = update_collections(value, made[key]) if isinstance(value, Mapping) else value
    for key in [key for key in made if key.endswith("_scale")]:
        history = key.removesuffix("scale") + "amax_history"
        if key in new and history in new and history in made:
            unused = jnp.asarray(new[key]) == 0
            made.update({name: jnp.where(unused, original[name], new[name]) for name in (key, history)})
    return made
