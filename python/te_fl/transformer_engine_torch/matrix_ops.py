"""te_fl.ops for Transformer Engine's tensors. An argument that is a matrix accepts a tensor of any rank: its last dimension is the columns, the
others together the rows. Non-contiguous inputs are copied first. Inputs may be positional, in the order of docs/ops.md.
"""

from te_fl import _native


def __getattr__(name: str):
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        op = _native.matrix_op(name)
    except LookupError as error:
        raise AttributeError(str(error)) from None
    globals()[name] = op
    return op
