"""Attention and the Transformer layer as Flax modules."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any, Callable, Mapping, Optional, Sequence, Tuple, Union

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from te_fl.errors import InvalidArgument
from te_fl.jax.attention import (AttnBiasType, AttnSoftmaxType, QKVLayout, SequenceDescriptor, canonicalize_attn_mask_type, fused_attn)
from te_fl.jax.flax.module import (DenseGeneral, Initializer, LayerNorm, LayerNormDenseGeneral, LayerNormMLP, Module, check_activations,
                                     check_sizes, default_kernel_init, dropout, refuse)
from te_fl.jax.rope import rotary_pos_emb
from te_fl.jax.sharding import (BATCH_AXES, HEAD_AXES, HIDDEN_AXES, HIDDEN_TP_AXES, SEQLEN_AXES, SEQLEN_TP_AXES, W_FSDP_AXES, W_JOINED_AXES,
                                W_NO_SHARD_AXES, W_TP_AXES, get_sharding_map_logic_axis_to_mesh_axis, with_sharding_constraint_by_logical_axes)

Mask = Optional[Union[SequenceDescriptor, jax.Array]]
_LORA_SCOPES = {  # scope names for the projections of q, k and v, of the output, and of the MLP
    "none": (False, False, False), "all": (True, True, True), "qkv_proj": (True, False, False), "output_proj": (False, True, False),
    "mlp": (False, False, True), "exclude_qkv_proj": (False, True, True), "exclude_output_proj": (True, False, True),
    "exclude_mlp": (True, True, False),
}


def _lora_scope(scope: Optional[str]) -> Tuple[bool, bool, bool]:
    name = "none" if scope is None else scope.lower()
    if name not in _LORA_SCOPES:
        raise InvalidArgument(f"low_rank_adaptation_scope is {scope!r}; it is one of {', '.join(_LORA_SCOPES)}")
    return _LORA_SCOPES[name]


def extend_logical_axis_rules(rules: Sequence[Tuple[str, Optional[str]]]) -> Tuple[Tuple[str, Optional[str]], ...]:
    """Adds rules for TransformerLayer's axes, on the mesh of autocast(mesh_resource=..), to Flax's rules."""
    known = dict(rules)
    added = []
    for axis, mesh_axis in get_sharding_map_logic_axis_to_mesh_axis().items():
        if axis not in known:
            added.append((axis, mesh_axis))
        elif known[axis] != mesh_axis:
            raise InvalidArgument(f"the given rule puts {axis!r} on {known[axis]!r}, the mesh resource on {mesh_axis!r}; they must agree")
    return (*rules, *added)


def _leading(transposed: bool, sequence_parallel: bool = False) -> Tuple[str, str]:
    sequence = SEQLEN_TP_AXES if sequence_parallel else SEQLEN_AXES
    return (sequence, BATCH_AXES) if transposed else (BATCH_AXES, sequence)


def check_heads(module: nn.Module) -> None:
    """Raises InvalidArgument for inconsistent numbers of heads and groups."""
    heads, groups = module.num_attention_heads, module.num_gqa_groups
    check_sizes(module, num_attention_heads=heads, **({} if not groups else {"num_gqa_groups": groups}))
    if groups and heads % groups != 0:
        raise InvalidArgument(f"num_attention_heads {heads} is not a multiple of num_gqa_groups {groups}")


class DotProductAttention(Module):
    """softmax(q k^T scale + bias, masked) v. The softmax is always computed in FP32; float32_logits has no effect."""

    head_dim: int
    num_attention_heads: int
    num_gqa_groups: Optional[int] = None
    attention_dropout: float = 0.0
    attn_mask_type: str = "causal"
    attn_bias_type: Optional[str] = None
    dtype: Any = None
    dropout_rng_name: str = "dropout"
    float32_logits: bool = False
    qkv_layout: str = "bshd_bshd_bshd"
    scale_factor: Optional[float] = None
    transpose_batch_sequence: Optional[bool] = None
    window_size: Optional[Tuple[int, int]] = None
    max_segments_per_seq: Optional[int] = 1
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str = ""
    context_parallel_strategy: str = "DEFAULT"
    context_checkpoint_name: str = "context"
    softmax_type: str = "vanilla"
    score_mod: Optional[Callable] = None
    score_mod_bprop: Optional[Callable] = None
    return_max_logit: bool = False

    def __post_init__(self):
        check_sizes(self, head_dim=self.head_dim)
        check_heads(self)
        super().__post_init__()

    @nn.compact
    def __call__(self, query: jax.Array, key: Optional[jax.Array], value: Optional[jax.Array], sequence_descriptor: Mask = None,
                 bias: Optional[jax.Array] = None, *, deterministic: bool = False, mask: Mask = None,
                 score_mod_tensors: Optional[Mapping[str, Any]] = None, score_mod_bprop_tensors: Optional[Mapping[str, Any]] = None) -> jax.Array:
        """sequence_descriptor (older name: mask): for padding masks; other mask types ignore it."""
        if mask is not None and sequence_descriptor is not None:
            raise InvalidArgument("sequence_descriptor and mask are two names of one argument: give one")
        if self.dtype is not None and jnp.dtype(self.dtype) != query.dtype:
            raise InvalidArgument(f"DotProductAttention(dtype={self.dtype}) has no parameters and works in its inputs' dtype, {query.dtype}")
        bias_type = AttnBiasType[self.attn_bias_type.upper()] if self.attn_bias_type is not None else (
            AttnBiasType.NO_BIAS if bias is None else AttnBiasType.POST_SCALE_BIAS)
        softmax_type = AttnSoftmaxType.from_str(self.softmax_type)
        groups = self.num_gqa_groups or self.num_attention_heads
        offset = None
        if softmax_type is AttnSoftmaxType.LEARNABLE_SOFTMAX:
            offset = self.param("softmax_offset", nn.with_logical_partitioning(nn.initializers.zeros, (None, HEAD_AXES, None, None)),
                                (1, self.num_attention_heads, 1, 1), jnp.float32)
        seed = None
        if self.attention_dropout > 0 and not deterministic:
            seed = self.make_rng(self.dropout_rng_name)
        layout = self.qkv_layout.upper()
        if layout not in QKVLayout.__members__:
            raise InvalidArgument(f"qkv_layout is {self.qkv_layout!r}; it is one of {', '.join(known.value for known in QKVLayout)}")
        out = fused_attn((query, key, value), bias, mask if sequence_descriptor is None else sequence_descriptor, seed, bias_type,
                         canonicalize_attn_mask_type(self.attn_mask_type), QKVLayout[layout], softmax_type,
                         1.0 / math.sqrt(self.head_dim) if self.scale_factor is None else self.scale_factor, self.attention_dropout,
                         not deterministic, self.max_segments_per_seq, self.window_size, self.context_parallel_strategy,
                         self.context_parallel_causal_load_balanced, self.context_parallel_axis, softmax_offset=offset,
                         score_mod=self.score_mod, score_mod_bprop=self.score_mod_bprop, score_mod_tensors=score_mod_tensors,
                         score_mod_bprop_tensors=score_mod_bprop_tensors, return_max_logit=self.return_max_logit,
                         transpose_batch_sequence=bool(self.transpose_batch_sequence))
        return checkpoint_name(out, self.context_checkpoint_name)


class MultiHeadAttention(Module):
    """Projections of q, k and v, attention, and the output projection. Returns (the result, the norm's result or None)."""

    head_dim: int
    num_attention_heads: int
    num_gqa_groups: Optional[int] = None
    attention_dropout: float = 0.0
    dropout_rng_name: str = "dropout"
    input_layernorm: bool = True
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    return_layernorm_output: bool = False
    zero_centered_gamma: bool = False
    kernel_init: Optional[Initializer] = None
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    attn_mask_type: str = "causal"
    attn_bias_type: Optional[str] = None
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: Tuple[int, int] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    low_rank_adaptation_scope: str = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: Optional[float] = None
    dtype: Any = jnp.float32
    fuse_qkv_params: bool = True
    transpose_batch_sequence: Optional[bool] = None
    enable_sequence_parallel: bool = False
    scale_attn_logits: bool = False
    scaled_query_init: bool = True
    float32_logits: bool = False
    window_size: Optional[Tuple[int, int]] = None
    softmax_type: str = "vanilla"
    score_mod: Optional[Callable] = None
    score_mod_bprop: Optional[Callable] = None
    # Older names; giving one together with the newer name is an error.
    num_heads: Optional[int] = None
    dropout_rate: Optional[float] = None
    output_layernorm: Optional[bool] = None
    apply_residual_connection_post_layernorm: Optional[bool] = None
    fuse_qkv: Optional[bool] = None

    def __post_init__(self):
        check_sizes(self, head_dim=self.head_dim)
        check_heads(self)
        super().__post_init__()

    def _refuse_older_names(self) -> None:
        for old, new in (("num_heads", "num_attention_heads"), ("dropout_rate", "attention_dropout"), ("output_layernorm", "input_layernorm"),
                         ("apply_residual_connection_post_layernorm", "return_layernorm_output"), ("fuse_qkv", "fuse_qkv_params")):
            refuse(self, f"its newer name is {new}", **{old: getattr(self, old)})

    def _kernel_init(self) -> Initializer:
        return self.kernel_init or default_kernel_init(self.dtype, "normal")

    def _query_init(self, *args: Any) -> jax.Array:
        kernel = self._kernel_init()(*args)
        return kernel / jnp.sqrt(self.head_dim).astype(kernel.dtype) if self.scaled_query_init else kernel

    def _packed_init(self, inits: Sequence[Initializer]) -> Initializer:
        """The initialiser of a kernel [K, n, N] whose n slices have separate initialisers."""
        def init(key, shape, dtype):
            keys = jax.random.split(key, len(inits))
            return jnp.stack([one(k, (shape[0], shape[2]), dtype) for one, k in zip(inits, keys)], axis=-2)
        return init

    def _shared(self) -> dict:
        return {"use_bias": self.use_bias, "bias_init": self.bias_init, "dtype": self.dtype,
                "enable_low_rank_adaptation": _lora_scope(self.low_rank_adaptation_scope)[0],
                "low_rank_adaptation_dim": self.low_rank_adaptation_dim, "low_rank_adaptation_alpha": self.low_rank_adaptation_alpha,
                "transpose_batch_sequence": bool(self.transpose_batch_sequence)}

    def _with_norm(self, features, kernel_axes, bias_axes, kernel_init, return_norm: bool, name: str) -> LayerNormDenseGeneral:
        leading = _leading(bool(self.transpose_batch_sequence), self.enable_sequence_parallel)
        return LayerNormDenseGeneral(
            features=features, enable_layernorm=self.input_layernorm, layernorm_type=self.layernorm_type, epsilon=self.layernorm_epsilon,
            zero_centered_gamma=self.zero_centered_gamma, scale_axes=(W_NO_SHARD_AXES,), ln_bias_axes=(W_NO_SHARD_AXES,),
            kernel_init=kernel_init, kernel_axes=kernel_axes, bias_axes=bias_axes, return_layernorm_output=return_norm,
            layernorm_input_axes=(*leading, HIDDEN_AXES), dot_input_axes=(*_leading(bool(self.transpose_batch_sequence)), HIDDEN_AXES),
            name=name, **self._shared())

    def _project(self, inputs_q: jax.Array, inputs_kv: jax.Array):
        """Returns q, k and v as [.., heads, size], and the norm's result."""
        size, heads, groups = self.head_dim, self.num_attention_heads, self.num_gqa_groups or self.num_attention_heads
        one, packed = (W_FSDP_AXES, W_TP_AXES), (W_FSDP_AXES, W_JOINED_AXES, W_TP_AXES)
        init = self._kernel_init()
        self_attention = inputs_q is inputs_kv
        if self.fuse_qkv_params and self_attention and groups == heads:
            qkv, norm = self._with_norm((3, heads * size), packed, (W_JOINED_AXES, W_TP_AXES),
                                        self._packed_init([self._query_init, init, init]), self.return_layernorm_output, "qkv")(inputs_q)
            parts = [jnp.squeeze(p, -2) for p in jnp.split(checkpoint_name(qkv, "combined_qkv_proj"), 3, axis=-2)]
        else:
            keep = self.return_layernorm_output or self_attention or not self.fuse_qkv_params
            query, norm = self._with_norm(heads * size, one, (W_TP_AXES,), self._query_init, keep, "query")(inputs_q)
            source = norm if self_attention else inputs_kv
            if self.fuse_qkv_params:
                kv = DenseGeneral(features=(2, groups * size), kernel_axes=packed, bias_axes=(W_JOINED_AXES, W_TP_AXES),
                                  kernel_init=self._packed_init([init, init]), name="kv", **self._shared())(source)
                parts = [query] + [jnp.squeeze(p, -2) for p in jnp.split(checkpoint_name(kv, "combined_kv_proj"), 2, axis=-2)]
            else:
                parts = [query] + [DenseGeneral(features=groups * size, kernel_axes=one, bias_axes=(W_TP_AXES,), kernel_init=init, name=name,
                                                **self._shared())(source) for name in ("key", "value")]
                parts = [checkpoint_name(p, name) for p, name in zip(parts, ("query_proj", "key_proj", "value_proj"))]
        return [p.reshape(*p.shape[:2], n, size) for p, n in zip(parts, (heads, groups, groups))], norm

    @nn.compact
    def __call__(self, inputs_q: jax.Array, inputs_kv: jax.Array, mask: Mask = None, bias: Optional[jax.Array] = None, *, decode: bool = False,
                 deterministic: bool = False, score_mod_tensors: Optional[Mapping[str, Any]] = None,
                 score_mod_bprop_tensors: Optional[Mapping[str, Any]] = None) -> Tuple[jax.Array, Optional[jax.Array]]:
        """Computes self-attention if inputs_q and inputs_kv are the same object."""
        self._refuse_older_names()
        refuse(self, "it has no cache of keys and values: leave it False", decode=True if decode else None)
        if inputs_q.dtype != inputs_kv.dtype:
            raise InvalidArgument(f"inputs_q is {inputs_q.dtype}, inputs_kv {inputs_kv.dtype}; they must be of one dtype")
        transposed = bool(self.transpose_batch_sequence)
        (query, key, value), norm = self._project(inputs_q, inputs_kv)
        if self.enable_rotary_pos_emb:
            turn = (self.rotary_pos_emb_windows, transposed, self.rotary_pos_emb_group_method)
            query, key = rotary_pos_emb(query, *turn), rotary_pos_emb(key, *turn)
        leading = _leading(transposed)
        query, key, value = (with_sharding_constraint_by_logical_axes(a, (*leading, HEAD_AXES, HIDDEN_AXES)) for a in (query, key, value))
        x = DotProductAttention(
            head_dim=self.head_dim, num_attention_heads=self.num_attention_heads, num_gqa_groups=self.num_gqa_groups,
            attn_mask_type=self.attn_mask_type, attn_bias_type=self.attn_bias_type, attention_dropout=self.attention_dropout,
            dropout_rng_name=self.dropout_rng_name, float32_logits=self.float32_logits,
            scale_factor=1.0 / math.sqrt(self.head_dim) if self.scale_attn_logits else 1.0, transpose_batch_sequence=transposed,
            window_size=self.window_size, softmax_type=self.softmax_type, score_mod=self.score_mod, score_mod_bprop=self.score_mod_bprop)(
                query, key, value, mask, bias, deterministic=deterministic, score_mod_tensors=score_mod_tensors,
                score_mod_bprop_tensors=score_mod_bprop_tensors)
        x = with_sharding_constraint_by_logical_axes(x.reshape(*x.shape[:2], x.shape[2] * x.shape[3]), (*leading, HIDDEN_TP_AXES))
        shared = {**self._shared(), "enable_low_rank_adaptation": _lora_scope(self.low_rank_adaptation_scope)[1]}
        out = DenseGeneral(features=inputs_q.shape[-1], kernel_init=self._kernel_init(), kernel_axes=(W_TP_AXES, W_FSDP_AXES),
                           bias_axes=(W_NO_SHARD_AXES,), name="out", **shared)(x)
        return checkpoint_name(out, "out_proj"), norm


class RelativePositionBiases(Module):
    """T5's relative position bias of attention scores: [1, heads, queries, keys]."""

    num_buckets: int
    max_distance: int
    num_attention_heads: int
    embedding_init: Initializer = nn.linear.default_embed_init
    embedding_axes: Tuple[str, ...] = ("heads", "relpos_buckets")
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, q_seqlen: int, k_seqlen: int, bidirectional: bool = True) -> jax.Array:
        """Half of the buckets hold one short distance each; the others cover ranges that widen up to max_distance. Bidirectional: half of the buckets
        for each direction.
        """
        back = np.arange(q_seqlen)[:, None] - np.arange(k_seqlen)[None, :]
        buckets = self.num_buckets // 2 if bidirectional else self.num_buckets
        side = np.where(back < 0, buckets, 0) if bidirectional else 0
        distance = np.abs(back) if bidirectional else np.maximum(back, 0)
        near = buckets // 2
        grown = np.log(distance.astype(np.float32) / near + np.finfo(np.float32).eps) / np.log(self.max_distance / near) * (buckets - near)
        far = np.minimum(near + grown.astype(np.int32), buckets - 1)
        table = self.param("rel_embedding", nn.with_logical_partitioning(self.embedding_init, self.embedding_axes),
                           (self.num_attention_heads, self.num_buckets), self.dtype)
        return jnp.asarray(table, self.dtype)[None, :, side + np.where(distance < near, distance, far)]


