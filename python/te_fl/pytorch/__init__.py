"""Transformer Engine's modules for PyTorch, on te-fl's ops: te_fl.pytorch.Linear(768, 768) on cuda and on cpu."""

from __future__ import annotations

from te_fl.frameworks import require

require("torch")

from te_fl.common import recipe  # noqa: E402
from te_fl.pytorch import constants, optimizers  # noqa: E402
from te_fl.pytorch.attention import DotProductAttention  # noqa: E402
from te_fl.pytorch.availability import (get_cudnn_version, get_default_recipe, get_device_compute_capability,  # noqa: E402
                                        is_bf16_available, is_fp8_available, is_fp8_block_scaling_available, is_mxfp8_available,
                                        is_nvfp4_available)
from te_fl.pytorch.checkpoint import checkpoint, recompute_contexts  # noqa: E402
from te_fl.pytorch.cross_entropy import parallel_cross_entropy  # noqa: E402
from te_fl.pytorch.linear import LayerNormLinear, Linear  # noqa: E402
from te_fl.pytorch.mlp import LayerNormMLP  # noqa: E402
from te_fl.pytorch.multihead_attention import MultiheadAttention  # noqa: E402
from te_fl.pytorch.norm import LayerNorm, RMSNorm  # noqa: E402
from te_fl.pytorch.quantization import autocast, fp8_autocast, fp8_model_init, quantized_model_init  # noqa: E402
from te_fl.pytorch.rng import CudaRNGStatesTracker  # noqa: E402
from te_fl.pytorch.rope import RotaryPositionEmbedding, apply_rotary_pos_emb  # noqa: E402
from te_fl.pytorch.softmax import FusedScaleMaskSoftmax  # noqa: E402
from te_fl.pytorch.transformer import TransformerLayer  # noqa: E402

__all__ = ["CudaRNGStatesTracker", "DotProductAttention", "FusedScaleMaskSoftmax", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear",
           "MultiheadAttention", "RMSNorm", "RotaryPositionEmbedding", "TransformerLayer", "apply_rotary_pos_emb", "autocast", "checkpoint",
           "constants", "fp8_autocast", "fp8_model_init", "get_cudnn_version", "get_default_recipe", "get_device_compute_capability",
           "is_bf16_available", "is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available", "is_nvfp4_available",
           "optimizers", "parallel_cross_entropy", "quantized_model_init", "recipe", "recompute_contexts"]
