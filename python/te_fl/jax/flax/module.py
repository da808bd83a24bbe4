"""Norms and linear layers as Flax modules. Parameter names and shapes are Transformer Engine's."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
import operator
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence, Tuple, Union

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from te_fl.errors import InvalidArgument, Unsupported, did_you_mean
from te_fl.jax.activation import activation, canonicalize_activation, nearest
from te_fl.jax.attention import AttnSoftmaxType
from te_fl.jax.dense import dense
from te_fl.jax.layernorm import canonicalize_norm_type, layernorm
from te_fl.jax.layernorm_dense import layernorm_dense
from te_fl.jax.layernorm_mlp import layernorm_mlp
from te_fl.jax.quantize import NVTE_FP8_COLLECTION_NAME, QuantizerSet, create_set, get_global_quantize_recipe
from te_fl.jax.sharding import with_sharding_constraint_by_logical_axes
from te_fl.jax.softmax import SoftmaxFusionType, softmax

Initializer = Callable[..., jax.Array]
Axes = Optional[Tuple[Optional[str], ...]]


def refuse(module: nn.Module, way_out: str, **options: Any) -> None:
    """Raises Unsupported for the first argument that is not None."""
    for name, value in options.items():
        if value is not None:
            raise Unsupported(f"te_fl.jax: {type(module).__name__}({name}={value!r}) is not supported; {way_out}")


def as_tuple(value: Union[int, Iterable[int]]) -> Tuple[int, ...]:
    return tuple(value) if isinstance(value, Iterable) else (value,)


def check_sizes(module: nn.Module, **sizes: Any) -> None:
    """Raises InvalidArgument for the first value that is not a positive size."""
    for name, value in sizes.items():
        for one in as_tuple(value):
            if isinstance(one, bool) or not isinstance(one, numbers.Integral) or one < 1:
                raise InvalidArgument(f"{type(module).__name__}({name}={value!r}): it is a whole number of elements, 1 or more")


def _named(function: Callable, what: str) -> Callable:
    """Wraps a module's function: raises TypeError for an unknown keyword, naming the nearest known one."""
    known = {name: p.kind for name, p in inspect.signature(function).parameters.items() if name != "self"}

    @functools.wraps(function)
    def named(self, *args: Any, **kwargs: Any) -> Any:
        wrong = next((name for name in kwargs if name not in known), None)
        if wrong is not None and inspect.Parameter.VAR_KEYWORD not in known.values():
            raise TypeError(f"{type(self).__name__}{what}() has no argument {wrong!r}{did_you_mean(wrong, known)}; it takes {', '.join(known)}")
        return function(self, *args, **kwargs)

    return named


