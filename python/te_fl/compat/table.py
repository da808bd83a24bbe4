"""Which of Transformer Engine's names te-fl serves, and where they are. Data only: tools/transformer_engine_names.py reads it alone."""

VERSION = "2.20.2"

# Modules of te-fl and the names of Transformer Engine that are there.
SERVED = {
    "te_fl.common.recipe":
        "CustomRecipe DelayedScaling Float8BlockScaling Float8CurrentScaling Format MMParams MXFP8BlockScaling NVFP4BlockScaling QParams "
        "Recipe",
    "te_fl.pytorch.attention": "DotProductAttention",
    "te_fl.pytorch.checkpoint": "checkpoint",
    "te_fl.pytorch.linear": "LayerNormLinear Linear",
    "te_fl.pytorch.mlp": "LayerNormMLP",
    "te_fl.pytorch.norm": "LayerNorm RMSNorm",
    "te_fl.pytorch.quantization": "autocast fp8_autocast fp8_model_init quantized_model_init",
    "te_fl.pytorch.availability":
        "check_fp8_block_scaling_support check_fp8_support check_mxfp8_support check_nvfp4_support check_recipe_support "
        "get_align_size_for_quantization get_cudnn_version get_default_fp8_recipe get_default_recipe get_device_compute_capability "
        "get_fp8_max get_fp8_torch_dtype is_bf16_available is_fp8_available is_fp8_block_scaling_available is_mxfp8_available "
        "is_nvfp4_available torch_version",
    "te_fl.pytorch.constants":
        "AttnBiasTypes AttnMaskTypes AttnTypes CPLoadBalancingStrategy DType GemmParallelModes LayerTypes MXFP8_BLOCK_SCALING_SIZE "
        "NVFP4_BLOCK_SCALING_SIZE TE_DType TE_DType_To_Torch dist_group_type",
    "te_fl.pytorch.cross_entropy": "parallel_cross_entropy",
    "te_fl.pytorch.optimizers":
        "FusedAdam FusedSGD MultiTensorApply multi_tensor_adam multi_tensor_applier multi_tensor_l2norm multi_tensor_scale "
        "multi_tensor_sgd multi_tensor_unscale_l2norm",
    "te_fl.pytorch.rng":
        "CudaRNGStatesTracker get_all_rng_states graph_safe_rng_available is_graph_safe_rng_state set_all_rng_states",
    "te_fl.pytorch.rope": "RotaryPositionEmbedding apply_fused_qkv_rotary_pos_emb apply_rotary_pos_emb",
    "te_fl.pytorch.softmax":
        "FusedScaleMaskSoftmax attention_mask_func scaled_aligned_causal_masked_softmax_backward "
        "scaled_aligned_causal_masked_softmax_forward scaled_masked_softmax_backward scaled_masked_softmax_forward "
        "scaled_softmax_backward scaled_softmax_forward scaled_upper_triang_masked_softmax_backward "
        "scaled_upper_triang_masked_softmax_forward",
    "te_fl.pytorch.weights": "deinterleave_glu_tensor interleave_glu_tensor",
    "te_fl.jax": "",
    "te_fl.jax.flax": "",
}

# Arguments of served names that take one value only. Each has another value, which is refused by an error that names the argument.
PARTLY = {
    "te_fl.pytorch.cross_entropy.parallel_cross_entropy": {"dist_process_group": "a group of several ranks"},
    "te_fl.pytorch.optimizers.FusedAdam": {"amsgrad": True, "master_weight_dtype": "torch.float16", "exp_avg_dtype": "torch.bfloat16",
                                           "exp_avg_sq_dtype": "torch.bfloat16", "store_param_remainders": True},
    "te_fl.pytorch.optimizers.FusedSGD": {"materialize_master_grads": False},
    "te_fl.pytorch.softmax.FusedScaleMaskSoftmax": {"softmax_in_fp32": False},
}

# Recipes that exist so that programs can name them, and that autocast refuses.
UNUSABLE = ("CustomRecipe", "MXFP8BlockScaling", "NVFP4BlockScaling")

