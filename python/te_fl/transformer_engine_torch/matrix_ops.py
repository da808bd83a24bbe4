"""te_fl.ops for Transformer Engine's tensors. Arguments that are matrices, or have any number of dimensions before the last, accept any contiguous
tensor, as a matrix over its last dimension. Non-contiguous inputs are copied first. A quantised storage (schemes.py) is read attribute by attribute
at the time of the call, without creating views or caching.
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
