"""The names of Transformer Engine that te-fl supports, and the modules that provide them. Contains data only; tools/transformer_engine_names.py loads
this file by itself.
"""

VERSION = "2.20.2"

# Modules of te-fl, and the names of Transformer Engine that they provide.
SERVED = {
    "te_fl.common.recipe":
        "CustomRecipe DelayedScaling Float8BlockScaling Float8CurrentScaling Format MMParams MXFP8BlockScaling NVFP4BlockScaling QParams "
        "Recipe",
    "te_fl.pytorch.modules.attention": "DotProductAttention",
    "te_fl.pytorch.modules.multihead_attention": "MultiheadAttention",
    "te_fl.pytorch.modules.transformer": "DropPath TransformerLayer",
    "te_fl.pytorch.modules.base": "TransformerEngineBaseModule",
    "te_fl.pytorch.autograd.checkpoint":
        "activation_recompute_forward checkpoint get_activation_recompute_contexts in_fp8_activation_recompute_phase "
        "is_fp8_activation_recompute_enabled use_reentrant_activation_recompute",
    "te_fl.pytorch.fp8.float8_tensor": "Float8Tensor QuantizedTensor",
    "te_fl.pytorch.fp8.global_state": "FP8GlobalStateManager",
    "te_fl.pytorch.modules.grouped_linear": "GroupedLinear",
    "te_fl.pytorch.modules.inference": "InferenceParams KVCacheManager NonPagedKVCacheManager PagedKVCacheManager",
    "te_fl.pytorch.modules.linear": "LayerNormLinear Linear",
    "te_fl.pytorch.fp8.master_weights": "cast_master_weights_to_fp8 clear_columnwise_cache post_all_gather_processing quantize_master_weights replace_raw_data",
    "te_fl.pytorch.modules.mlp": "LayerNormMLP",
    "te_fl.pytorch.modules.norm": "LayerNorm RMSNorm",
    "te_fl.pytorch.modules.own_classes": "get_te_classes has_te_modules prepare_te_modules_for_fsdp",
    "te_fl.pytorch.fp8.quantized_gather": "gather_along_first_dim",
    "te_fl.pytorch.distributed.context_batches":
        "generate_positional_ids_for_cp get_batch_on_this_cp_rank get_cu_seqlens_on_cp_rank get_thd_partitioned_indices pad_thd_sequences_for_cp",
    "te_fl.pytorch.fp8.block_quantizers": "HybridQuantizer IdentityQuantizer MXFP8Quantizer NVFP4Quantizer",
    "te_fl.pytorch.fp8.roles": "DelayedScalingRequest QuantizerRequest QuantizerRole",
    "te_fl.pytorch.fp8.quantizers": "Float8BlockQuantizer Float8CurrentScalingQuantizer Float8Quantizer Quantizer",
    "te_fl.pytorch.distributed.rank_helpers":
        "HAS_TORCH_SYMMETRIC allreduce gather_split_1d_tensor get_distributed_rank get_distributed_world_size initialize_affine_weight_gpu "
        "reduce_scatter_along_first_dim set_tensor_model_parallel_attributes split_tensor_into_1d_equal_chunks symmetric_all_reduce",
    "te_fl.pytorch.fp8.quantization": "autocast fp8_autocast fp8_model_init quantized_model_init",
    "te_fl.pytorch.fp8.availability":
        "check_fp8_block_scaling_support check_fp8_support check_mxfp8_support check_nvfp4_support check_recipe_support "
        "get_align_size_for_quantization get_cudnn_version get_default_fp8_recipe get_default_recipe get_device_compute_capability "
        "get_fp8_max get_fp8_torch_dtype is_bf16_available is_fp8_available is_fp8_block_scaling_available is_mxfp8_available "
        "is_nvfp4_available torch_version",
    "te_fl.pytorch.runtime.constants":
        "AttnBiasTypes AttnMaskTypes AttnTypes CPLoadBalancingStrategy DType GemmParallelModes LayerTypes MXFP8_BLOCK_SCALING_SIZE "
        "NVFP4_BLOCK_SCALING_SIZE TE_DType TE_DType_To_Torch dist_group_type",
    "te_fl.pytorch.functions.cross_entropy": "parallel_cross_entropy",
    "te_fl.pytorch.functions.framework_helpers": "SplitAlongDim get_dummy_wgrad gpu_autocast_ctx make_weak_ref",
    "te_fl.pytorch.functions.general_gemm": "general_gemm",
    "te_fl.pytorch.compile.graph": "make_graphed_callables",
    "te_fl.pytorch.compile.graph_state":
        "graph_pool_handle is_graph_capturing restore_fp8_tensors save_fp8_tensors set_capture_end set_capture_start",
    "te_fl.pytorch.autograd.offload":
        "ManualOffloadSynchronizer get_cpu_offload_context is_cpu_offload_enabled mark_activation_offload mark_not_offload",
    "te_fl.pytorch.optimizers":
        "FusedAdam FusedSGD MultiTensorApply multi_tensor_adam multi_tensor_adam_capturable multi_tensor_adam_capturable_master "
        "multi_tensor_adam_fp8 multi_tensor_applier multi_tensor_l2norm multi_tensor_scale multi_tensor_scale_tensor multi_tensor_sgd "
        "multi_tensor_unscale_l2norm",
    "te_fl.pytorch.modules.padding": "Fp8Padding Fp8Unpadding",
    "te_fl.pytorch.functions.permutation":
        "moe_permute moe_permute_and_pad_with_probs moe_permute_with_probs moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs "
        "moe_unpermute",
    "te_fl.pytorch.runtime.export": "is_in_onnx_export_mode onnx_export te_translation_table",
    "te_fl.pytorch.runtime.rng":
        "CudaRNGStatesTracker get_all_rng_states graph_safe_rng_available is_graph_safe_rng_state set_all_rng_states",
    "te_fl.pytorch.functions.rope": "RotaryPositionEmbedding apply_fused_qkv_rotary_pos_emb apply_rotary_pos_emb",
    "te_fl.pytorch.functions.router": "RoutingMapFormat fused_compute_score_for_moe_aux_loss fused_moe_aux_loss fused_topk_with_score_function",
    "te_fl.pytorch.functions.softmax":
        "FusedScaleMaskSoftmax attention_mask_func scaled_aligned_causal_masked_softmax_backward "
        "scaled_aligned_causal_masked_softmax_forward scaled_masked_softmax_backward scaled_masked_softmax_forward "
        "scaled_softmax_backward scaled_softmax_forward scaled_upper_triang_masked_softmax_backward "
        "scaled_upper_triang_masked_softmax_forward",
    "te_fl.pytorch.functions.weights": "deinterleave_glu_tensor interleave_glu_tensor",
    # Listed after the modules, because some operations have the same names.
    "te_fl.pytorch.ops":
        "AddExtraInput AllGather AllReduce BasicLinear BasicOperation Bias ClampedSwiGLU ConstantScale Dropout FusedOperation FusibleOperation GEGLU "
        "GELU GLU GroupedLinear Identity L2Normalization LayerNorm Linear MakeExtraOutput OperationContext QGEGLU QGELU Quantize RMSNorm ReGLU ReLU "
        "ReduceScatter Reshape SReGLU SReLU ScaledClampedQGeGLU ScaledSReLU ScaledSiTUGLU ScaledSwiGLU ScaledTanhSReLU Sequential SiLU SiTUGLU SwiGLU",
    "te_fl.jax.activation": "activation",
    "te_fl.jax.attention":
        "AttnBiasType AttnMaskType AttnSoftmaxType CPStrategy QKVFormat QKVLayout SequenceDescriptor canonicalize_attn_mask_type fused_attn "
        "make_swa_mask",
    "te_fl.jax._context_parallel": "ReorderStrategy inverse_reorder_causal_load_balancing reorder_causal_load_balancing",
    "te_fl.jax.dense": "dense noop_collective_op_set",
    "te_fl.jax.flax":
        "DenseGeneral DotProductAttention LayerNorm LayerNormDenseGeneral LayerNormMLP MultiHeadAttention RelativePositionBiases Softmax "
        "TransformerEngineBase TransformerLayer TransformerLayerType extend_logical_axis_rules make_dot_general_cls rotary_pos_emb "
        "wrap_function_in_te_state_module",
    "te_fl.jax.layernorm": "canonicalize_norm_type layernorm",
    "te_fl.jax.layernorm_dense": "layernorm_dense",
    "te_fl.jax.layernorm_mlp": "layernorm_mlp",
    "te_fl.jax.quantize":
        "NVTE_FP8_COLLECTION_NAME autocast fp8_autocast get_global_quantize_recipe noop_quantizer_set update_collections",
    "te_fl.jax.sharding":
        "BATCH_AXES HEAD_AXES HIDDEN_AXES HIDDEN_TP_AXES JOINED_AXES MeshResource SEQLEN_AXES SEQLEN_CP_AXES SEQLEN_TP_AXES W_FSDP_AXES "
        "W_JOINED_AXES W_NO_SHARD_AXES W_TP_AXES all_reduce_max_along_all_axes_except_PP all_reduce_sum_along_dp_fsdp "
        "all_reduce_sum_along_dp_fsdp_tpsp dp_or_fsdp_axis_size ep_axis_size get_active_resource_axis get_all_mesh_axes get_mesh_axis_rank "
        "get_mesh_axis_size get_num_devices_in_mesh get_sharding_map_logic_axis_to_mesh_axis global_mesh_resource "
        "global_shard_guard is_mesh_available lax_paral_op num_of_devices tpsp_axis_size with_sharding_constraint "
        "with_sharding_constraint_by_logical_axes",
    "te_fl.jax.softmax": "SoftmaxFusionType softmax",
}

