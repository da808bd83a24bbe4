"""Transformer Engine's modules for PyTorch, on te-fl's ops."""

from __future__ import annotations

from te_fl import frameworks

frameworks.require("torch")

from te_fl.common import recipe
from te_fl.pytorch.attention import DotProductAttention
from te_fl.pytorch.checkpoint import checkpoint
from te_fl.pytorch.quantization import autocast, fp8_autocast, fp8_model_init, quantized_model_init
from te_fl.pytorch.linear import LayerNormLinear, Linear
from te_fl.pytorch.mlp import LayerNormMLP
from te_fl.pytorch.multihead_attention import MultiheadAttention
from te_fl.pytorch.norm import LayerNorm, RMSNorm
from te_fl.pytorch.transformer import TransformerLayer
