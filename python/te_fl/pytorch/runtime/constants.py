"""The constants of Transformer Engine's te.pytorch.constants."""

import enum

import torch

__all__ = ["AttnBiasTypes", "AttnMaskTypes", "AttnTypes", "CPLoadBalancingStrategy", "DType", "GemmParallelModes", "LayerTypes",
           "MXFP8_BLOCK_SCALING_SIZE", "NVFP4_BLOCK_SCALING_SIZE", "TE_DType", "TE_DType_To_Torch", "dist_group_type"]


class CPLoadBalancingStrategy(enum.Enum):
    """Ways of distributing tokens over the ranks of context parallelism."""

    DUAL_CHUNK_SWAP = "dual_chunk_swap"
    NO_LOAD_BALANCE = "no_load_balance"


class DType(enum.IntEnum):
    """Numbers of dtypes, as in Transformer Engine's C header."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10

    @classmethod
    def cast(cls, dtype) -> "DType":
        return cls(int(dtype))


TE_DType = {torch.uint8: DType.kByte, torch.float8_e4m3fn: DType.kFloat8E4M3, torch.float8_e5m2: DType.kFloat8E5M2,
            torch.int32: DType.kInt32, torch.float32: DType.kFloat32, torch.float16: DType.kFloat16, torch.bfloat16: DType.kBFloat16}
TE_DType_To_Torch = {number: dtype for dtype, number in TE_DType.items()}

AttnMaskTypes = ("no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right", "arbitrary")
AttnTypes = ("self", "cross")
AttnBiasTypes = ("pre_scale_bias", "post_scale_bias", "no_bias", "alibi")
LayerTypes = ("encoder", "decoder")
GemmParallelModes = ("row", "column", None)
MXFP8_BLOCK_SCALING_SIZE = 32
NVFP4_BLOCK_SCALING_SIZE = 16


def __getattr__(name: str):
    if name == "dist_group_type":  # looked up late, since torch.distributed may be missing from a build of PyTorch
        return torch.distributed.ProcessGroup
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