# Modules of transformer_engine.pytorch that te_fl.pytorch has under the same name, besides its packages.
SAME_MODULES = ("attention", "constants", "cross_entropy", "export", "float8_tensor", "graph", "permutation", "quantization", "router", "transformer")

# Private names that occur in pickles of Transformer Engine's recipes, by their module: (te-fl's module, names).
IN_PICKLES = {"transformer_engine.common.recipe": ("te_fl.common.recipe", ("_FormatHelper",))}

# Arguments of supported names for which te-fl accepts only one value, with an example of another value. That value is refused with an error that
# names the argument.
PARTLY = {
    # By tools/modulegen.py, from nn/modules.yaml:
    "te_fl.pytorch.modules.attention.DotProductAttention.forward": {"fp8_output": True, "bf16_backward": True, "num_splits": 2,
        "score_mod": "a function", "score_mod_bprop": "a function", "score_mod_tensors": "tensors", "score_mod_bprop_tensors": "tensors",
        "thd_attention_policies": "policies"},
    "te_fl.pytorch.modules.linear.LayerNormLinear": {"symmetric_ar_type": "two_shot"},
    "te_fl.pytorch.modules.linear.LayerNormLinear.forward": {"fp8_output": True, "fp8_grad": True},
    "te_fl.pytorch.modules.linear.Linear": {"symmetric_ar_type": "two_shot"},
    "te_fl.pytorch.modules.linear.Linear.forward": {"fp8_output": True, "fp8_grad": True},
    "te_fl.pytorch.modules.mlp.LayerNormMLP": {"symmetric_ar_type": "two_shot"},
    "te_fl.pytorch.modules.norm.LayerNorm": {"sm_margin": 4},
    "te_fl.pytorch.modules.norm.RMSNorm": {"sm_margin": 4},
    # By hand:
    "te_fl.jax.flax.DotProductAttention": {
        "max_segments_per_seq": 2, "score_mod": "a function", "score_mod_bprop": "a function", "return_max_logit": True},
    "te_fl.jax.flax.LayerNormDenseGeneral": {"axis": 0},
    "te_fl.jax.flax.LayerNormMLP": {"axis": 0},
    "te_fl.jax.flax.MultiHeadAttention": {"num_heads": 2, "dropout_rate": 0.1, "output_layernorm": True,
                                          "apply_residual_connection_post_layernorm": True, "fuse_qkv": True},
    "te_fl.jax.flax.MultiHeadAttention.__call__": {"decode": True},
    "te_fl.jax.flax.TransformerLayer.__call__": {"decode": True, "max_decode_length": 8},
    "te_fl.pytorch.compile.graph.make_graphed_callables": {"_order": [1, -1], "_num_layers_per_chunk": [1],
                                                   "_reuse_graph_input_output_buffers": True},
    "te_fl.pytorch.functions.general_gemm.general_gemm": {
        "quantization_params": "a quantizer", "gelu": True, "gelu_in": "a tensor", "ub": "a communicator", "ub_type": "a kind", "extra_output": "a tensor",
        "bulk_overlap": True},
    "te_fl.pytorch.modules.grouped_linear.GroupedLinear": {"ub_overlap_rs": True, "ub_overlap_ag": True},
    **{f"te_fl.pytorch.ops.{name}": {"activation_recompute_in_mlp": True} for name in
       "ScaledSReLU ScaledTanhSReLU ScaledSwiGLU ScaledSiTUGLU ScaledClampedQGeGLU".split()},
    "te_fl.pytorch.ops.AllReduce": {"reduce_in_backward": False},
    "te_fl.pytorch.ops.BasicLinear": {"userbuffers_options": {"comm_name": "fc1"}},
    "te_fl.pytorch.ops.LayerNorm": {"sm_margin": 4},
    "te_fl.pytorch.ops.RMSNorm": {"sm_margin": 4},
    "te_fl.pytorch.optimizers.FusedAdam": {"amsgrad": True},
    "te_fl.pytorch.optimizers.FusedSGD": {"materialize_master_grads": False},
    "te_fl.pytorch.fp8.quantizers.Float8BlockQuantizer": {"rowwise": False},
    "te_fl.pytorch.fp8.block_quantizers.IdentityQuantizer": {"rowwise": False},
    "te_fl.pytorch.fp8.block_quantizers.MXFP8Quantizer": {"rowwise": False},
    "te_fl.pytorch.fp8.block_quantizers.NVFP4Quantizer": {"rowwise": False, "with_amax_reduction": True, "with_post_rht_amax": True},
    "te_fl.pytorch.fp8.quantizers.Float8CurrentScalingQuantizer": {"rowwise": False, "with_amax_reduction": True},
    "te_fl.pytorch.fp8.quantizers.Float8Quantizer": {"rowwise": False},
    "te_fl.pytorch.fp8.quantizers.Quantizer": {"rowwise": False},
    "te_fl.pytorch.functions.router.fused_topk_with_score_function": {"qb_histogram": "a tensor", "qb_bin_bounds": "a tensor", "qb_histogram_mode": "two_kernel"},
    "te_fl.pytorch.functions.softmax.FusedScaleMaskSoftmax": {"softmax_in_fp32": False},
}