class Module(nn.Module):
    """Base class of te-fl's modules and of user-defined modules derived from them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "__call__" in vars(cls):
            cls.__call__ = _named(vars(cls)["__call__"], ".__call__")
        super().__init_subclass__(**kwargs)
        cls.__init__ = _named(cls.__init__, "")


_FLAX = tuple(n for n in dir(nn.activation) if n.islower() and not n.startswith("_") and callable(getattr(nn.activation, n)) and n != "compact")


def check_activations(module: nn.Module, name: str) -> None:
    """Raises InvalidArgument for names that are neither te-fl's nor Flax's activations."""
    options = getattr(module, name)
    what = f"{type(module).__name__}({name}={options!r})"
    if isinstance(options, str) or not tuple(options):
        raise InvalidArgument(f"{what}: it is a tuple of one or two activations, as ('gelu',) or ('silu', 'linear')")
    try:
        canonicalize_activation(tuple(options))
    except ValueError:
        wrong = [a for a in options if not callable(a) and a not in (*_FLAX, "linear")]
        if wrong:
            raise InvalidArgument(f"{what}: {wrong[0]!r} is no activation by itself{nearest(wrong[:1], _FLAX)}; it has the combinations of "
                             "te_fl.jax.activation, and any of functions, names of flax.linen's, and 'linear'") from None


def default_scale_init(scale_init: Optional[Initializer], zero_centered_gamma: bool) -> Initializer:
    return scale_init or (nn.initializers.zeros if zero_centered_gamma else nn.initializers.ones)


def default_kernel_init(dtype: Any, distribution: str = "truncated_normal") -> Initializer:
    return nn.initializers.variance_scaling(1.0, "fan_in", distribution, dtype=dtype)


def _param(module: nn.Module, name: str, init: Initializer, axes: Axes, *args: Any) -> jax.Array:
    return module.param(name, nn.with_logical_partitioning(init, axes), *args)


def norm_parameters(module: nn.Module, norm_type: str, width: int, inits: Tuple[Initializer, Initializer], axes: Tuple[Axes, Axes], dtype: Any):
    """Creates scale and, for layernorm, ln_bias."""
    scale = _param(module, "scale", inits[0], axes[0], (width,), module.dtype).astype(dtype)
    if canonicalize_norm_type(norm_type) == "rmsnorm":
        return scale, None
    return scale, _param(module, "ln_bias", inits[1], axes[1], (width,), module.dtype).astype(dtype)


def low_rank(module: nn.Module, prefix: str, x: jax.Array, axis: Tuple[int, ...], features: Tuple[int, ...], a_init: Initializer) -> jax.Array:
    """The low-rank adaptation (LoRA) of a linear layer: x a b * alpha / rank."""
    rank, alpha = module.low_rank_adaptation_dim, module.low_rank_adaptation_alpha
    shape = (*[x.shape[d] for d in axis], *features[:-1], rank)
    a = _param(module, f"{prefix}lora_a_kernel", a_init, (None,) * len(shape), shape, module.dtype).astype(x.dtype)
    shape = (*features[:-1], rank, features[-1])
    b = _param(module, f"{prefix}lora_b_kernel", nn.initializers.zeros, (None,) * len(shape), shape, module.dtype).astype(x.dtype)
    inner, outer = "ijklm"[:len(axis)], "nopqr"[:len(features)]
    last = [d % x.ndim for d in axis]
    x = jnp.moveaxis(x, last, range(x.ndim - len(last), x.ndim))
    y = jnp.einsum(f"...{inner},{inner}{outer[:-1]}s,{outer[:-1]}s{outer[-1]}->...{outer}", x, a, b)
    return y if alpha is None else y * (alpha / rank)


def dropout(x: jax.Array, rate: float, dims: Sequence[int], rng_name: str, deterministic: bool) -> jax.Array:
    """Flax's Dropout, for use in a compact module. Over explicit axes Flax's Dropout refuses sharded arrays; there this function
    applies Dropout to an array of ones and multiplies x by the result.
    """
    module = nn.Dropout(rate, broadcast_dims=dims, rng_collection=rng_name)
    if deterministic or rate == 0 or all(axis is None for axis in jax.typeof(x).sharding.spec):
        return module(x, deterministic=deterministic)
    return (x * module(jnp.ones(x.shape, jnp.float32), deterministic=False)).astype(x.dtype)


class Softmax(Module):
    """Scaled softmax of scores [batch, heads, queries, keys]."""

    scale_factor: float = 1.0
    softmax_fusion_type: SoftmaxFusionType = SoftmaxFusionType.SCALED
    softmax_type: AttnSoftmaxType = AttnSoftmaxType.VANILLA_SOFTMAX

    @nn.compact
    def __call__(self, inputs: jax.Array, mask: Optional[jax.Array] = None, bias: Optional[jax.Array] = None,
                 softmax_offset: Optional[jax.Array] = None) -> jax.Array:
        """`mask` is used only by the softmax types with a mask."""
        if self.softmax_type is not AttnSoftmaxType.VANILLA_SOFTMAX or softmax_offset is not None:
            raise Unsupported(f"te_fl.jax: Softmax(softmax_type={self.softmax_type}) is not supported; DotProductAttention has it")
        logits = inputs if bias is None else inputs + bias.astype(inputs.dtype)
        masked = self.softmax_fusion_type is SoftmaxFusionType.SCALED_MASKED
        return softmax(logits, mask if masked else None, self.scale_factor, self.softmax_fusion_type)


class LayerNorm(Module):
    """Layer or RMS normalisation over the last dimension."""

    epsilon: float = 1e-6
    layernorm_type: str = "layernorm"
    zero_centered_gamma: bool = False
    scale_init: Optional[Initializer] = None
    scale_axes: Axes = ("embed",)
    bias_init: Initializer = nn.initializers.zeros
    bias_axes: Axes = ("embed",)
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        inits = (default_scale_init(self.scale_init, self.zero_centered_gamma), self.bias_init)
        scale, bias = norm_parameters(self, self.layernorm_type, x.shape[-1], inits, (self.scale_axes, self.bias_axes), x.dtype)
        return layernorm(x, scale, bias, self.layernorm_type, self.zero_centered_gamma, self.epsilon)


class TransformerEngineBase(Module):
    """Base class of modules with matrix products. The state of their quantisers is in the collection "fp8_metas"."""

    def generate_quantizer_set(self, postfix: str = "", variable_collection: Optional[str] = None,
                               quantization_checkpoint_name: Optional[str] = None, fp8_recipe: Any = None,
                               n_groups: Optional[int] = None) -> QuantizerSet:
        refuse(self, "leave it None", n_groups=n_groups)
        recipe = fp8_recipe if fp8_recipe is not None else get_global_quantize_recipe()
        collection = variable_collection or NVTE_FP8_COLLECTION_NAME

        def state(name: str) -> Tuple[jax.Array, jax.Array]:
            scale = self.variable(collection, f"{name}{postfix}_scale", jnp.ones, (1,), jnp.float32)
            history = self.variable(collection, f"{name}{postfix}_amax_history", jnp.zeros, (recipe.amax_history_len,), jnp.float32)
            if history.value.shape != (recipe.amax_history_len,):
                raise InvalidArgument(f"{type(self).__name__}: the recipe has amax_history_len={recipe.amax_history_len}, and the variable "
                                 f"{name}{postfix}_amax_history of the collection {collection!r} has shape {history.value.shape}; state keeps its "
                                 "shape from step to step: give the recipe that length, or initialise the collection under this recipe")
            return scale.value, history.value

        return dataclasses.replace(create_set(recipe, state), checkpoint_name=quantization_checkpoint_name)


class DenseGeneral(TransformerEngineBase):
    """A linear layer: contracts the input's axes `axis` with a kernel [.., features]."""

    features: Union[Iterable[int], int]
    kernel_init: Optional[Initializer] = None
    kernel_axes: Axes = ()
    use_bias: bool = True
    bias_init: Initializer = nn.initializers.zeros
    bias_axes: Axes = ()
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: Optional[float] = None
    axis: Union[Iterable[int], int] = -1
    dtype: Any = jnp.float32
    input_axes: Axes = ()
    transpose_batch_sequence: bool = False
    quantization_checkpoint_name: Optional[str] = None

    def __post_init__(self):
        check_sizes(self, features=self.features)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        features = as_tuple(self.features)
        axis = tuple(a % inputs.ndim for a in as_tuple(self.axis))
        init = self.kernel_init or default_kernel_init(self.dtype)
        shape = tuple(inputs.shape[a] for a in axis) + features
        if self.kernel_axes and len(self.kernel_axes) != len(shape):
            raise InvalidArgument(f"kernel_axes {self.kernel_axes} names {len(self.kernel_axes)} axes, the kernel {shape} has {len(shape)}")
        kernel = _param(self, "kernel", init, self.kernel_axes, shape, self.dtype)
        bias = _param(self, "bias", self.bias_init, self.bias_axes, features, self.dtype).astype(inputs.dtype) if self.use_bias else None
        quantizers = self.generate_quantizer_set(quantization_checkpoint_name=self.quantization_checkpoint_name)
        y = dense(inputs, kernel, bias, contracting_dims=(axis, tuple(range(len(axis)))), input_axes=self.input_axes,
                  kernel_axes=self.kernel_axes, quantizer_set=quantizers, transpose_batch_sequence=self.transpose_batch_sequence)
        if self.enable_low_rank_adaptation:
            y = y + low_rank(self, "", inputs, axis, features, init)
        return y


