"""Transformer Engine's modules for PyTorch, on te-fl's ops."""

from __future__ import annotations

import torch

if tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 11):
    raise ImportError(f"te_fl.pytorch needs PyTorch 2.11 or newer; this is PyTorch {torch.__version__}")

from te_fl.common import recipe
from te_fl.pytorch.attention import DotProductAttention
from te_fl.pytorch.checkpoint import checkpoint
from te_fl.pytorch.quantization import autocast, fp8_autocast, fp8_model_init, quantized_model_init
from te_fl.pytorch.linear import LayerNormLinear, Linear
from te_fl.pytorch.mlp import LayerNormMLP
from te_fl.pytorch.multihead_attention import MultiheadAttention
from te_fl.pytorch.norm import LayerNorm, RMSNorm
from te_fl.pytorch.transformer import TransformerLayer