# Classes that are not constructed by calling them, so their parameters are not compared.
MADE_BY = {
    "te_fl.jax.attention.SequenceDescriptor": "made by from_seqlens; segment ids are refused",
    "te_fl.pytorch.modules.base.TransformerEngineBaseModule": "the base of te-fl's modules, for isinstance",
    "te_fl.pytorch.fp8.float8_tensor.Float8Tensor": "made by quantized_model_init, with block scaling too",
    "te_fl.pytorch.fp8.float8_tensor.QuantizedTensor": "the base of Float8Tensor, for isinstance",
    "te_fl.pytorch.ops.BasicOperation": "a program's own has op_forward or fuser_forward, whose quantizers are None",
    "te_fl.pytorch.ops.FusedOperation": "its basic operations compute, one after the other",
    "te_fl.pytorch.ops.Quantize": "the output is values as they read after quantisation; by delayed scaling the input",
}

# Parameters that te-fl adds after Transformer Engine's.
MORE = {"te_fl.jax.attention.fused_attn": ("transpose_batch_sequence",)}

MEMBERS_INTRODUCTION = """
The classes of `transformer_engine.pytorch` that te-fl supports have the attributes, properties and methods of Transformer Engine's classes. A plain attribute of Transformer Engine's can be set in te-fl too.
The members below are missing from every class that has them in Transformer Engine. The second column says what they are for in Transformer Engine, and how te-fl differs:
"""
# Members of Transformer Engine's classes that te-fl's classes lack, with the reason. tests/python/te_names_test.py checks them.
LACKING = (
    ("activation_dtype adjust_amax_history_length end_forward get_fp8_meta_tensors get_grad_output_quantizer get_input_quantizer get_quantizer "
     "get_quantizer_roles grad_input_quantizer_role grad_output_preprocess init_fp8_meta_tensors module_setattr num_quantizers output_quantizer_role "
     "param_init_meta prepare_forward prepare_forward_ctx quantizers reset_recipe_state set_activation_dtype set_meta_tensor wgrad_store",
     "internals of its forwards; te-fl's forwards are in C++ and quantise there"),
    ("add_fp8_tensors_to_global_buffer autocast_enter autocast_exit copy_forward_fp8_meta_tensors_for_recompute get_autocast_state get_buffer_info "
     "get_fwd_bwd_key get_key_in_buffer get_meta_tensor_key get_old_fp8_meta_tensors_for_recompute get_unique_autocast_key is_first_fp8_module "
     "reduce_and_update_fp8_tensors reduce_tensor_across_group_op_max restore_fp8_meta_tensors set_autocast_state split_key_in_buffer",
     "internal storage and update of scales; te-fl's are in C++: use `autocast` and `checkpoint`"),
    ("alloc_tensors amax_reduction_group calibrate clear convert_shape_for_fp4 copy_from_storage create_metadata create_tensor_from_data fsdp_assign_gathered fsdp_buffer_fields "
     "fsdp_extract_buffers get_columnwise_shape get_data_tensors get_metadata get_scale_shape get_usages inner_tensor_specs internal is_requantization_safe "
     "make_like optimize_for_gemm prepare_for_saving quantize_impl remove_caches restore_from_saved rht_matrix_random_sign_mask_t storage_metadata supports_only_rowwise_all_gather to_dtype "
     "update_quantizer update_usage with_amax_reduction", "memory layout of its tensors; a Float8Tensor of te-fl owns codes and scales"),
    ("fuser_backward fuser_forward fuser_forward_save_ctx op_backward op_forward",
     "fusion of its operations; only user-defined operations define them in te-fl"),
    ("is_fused_op pre_first_fuser_forward pre_fuser_forward set_extra_input_channel set_extra_output_channel",
     "its LayerNorm and RMSNorm modules are operations too; in te-fl the operations in `te.ops` have these members"),
    ("has_bias init_method make_grouped_weights set_tensor_parallel_attributes", "one weight for all experts, which te-fl does not support"),
    ("bias_dropout_add_exec_handler bias_dropout_fusion bias_gelu_nvfusion deterministic flash_attention forward_fused_softmax forward_torch_softmax "
     "fused_attention gemm_bias_unfused_add gemm_gelu_fusion get_batch_per_block get_qkv_quantization_capabilities is_kernel_available logger "
     "rng_states_tracker scaled_masked_softmax_fusion_type set_nccl_overlap_warning_if_tp unfused_attention",
     "the choice among its kernels; in te-fl the policy decides, and `te_fl.explain` shows the choice"),
    ("dtype_to_range_map fuse_unscale most_recent_scale multi_tensor_adam multi_tensor_adam_capturable multi_tensor_adam_capturable_master "
     "multi_tensor_adam_fp8 multi_tensor_adam_param_remainder multi_tensor_sgd name_to_dtype_map scale_set_by_backward",
     "the kernels of its optimizers; the functions are in `te_fl.pytorch.optimizers`"),
    ("bwd_step current_layer_id finish_part_of_bwd fwd_step layer_states num_of_fwds offload_stream pop_tensor previous_bwd_layer_id push_tensor",
     "internals of its offloading"),
    ("inter_attention key_value layernorm layernorm_qkv layernorm_query query_layer", "submodules that exist, as in Transformer Engine, only with certain arguments"),
    ("is_debug_iter next_iter_when_debug_should_be_run no_debug_features_active", "its debug tools"),
    ("onnx_dequantize onnx_forward onnx_quantize op_onnx_forward", "internals of its ONNX export; `onnx_export` is supported"),
    ("bwd_ln_sm_margin bwd_rmsnorm_sm_margin fwd_ln_sm_margin fwd_rmsnorm_sm_margin inf_ln_sm_margin inf_rmsnorm_sm_margin",
     "multiprocessors that its kernels leave free"),
)

