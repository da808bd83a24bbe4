"""Transformer Engine's modules for PyTorch, on te-fl's ops."""

from __future__ import annotations

from te_fl import frameworks

frameworks.require("torch")

from te_fl.common import recipe
from te_fl.pytorch.quantization import autocast, fp8_autocast, fp8_model_init, quantized_model_init
from te_fl.pytorch.linear import LayerNormLinear, Linear
from te_fl.pytorch.mlp import LayerNormMLP
from te_fl.pytorch.norm import LayerNorm, RMSNorm
