"""Transformer Engine's modules for PyTorch, on te-fl's ops: te_fl.pytorch.Linear(768, 768) on cuda and on cpu."""

from __future__ import annotations

import importlib

from te_fl.frameworks import require

require("torch")

# `as` says to type checkers that a name is the package's own.
from te_fl.common import recipe as recipe  # noqa: E402
from te_fl.errors import did_you_mean  # noqa: E402
from te_fl.pytorch.modules.attention import DotProductAttention as DotProductAttention  # noqa: E402
from te_fl.pytorch.autograd.checkpoint import checkpoint as checkpoint, recompute_contexts as recompute_contexts  # noqa: E402
from te_fl.pytorch.fp8.plain_codes import saving_codes as saving_codes  # noqa: E402
from te_fl.pytorch.fp8.quantization import autocast as autocast, fp8_autocast as fp8_autocast  # noqa: E402
from te_fl.pytorch.fp8.quantization import fp8_model_init as fp8_model_init, quantized_model_init as quantized_model_init  # noqa: E402
from te_fl.pytorch.modules.linear import LayerNormLinear as LayerNormLinear, Linear as Linear  # noqa: E402
from te_fl.pytorch.modules.mlp import LayerNormMLP as LayerNormMLP  # noqa: E402
from te_fl.pytorch.modules.multihead_attention import MultiheadAttention as MultiheadAttention  # noqa: E402
from te_fl.pytorch.modules.norm import LayerNorm as LayerNorm, RMSNorm as RMSNorm  # noqa: E402
from te_fl.pytorch.modules.transformer import TransformerLayer as TransformerLayer  # noqa: E402
from te_fl.pytorch.fp8.weight_cache import cache_quantized_weights as cache_quantized_weights  # noqa: E402
from te_fl.compat import known_names as _known_names, table as _table  # noqa: E402
from te_fl.compat.variables import read_variables as _read_variables  # noqa: E402
from te_fl.pytorch import compile as _compile  # noqa: E402, F401  (enters itself where the other rooms ask for it)
from te_fl.pytorch.rooms import open_rooms as _open_rooms  # noqa: E402

_read_variables()
_open_rooms()

_LATER = ("availability", "constants", "cross_entropy", "global_state", "offload", "ops", "optimizers", "rng", "rope", "softmax", "weights")


def __getattr__(name: str):
    # Names that not every program needs are imported when they are first read, from the module that docs/transformer-engine.md
    # names.
    if name in _LATER:
        return importlib.import_module(f"te_fl.pytorch.{name}")
    home = None if name.startswith("_") else _table.home("transformer_engine.pytorch", name)
    if home is None:
        raise AttributeError(f"te_fl.pytorch has no {name!r}{'' if name.startswith('_') else _instead_of(name)}; docs/transformer-engine.md lists "
                             "what there is")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def _instead_of(name: str) -> str:
    if name in _known_names.NAMES["transformer_engine.pytorch"].split():
        return f", which Transformer Engine has; {_table.way_out('transformer_engine.pytorch', name)}"
    return did_you_mean(name, __dir__())


def __dir__():
    served = {name for home, names in _table.SERVED.items() if home.startswith("te_fl.pytorch") for name in names.split()}
    return sorted({*globals(), *_LATER, *served})
