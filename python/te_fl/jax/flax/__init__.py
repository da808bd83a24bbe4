"""Flax modules on te_fl.jax, with Transformer Engine's names, arguments, defaults and parameters."""

try:
    import flax.linen  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("te_fl.jax.flax needs Flax, which is not installed: pip install flax", name="flax") from error

from te_fl.jax.flax.module import (DenseGeneral, LayerNorm, LayerNormDenseGeneral, LayerNormMLP, Softmax,  # noqa: E402
                                   TransformerEngineBase, make_dot_general_cls, wrap_function_in_te_state_module)
from te_fl.jax.flax.transformer import (DotProductAttention, MultiHeadAttention, RelativePositionBiases, TransformerLayer,  # noqa: E402
                                        TransformerLayerType, extend_logical_axis_rules, rotary_pos_emb)

__all__ = ["DenseGeneral", "DotProductAttention", "LayerNorm", "LayerNormDenseGeneral", "LayerNormMLP", "MultiHeadAttention",
           "RelativePositionBiases", "Softmax", "TransformerEngineBase", "TransformerLayer", "TransformerLayerType", "extend_logical_axis_rules",
           "make_dot_general_cls", "rotary_pos_emb", "wrap_function_in_te_state_module"]
