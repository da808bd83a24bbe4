"""Transformer Engine's modules for PyTorch, on te-fl's ops."""

from __future__ import annotations

import importlib

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
from te_fl.compat import table as _table
from te_fl.compat.variables import warn_of_variables as _warn_of_variables

_warn_of_variables()

_LATER = ("availability", "constants", "cross_entropy", "optimizers", "rng", "rope", "softmax", "weights")


def __getattr__(name: str):
    # What not every program needs is imported when it is first read, from the module that docs/transformer-engine.md names.
    if name in _LATER:
        return importlib.import_module(f"te_fl.pytorch.{name}")
    home = None if name.startswith("_") else _table.home("transformer_engine.pytorch", name)
    if home is None:
        raise AttributeError(f"te_fl.pytorch has no {name!r}; docs/transformer-engine.md lists what there is")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__():
    served = {name for home, names in _table.SERVED.items() if home.startswith("te_fl.pytorch") for name in names.split()}
    return sorted({*globals(), *_LATER, *served})
