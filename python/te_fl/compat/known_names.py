"""Modules and public names of Transformer Engine 2.20.2. Written by tools/transformer_engine_names.py; do not edit."""

NAMES = {
    "transformer_engine":
        "is_nccl_ep_available require_nccl_ep",
    "transformer_engine.common":
        "MIN_CUDNN_VERSION check_cudnn_version cuda_include_dir decode_cudnn_version get_te_core_package_info "
        "load_libs_for_no_ctk sanity_checks_for_pypi_installation",
    "transformer_engine.common.recipe":
        "CustomRecipe DelayedScaling Float8BlockScaling Float8CurrentScaling Format MMParams MXFP8BlockScaling NVFP4BlockScaling "
        "QParams Recipe",
    "transformer_engine.common.utils":
        "DeprecatedEnum deprecate_wrapper",
    "transformer_engine.jax":
        "MeshResource NVTE_FP8_COLLECTION_NAME autocast flax fp8_autocast quantize update_collections",
    "transformer_engine.jax.activation":
        "activation",
    "transformer_engine.jax.attention":
        "AttnBiasType AttnMaskType AttnSoftmaxType CPStrategy QKVFormat QKVLayout ReorderStrategy SequenceDescriptor "
        "canonicalize_attn_mask_type fused_attn fused_attn_thd inverse_reorder_causal_load_balancing "
        "is_fused_attn_kernel_available make_swa_mask reorder_causal_load_balancing run_length_fill run_length_fill_flattened",
    "transformer_engine.jax.checkpoint_policies":
        "checkpoint_dots_and_te_gemms dots_and_te_gemms_with_no_batch_dims te_gemms_saveable",
    "transformer_engine.jax.cpp_extensions":
        "ActLuPrimitive ActivationEnum ActivationParams AmaxCalculationPrimitive AmaxScope AttentionLogging "
        "BaseDActLuDBiasQuantizePrimitive BaseDBiasQuantizePrimitive ClampedSwigluParams CollectiveOp CollectiveOpSet "
        "DActLuDBiasQuantizePrimitive DActLuQuantizePrimitive DBiasQuantizePrimitive EP_COMMUNICATION_ID EpCombineBwdPrimitive "
        "EpCombinePrimitive EpConfig EpDispatchBwdPrimitive EpDispatchPrimitive EpLayerConfig EpPreparePrimitive "
        "FusedAttnBwdPrimitive FusedAttnCPStripedWithAllGatherBwdPrimitive FusedAttnCPStripedWithAllGatherFwdPrimitive "
        "FusedAttnCPWithAllGatherBwdPrimitive FusedAttnCPWithAllGatherFwdPrimitive FusedAttnFwdPrimitive FusedAttnHelper "
        "FusedAttnParams FusedAttnScoreModHelper FusedMoEAuxLossBwdPrimitive FusedMoEAuxLossFwdPrimitive "
        "FusedRingAttnBwdPrimitive FusedRingAttnFwdPrimitive FusedRingAttnStripedBwdPrimitive FusedRingAttnStripedFwdPrimitive "
        "FusedTopkWithScoreFunctionBwdPrimitive FusedTopkWithScoreFunctionFwdPrimitive GemmPrimitive "
        "GroupedGemmCopySizesPrimitive GroupedGemmPrimitive GroupedQuantizePrimitive NormBwdPrimitive NormFwdPrimitive "
        "QuantizePrimitive RHTAmaxCalculationPrimitive RoutingMapFormat ScaledMaskedSoftmaxBwdPrimitive "
        "ScaledMaskedSoftmaxFwdPrimitive ScaledSoftmaxBwdPrimitive ScaledSoftmaxFwdPrimitive "
        "ScaledUpperTriangMaskedSoftmaxBwdPrimitive ScaledUpperTriangMaskedSoftmaxFwdPrimitive ScoreFunction SoftmaxPrimitive "
        "TopKPrimitive act_lu adjust_cp_striped_window_size assert_cublas_requirements calculate_amax calculate_post_rht_amax "
        "collective_gemm_bootstrap dact_lu ep_combine_bwd ep_combine_fwd ep_dispatch_bwd ep_dispatch_fwd ep_handle_mem_size "
        "ep_prepare fused_attn_bwd fused_attn_fwd fused_attn_score_mod_bwd fused_attn_score_mod_fwd fused_moe_aux_loss_bwd "
        "fused_moe_aux_loss_fwd fused_topk_with_score_function_bwd fused_topk_with_score_function_fwd gemm generate_cu_seqlen "
        "get_backward_sm_margin get_cublas_workspace_size_bytes get_ep_config get_forward_sm_margin get_lhs_axis_boundary "
        "get_non_contracting_dims get_rhs_axis_boundary get_topk_workspace_sizes grouped_dbias grouped_gemm "
        "grouped_gemm_copy_group_sizes grouped_quantize is_ep_borrowed_comm_built is_norm_fwd_cudnn_enabled "
        "is_norm_zero_centered_gamma_in_weight_dtype is_softmax_kernel_available is_v2_grouped_gemm_supported "
        "jax_general_softmax jax_scaled_masked_softmax jax_scaled_softmax jax_scaled_upper_triang_masked_softmax layernorm_bwd "
        "layernorm_fwd make_fused_attn_score_mod_config noop_collective_op_set normalization_bwd normalization_fwd "
        "num_cublas_streams quantize quantize_dact_dbias quantize_dbias reorder_causal_dual_chunk_swap reorder_causal_striped "
        "reset_ep_config rmsnorm_bwd rmsnorm_fwd run_borrowed_comm_bootstrap sanitize_dims scaled_masked_softmax_bwd "
        "scaled_masked_softmax_fwd scaled_softmax_bwd scaled_softmax_fwd scaled_upper_triang_masked_softmax_bwd "
        "scaled_upper_triang_masked_softmax_fwd set_ep_config swizzled_scale topk transpose_dims use_nccl_comm_from_xla "
        "validate_fused_attn_score_mod",
    "transformer_engine.jax.cpp_extensions.activation":
        "ActLuPrimitive ActivationEnum ActivationParams BaseDActLuDBiasQuantizePrimitive ClampedSwigluParams "
        "DActLuDBiasQuantizePrimitive DActLuQuantizePrimitive act_lu dact_lu quantize_dact_dbias",
    "transformer_engine.jax.cpp_extensions.amax":
        "AmaxCalculationPrimitive AmaxScope RHTAmaxCalculationPrimitive calculate_amax calculate_post_rht_amax",
    "transformer_engine.jax.cpp_extensions.attention":
        "AttentionLogging FusedAttnBwdPrimitive FusedAttnCPStripedWithAllGatherBwdPrimitive "
        "FusedAttnCPStripedWithAllGatherFwdPrimitive FusedAttnCPWithAllGatherBwdPrimitive FusedAttnCPWithAllGatherFwdPrimitive "
        "FusedAttnFwdPrimitive FusedAttnHelper FusedAttnParams FusedRingAttnBwdPrimitive FusedRingAttnFwdPrimitive "
        "FusedRingAttnStripedBwdPrimitive FusedRingAttnStripedFwdPrimitive adjust_cp_striped_window_size fused_attn_bwd "
        "fused_attn_fwd generate_cu_seqlen reorder_causal_dual_chunk_swap reorder_causal_striped",
    "transformer_engine.jax.cpp_extensions.base":
        "BasePrimitive manage_primitives register_primitive",
    "transformer_engine.jax.cpp_extensions.ep":
        "EP_COMMUNICATION_ID EpCombineBwdPrimitive EpCombinePrimitive EpConfig EpDispatchBwdPrimitive EpDispatchPrimitive "
        "EpLayerConfig EpPreparePrimitive ep_combine_bwd ep_combine_fwd ep_dispatch_bwd ep_dispatch_fwd ep_handle_mem_size "
        "ep_prepare get_ep_config is_ep_borrowed_comm_built reset_ep_config run_borrowed_comm_bootstrap set_ep_config "
        "use_nccl_comm_from_xla",
    "transformer_engine.jax.cpp_extensions.flex_attention":
        "FusedAttnScoreModHelper fused_attn_score_mod_bwd fused_attn_score_mod_fwd make_fused_attn_score_mod_config "
        "validate_fused_attn_score_mod",
    "transformer_engine.jax.cpp_extensions.gemm":
        "CollectiveOp CollectiveOpSet GemmPrimitive GroupedGemmCopySizesPrimitive GroupedGemmPrimitive "
        "assert_cublas_requirements collective_gemm_bootstrap gemm get_cublas_workspace_size_bytes get_lhs_axis_boundary "
        "get_non_contracting_dims get_rhs_axis_boundary grouped_gemm grouped_gemm_copy_group_sizes is_v2_grouped_gemm_supported "
        "noop_collective_op_set num_cublas_streams sanitize_dims swizzled_scale transpose_dims",
    "transformer_engine.jax.cpp_extensions.misc":
        "NamedSharding TEDType check_valid_batch_dims get_all_device_compute_capability get_cudnn_version "
        "get_min_device_compute_capability get_padded_spec get_xla_flag is_all_reduce_in_float32 jax_dtype_to_ir_dtype "
        "jax_dtype_to_te_dtype multidim_transpose normalize_axis_boundary should_apply_1x_fused_dbias_war_for_arch_l_100 "
        "te_dtype_to_ir_dtype te_dtype_to_jax_dtype try_apply_delayed_scaling_2x_war",
    "transformer_engine.jax.cpp_extensions.normalization":
        "NormBwdPrimitive NormFwdPrimitive get_backward_sm_margin get_forward_sm_margin is_norm_fwd_cudnn_enabled "
        "is_norm_zero_centered_gamma_in_weight_dtype layernorm_bwd layernorm_fwd normalization_bwd normalization_fwd rmsnorm_bwd "
        "rmsnorm_fwd",
    "transformer_engine.jax.cpp_extensions.quantization":
        "BaseDBiasQuantizePrimitive DBiasQuantizePrimitive GroupedQuantizePrimitive QuantizePrimitive grouped_dbias "
        "grouped_quantize quantize quantize_dbias",
    "transformer_engine.jax.cpp_extensions.router":
        "FusedMoEAuxLossBwdPrimitive FusedMoEAuxLossFwdPrimitive FusedTopkWithScoreFunctionBwdPrimitive "
        "FusedTopkWithScoreFunctionFwdPrimitive RoutingMapFormat ScoreFunction fused_moe_aux_loss_bwd fused_moe_aux_loss_fwd "
        "fused_topk_with_score_function_bwd fused_topk_with_score_function_fwd",
    "transformer_engine.jax.cpp_extensions.softmax":
        "ScaledMaskedSoftmaxBwdPrimitive ScaledMaskedSoftmaxFwdPrimitive ScaledSoftmaxBwdPrimitive ScaledSoftmaxFwdPrimitive "
        "ScaledUpperTriangMaskedSoftmaxBwdPrimitive ScaledUpperTriangMaskedSoftmaxFwdPrimitive SoftmaxPrimitive "
        "is_softmax_kernel_available jax_general_softmax jax_scaled_masked_softmax jax_scaled_softmax "
        "jax_scaled_upper_triang_masked_softmax scaled_masked_softmax_bwd scaled_masked_softmax_fwd scaled_softmax_bwd "
        "scaled_softmax_fwd scaled_upper_triang_masked_softmax_bwd scaled_upper_triang_masked_softmax_fwd",
    "transformer_engine.jax.cpp_extensions.topk":
        "TopKPrimitive get_topk_workspace_sizes topk",
    "transformer_engine.jax.dense":
        "dense grouped_dense",
    "transformer_engine.jax.ep":
        "EpLayerConfig ep_bootstrap ep_combine ep_dispatch ep_finalize ep_handle_mem_size ep_prepare",
    "transformer_engine.jax.flax":
        "DenseGeneral DotProductAttention LayerNorm LayerNormDenseGeneral LayerNormMLP MultiHeadAttention RelativePositionBiases "
        "TransformerLayer TransformerLayerType extend_logical_axis_rules make_dot_general_cls make_grouped_dense_cls "
        "wrap_function_in_te_state_module",
    "transformer_engine.jax.flax.module":
        "Array DType DenseGeneral Initializer LayerNorm LayerNormDenseGeneral LayerNormMLP PRNGKey PrecisionLike Shape Softmax "
        "TransformerEngineBase make_dot_general_cls make_grouped_dense_cls wrap_function_in_te_state_module",
    "transformer_engine.jax.flax.moe":
        "Array DType Initializer PRNGKey Shape",
    "transformer_engine.jax.flax.transformer":
        "Array DType DotProductAttention Initializer LoRAScope LogicalRules MultiHeadAttention PRNGKey PrecisionLike "
        "RelativePositionBiases Shape TransformerLayer TransformerLayerType extend_logical_axis_rules rotary_pos_emb",
    "transformer_engine.jax.layernorm":
        "canonicalize_norm_type layernorm",
    "transformer_engine.jax.layernorm_dense":
        "layernorm_dense",
    "transformer_engine.jax.layernorm_mlp":
        "layernorm_mlp",
    "transformer_engine.jax.moe":
        "get_moe_recv_capacity_per_rank moe record_ep_bootstrap_signature_for_moe",
    "transformer_engine.jax.permutation":
        "PureJaxPermState compute_ragged_all_to_all_params compute_reverse_ragged_all_to_all_params local_permute_after_a2a "
        "local_unpermute_before_a2a pure_jax_token_combine pure_jax_token_dispatch routing_map_to_selected_experts "
        "sort_chunks_by_index token_combine token_dispatch",
    "transformer_engine.jax.quantize":
        "AbstractBaseTensor AbstractBaseTensor1x AmaxComputeAlgo BaseQuantizeConfig BlockScaleDequantizer BlockScaleQuantizer "
        "BlockScalingModeMetadataImpl BlockScalingQuantizeConfig Collection CurrentScaleQuantizer CurrentScalingModeMetadataImpl "
        "CurrentScalingQuantizeConfig DIVUP DelayedScaleQuantizer DelayedScalingModeMetadataImpl DelayedScalingQuantizeConfig "
        "Dequantizer GroupedNoScaleTensor GroupedQuantizer GroupedScaledTensor1x NVFP4Dequantizer NVFP4Quantizer "
        "NVFP4ScalingQuantizeConfig NVTE_FP8_COLLECTION_NAME NoOpQuantizeConfig NoScaleTensor NoScalingModeMetadataImpl "
        "NoopDequantizer QuantizeLayout QuantizeMeta QuantizeMetaSet QuantizeShardyRules Quantizer QuantizerFactory QuantizerSet "
        "ScaledTensor ScaledTensor1x ScaledTensor2x ScaledTensorFactory ScalingMode ScalingModeMetadataImpl "
        "ScalingModeToDequantizerMap TensorScaleDequantizer TensorSource TensorUsage apply_padding_to_scale_inv apply_rht "
        "autocast compute_scale_from_amax fp8_autocast get_device_compute_capability get_global_quantize_recipe "
        "get_quantization_recipe get_quantize_config_class get_quantize_config_with_recipe get_rht_matrix get_sign_from_vector "
        "get_supported_quantization_recipes get_supported_scaling_modes get_wgrad_sign_vector is_fp8_available "
        "is_fp8_gemm_with_all_layouts_supported is_quantize_recipe_supported is_scaling_mode_supported noop_quantizer_set "
        "remove_padding_from_scale_inv update_collections with_sharding_constraint_by_logical_axes",
    "transformer_engine.jax.quantize.dequantizer":
        "BlockScaleDequantizer Dequantizer NVFP4Dequantizer NoopDequantizer ScalingModeToDequantizerMap TensorScaleDequantizer",
    "transformer_engine.jax.quantize.device_utils":
        "get_device_compute_capability is_fp8_gemm_with_all_layouts_supported",
    "transformer_engine.jax.quantize.hadamard":
        "apply_rht get_rht_matrix get_sign_from_vector get_wgrad_sign_vector",
    "transformer_engine.jax.quantize.helper":
        "AmaxComputeAlgo BaseQuantizeConfig BlockScalingQuantizeConfig Collection CurrentScalingQuantizeConfig "
        "DelayedScalingQuantizeConfig NVFP4ScalingQuantizeConfig NVTE_FP8_COLLECTION_NAME NoOpQuantizeConfig TensorSource "
        "apply_padding_to_scale_inv autocast fp8_autocast get_global_quantize_recipe get_quantization_recipe "
        "get_quantize_config_class get_quantize_config_with_recipe get_supported_quantization_recipes "
        "get_supported_scaling_modes is_fp8_available is_quantize_recipe_supported is_scaling_mode_supported "
        "remove_padding_from_scale_inv update_collections",
    "transformer_engine.jax.quantize.metadata":
        "QuantizeMeta QuantizeMetaSet",
    "transformer_engine.jax.quantize.misc":
        "QuantizeLayout",
    "transformer_engine.jax.quantize.quantizer":
        "BlockScaleQuantizer CurrentScaleQuantizer DelayedScaleQuantizer GroupedQuantizer NVFP4Quantizer Quantizer "
        "QuantizerFactory QuantizerSet compute_scale_from_amax noop_quantizer_set",
    "transformer_engine.jax.quantize.scaling_modes":
        "BlockScalingModeMetadataImpl CurrentScalingModeMetadataImpl DIVUP DelayedScalingModeMetadataImpl "
        "NoScalingModeMetadataImpl QuantizeShardyRules ScalingMode ScalingModeMetadataImpl TensorUsage",
    "transformer_engine.jax.quantize.tensor":
        "AbstractBaseTensor AbstractBaseTensor1x GroupedNoScaleTensor GroupedScaledTensor1x NoScaleTensor ScaledTensor "
        "ScaledTensor1x ScaledTensor2x ScaledTensorFactory TensorUsage with_sharding_constraint_by_logical_axes",
    "transformer_engine.jax.router":
        "RoutingMapFormat ScoreFunction fused_moe_aux_loss fused_topk_with_score_function",
    "transformer_engine.jax.sharding":
        "BATCH_AXES HEAD_AXES HIDDEN_AXES HIDDEN_TP_AXES JOINED_AXES MeshResource SEQLEN_AXES SEQLEN_CP_AXES SEQLEN_TP_AXES "
        "W_FSDP_AXES W_JOINED_AXES W_NO_SHARD_AXES W_TP_AXES all_reduce_max_along_all_axes_except_PP "
        "all_reduce_sum_along_dp_fsdp all_reduce_sum_along_dp_fsdp_tpsp dp_or_fsdp_axis_size ep_axis_size "
        "get_active_resource_axis get_all_mesh_axes get_mesh_axis_rank get_mesh_axis_rank_host get_mesh_axis_size "
        "get_num_devices_in_mesh get_padded_spec get_sharding_map_logic_axis_to_mesh_axis global_mesh_resource "
        "global_shard_guard is_mesh_available lax_paral_op num_of_devices tpsp_axis_size with_sharding_constraint "
        "with_sharding_constraint_by_logical_axes",
    "transformer_engine.jax.softmax":
        "SoftmaxFusionType softmax",
    "transformer_engine.jax.version_utils":
        "TRITON_AUTOTUNED_INPUT_OUTPUT_ALIAS_MIN_JAX_VERSION TRITON_EXTENSION_CUDA_GRAPH_MIN_JAX_VERSION "
        "TRITON_EXTENSION_MIN_JAX_VERSION is_collective_stream_supported is_triton_autotuned_alias_safe "
        "is_triton_extension_supported is_xla_ffi_collectives_supported jax_version_meet_requirement",
    "transformer_engine.pytorch":
        "CPLoadBalancingStrategy CudaRNGStatesTracker CusolverMpCtx DType DelayedScalingRequest DotProductAttention "
        "Float8BlockQuantizer Float8BlockwiseQTensor Float8BlockwiseQTensorStorage Float8CurrentScalingQuantizer Float8Quantizer "
        "Float8Tensor Float8TensorStorage Fp8Padding Fp8Unpadding FusedMLAQUpProjFunction FusedMLAQUpProjRopeQuant "
        "GatedDeltaNet2Attention GatedDeltaNetAttention GatedDeltaProductAttention GroupedLinear HybridQuantizedTensor "
        "HybridQuantizedTensorStorage HybridQuantizer IdentityQuantizer IdentityTensor IdentityTensorStorage InferenceParams "
        "LayerNorm LayerNormLinear LayerNormMLP Linear MXFP8Quantizer MXFP8Tensor MXFP8TensorStorage ManualOffloadSynchronizer "
        "MultiheadAttention NVFP4Quantizer NVFP4Tensor NVFP4TensorStorage QuantizedTensor QuantizedTensorStorage Quantizer "
        "QuantizerRequest QuantizerRole RMSNorm RotaryPositionEmbedding TransformerLayer UserBufferQuantizationMode autocast "
        "checkpoint deinterleave_glu_tensor destroy_ub fp8_autocast fp8_model_init get_cpu_offload_context get_cudnn_version "
        "get_default_recipe get_device_compute_capability initialize_ub interleave_glu_tensor is_bf16_available is_fp8_available "
        "is_fp8_block_scaling_available is_mxfp8_available is_nvfp4_available make_graphed_callables mark_not_offload "
        "moe_permute moe_permute_and_pad_with_probs moe_permute_with_probs moe_sort_chunks_by_index "
        "moe_sort_chunks_by_index_with_probs moe_unpermute newton_schulz newton_schulz_tp onnx_export parallel_cross_entropy "
        "prepare_for_saving quantized_model_init restore_from_func_ctx restore_from_saved torch_version",
    "transformer_engine.pytorch.attention":
        "DotProductAttention FusedMLAQUpProjFunction FusedMLAQUpProjRopeQuant GatedDeltaNet2Attention GatedDeltaNetAttention "
        "GatedDeltaProductAttention InferenceParams MultiheadAttention RotaryPositionEmbedding",
    "transformer_engine.pytorch.attention.custom_ops":
        "QKV_FORMAT_VALUE convert_bshd_to_thd convert_thd_to_bshd copy_to_kv_cache fa_prepare_bwd fa_prepare_fwd",
    "transformer_engine.pytorch.attention.dot_product_attention":
        "DotProductAttention",
    "transformer_engine.pytorch.attention.dot_product_attention.backends":
        "FP8EmulationFunc FlashAttention FusedAttention FusedAttnBwdArgs FusedAttnFunc FusedAttnFwdArgs "
        "UnfusedDotProductAttention flash_attn_cuda_bwd flash_attn_func flash_attn_varlen_func",
    "transformer_engine.pytorch.attention.dot_product_attention.context_parallel":
        "AttnFuncWithCPAndKVAllGather AttnFuncWithCPAndKVP2P AttnFuncWithCPAndQKVOA2A attn_forward_func_with_cp "
        "cp_p2p_bwd_flash_attn cp_p2p_bwd_fused_attn cp_p2p_bwd_prepare_qkv cp_p2p_fwd_flash_attn cp_p2p_fwd_fused_attn "
        "cp_p2p_fwd_prepare_qkv cp_per_step_configs flash_attn_a2a_communicate flash_attn_a2a_communicate_softmax_offset "
        "flash_attn_fwd_incremental_out_correction flash_attn_fwd_incremental_second_half_out_correction "
        "flash_attn_fwd_second_half_softmax_lse_correction flash_attn_fwd_softmax_lse_correction flash_attn_p2p_communicate "
        "generate_positional_ids_for_cp get_batch_on_this_cp_rank get_bsh_dims get_cu_seqlens_on_cp_rank get_fa_args "
        "get_kv_seq_info_after_all_gather get_no_load_balance_thd_causal_metadata get_seq_chunk_ids_for_reordering_after_attn "
        "get_seq_chunk_ids_for_reordering_before_attn get_thd_partitioned_indices pad_thd_sequences_for_cp "
        "reorder_seq_chunks_for_a2a_after_attn reorder_seq_chunks_for_a2a_before_attn restore_thd_gathered_kv "
        "thd_cp_rank_order_to_sequence_order thd_sequence_order_to_cp_rank_order unrestore_thd_gathered_kv "
        "validate_no_load_balance_thd_metadata",
    "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention":
        "DotProductAttention FlashAttention formats",
    "transformer_engine.pytorch.attention.dot_product_attention.flex_attention":
        "FusedAttentionWithScoreModFunc",
    "transformer_engine.pytorch.attention.dot_product_attention.softmax":
        "FusedScaleMaskSoftmax THREADS_PER_BLOCK THREADS_PER_WARP scaled_aligned_causal_masked_softmax_backward "
        "scaled_aligned_causal_masked_softmax_forward scaled_masked_softmax_backward scaled_masked_softmax_forward "
        "scaled_softmax_backward scaled_softmax_forward scaled_upper_triang_masked_softmax_backward "
        "scaled_upper_triang_masked_softmax_forward",
    "transformer_engine.pytorch.attention.dot_product_attention.utils":
        "AttentionLogging AttentionParams ConvertBSHDtoTHD ConvertTHDtoBSHD FlashAttentionUtils FusedAttentionParams "
        "FusedAttnSpec PackTensors UnpackTensor check_set_window_size combine_and_dequantize combine_and_quantize get_alibi "
        "get_attention_backend get_attention_quantizers get_cu_seqlens get_cu_seqlens_and_indices get_full_cu_seqlens "
        "get_full_mask get_fused_attn_spec get_indices get_padding_mask get_qkv_format get_qkv_layout get_thd_padding_mask "
        "maybe_contiguous mxfp8_quantize_fast_path mxfp8_quantize_only mxfp8_transpose_swizzle no_op_logger print_quantizers "
        "qkv_layout_needs_detection transpose_to_bhsd_htd_pytorch",
    "transformer_engine.pytorch.attention.fused_mla_q_uproj":
        "FusedMLAQUpProjFunction FusedMLAQUpProjRopeQuant rotary_bwd_q_kernel",
    "transformer_engine.pytorch.attention.inference":
        "InferenceParams KVCacheManager NonPagedKVCacheManager Page PagedKVCacheManager",
    "transformer_engine.pytorch.attention.multi_head_attention":
        "MultiheadAttention",
    "transformer_engine.pytorch.attention.rope":
        "FusedQKVRoPEFunc FusedRoPEFunc RotaryPositionEmbedding apply_fused_qkv_rotary_pos_emb apply_rotary_pos_emb",
    "transformer_engine.pytorch.constants":
        "AttnBiasTypes AttnMaskTypes AttnTypes CPLoadBalancingStrategy DType FP8BwdTensorIdx FP8FwdTensorIdx GemmParallelModes "
        "LayerTypes MXFP8_BLOCK_SCALING_SIZE NVFP4_BLOCK_SCALING_SIZE QKVLayouts TE_DType TE_DType_To_Torch dist_group_type",
    "transformer_engine.pytorch.cpp_extensions":
        "AttnBiasType AttnMaskType BACKEND_F16arb_ELTS_PER_THREADS BACKEND_FP8_THREADS_PER_CTA FusedAttnBackend META_DO META_DP "
        "META_DQKV META_O META_QKV META_S QKVFormat QKVLayout SoftmaxType TORCH_DType fused_attn_bwd fused_attn_fwd general_gemm "
        "general_grouped_gemm general_grouped_gemm_for_grouped_tensor get_cublas_workspace get_cublas_workspace_size_bytes "
        "get_grouped_gemm_setup_workspace_size validate_gemm_scale",
    "transformer_engine.pytorch.cpp_extensions.fused_attn":
        "AttnBiasType AttnMaskType BACKEND_F16arb_ELTS_PER_THREADS BACKEND_FP8_THREADS_PER_CTA FusedAttnBackend META_DO META_DP "
        "META_DQKV META_O META_QKV META_S QKVFormat QKVLayout SoftmaxType TORCH_DType fused_attn_bwd fused_attn_fwd",
    "transformer_engine.pytorch.cpp_extensions.gemm":
        "general_gemm general_grouped_gemm general_grouped_gemm_for_grouped_tensor get_cublas_workspace "
        "get_cublas_workspace_size_bytes get_grouped_gemm_setup_workspace_size validate_gemm_scale",
    "transformer_engine.pytorch.cpu_offload":
        "DefaultOffloadSynchronizer ManualOffloadSynchronizer NVTE_CPU_OFFLOAD_V1 OFFLOAD_SYNCHRONIZER OffloadSynchronizer "
        "OffloadableLayerState TensorGroup TensorGroupProcessor get_cpu_offload_context is_cpu_offload_enabled "
        "mark_activation_offload mark_not_offload start_offload",
    "transformer_engine.pytorch.cpu_offload_v1":
        "AsyncDoubleBufferGroupOffloadHandler CPUOffloadEnabled CPUOffloadedLayer CpuOffloadHookWithOffloadHandler "
        "CpuOffloadSavedTensorHook GroupCommitFunction OffloadHandler SynchronizedGroupOffloadHandler get_cpu_offload_context "
        "group_prefetch_offload_commit is_cpu_offload_enabled is_current_layer_offloaded mark_activation_offload",
    "transformer_engine.pytorch.cross_entropy":
        "CrossEntropyFunction parallel_cross_entropy",
    "transformer_engine.pytorch.distributed":
        "CudaRNGStatesTracker FullyShardedDataParallel HAS_TORCH_SYMMETRIC activation_recompute_forward allreduce checkpoint "
        "gather_along_first_dim gather_split_1d_tensor get_activation_recompute_contexts get_all_rng_states get_distributed_rank "
        "get_distributed_world_size get_symmetric_memory_tensor get_te_classes graph_safe_rng_available has_te_modules "
        "in_fp8_activation_recompute_phase initialize_affine_weight_gpu is_fp8_activation_recompute_enabled "
        "is_graph_safe_rng_state prepare_te_modules_for_fsdp reduce_scatter_along_first_dim release_symm_mem_pool "
        "set_all_rng_states set_tensor_model_parallel_attributes split_tensor_into_1d_equal_chunks symm_mem_alloc "
        "symmetric_all_reduce symmetric_mem_cache use_reentrant_activation_recompute",
    "transformer_engine.pytorch.distributed_weight":
        "DistributedWeight finalize_weight_grads is_distributed_weight materialize_weight_for_backward "
        "materialize_weight_for_forward",
    "transformer_engine.pytorch.ep":
        "EpBuffer ep_bootstrap ep_combine ep_dispatch ep_finalize ep_prepare is_ep_bootstrapped is_symm_backed "
        "release_symm_mem_pool symm_mem_alloc",
    "transformer_engine.pytorch.export":
        "TORCH_MAJOR TORCH_MINOR assert_warmed_up is_in_onnx_export_mode onnx_export",
    "transformer_engine.pytorch.float8_tensor":
        "Float8Tensor",
    "transformer_engine.pytorch.fp8":
        "CustomRecipe CustomRecipeState DelayedScaling DelayedScalingRecipeState FP8GlobalStateManager Float8BlockScaling "
        "Float8BlockScalingRecipeState Float8CurrentScaling Float8CurrentScalingRecipeState Format MXFP8BlockScaling "
        "MXFP8BlockScalingRecipeState NVFP4BlockScaling NVFP4BlockScalingRecipeState Recipe RecipeState "
        "check_fp8_block_scaling_support check_fp8_support check_mxfp8_support check_nvfp4_support check_recipe_support "
        "fp8_autocast fp8_model_init get_default_fp8_recipe get_fp4_te_dtype get_fp8_max get_fp8_te_dtype get_fp8_torch_dtype "
        "split_and_copy",
    "transformer_engine.pytorch.graph":
        "SingleOrTuple graph_pool_handle is_graph_capturing make_graphed_callables restore_fp8_tensors save_fp8_tensors "
        "set_capture_end set_capture_start",
    "transformer_engine.pytorch.jit":
        "bgrad_dgelu_fused bgrad_dgelu_fused_ bias_dropout_add bias_dropout_add_fused_inference "
        "bias_dropout_add_fused_inference_ bias_dropout_add_fused_train bias_dropout_add_fused_train_ bias_gelu_fused "
        "bias_gelu_fused_ dgelu_fused_ gelu_fused_ get_bias_dropout_add jit_fuser l2normalization_backward_fused "
        "l2normalization_backward_fused_ l2normalization_fused l2normalization_fused_ l2normalization_fwd_fused "
        "l2normalization_fwd_fused_ lazy_compile no_torch_dynamo set_jit_fusion_options warmup_jit_bias_dropout_add "
        "warmup_jit_bias_dropout_add_all_dtypes warmup_jit_bias_gelu warmup_jit_bias_gelu_all_dtypes warmup_jit_l2normalization "
        "warmup_jit_l2normalization_all_dtypes",
    "transformer_engine.pytorch.module":
        "Fp8Padding Fp8Unpadding GroupedLinear LayerNorm LayerNormLinear LayerNormMLP Linear RMSNorm UserBufferQuantizationMode "
        "destroy_ub initialize_ub is_module_grouped_tensor_path_supported",
    "transformer_engine.pytorch.module.base":
        "TransformerEngineBaseModule UserBufferQuantizationMode destroy_ub fill_userbuffers_buffer_for_all_gather "
        "get_dummy_wgrad get_ub get_ub_is_fp8 initialize_ub is_ub_initialized layers_atomic_ring_exchange quantize_weight "
        "using_cublasmp_backend",
    "transformer_engine.pytorch.module.fp8_padding":
        "Fp8Padding",
    "transformer_engine.pytorch.module.fp8_unpadding":
        "Fp8Unpadding",
    "transformer_engine.pytorch.module.grouped_linear":
        "GroupedLinear is_module_grouped_tensor_path_supported",
    "transformer_engine.pytorch.module.layernorm":
        "LayerNorm",
    "transformer_engine.pytorch.module.layernorm_linear":
        "LayerNormLinear",
    "transformer_engine.pytorch.module.layernorm_mlp":
        "LayerNormMLP",
    "transformer_engine.pytorch.module.linear":
        "Linear LinearBwdArgs LinearFwdArgs",
    "transformer_engine.pytorch.module.rmsnorm":
        "RMSNorm",
    "transformer_engine.pytorch.newton_schulz":
        "CoeffIterMode CoeffT CusolverMpCtx NSCoeffT get_coefficient_iterator get_coefficients newton_schulz newton_schulz_tp",
    "transformer_engine.pytorch.numerics_debug":
        "debug fp8_tensor_statistics",
    "transformer_engine.pytorch.onnx_extensions":
        "TRT_FP8DequantizeLinear TRT_FP8QuantizeLinear TRT_MXFP8DequantizeLinear TRT_MXFP8DynamicQuantize "
        "onnx_attention_mask_func onnx_cs_quantize_fp8_op onnx_dequantize_fp8_op onnx_dequantize_fp8_symbolic "
        "onnx_dequantize_mxfp8_op onnx_dequantize_mxfp8_symbolic onnx_gemm onnx_gemm_inf_symbolic onnx_layernorm "
        "onnx_layernorm_op onnx_layernorm_symbolic onnx_quantize_fp8_cs_symbolic onnx_quantize_fp8_op onnx_quantize_fp8_symbolic "
        "onnx_quantize_mxfp8_op onnx_quantize_mxfp8_symbolic schema te_translation_table torch_onnx_gemm_inf_op trt_opset",
    "transformer_engine.pytorch.ops":
        "AddExtraInput AllGather AllReduce BasicLinear BasicOperation Bias ClampedSwiGLU ConstantScale Dropout FusedOperation "
        "FusibleOperation GEGLU GELU GLU GroupedLinear Identity L2Normalization LayerNorm Linear MakeExtraOutput QGEGLU QGELU "
        "Quantize RMSNorm ReGLU ReLU ReduceScatter Reshape SReGLU SReLU ScaledClampedQGeGLU ScaledSReLU ScaledSiTUGLU "
        "ScaledSwiGLU ScaledTanhSReLU Sequential SiLU SiTUGLU SwiGLU is_op_fuser_grouped_tensor_path_supported "
        "register_backward_fusion register_forward_backward_fusion register_forward_fusion",
    "transformer_engine.pytorch.ops.basic":
        "AddExtraInput AllGather AllReduce BasicLinear Bias ClampedSwiGLU ConstantScale Dropout GEGLU GELU GLU GroupedLinear "
        "Identity L2Normalization LayerNorm MakeExtraOutput QGEGLU QGELU Quantize RMSNorm ReGLU ReLU ReduceScatter Reshape "
        "SReGLU SReLU ScaledClampedQGeGLU ScaledSReLU ScaledSiTUGLU ScaledSwiGLU ScaledTanhSReLU SiLU SiTUGLU SwiGLU "
        "is_op_fuser_grouped_tensor_path_supported",
    "transformer_engine.pytorch.ops.basic.activation":
        "GEGLU GELU GLU QGEGLU QGELU ReGLU ReLU SReGLU SReLU ScaledSReLU ScaledTanhSReLU SiLU",
    "transformer_engine.pytorch.ops.basic.add_extra_input":
        "AddExtraInput",
    "transformer_engine.pytorch.ops.basic.all_gather":
        "AllGather",
    "transformer_engine.pytorch.ops.basic.all_reduce":
        "AllReduce",
    "transformer_engine.pytorch.ops.basic.basic_linear":
        "BasicLinear",
    "transformer_engine.pytorch.ops.basic.bias":
        "Bias",
    "transformer_engine.pytorch.ops.basic.constant_scale":
        "ConstantScale",
    "transformer_engine.pytorch.ops.basic.dropout":
        "Dropout",
    "transformer_engine.pytorch.ops.basic.grouped_linear":
        "GRAD_INPUT_BUFFER_KEY GroupedLinear OUTPUT_BUFFER_KEY is_op_fuser_grouped_tensor_path_supported",
    "transformer_engine.pytorch.ops.basic.identity":
        "Identity",
    "transformer_engine.pytorch.ops.basic.l2normalization":
        "L2Normalization",
    "transformer_engine.pytorch.ops.basic.layer_norm":
        "LayerNorm",
    "transformer_engine.pytorch.ops.basic.make_extra_output":
        "MakeExtraOutput",
    "transformer_engine.pytorch.ops.basic.quantize":
        "Quantize",
    "transformer_engine.pytorch.ops.basic.reduce_scatter":
        "ReduceScatter",
    "transformer_engine.pytorch.ops.basic.reshape":
        "Reshape",
    "transformer_engine.pytorch.ops.basic.rmsnorm":
        "RMSNorm",
    "transformer_engine.pytorch.ops.basic.swiglu":
        "ClampedSwiGLU ScaledClampedQGeGLU ScaledSiTUGLU ScaledSwiGLU SiTUGLU SwiGLU",
    "transformer_engine.pytorch.ops.fused":
        "BackwardActivationBias BackwardAddRMSNorm BackwardLinearAdd BackwardLinearScale ForwardLinearBiasActivation "
        "ForwardLinearBiasAdd ForwardLinearScaleAdd GroupedMLP_CuTeGEMMGLU GroupedMLP_CuTeGEMMUnary UserbuffersBackwardLinear "
        "UserbuffersForwardLinear register_backward_fusion register_forward_fusion",
    "transformer_engine.pytorch.ops.fused.backward_activation_bias":
        "BackwardActivationBias",
    "transformer_engine.pytorch.ops.fused.backward_add_rmsnorm":
        "BackwardAddRMSNorm",
    "transformer_engine.pytorch.ops.fused.backward_linear_add":
        "BackwardLinearAdd",
    "transformer_engine.pytorch.ops.fused.backward_linear_scale":
        "BackwardLinearScale",
    "transformer_engine.pytorch.ops.fused.forward_linear_bias_activation":
        "ForwardLinearBiasActivation",
    "transformer_engine.pytorch.ops.fused.forward_linear_bias_add":
        "ForwardLinearBiasAdd",
    "transformer_engine.pytorch.ops.fused.forward_linear_scale_add":
        "ForwardLinearScaleAdd",
    "transformer_engine.pytorch.ops.fused.grouped_mlp":
        "GroupedMLP_CuTeGEMMGLU GroupedMLP_CuTeGEMMUnary fuse_glu_ops fuse_grouped_mlp_ops fuse_unary_activation_ops "
        "is_glu_activation validate_grouped_mlp_dims",
    "transformer_engine.pytorch.ops.fused.userbuffers_backward_linear":
        "UserbuffersBackwardLinear",
    "transformer_engine.pytorch.ops.fused.userbuffers_forward_linear":
        "UserbuffersForwardLinear",
    "transformer_engine.pytorch.ops.fuser":
        "OperationFuser register_backward_fusion register_forward_backward_fusion register_forward_fusion",
    "transformer_engine.pytorch.ops.linear":
        "Linear",
    "transformer_engine.pytorch.ops.op":
        "BasicOperation FusedOperation FusibleOperation OperationContext",
    "transformer_engine.pytorch.ops.sequential":
        "Sequential",
    "transformer_engine.pytorch.optimizers":
        "FusedAdam FusedSGD MultiTensorApply multi_tensor_adam multi_tensor_adam_capturable multi_tensor_adam_capturable_master "
        "multi_tensor_adam_fp8 multi_tensor_applier multi_tensor_l2norm multi_tensor_scale multi_tensor_scale_tensor "
        "multi_tensor_sgd multi_tensor_unscale_l2norm",
    "transformer_engine.pytorch.optimizers.fused_adam":
        "FusedAdam get_fp8_meta",
    "transformer_engine.pytorch.optimizers.fused_sgd":
        "FusedSGD",
    "transformer_engine.pytorch.optimizers.multi_tensor_apply":
        "MultiTensorApply multi_tensor_applier",
    "transformer_engine.pytorch.optimizers.newton_schulz":
        "CoeffIterMode CoeffT CusolverMpCtx NSCoeffT get_coefficient_iterator get_coefficients newton_schulz newton_schulz_tp",
    "transformer_engine.pytorch.permutation":
        "moe_chunk_sort_backward moe_chunk_sort_forward moe_permute moe_permute_and_pad_with_probs "
        "moe_permute_index_map_backward moe_permute_index_map_forward moe_permute_mask_map_backward moe_permute_mask_map_forward "
        "moe_permute_with_probs moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs moe_unpermute "
        "moe_unpermute_index_map_backward moe_unpermute_index_map_forward moe_unpermute_mask_map_backward_no_probs "
        "moe_unpermute_mask_map_backward_with_probs moe_unpermute_mask_map_forward",
    "transformer_engine.pytorch.quantization":
        "CustomRecipeState DelayedScalingRecipeState DelayedScalingRequest FP8GlobalState FP8GlobalStateManager "
        "Float8BlockScalingRecipeState Float8CurrentScalingRecipeState MXFP8BlockScalingRecipeState NVFP4BlockScalingRecipeState "
        "QuantizerRequest QuantizerRole RecipeState autocast check_fp8_block_scaling_support check_fp8_support "
        "check_mxfp8_support check_nvfp4_support check_recipe_support fp8_autocast fp8_model_init "
        "get_align_size_for_quantization get_default_fp8_recipe get_default_recipe get_fp4_te_dtype get_fp8_max get_fp8_te_dtype "
        "get_fp8_torch_dtype is_fp8_available is_fp8_block_scaling_available is_mxfp8_available is_nvfp4_available "
        "quantized_model_init split_and_copy",
    "transformer_engine.pytorch.quantized_tensor":
        "InnerTensor QuantizedTensor QuantizedTensorStorage Quantizer prepare_for_saving restore_from_func_ctx restore_from_saved",
    "transformer_engine.pytorch.router":
        "FusedAuxLoss FusedComputeScoresForMoEAuxLoss FusedTopkScoreFunction FusedTopkScoreFunctionQB QBHistogramMode "
        "RoutingMapFormat fused_compute_score_for_moe_aux_loss fused_moe_aux_loss fused_topk_with_score_function "
        "mark_qb_bin_bounds_validated",
    "transformer_engine.pytorch.tensor":
        "Float8BlockQuantizer Float8BlockwiseQTensor Float8BlockwiseQTensorStorage Float8CurrentScalingQuantizer Float8Quantizer "
        "Float8Tensor Float8TensorStorage GroupedTensor GroupedTensorStorage HybridQuantizedTensor HybridQuantizedTensorStorage "
        "HybridQuantizer IdentityQuantizer IdentityTensor IdentityTensorStorage MXFP8Quantizer MXFP8Tensor MXFP8TensorStorage "
        "NVFP4Quantizer NVFP4Tensor NVFP4TensorStorage QuantizedTensor QuantizedTensorStorage Quantizer get_all_tensor_types "
        "prepare_for_saving restore_from_func_ctx restore_from_saved",
    "transformer_engine.pytorch.tensor.float8_blockwise_tensor":
        "Float8BlockQuantizer Float8BlockwiseQTensor aten",
    "transformer_engine.pytorch.tensor.float8_tensor":
        "Float8CurrentScalingQuantizer Float8Quantizer Float8Tensor aten",
    "transformer_engine.pytorch.tensor.grouped_tensor":
        "BANNED_SHAPE_OPS GroupedTensor",
    "transformer_engine.pytorch.tensor.hybrid_tensor":
        "HybridQuantizedTensor HybridQuantizer aten",
    "transformer_engine.pytorch.tensor.identity_tensor":
        "IdentityQuantizer IdentityTensor",
    "transformer_engine.pytorch.tensor.mxfp8_tensor":
        "MXFP8Quantizer MXFP8Tensor aten",
    "transformer_engine.pytorch.tensor.nvfp4_tensor":
        "NVFP4Quantizer NVFP4Tensor aten get_hadamard_matrix get_no_random_sign_vector get_random_sign_mask_for_rht "
        "get_rht_matrix get_sign_from_vector get_wgrad_sign_vector",
    "transformer_engine.pytorch.tensor.storage":
        "Float8BlockwiseQTensorStorage Float8TensorStorage GroupedTensorStorage MXFP8TensorStorage NVFP4TensorStorage",
    "transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage":
        "Float8BlockwiseQTensorStorage",
    "transformer_engine.pytorch.tensor.storage.float8_tensor_storage":
        "Float8TensorStorage",
    "transformer_engine.pytorch.tensor.storage.grouped_tensor_storage":
        "GroupedTensorStorage",
    "transformer_engine.pytorch.tensor.storage.hybrid_tensor_storage":
        "HybridQuantizedTensorStorage",
    "transformer_engine.pytorch.tensor.storage.identity_tensor_storage":
        "IdentityTensorStorage",
    "transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage":
        "MXFP8TensorStorage",
    "transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage":
        "NVFP4TensorStorage",
    "transformer_engine.pytorch.tensor.utils":
        "cast_master_weights_to_fp8 clear_columnwise_cache is_custom post_all_gather_processing quantize_master_weights "
        "replace_raw_data",
    "transformer_engine.pytorch.torch_version":
        "torch_version",
    "transformer_engine.pytorch.transformer":
        "DropPath TransformerLayer",
    "transformer_engine.pytorch.utils":
        "SplitAlongDim all_close assert_dim_for_fp8_exec assert_viewless_tensor attention_mask_func canonicalize_device "
        "canonicalize_dtype canonicalize_process_group cast_if_needed ceil_div check_dim_for_fp8_exec check_gemm_dims "
        "clear_tensor_data combine_tensors compare_tensors deinterleave_glu_tensor devices_match divide ensure_divisibility "
        "get_cached_ones_tensor get_cudnn_version get_default_init_method get_device_compute_capability get_nvtx_range_context "
        "get_sm_count gpu_autocast_ctx init_method_constant init_method_normal interleave_glu_tensor is_bf16_available "
        "is_bf16_compatible is_non_tn_fp8_gemm_supported make_weak_ref mark_grouped_tensor needs_quantized_gemm nvtx_range_pop "
        "nvtx_range_push print_rank_0 record_compile_disabled requires_grad resolve_grouped_linear_single_param_flags "
        "round_up_to_nearest_multiple safely_set_viewless_tensor_data scaled_init_method_normal split_tensor_along_dim "
        "torch_get_autocast_gpu_dtype validate_ctx_manager validate_rng_states_func warn_compile_eager_fallback "
        "warn_if_compile_disabled",
}