class LayerNormDenseGeneral(TransformerEngineBase):
    """A norm followed by a linear layer over the last dimension. Returns (the result, the norm's result or None)."""

    features: Union[Iterable[int], int]
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Optional[Initializer] = None
    scale_axes: Axes = ("embed",)
    ln_bias_init: Initializer = nn.initializers.zeros
    ln_bias_axes: Axes = ("embed",)
    kernel_init: Optional[Initializer] = None
    kernel_axes: Axes = ()
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    bias_axes: Axes = ()
    return_layernorm_output: bool = False
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: Optional[float] = None
    axis: Union[Iterable[int], int] = -1
    dtype: Any = jnp.float32
    layernorm_input_axes: Axes = None
    dot_input_axes: Axes = None
    depth_scaling: Optional[float] = None
    transpose_batch_sequence: bool = False
    quantization_checkpoint_name: Optional[str] = None

    def __post_init__(self):
        check_sizes(self, features=self.features)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> Tuple[jax.Array, Optional[jax.Array]]:
        if as_tuple(self.axis) not in ((-1,), (inputs.ndim - 1,)):
            raise Unsupported(f"LayerNormDenseGeneral(axis={self.axis}) is not supported; it has the last dimension, axis=-1")
        features, width, dtype = as_tuple(self.features), inputs.shape[-1], inputs.dtype
        norm = {"norm_type": self.layernorm_type, "zero_centered_gamma": self.zero_centered_gamma, "epsilon": self.epsilon}
        separate = self.return_layernorm_output or self.enable_low_rank_adaptation
        y = inputs
        if self.enable_layernorm:
            inits = (default_scale_init(self.scale_init, self.zero_centered_gamma), self.ln_bias_init)
            scale, ln_bias = norm_parameters(self, self.layernorm_type, width, inits, (self.scale_axes, self.ln_bias_axes), dtype)
            if separate:
                y = layernorm(with_sharding_constraint_by_logical_axes(y, self.layernorm_input_axes), scale, ln_bias, **norm)
        init = self.kernel_init or default_kernel_init(self.dtype)
        kernel = _param(self, "kernel", init, self.kernel_axes, (width, *features), self.dtype)
        bias = _param(self, "bias", self.bias_init, self.bias_axes, features, self.dtype).astype(dtype) if self.use_bias else None
        quantizers = self.generate_quantizer_set(quantization_checkpoint_name=self.quantization_checkpoint_name)
        shared = {"kernel_axes": self.kernel_axes, "quantizer_set": quantizers, "transpose_batch_sequence": self.transpose_batch_sequence}
        if self.enable_layernorm and not separate:
            z = layernorm_dense(y, kernel, scale, ln_bias, bias, layernorm_input_axes=self.layernorm_input_axes,
                                dot_input_axes=self.dot_input_axes, **norm, **shared)
        else:
            z = dense(y, kernel, bias, contracting_dims=((-1,), (0,)), input_axes=self.dot_input_axes, **shared)
        if self.enable_low_rank_adaptation:
            z = z + low_rank(self, "", y, (-1,), features, init)
        if self.depth_scaling is not None:
            z = z / self.depth_scaling
        return z, y if self.return_layernorm_output else None


