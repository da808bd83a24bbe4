#include "policy/tex_names.hpp"

#include <algorithm>

#include "te_fl/tex_names.hpp"

namespace te_fl {
namespace {

// The functions of Transformer Engine's and TransformerEngine-FL's modules transformer_engine_torch
// that are not ops of the catalogue, in order.
constexpr std::string_view kNames[] = {
    "bgrad_group_quantize",
    "bulk_allocate",
    "bulk_overlap_ag_with_external_gemm",
    "convert_bshd_to_thd",
    "convert_host_pointers_to_tensor",
    "convert_thd_to_bshd",
    "copy_data_ptrs_to_device",
    "copy_to_kv_cache",
    "create_comm_overlap",
    "create_comm_overlap_helper",
    "create_comm_overlap_p2p",
    "create_empty_quantized_tensor",
    "create_fp8_tensor_meta",
    "create_nvshmem_tensor",
    "cusolvermp_ctx_create",
    "cusolvermp_ctx_destroy",
    "device_supports_multicast",
    "ep_combine",
    "ep_combine_bwd",
    "ep_dispatch",
    "ep_dispatch_bwd",
    "ep_finalize",
    "ep_get_zero_copy",
    "ep_handle_mem_size",
    "ep_initialize",
    "ep_prepare",
    "ep_prepare_and_dispatch",
    "ep_zero_copy_supported",
    "fa_prepare_bwd",
    "fa_prepare_fwd",
    "fp8_block_scaling_compute_partial_amax",
    "fp8_block_scaling_partial_cast",
    "fused_moe_aux_loss_fwd_graph_safe",
    "fused_topk_with_score_function_qb_fwd",
    "get_attention_backend",
    "get_cublasLt_version",
    "get_cudnn_version",
    "get_device_pointer_for_data_and_scales",
    "get_flash_attention_class",
    "get_grouped_gemm_setup_workspace_size",
    "get_num_cublas_streams",
    "group_dequantize",
    "group_quantize",
    "group_requantize_inplace",
    "group_scaled_clamped_swiglu",
    "group_scaled_swiglu",
    "grouped_swizzle_for_gemm",
    "init_nvshmem_backend",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_adam_fp8",
    "multi_tensor_adam_param_remainder",
    "multi_tensor_compute_scale_and_scale_inv",
    "multi_tensor_compute_scale_inv_e8m0",
    "multi_tensor_pad_last_dim",
    "multi_tensor_scale_tensor",
    "multi_tensor_swizzle_scales_for_gemm_",
    "multi_tensor_swizzle_scales_for_gemm_unchecked_",
    "multi_tensor_transpose_to_bhsd",
    "mxfp8_scaling_compute_partial_amax",
    "mxfp8_scaling_partial_cast",
    "newton_schulz",
    "nvfp4_2d_compute_partial_amax",
    "nvfp4_2d_multi_tensor_transpose",
    "nvfp4_2d_partial_cast",
    "nvfp4_2d_scale_transpose",
    "nvfp4_compute_global_scale",
    "nvfp4_compute_per_block_scale",
    "nvfp4_data_transpose",
    "nvfp4_expand_scale_to_fp8",
    "nvfp4_fused_scale",
    "nvfp4_group_quantize_with_amax",
    "nvfp4_multi_tensor_2d_partial_cast",
    "nvfp4_multi_tensor_compute_partial_amax",
    "nvfp4_multi_tensor_fused_scale",
    "nvfp4_quantize_with_amax",
    "nvshmem_finalize",
    "nvshmem_send_on_current_stream",
    "nvshmem_wait_on_current_stream",
    "nvte_built_with_cublasmp",
    "splits_to_offsets_multi",
    "swap_first_dims",
    "swizzle_scales_for_gemm_",
    "te_general_grouped_gemm",
    "te_general_grouped_gemm_for_discrete_in",
    "te_general_grouped_gemm_for_discrete_out",
    "te_general_grouped_gemm_for_grouped_tensor",
    "thd_copy_valid_tokens_from_per_split_to_rank_local",
    "thd_cp_rank_order_to_sequence_order",
    "thd_get_partitioned_indices",
    "thd_grad_correction",
    "thd_out_correction",
    "thd_read_half_tensor",
    "thd_read_second_half_lse",
    "thd_second_half_lse_correction",
    "thd_sequence_order_to_cp_rank_order",
    "ubuf_built_with_mpi",
};

static_assert(std::ranges::is_sorted(kNames));

}  // namespace

bool policy::is_tex_name(std::string_view op) noexcept {
  return std::ranges::binary_search(kNames, op);
}

std::string_view policy::governing_name(std::string_view op) noexcept {
  return op.starts_with(kTexPrefix) ? op.substr(kTexPrefix.size()) : op;
}

std::vector<std::string> tex_op_names() { return {std::begin(kNames), std::end(kNames)}; }

}  // namespace te_fl