# Functions of Transformer Engine's extension module that frameworks call with plain tensors, by the module that they find them in, with te-fl's module.
EXTENSION = {
    "transformer_engine_torch": {"thd_get_partitioned_indices": "te_fl.transformer_engine_torch.context_parallel"},
    "transformer_engine.pytorch.cpp_extensions": {"rmsnorm_fwd": "te_fl.transformer_engine_torch.normalization"},  # it has all names of the extension
}

# Modules of transformer_engine.plugin.core, TransformerEngine-FL's names for implementations and policies; "": the package itself. te_fl.plugin_core
# has modules of the same names.
PLUGIN_CORE = ("", ".discovery", ".logger_manager", ".manager", ".ops", ".policy", ".registry", ".types")

# Prefixes of Transformer Engine's modules, and the prefixes of te-fl's modules in which their names are looked up.
HOMES = (
    ("transformer_engine.pytorch.ops", ("te_fl.pytorch.ops",)),  # te.ops has other classes named Linear and LayerNorm
    ("transformer_engine.pytorch", ("te_fl.pytorch", "te_fl.common")),
    ("transformer_engine.jax.flax", ("te_fl.jax.flax",)),
    ("transformer_engine.jax", ("te_fl.jax", "te_fl.common")),
    ("transformer_engine.common", ("te_fl.common",)),
)