class LayerNormMLP(TransformerEngineBase):
    """A norm, a linear layer, activations and a second linear layer. Returns (the result, the norm's result or None)."""

    intermediate_dim: int = 2048
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Optional[Initializer] = None
    scale_axes: Axes = ("embed",)
    ln_bias_init: Initializer = nn.initializers.zeros
    ln_bias_axes: Axes = ("embed",)
    kernel_init: Optional[Initializer] = None
    kernel_axes_1: Axes = ("embed", "act", "mlp")
    kernel_axes_2: Axes = ("mlp", "embed")
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    bias_axes_1: Axes = ("act", "mlp")
    bias_axes_2: Axes = ("embed",)
    return_layernorm_output: bool = False
    activations: Sequence[Union[str, Callable]] = ("gelu",)
    activation_params: Optional[Mapping] = None
    intermediate_dropout_rng_name: str = "dropout"
    intermediate_dropout_rate: float = 0.0
    intermediate_hidden_dropout_dims: Sequence[int] = ()
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: Optional[float] = None
    axis: Union[Iterable[int], int] = -1
    dtype: Any = jnp.float32
    layernorm_input_axes: Axes = None
    dot_1_input_axes: Axes = None
    dot_2_input_axes: Axes = None
    ffn1_ckpt_name: str = "ffn1"
    ffn2_ckpt_name: str = "ffn2"
    transpose_batch_sequence: bool = False
    quantization_checkpoint_name: Optional[str] = None

    def __post_init__(self):
        check_sizes(self, intermediate_dim=self.intermediate_dim)
        check_activations(self, "activations")
        super().__post_init__()

    def _parameters(self, width: int, dtype: Any):
        count, init = len(tuple(self.activations)), self.kernel_init or default_kernel_init(self.dtype)

        def stacked(key, shape, kind):
            return jnp.stack([init(one, (shape[0], shape[2]), kind) for one in jax.random.split(key, count)], axis=-2)

        first = _param(self, "wi_kernel", stacked, self.kernel_axes_1, (width, count, self.intermediate_dim), self.dtype)
        second = _param(self, "wo_kernel", init, self.kernel_axes_2, (self.intermediate_dim, width), self.dtype)
        if not self.use_bias:
            return (first, second), (None, None)
        bias_1 = _param(self, "wi_bias", self.bias_init, self.bias_axes_1, (count, self.intermediate_dim), self.dtype)
        bias_2 = _param(self, "wo_bias", self.bias_init, self.bias_axes_2, (width,), self.dtype)
        return (first, second), (bias_1.astype(dtype), bias_2.astype(dtype))

    def _activate(self, x: jax.Array) -> jax.Array:
        """x [.., activations, F]. Uses te-fl's op if there is one for this combination, else the named functions."""
        try:
            return activation(x, canonicalize_activation(tuple(self.activations)), act_params=self.activation_params)
        except ValueError:
            if self.activation_params:
                raise
        named = [getattr(nn, a) if isinstance(a, str) and a != "linear" else a for a in self.activations]
        parts = [x[..., i, :] if f == "linear" else f(x[..., i, :]) for i, f in enumerate(named)]
        return functools.reduce(operator.mul, parts).astype(x.dtype)

    def _one_by_one(self, x: jax.Array, kernels, biases, quantizers, deterministic: bool) -> jax.Array:
        """Computes the MLP step by step, for features that the fused ops lack: low-rank adaptation, dropout, user-defined
        activations.
        """
        features = (len(tuple(self.activations)), self.intermediate_dim)
        shared = {"contracting_dims": ((-1,), (0,)), "transpose_batch_sequence": self.transpose_batch_sequence}
        init = self.kernel_init or default_kernel_init(self.dtype)
        y = dense(x, kernels[0], biases[0], input_axes=self.dot_1_input_axes, kernel_axes=self.kernel_axes_1, quantizer_set=quantizers[0], **shared)
        if self.enable_low_rank_adaptation:
            y = y + low_rank(self, "wi_", x, (-1,), features, init)
        z = self._activate(checkpoint_name(y, self.ffn1_ckpt_name))
        z = dropout(z, self.intermediate_dropout_rate, self.intermediate_hidden_dropout_dims, self.intermediate_dropout_rng_name, deterministic)
        out = dense(z, kernels[1], biases[1], input_axes=self.dot_2_input_axes, kernel_axes=self.kernel_axes_2, quantizer_set=quantizers[1], **shared)
        if self.enable_low_rank_adaptation:
            out = out + low_rank(self, "wo_", z, (-1,), (x.shape[-1],), init)
        return checkpoint_name(out, self.ffn2_ckpt_name)

    @nn.compact
    def __call__(self, inputs: jax.Array, deterministic: bool = False) -> Tuple[jax.Array, Optional[jax.Array]]:
        if as_tuple(self.axis) not in ((-1,), (inputs.ndim - 1,)):
            raise Unsupported(f"LayerNormMLP(axis={self.axis}) is not supported; it has the last dimension, axis=-1")
        name = self.quantization_checkpoint_name
        quantizers = [self.generate_quantizer_set(postfix, quantization_checkpoint_name=name) for postfix in ("_0", "_1")]
        norm = {"norm_type": self.layernorm_type, "zero_centered_gamma": self.zero_centered_gamma, "epsilon": self.epsilon}
        if self.enable_layernorm:
            inits = (default_scale_init(self.scale_init, self.zero_centered_gamma), self.ln_bias_init)
            scale, ln_bias = norm_parameters(self, self.layernorm_type, inputs.shape[-1], inits, (self.scale_axes, self.ln_bias_axes),
                                             inputs.dtype)
        kernels, biases = self._parameters(inputs.shape[-1], inputs.dtype)
        try:
            known = canonicalize_activation(tuple(self.activations))
        except ValueError:
            known = None
        dropout = self.intermediate_dropout_rate > 0 and not deterministic
        if self.enable_layernorm and known and not (dropout or self.enable_low_rank_adaptation or self.return_layernorm_output):
            out = layernorm_mlp(inputs, scale, ln_bias, kernels, biases, norm_input_axes=self.layernorm_input_axes,
                                dot_1_input_axes=self.dot_1_input_axes, dot_2_input_axes=self.dot_2_input_axes,
                                kernel_1_axes=self.kernel_axes_1, kernel_2_axes=self.kernel_axes_2, ffn1_ckpt_name=self.ffn1_ckpt_name,
                                ffn2_ckpt_name=self.ffn2_ckpt_name, activation_type=known, activation_params=self.activation_params,
                                quantizer_sets=tuple(quantizers), transpose_batch_sequence=self.transpose_batch_sequence, **norm)
            return out, None
        y = inputs
        if self.enable_layernorm:
            y = layernorm(with_sharding_constraint_by_logical_axes(y, self.layernorm_input_axes), scale, ln_bias, **norm)
        out = self._one_by_one(y, kernels, biases, quantizers, deterministic)
        return out, y if self.return_layernorm_output else None


