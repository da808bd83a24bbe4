"""The checks that te_fl.pytorch.runtime.refuse.check() makes of each module's arguments.

Written by tools/modulegen.py from nn/modules.yaml; do not edit.
"""
from typing import Any, Dict, Tuple

RULES: Dict[str, Tuple[Tuple[Any, ...], ...]] = {
    "Linear": (
        ('tensor_parallel', ('tp_group', 'tp_size')),
        ('parallel_mode', ('parallel_mode',)),
        ('symmetric', ('symmetric_ar_type',)),
    ),
    "LayerNormLinear": (
        ('tensor_parallel', ('tp_group', 'tp_size')),
        ('parallel_mode', ('parallel_mode',)),
        ('symmetric', ('symmetric_ar_type',)),
        ('choice', ('normalization',), ('LayerNorm', 'RMSNorm')),
    ),
    "LayerNormMLP": (
        ('tensor_parallel', ('tp_group', 'tp_size')),
        ('symmetric', ('symmetric_ar_type',)),
        ('choice', ('normalization',), ('LayerNorm', 'RMSNorm')),
        ('choice', ('activation',), ('gelu', 'geglu', 'glu', 'qgelu', 'qgeglu', 'relu', 'reglu', 'srelu', 'sreglu', 'silu', 'swiglu', 'clamped_swiglu')),
    ),
    "LayerNorm": (
    ),
    "RMSNorm": (
    ),
    "DotProductAttention": (
        ('tensor_parallel', ('tp_group', 'tp_size')),
        ('context_parallel', ('cp_group', 'cp_global_ranks', 'cp_comm_type')),
        ('choice', ('attention_type',), ('self', 'cross')),
        ('choice', ('qkv_format',), ('sbhd', 'bshd', 'thd')),
        ('choice', ('softmax_type',), ('vanilla', 'off-by-one', 'learnable')),
    ),
    "MultiheadAttention": (
        ('tensor_parallel', ('tp_group', 'tp_size')),
        ('choice', ('attention_type',), ('self', 'cross')),
        ('choice', ('qkv_format',), ('sbhd', 'bshd', 'thd')),
        ('choice', ('qk_norm_type',), (None, 'L2Normalization', 'RMSNorm', 'LayerNorm')),
    ),
    "TransformerLayer": (
        ('tensor_parallel', ('tp_group', 'tp_size')),
        ('choice', ('layer_type',), ('encoder', 'decoder')),
        ('choice', ('attn_input_format',), ('sbhd', 'bshd', 'thd')),
    ),
}
