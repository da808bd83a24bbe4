"""Differentiable activations. Gated activations take [.., 2H], whose first half is activated, and return [.., H].

Options follow the input, in the order of the op's specification (docs/ops.md). The scaled ones take (input, factors, *options), and scale row i of the
activation by factors[i].
"""

from __future__ import annotations

from te_fl.pytorch.functions.function import differentiable_op

__all__ = ["clamped_swiglu", "geglu", "gelu", "glu", "qgeglu", "qgelu", "reglu", "relu", "silu", "scaled_clamped_swiglu", "scaled_situglu",
           "scaled_srelu", "scaled_swiglu", "situglu", "sreglu", "srelu", "swiglu"]

for _name in __all__:
    globals()[_name] = differentiable_op(_name, f"activation_{_name}", f"activation_{_name}_bwd")