# Advice for unsupported names, by a prefix of the module or a part of the name; the first match applies.
WAYS_OUT = (
    ("transformer_engine.pytorch.ops", "string operations together with Sequential, which te-fl does not fuse further"),
    ("transformer_engine.pytorch.cpp_extensions", "call the op by its name in te_fl.ops (docs/ops.md)"),
    ("transformer_engine.jax.cpp_extensions", "call the op by its name in te_fl.ops (docs/ops.md)"),
    ("transformer_engine.pytorch.attention.dot_product_attention.context_parallel", "give DotProductAttention a cp_group"),
    ("symm", "call allreduce(), over whatever backend the group has"),
    ("FullySharded", "use torch.distributed.fsdp.fully_shard, which gathers te-fl's FP8 weights as codes"),
    ("Grouped", "use one Linear for each group"),
    ("Quantizer", "quantise with te_fl.ops.quantize and te_fl.Quantized"),
    ("Tensor", "quantise with te_fl.ops.quantize and te_fl.Quantized"),
    ("saving", "save tensors with ctx.save_for_backward"),
    ("restore_", "save tensors with ctx.save_for_backward"),
    ("Gated", "use DotProductAttention or MultiheadAttention"),
    ("MLA", "use DotProductAttention or MultiheadAttention"),
    ("offload", "use get_cpu_offload_context, and mark_not_offload"),
    ("Offload", "use get_cpu_offload_context, and mark_not_offload"),
    ("_ub", "leave ub_ arguments at False"),
    ("UserBuffer", "leave ub_ arguments at False"),
    ("newton_schulz", "iterate with torch.matmul"),
    ("Cusolver", "iterate with torch.matmul"),
    ("onnx", "export the model in plain PyTorch; the parameters have the same names"),
)
OTHERWISE = "te-fl has nothing in its place"