# Beginnings of modules in which te-fl serves names, and the beginning of te-fl's own modules that are asked.
HOMES = (
    ("transformer_engine.pytorch.ops", None),  # its Linear and LayerNorm are other classes of the same names
    ("transformer_engine.pytorch", ("te_fl.pytorch", "te_fl.common")),
    ("transformer_engine.jax.flax", ("te_fl.jax.flax",)),
    ("transformer_engine.jax", ("te_fl.jax", "te_fl.common")),
    ("transformer_engine.common", ("te_fl.common",)),
    ("transformer_engine.plugin", ("te_fl",)),
)

# What to do without a name, by what it begins with or contains; the first that fits.
WAYS_OUT = (
    ("transformer_engine.pytorch.ops", "use the modules of te_fl.pytorch"),
    ("transformer_engine.pytorch.cpp_extensions", "call the op by its name in te_fl.ops (docs/ops.md)"),
    ("transformer_engine.jax.cpp_extensions", "call the op by its name in te_fl.ops (docs/ops.md)"),
    ("multi_tensor_", "use FusedAdam, or te_fl.ops.multi_tensor_adam"),
    ("moe_", "permute with torch.index_select; te-fl has no op of it"),
    ("Grouped", "use one Linear for each group"),
    ("Fp8Padding", "pad rows to a multiple of 16 with torch.nn.functional.pad"),
    ("Fp8Unpadding", "slice the rows"),
    ("Request", "use DelayedScaling, Float8CurrentScaling or Float8BlockScaling"),
    ("QuantizerRole", "use DelayedScaling, Float8CurrentScaling or Float8BlockScaling"),
    ("Quantizer", "quantise with te_fl.ops.quantize and te_fl.Quantized"),
    ("Tensor", "quantise with te_fl.ops.quantize and te_fl.Quantized"),
    ("saving", "save tensors with ctx.save_for_backward"),
    ("restore_", "save tensors with ctx.save_for_backward"),
    ("Gated", "use DotProductAttention or MultiheadAttention"),
    ("MLA", "use DotProductAttention or MultiheadAttention"),
    ("offload", "keep activations on the device, or recompute them with checkpoint"),
    ("Offload", "keep activations on the device, or recompute them with checkpoint"),
    ("_ub", "leave ub_ arguments at False"),
    ("UserBuffer", "leave ub_ arguments at False"),
    ("newton_schulz", "iterate with torch.matmul"),
    ("Cusolver", "iterate with torch.matmul"),
    ("onnx", "export the model in plain PyTorch; the parameters have the same names"),
    ("MultiheadAttention", "use Linear and DotProductAttention"),
    ("TransformerLayer", "use LayerNormLinear, DotProductAttention, Linear and LayerNormMLP"),
    ("make_graphed_callables", "capture with torch.cuda.graph"),
    ("InferenceParams", "keep keys and values in the program"),
)
OTHERWISE = "te-fl has nothing in its place"

INTRODUCTION = """
`te_fl.as_transformer_engine()` makes `import transformer_engine` mean te-fl ([PyTorch](pytorch.md)): what is served comes from the module of
te-fl that the table names, with Transformer Engine's parameters and defaults (but `device`). What is refused can be imported, and `isinstance`
of it is False; calling it, subclassing it or reading an attribute is `te_fl.errors.Unsupported`, which says what to use. An argument that is not
honoured is refused by name, never ignored; the tables list those that take one value only.
"""

# TransformerEngine-FL's names of implementations in Python, in transformer_engine.plugin.core.
PLUGINS = ("te_fl", "BackendImplKind OpImpl OpManager OpRegistry")

_PLACES = [(home, frozenset(names.split())) for home, names in (*SERVED.items(), PLUGINS)]


def home(module: str, name: str):
    """The module of te-fl that serves a name of Transformer Engine's module; None if it is refused."""
    asked = next((own for prefix, own in HOMES if (module + ".").startswith(prefix + ".")), None)
    for place, names in _PLACES if asked else ():
        if name in names and any(place == own or (own != "te_fl" and place.startswith(own + ".")) for own in asked):
            return place
    return None


def way_out(module: str, name: str) -> str:
    """What to do without a name that is refused."""
    for part, text in WAYS_OUT:
        if module.startswith(part) or part in name:
            return text
    return OTHERWISE