def wrap_function_in_te_state_module(f: Callable, quantization_recipe: Any, name: Optional[str] = None,
                                     quantization_checkpoint_name: Optional[str] = None) -> type:
    """Makes a module class that calls f(generate_quantizer_set, ..). The quantisers' state is in the collection "_overwrite_with_gradient"."""

    class Wrapped(TransformerEngineBase):
        @nn.compact
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            def generate(postfix: str = "", n_groups: Optional[int] = None) -> QuantizerSet:
                return self.generate_quantizer_set(postfix, "_overwrite_with_gradient", quantization_checkpoint_name, quantization_recipe, n_groups)

            return f(generate, *args, **kwargs)

    Wrapped.__name__ = Wrapped.__qualname__ = f"TEWrapper_{name or f.__name__}"
    return Wrapped


def make_dot_general_cls(quantization_recipe: Any) -> type:
    """Makes a module class for Flax's own layers: nn.Dense(.., dot_general=make_dot_general_cls(recipe)())."""

    def dot_general(generate_quantizer_set: Callable, x: jax.Array, kernel: jax.Array, dims: Any, **rest: Any) -> jax.Array:
        contracting, batched = dims
        if any(batched):
            raise Unsupported(f"te_fl.jax: dot_general with batch dimensions {batched} is not supported; it has products without")
        for option, value in rest.items():
            if value is not None and not (option == "preferred_element_type" and jnp.dtype(value) == x.dtype):
                raise Unsupported(f"te_fl.jax: dot_general({option}={value!r}) is not supported; leave it None")
        return dense(x, kernel, contracting_dims=contracting, quantizer_set=generate_quantizer_set())

    return wrap_function_in_te_state_module(dot_general, quantization_recipe, "dot_general")