# Private names of Transformer Engine that programs import to patch or call parts of modules: their location and advice.
PRIVATE = {name: (f"transformer_engine.pytorch.module.{module}.{name}", f"call {kind}, whose forward and backward are te-fl's") for name, module, kind in (
    ("_Linear", "linear", "Linear"), ("_LayerNormLinear", "layernorm_linear", "LayerNormLinear"), ("_LayerNormMLP", "layernorm_mlp", "LayerNormMLP"),
    ("_GroupedLinear", "grouped_linear", "GroupedLinear, which takes m_splits"))}

INTRODUCTION = """
After `te_fl.as_transformer_engine()`, `import transformer_engine` imports te-fl ([PyTorch](pytorch.md)). With `TE_FL_AS_TRANSFORMER_ENGINE=1` in the environment
an installed te-fl does this without the call.

- A supported name is imported from the te-fl module in the table. It has Transformer Engine's parameters and defaults (except `device`).
- `te_fl.pytorch` itself has the modules `attention`, `constants`, `cross_entropy`, `distributed`, `export`, `float8_tensor`, `graph`, `ops`, `optimizers`,
  `permutation`, `quantization`, `router` and `transformer` with the served names of Transformer Engine's modules.
- A refused name can be imported and used as a base class, and `isinstance` with it is False. Calling it, making an object of a derived class or reading an
  attribute raises `te_fl.errors.Unsupported` with a message that says what to use instead.
- An unsupported argument is refused by name, never ignored. The tables list the arguments of which only one value is accepted.
- If a variable `NVTE_..` is set that te-fl does not support, a warning says so once.

The column "inside" is for the other way of use, [inside Transformer Engine](inside-transformer-engine.md): NVIDIA's own package on te-fl's ops.
"""

