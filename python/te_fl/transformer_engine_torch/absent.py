"""Names of the extension module that te-fl does not support, each with the reason. Calling one, or constructing an object of it, raises an error with
the reason.
"""

from __future__ import annotations

from typing import Any

from te_fl.errors import Unsupported

_OVERLAP = "kernels that overlap with collectives need NVIDIA's user buffers; leave the ub_ arguments of modules at False"
_NVSHMEM = "NVSHMEM is NVIDIA's own; use torch.distributed"
_EP = "expert parallelism over NCCL's device API is NVIDIA's own; use all-to-all of torch.distributed"
_GROUPED_MLP = "te.ops' fused grouped MLP is kernels of Blackwell's; leave them out by NVTE_CUTEDSL_FUSED_GROUPED_MLP=0"
_SOLVER = "cuSolverMp is NVIDIA's own; iterate with torch.matmul"
_FP4_AMAX = "te-fl's NVFP4 finds a tensor's amax itself; quantise by quantize()"

REASONS = {
    "CommOverlap": _OVERLAP, "CommOverlapCore": _OVERLAP, "CommOverlapBase": _OVERLAP, "CommOverlapP2PBase": _OVERLAP, "CommOverlapP2P": _OVERLAP,
    "CommOverlapHelper": _OVERLAP, "bulk_overlap_ag_with_external_gemm": _OVERLAP,
    "init_nvshmem_backend": _NVSHMEM, "create_nvshmem_tensor": _NVSHMEM, "nvshmem_send_on_current_stream": _NVSHMEM,
    "nvshmem_wait_on_current_stream": _NVSHMEM, "nvshmem_finalize": _NVSHMEM,
    "nvfp4_quantize_with_amax": _FP4_AMAX, "nvfp4_group_quantize_with_amax": _FP4_AMAX,
    **dict.fromkeys("EpLayerConfig ep_combine ep_combine_bwd ep_combine_fwd ep_dispatch ep_dispatch_bwd ep_dispatch_fwd ep_finalize ep_get_zero_copy "
                    "ep_handle_mem_size ep_initialize ep_prepare ep_prepare_and_dispatch ep_zero_copy_supported".split(), _EP),
    "grouped_mlp_experimental": _GROUPED_MLP, "convert_host_pointers_to_tensor": _GROUPED_MLP, "get_device_pointer_for_data_and_scales": _GROUPED_MLP,
    "cusolvermp_ctx_create": _SOLVER, "cusolvermp_ctx_destroy": _SOLVER, "newton_schulz": _SOLVER,
}
__all__ = sorted(REASONS)


class _Absent(type):
    """The metaclass of an unsupported name; accessing an attribute raises the same error."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return refused(f"{cls.__name__}.{name}", cls.reason)


def refused(name: str, reason: str) -> Any:
    """A placeholder for an unsupported name: calling it, or constructing an object, raises Unsupported with the reason."""
    def refuse(cls: type, *arguments: Any, **options: Any) -> Any:
        raise Unsupported(f"transformer_engine_torch.{name} is not supported by te-fl: {reason}")

    # It is a class, because Transformer Engine uses some of these names in annotations and isinstance(). It has no instances.
    return _Absent(name, (), {"__new__": refuse, "__module__": "transformer_engine_torch", "__doc__": f"Not supported: {reason}.", "reason": reason})


globals().update((name, refused(name, reason)) for name, reason in REASONS.items())
