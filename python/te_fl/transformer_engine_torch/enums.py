"""The enumerations of Transformer Engine's extension module, with its values.

Their __module__ is transformer_engine_torch: pickles contain a class's module name, and must be readable without te-fl.
"""

from __future__ import annotations

import enum

__all__ = ["CommOverlapAlgo", "CommOverlapType", "DType", "FP8BwdTensors", "FP8FwdTensors", "FP8TensorMeta", "Float8BlockScaleTensorFormat",
           "NVTEQBHistogramMode", "NVTERoutingMapFormat", "NVTEScalingMode", "NVTE_Bias_Type", "NVTE_Fused_Attn_Backend", "NVTE_Mask_Type",
           "NVTE_QKV_Format", "NVTE_QKV_Layout", "NVTE_Softmax_Type"]


_MODULE = "transformer_engine_torch"


class DType(enum.IntEnum):
    __module__ = _MODULE
    kByte, kInt32, kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2, kFloat4E2M1 = 0, 2, 4, 5, 6, 7, 8, 10


def _numbered(name: str, names: str, start: int = 0, prefix: str = "") -> type:
    return enum.IntEnum(name, {prefix + n: i for i, n in enumerate(names.split(), start)}, module=_MODULE)


NVTE_Bias_Type = _numbered("NVTE_Bias_Type", "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI")
NVTE_Mask_Type = _numbered("NVTE_Mask_Type", "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK "
                           "NVTE_CAUSAL_BOTTOM_RIGHT_MASK NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK")
NVTE_Softmax_Type = _numbered("NVTE_Softmax_Type", "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX")
NVTE_QKV_Format = _numbered("NVTE_QKV_Format", "NVTE_SBHD NVTE_BSHD NVTE_THD NVTE_BSHD_2SBHD NVTE_SBHD_2BSHD NVTE_THD_2BSHD NVTE_THD_2SBHD "
                            "NVTE_BHSD NVTE_QKV_Format_NOT_SET")
NVTE_QKV_Layout = _numbered("NVTE_QKV_Layout", "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D "
                            "BSHD_BSHD_BSHD T3HD TH3D THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD THD_BSHD_BSHD THD_SBHD_SBHD "
                            "Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD "
                            "Paged_KV_THD_BSHD_BSHD Paged_KV_THD_SBHD_SBHD BHSD_BHSD_BHSD QKV_Layout_NOT_SET", prefix="NVTE_")
NVTE_Fused_Attn_Backend = enum.IntEnum("NVTE_Fused_Attn_Backend", {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2},
                                       module=_MODULE)
NVTEScalingMode = enum.IntEnum("NVTEScalingMode", {"NVTE_DELAYED_TENSOR_SCALING": 0, "NVTE_MXFP8_1D_SCALING": 1, "NVTE_BLOCK_SCALING_1D": 2,
                                                   "NVTE_BLOCK_SCALING_2D": 3, "NVTE_NVFP4_1D_SCALING": 4, "NVTE_INVALID_SCALING": 100},
                               module=_MODULE)
Float8BlockScaleTensorFormat = _numbered("Float8BlockScaleTensorFormat", "GEMM_READY COMPACT INVALID")
CommOverlapType = _numbered("CommOverlapType", "RS AG")
CommOverlapAlgo = _numbered("CommOverlapAlgo", "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS SPLIT_PIPELINED_RS_P2P "
                            "ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG")
NVTERoutingMapFormat = _numbered("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8")
NVTEQBHistogramMode = _numbered("NVTEQBHistogramMode", "TWO_KERNEL FUSED_ATOMIC")
FP8FwdTensors = _numbered("FP8FwdTensors", "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT GEMM3_WEIGHT "
                          "GEMM3_OUTPUT")
FP8BwdTensors = _numbered("FP8BwdTensors", "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3")


class FP8TensorMeta:
    """The scales and amaxes of a module's tensors under delayed scaling; Transformer Engine fills them in."""

    __module__ = _MODULE
    __slots__ = ("scale", "scale_inv", "amax_history")