# With te-fl inside NVIDIA's package (docs/inside-transformer-engine.md), all PyTorch names work except these.
INSIDE_REFUSED = frozenset("CusolverMpCtx newton_schulz newton_schulz_tp initialize_ub destroy_ub UserBufferQuantizationMode".split())
INSIDE_OWN_KERNELS = frozenset(  # use kernels of Triton or another library
    "FusedMLAQUpProjFunction FusedMLAQUpProjRopeQuant GatedDeltaNet2Attention GatedDeltaNetAttention GatedDeltaProductAttention "
    "moe_permute_and_pad_with_probs moe_permute_with_probs moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs parallel_cross_entropy".split())


def inside(module: str, name: str) -> str:
    """The state of a name with te-fl inside NVIDIA's package: supported, refused, or with the package's own kernels; empty for JAX."""
    if module.startswith("transformer_engine.jax"):
        return ""
    return "refused" if name in INSIDE_REFUSED else "the package's own kernels" if name in INSIDE_OWN_KERNELS else "supported"


_PLACES = [(home, frozenset(names.split())) for home, names in SERVED.items()]


def home(module: str, name: str):
    """The te-fl module that provides a name of a Transformer Engine module; None if the name is refused."""
    asked = next((own for prefix, own in HOMES if (module + ".").startswith(prefix + ".")), None)
    for place, names in _PLACES if asked else ():
        if name in names and any(place == own or (own != "te_fl" and place.startswith(own + ".")) for own in asked):
            return place
    return None


def way_out(module: str, name: str) -> str:
    """Advice for a refused name."""
    for part, text in WAYS_OUT:
        if module.startswith(part) or part in name:
            return text
    return OTHERWISE