class TransformerLayerType(Enum):
    ENCODER = "encoder"
    DECODER = "decoder"


class TransformerLayer(Module):
    """Attention and an MLP with residual connections; a decoder also attends to the encoder's output."""

    hidden_size: int = 512
    mlp_hidden_size: int = 2048
    num_attention_heads: int = 8
    num_gqa_groups: Optional[int] = None
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    hidden_dropout: float = 0.1
    hidden_dropout_dims: Sequence[int] = ()
    attention_dropout: float = 0.1
    intermediate_dropout: float = 0.0
    intermediate_dropout_dims: Sequence[int] = ()
    dropout_rng_name: str = "dropout"
    mha_kernel_init: Optional[Initializer] = None
    mlp_kernel_init: Optional[Initializer] = None
    mlp_activations: Sequence[str] = ("gelu",)
    mlp_activation_params: Optional[Mapping] = None
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    apply_residual_connection_post_layernorm: bool = False
    output_layernorm: bool = False
    float32_attention_logits: bool = False
    layer_type: TransformerLayerType = TransformerLayerType.ENCODER
    self_attn_mask_type: str = "causal"
    self_attn_bias_type: Optional[str] = None
    enable_relative_embedding: bool = True
    relative_embedding: Optional[nn.Module] = None
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: Tuple[int, int] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    low_rank_adaptation_scope: str = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: Optional[float] = None
    dtype: Any = jnp.float32
    drop_path: float = 0.0
    fuse_qkv_params: bool = True
    transpose_batch_sequence: bool = False
    enable_sequence_parallel: bool = False
    scale_attn_logits: bool = False
    scaled_query_init: bool = True
    window_size: Optional[Tuple[int, int]] = None
    softmax_type: str = "vanilla"
    score_mod: Optional[Callable] = None
    score_mod_bprop: Optional[Callable] = None

    def __post_init__(self):
        check_sizes(self, hidden_size=self.hidden_size, mlp_hidden_size=self.mlp_hidden_size)
        check_activations(self, "mlp_activations")
        check_heads(self)
        if self.hidden_size % self.num_attention_heads != 0:
            raise InvalidArgument(f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}")
        super().__post_init__()

    def _attention(self, name: str, **own: Any) -> MultiHeadAttention:
        same = ("num_attention_heads", "dtype", "num_gqa_groups", "transpose_batch_sequence", "enable_sequence_parallel", "attention_dropout",
                "dropout_rng_name", "scale_attn_logits", "scaled_query_init", "layernorm_type", "layernorm_epsilon", "zero_centered_gamma",
                "enable_rotary_pos_emb", "rotary_pos_emb_windows", "rotary_pos_emb_group_method", "low_rank_adaptation_scope",
                "low_rank_adaptation_dim", "low_rank_adaptation_alpha", "fuse_qkv_params", "use_bias", "bias_init", "window_size",
                "softmax_type")
        return MultiHeadAttention(head_dim=self.hidden_size // self.num_attention_heads, kernel_init=self.mha_kernel_init,
                                  float32_logits=self.float32_attention_logits,
                                  return_layernorm_output=self.apply_residual_connection_post_layernorm, name=name,
                                  **{field: getattr(self, field) for field in same}, **own)

    def _position_bias(self, length: int) -> Optional[jax.Array]:
        if not self.enable_relative_embedding:
            return None
        embedding = self.relative_embedding
        if embedding is None:
            embedding = RelativePositionBiases(32, 128, self.num_attention_heads, dtype=self.dtype, name="relpos_bias",
                                               embedding_init=nn.initializers.variance_scaling(1.0, "fan_avg", "uniform", dtype=self.dtype))
        return embedding(length, length, self.layer_type is TransformerLayerType.ENCODER)

    def _dropout(self, x: jax.Array, deterministic: bool, path: bool = True) -> jax.Array:
        x = dropout(x, self.hidden_dropout, self.hidden_dropout_dims, self.dropout_rng_name, deterministic)
        if path and self.drop_path > 0:
            batch = 1 if self.transpose_batch_sequence else 0
            others = [d for d in range(x.ndim) if d != batch]
            x = dropout(x, self.drop_path, others, self.dropout_rng_name, deterministic)
        return x

    def _check(self, inputs: jax.Array, encoded: Optional[jax.Array]) -> None:
        if not isinstance(self.layer_type, TransformerLayerType):
            raise InvalidArgument(f"layer_type is {self.layer_type!r}; it is one of {list(TransformerLayerType)}")
        if inputs.ndim != 3:
            raise InvalidArgument(f"inputs has shape {inputs.shape}, not [batch, sequence, hidden]")
        if self.layer_type is TransformerLayerType.DECODER and encoded is None:
            raise InvalidArgument("a decoder layer needs `encoded`, the encoder's result")

    def _mlp(self) -> LayerNormMLP:
        lead, dot = _leading(self.transpose_batch_sequence, self.enable_sequence_parallel), _leading(self.transpose_batch_sequence)
        return LayerNormMLP(
            intermediate_dim=self.mlp_hidden_size, layernorm_type=self.layernorm_type, epsilon=self.layernorm_epsilon,
            zero_centered_gamma=self.zero_centered_gamma, scale_axes=(W_NO_SHARD_AXES,), ln_bias_axes=(W_NO_SHARD_AXES,),
            kernel_init=self.mlp_kernel_init, kernel_axes_1=(W_FSDP_AXES, W_JOINED_AXES, W_TP_AXES), kernel_axes_2=(W_TP_AXES, W_FSDP_AXES),
            use_bias=self.use_bias, bias_init=self.bias_init, bias_axes_1=(W_JOINED_AXES, W_TP_AXES), bias_axes_2=(W_NO_SHARD_AXES,),
            return_layernorm_output=self.apply_residual_connection_post_layernorm, activations=self.mlp_activations,
            activation_params=self.mlp_activation_params, intermediate_dropout_rng_name=self.dropout_rng_name,
            intermediate_dropout_rate=self.intermediate_dropout, intermediate_hidden_dropout_dims=self.intermediate_dropout_dims,
            enable_low_rank_adaptation=_lora_scope(self.low_rank_adaptation_scope)[2], low_rank_adaptation_dim=self.low_rank_adaptation_dim,
            low_rank_adaptation_alpha=self.low_rank_adaptation_alpha, dtype=self.dtype, layernorm_input_axes=(*lead, HIDDEN_AXES),
            dot_1_input_axes=(*dot, HIDDEN_AXES), dot_2_input_axes=(*dot, HIDDEN_TP_AXES),
            transpose_batch_sequence=self.transpose_batch_sequence, name="mlp")

    @nn.compact
    def __call__(self, inputs: jax.Array, encoded: Optional[jax.Array] = None, attention_mask: Mask = None, encoder_decoder_mask: Mask = None,
                 deterministic: bool = False, decode: bool = False, max_decode_length: Optional[int] = None,
                 score_mod_tensors: Optional[Mapping[str, Any]] = None, score_mod_bprop_tensors: Optional[Mapping[str, Any]] = None) -> jax.Array:
        self._check(inputs, encoded)
        refuse(self, "it has no cache of keys and values: leave it out", decode=True if decode else None, max_decode_length=max_decode_length)
        axes = (*_leading(self.transpose_batch_sequence, self.enable_sequence_parallel), HIDDEN_AXES)
        decoder = self.layer_type is TransformerLayerType.DECODER
        x = with_sharding_constraint_by_logical_axes(inputs, axes)
        bias = self._position_bias(inputs.shape[0 if self.transpose_batch_sequence else 1])
        branch, norm = self._attention("self_attention" if decoder else "attention", input_layernorm=not self.output_layernorm,
                                       attn_mask_type=self.self_attn_mask_type, attn_bias_type=self.self_attn_bias_type,
                                       score_mod=self.score_mod, score_mod_bprop=self.score_mod_bprop)(
            x, x, attention_mask, bias, deterministic=deterministic, score_mod_tensors=score_mod_tensors,
            score_mod_bprop_tensors=score_mod_bprop_tensors)
        post = self.apply_residual_connection_post_layernorm
        x = self._dropout(with_sharding_constraint_by_logical_axes(branch, axes), deterministic) + (norm if post else x)
        if decoder:
            branch, norm = self._attention("encoder_decoder_attention", input_layernorm=True, attn_mask_type="padding", attn_bias_type="no_bias")(
                x, encoded, encoder_decoder_mask, deterministic=deterministic)
            x = self._dropout(with_sharding_constraint_by_logical_axes(branch, axes), deterministic, path=False) + (norm if post else x)
        x = with_sharding_constraint_by_logical_axes(x, axes)
        branch, norm = self._mlp()(x, deterministic=deterministic)
        x = self._dropout(with_sharding_constraint_by_logical_axes(branch, axes), deterministic) + (norm if post else x)
        if not self.output_layernorm:
            return x
        return LayerNorm(layernorm_type=self.layernorm_type, zero_centered_gamma=self.zero_centered_gamma, epsilon=self.layernorm_epsilon,
                         scale_axes=(W_NO_SHARD_AXES,), bias_axes=(W_NO_SHARD_AXES,), dtype=self.dtype, name="output_layernorm")(x)
