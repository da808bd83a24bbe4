"""Transformer Engine's operations API (te.ops), including Sequential, implemented with te-fl's modules and functions."""

from te_fl.pytorch.ops.activations import (GEGLU, GELU, GLU, QGEGLU, QGELU, ClampedSwiGLU, ReGLU, ReLU, ScaledClampedQGeGLU, ScaledSiTUGLU, ScaledSReLU,
                                           ScaledSwiGLU, ScaledTanhSReLU, SiLU, SiTUGLU, SReGLU, SReLU, SwiGLU)
from te_fl.pytorch.ops.norms import L2Normalization, LayerNorm, RMSNorm
from te_fl.pytorch.ops.operation import BasicOperation, FusedOperation, FusibleOperation, OperationContext
from te_fl.pytorch.ops.plain import (AddExtraInput, AllGather, AllReduce, ConstantScale, Dropout, Identity, MakeExtraOutput, Quantize, ReduceScatter,
                                     Reshape)
from te_fl.pytorch.ops.products import BasicLinear, Bias, GroupedLinear, Linear
from te_fl.pytorch.ops.sequential import Sequential

__all__ = ["AddExtraInput", "AllGather", "AllReduce", "BasicLinear", "BasicOperation", "Bias", "ClampedSwiGLU", "ConstantScale", "Dropout", "FusedOperation",
           "FusibleOperation", "GEGLU", "GELU", "GLU", "GroupedLinear", "Identity", "L2Normalization", "LayerNorm", "Linear", "MakeExtraOutput",
           "OperationContext", "QGEGLU", "QGELU", "Quantize", "RMSNorm", "ReGLU", "ReLU", "ReduceScatter", "Reshape", "SReGLU", "SReLU",
           "ScaledClampedQGeGLU", "ScaledSReLU", "ScaledSiTUGLU", "ScaledSwiGLU", "ScaledTanhSReLU", "Sequential", "SiLU", "SiTUGLU", "SwiGLU"]
